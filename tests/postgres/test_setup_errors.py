"""Missing tables or rights, replicas and lost servers: the error names the remedy, or says that a retry helps."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import anyio
import psycopg
import pytest
from psycopg import sql

from lanes.errors import ConfigError, SourceError
from lanes_postgres import Log, Positions, PostgresSource, check_schema, connecting, migrate
from tests.components import PostgresServer
from tests.postgres.tables import Effects, message

PASSWORD = "canary-password-5e1f"


Connection = psycopg.Connection


def once(positions: Positions, connection: Connection, position: int = 1) -> bool:
    with positions.once(connection, message(position)) as fresh:
        return fresh


@pytest.fixture
def stranger(postgres: PostgresServer, schema: str) -> Iterator[str]:
    """A user without any rights."""
    name = f"u{schema}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE USER {} PASSWORD {}").format(sql.Identifier(name), PASSWORD))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {0}; DROP USER {0}").format(sql.Identifier(name)))


def alter_positions(schema: str, text: str) -> sql.Composed:
    return Effects("", schema).query(text, "lanes_positions")


def migrate_without_work(connection: Connection, schema: str) -> list[str]:
    """A migration with nothing to do needs no right to create."""
    return migrate(connection, schema=schema)


def test_missing_tables_name_the_remedy(connection: Connection, schema: str) -> None:
    positions = Positions("books", schema=schema)
    with pytest.raises(ConfigError, match=rf"the schema '{schema}': 42P01 .*run lanes_postgres\.migrate"):
        once(positions, connection)
    with pytest.raises(ConfigError, match=r"no tables of lanes; run lanes_postgres\.migrate"):
        check_schema(connection, schema=schema)
    migrate(connection, schema=schema)
    check_schema(connection, schema=schema)
    assert once(positions, connection), "the same connection still works"
    connection.execute(alter_positions(schema, "ALTER TABLE {} DROP COLUMN epoch"))
    connection.commit()
    with pytest.raises(ConfigError, match="42703"):
        once(positions, connection)


def test_missing_rights_name_the_grants(postgres: PostgresServer, effects: Effects, stranger: str) -> None:
    positions = Positions("books", schema=effects.schema)
    with (
        psycopg.connect(postgres.url, autocommit=True) as owner,
        psycopg.connect(postgres.url_of("postgres", stranger), password=PASSWORD) as connection,
    ):
        rights = [
            f'USAGE ON SCHEMA "{effects.schema}"',
            f'SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA "{effects.schema}"',
        ]
        for right in rights:
            with pytest.raises(ConfigError, match=r"42501 permission denied.*grant this user USAGE") as refused:
                once(positions, connection)
            assert PASSWORD not in f"{refused.value}{refused.value.__cause__}{connection!r}"
            owner.execute(f"GRANT {right} TO {stranger}")
        assert once(positions, connection)
        check_schema(connection, schema=effects.schema)
        assert migrate_without_work(connection, effects.schema) == []
        with pytest.raises(ConfigError, match="42501"):
            migrate(connection, schema=f"{effects.schema}new")


def test_a_read_only_transaction_is_refused(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    connection.read_only = True
    with pytest.raises(ConfigError, match=r"25006 .*connect to the primary"):
        once(positions, connection)


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
def test_a_timeout_is_retryable(limit: str, connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    once(positions, connection)
    with psycopg.connect(effects.url) as other:
        assert positions.claim(other, message(2))
        connection.execute(f"SET {limit} = '20ms'")
        connection.commit()
        with pytest.raises(SourceError, match=r"57014|55P03") as failed:
            once(positions, connection, 2)
        assert failed.value.retryable
    assert not once(positions, connection, 2), "the transaction was committed"


def test_a_lost_connection_is_retryable(connection: Connection, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)
    assert once(positions, connection)

    def terminated(*, inside: bool) -> None:
        with psycopg.connect(effects.url) as doomed:
            if not inside:
                terminate(doomed)
                once(positions, doomed, 2)
            with positions.once(doomed, message(2)):
                effects.add(doomed, 2)
                terminate(doomed)

    def terminate(doomed: Connection) -> None:
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (doomed.info.backend_pid,))
        connection.commit()

    for inside in (False, True):
        with pytest.raises(SourceError) as failed:
            terminated(inside=inside)
        assert failed.value.retryable
    assert effects.all() == []
    connection.close()
    with pytest.raises(SourceError, match="closed") as failed:
        once(positions, connection, 2)
    assert failed.value.retryable


def test_a_server_that_is_away_has_a_remedy() -> None:
    source = PostgresSource("postgresql://127.0.0.1:1/none", Log("orders"), subscription="billing")
    with pytest.raises(SourceError, match=r"refused.*; start the server, or correct the connection string") as failed:
        anyio.run(source.open)
    assert failed.value.retryable


def test_a_server_that_never_answers_is_named_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(connecting, "_WARN_AFTER", 0.1)
    monkeypatch.setattr(connecting, "_TIMEOUT", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        source = PostgresSource(f"postgresql://me@127.0.0.1:{port}/none", Log("orders"), subscription="billing")
        where = f"orders/billing at host 127.0.0.1, port {port}, database none, user me: "
        remedy = "; start the server, or correct the connection string"
        with pytest.raises(SourceError, match=f"{where}.*timeout.*{remedy}"):
            anyio.run(source.open)
    assert f"{where}the PostgreSQL server has not answered for 0.1 s; check the address" in caplog.text


def test_an_empty_address_is_named_when_no_server_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", "1")
    source = PostgresSource("", Log("orders"), subscription="billing")
    place = r"at host 127\.0\.0\.1, port 1, .*, without an address and so by the PG… variables: "
    with pytest.raises(SourceError, match=rf"{place}.*; start the server, or"):
        anyio.run(source.open)


URL = f"postgresql://me:{PASSWORD}@host/db"


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("subscription", lambda: PostgresSource("", Log("orders"), subscription=URL)),
        ("subscription", lambda: Positions(URL)),
        ("schema", lambda: Positions("books", schema=URL)),
        ("schema", lambda: Log("orders", schema=URL)),
        ("name", lambda: Log(URL)),
        ("name", lambda: Log(f"dbname=db password={PASSWORD}")),
        ("subscription", lambda: PostgresSource("", Log("orders"), subscription=f"user=me password = {PASSWORD}")),
    ],
)
def test_an_address_in_place_of_a_name_is_refused_without_its_password(
    argument: str, make: Callable[[], object]
) -> None:
    with pytest.raises(ConfigError, match=f"^{argument}= is the address of a server, not a name; ") as refused:
        make()
    assert PASSWORD not in str(refused.value)


LIBPQ = """
import sys, types

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "psycopg":
            raise ImportError(MESSAGE)

sys.meta_path.insert(0, Finder())
try:
    import lanes_postgres
except ImportError as error:
    print(error)
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("no pq wrapper available. Attempts made: libpq library not found", "psycopg finds no libpq, the C library of"),
        ("another error", "another error"),
    ],
)
def test_a_missing_libpq_has_a_remedy(message: str, said: str) -> None:
    program = f"MESSAGE = {message!r}\n{LIBPQ}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(said)


def test_rows_hidden_by_a_policy_end_in_an_error(postgres: PostgresServer, effects: Effects, stranger: str) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as owner:
        for command in (
            f"GRANT USAGE ON SCHEMA {effects.schema} TO {stranger}",
            f"GRANT ALL ON ALL TABLES IN SCHEMA {effects.schema} TO {stranger}",
            f"ALTER TABLE {effects.schema}.lanes_topics ENABLE ROW LEVEL SECURITY",
            f"CREATE POLICY blind ON {effects.schema}.lanes_topics FOR INSERT WITH CHECK (true)",
        ):
            owner.execute(command)
    with (
        psycopg.connect(postgres.url_of("postgres", stranger), password=PASSWORD) as connection,
        pytest.raises(SourceError, match="this user may not see it"),
    ):
        once(Positions("books", schema=effects.schema), connection)
