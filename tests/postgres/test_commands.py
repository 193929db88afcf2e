"""``lanes doctor postgres`` names each fault of a real server, with a remedy and without a secret."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg import sql

from lanes.cli import app as cli
from lanes.cli import kit
from lanes_postgres import migrate, migrations
from tests.components import PostgresServer
from tests.postgres.tables import Effects

Command = Callable[..., tuple[object, str, str]]


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "600")
    monkeypatch.setattr(kit, "_SILENT_FOR", 3_600.0)

    def command(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["lanes", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return command


@pytest.fixture
def examined(lanes: Command) -> Callable[..., tuple[object, dict[str, dict[str, Any]]]]:
    """Run the doctor, and return its exit status and its checks by name."""

    def run(url: str, schema: str) -> tuple[object, dict[str, dict[str, Any]]]:
        status, out, err = lanes("doctor", "postgres", "--dsn", url, "--schema", schema, "--json")
        assert err == ""
        found = json.loads(out)
        assert found["usable"] is (status == 0) and found["schema"] == schema
        return status, {check["name"]: check for check in found["checks"]}

    return run


Examined = Callable[..., tuple[object, dict[str, dict[str, Any]]]]


def test_a_usable_server_passes_each_check(examined: Examined, lanes: Command, effects: Effects) -> None:
    status, checks = examined(effects.url, effects.schema)
    assert status == 0
    assert list(checks)[:4] == ["server", "writes", "connections", "tables"]
    assert [name for name, check in checks.items() if check["ok"] is not True] == []
    assert "user lanes" in checks["server"]["detail"]
    assert checks["logs"]["detail"] == f"no log in the schema {effects.schema}"
    status, out, _ = lanes("doctor", "postgres", "--dsn", effects.url, "--schema", effects.schema)
    assert status == 0 and "FAILED" not in out and "can hold advisory locks" in out
    # The only table of the command needs no title.
    assert "check" in out.splitlines()[1] and out.count("found") == 1


def test_the_connections_of_other_users_are_counted(
    examined: Examined, fresh_postgres: Callable[..., PostgresServer], schema: str
) -> None:
    server = fresh_postgres(settings=("max_connections=40",))
    Effects.make(server, schema)
    with contextlib.ExitStack() as opened:
        first = opened.enter_context(psycopg.connect(server.url, autocommit=True))
        first.execute("CREATE ROLE plain LOGIN")
        first.execute(sql.SQL("GRANT USAGE ON SCHEMA {} TO plain").format(sql.Identifier(schema)))
        for _ in range(9):
            opened.enter_context(psycopg.connect(server.url))
        _, checks = examined(server.url.replace("lanes@", "plain@"), schema)
    (used,) = re.findall(r"max_connections=40, (\d+) used", checks["connections"]["detail"])
    assert int(used) >= 11


def test_missing_and_older_tables_fail(
    examined: Examined, postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, checks = examined(postgres.url, schema)
    assert status == 3 and checks["tables"]["ok"] is False
    assert checks["tables"]["remedy"] == "run lanes_postgres.migrate for this schema"
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:1])
    with psycopg.connect(postgres.url) as connection:
        migrate(connection, schema=schema)
    monkeypatch.undo()
    status, checks = examined(postgres.url, schema)
    assert status == 3 and "have version 1" in checks["tables"]["detail"]
    assert checks["tables"]["remedy"] == "run lanes_postgres.migrate"


@pytest.fixture
def reader(postgres: PostgresServer, schema: str) -> Iterator[str]:
    """A user with no right in the schema."""
    name = f"reader_{schema}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(name)))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def test_missing_permissions_fail_with_the_grant(
    examined: Examined, effects: Effects, postgres: PostgresServer, reader: str
) -> None:
    url = postgres.url_of("postgres", reader)

    def grant(*statements: str) -> None:
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            for each in statements:
                connection.execute(
                    sql.SQL(each).format(schema=sql.Identifier(effects.schema), user=sql.Identifier(reader))
                )

    status, checks = examined(url, effects.schema)
    assert status == 3 and "42501" in checks["tables"]["detail"]
    assert "grant this user USAGE on the schema" in checks["tables"]["remedy"]
    grant(
        "GRANT USAGE ON SCHEMA {schema} TO {user}",
        "GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {user}",
        "GRANT ALL ON {schema}.lanes_positions TO {user}",
    )
    status, checks = examined(url, effects.schema)
    assert status == 3 and checks["tables"]["ok"] is True
    assert "lanes_attempts (INSERT, UPDATE, DELETE)" in checks["permissions"]["detail"]
    assert "lanes_positions" not in checks["permissions"]["detail"]
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES" in checks["permissions"]["remedy"]
    assert "lanes_log_batches (USAGE)" not in checks["permissions"]["detail"], "only four objects are shown"
    grant(
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {user}",
        "REVOKE EXECUTE ON FUNCTION {schema}.lanes_log_look, {schema}.lanes_log_visit FROM PUBLIC",
    )
    status, checks = examined(url, effects.schema)
    assert status == 3
    assert (
        "missing on lanes_log_batches (USAGE), lanes_log_look (EXECUTE), lanes_log_visit (EXECUTE)"
        in checks["permissions"]["detail"]
    )
    remedy = checks["permissions"]["remedy"]
    assert "GRANT USAGE ON ALL SEQUENCES" in remedy and "GRANT EXECUTE ON FUNCTION" in remedy
    # The remedy is a list of statements.
    grant(*remedy.replace("…", "{user}").split("; "))
    status, checks = examined(url, effects.schema)
    assert status == 0, checks
    grant("REVOKE SELECT ON {schema}.lanes_logs FROM {user}")
    status, checks = examined(url, effects.schema)
    assert status == 3 and "missing on lanes_logs (SELECT)" in checks["permissions"]["detail"]
    assert checks["trigger"]["ok"] is None and "may not read lanes_logs" in checks["trigger"]["detail"]


def test_a_standby_fails(examined: Examined, fresh_postgres: Callable[..., PostgresServer], schema: str) -> None:
    server = fresh_postgres()
    with psycopg.connect(server.url) as connection:
        migrate(connection, schema=schema)
    server.kill()
    (server._process.folder / "data" / "standby.signal").touch()
    server.start()
    status, checks = examined(server.url, schema)
    assert status == 3
    for name in ("writes", "locks"):
        assert checks[name]["ok"] is False and "standby" in checks[name]["detail"]
        assert "target_session_attrs=read-write" in checks[name]["remedy"]
    assert checks["tables"]["ok"] is True


def test_settings_of_the_server_are_named(
    examined: Examined, fresh_postgres: Callable[..., PostgresServer], schema: str
) -> None:
    server = fresh_postgres(
        settings=(
            "max_connections=8",
            "superuser_reserved_connections=3",
            "synchronous_commit=off",
            "idle_session_timeout=5min",
            "default_transaction_read_only=on",
        )
    )
    with psycopg.connect(server.url, options="-c default_transaction_read_only=off") as connection:
        migrate(connection, schema=schema)
    status, checks = examined(server.url, schema)
    assert status == 3
    assert checks["writes"]["detail"] == "transactions are read-only"
    for name, text in (
        ("synchronous_commit", "loses the last commits"),
        ("idle_session_timeout", "5min by default"),
        ("connections", "max_connections=8, 1 used, 4 free"),
    ):
        assert checks[name]["ok"] is None and text in checks[name]["detail"] and checks[name]["remedy"]
    assert checks["locks"]["ok"] is True


def test_a_server_without_a_free_connection_fails(
    examined: Examined, fresh_postgres: Callable[..., PostgresServer], schema: str
) -> None:
    server = fresh_postgres(settings=("max_connections=2", "superuser_reserved_connections=0", "max_wal_senders=0"))
    with psycopg.connect(server.url), psycopg.connect(server.url):
        status, checks = examined(server.url, schema)
    assert status == 3 and list(checks) == ["server"]
    assert "too many clients" in checks["server"]["detail"]
    assert checks["server"]["remedy"] == "raise max_connections, or start fewer processes"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--dsn", "postgresql://me:canary%zz@host/x"), 64, "correct the connection string"),
        (("--dsn", "host=h password='canary"), 64, "correct the connection string"),
        (("--dsn", "postgresql://me:canary@127.0.0.1:1/x"), 3, "start the server, or correct the connection string"),
        (("--dsn", "postgresql://host/x", "--schema", ""), 64, "--schema=''"),
        (
            ("--dsn", "postgresql://host/x", "--subscription", "billing"),
            64,
            "has --subscription and no --log; name the",
        ),
        (("--server", "x"), 64, "No such option: --server"),
    ],
)
def test_a_mistake_is_one_line_without_the_password(
    lanes: Command, arguments: Sequence[str], status: int, said: str
) -> None:
    found, out, err = lanes("doctor", "postgres", *arguments)
    assert found == status and said in " ".join((out + err).split())
    assert "canary" not in out + err and "Traceback" not in err
