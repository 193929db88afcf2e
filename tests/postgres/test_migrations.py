"""Migrations create the tables once, completely or not at all, and refuse tables of a newer version."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import IsolationLevel, sql

from lanes.errors import ConfigError, SourceError
from lanes_postgres import Positions, check_schema, migrate, migrations
from lanes_postgres.migrations import Migration
from tests.components import PostgresServer, wait_until
from tests.postgres.tables import Effects, message

ALL = [
    "positions",
    "attempts",
    "states",
    "log",
    "dead_letters",
    "log_guards",
    "log_look",
    "log_over",
    "log_guards_over",
    "ring",
    "log_over_upkeep",
    "ring_pieces",
    "log_visit",
    "ring_owners",
]


def test_the_files_are_numbered_without_a_gap() -> None:
    found = migrations.migrations()
    assert [(each.version, each.name) for each in found] == list(enumerate(ALL, 1))


def test_a_second_migration_does_nothing(connection: psycopg.Connection, schema: str) -> None:
    assert migrate(connection, schema=schema) == ALL
    assert migrate(connection, schema=schema) == []
    connection.isolation_level = IsolationLevel.SERIALIZABLE
    assert migrate(connection, schema=schema) == []
    assert connection.execute("SHOW search_path").fetchone() == ('"$user", public',)


@pytest.mark.anyio
async def test_an_asynchronous_connection_migrates(aconnection: psycopg.AsyncConnection, schema: str) -> None:
    await aconnection.set_autocommit(True)
    assert await migrate(aconnection, schema=schema) == ALL
    await check_schema(aconnection, schema=schema)
    assert await migrate(aconnection, schema=schema) == []


def test_concurrent_migrations_wait_for_each_other(postgres: PostgresServer, schema: str) -> None:
    def start() -> list[str]:
        with psycopg.connect(postgres.url) as connection:
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            return migrate(connection, schema=schema)

    with ThreadPoolExecutor(6) as threads:
        results = [each.result() for each in [threads.submit(start) for _ in range(6)]]
    assert sorted(results) == [[]] * 5 + [ALL]


def _migrate_to(count: int, server: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:count])
    with psycopg.connect(server.url) as connection:
        migrate(connection, schema=schema)
    monkeypatch.undo()


@pytest.mark.parametrize("deadlock_timeout", ["1s", "150ms"])
def test_an_update_beside_an_open_append_ends_no_transaction(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch, deadlock_timeout: str
) -> None:
    """Transactions lock the tables in any order. The update gives its locks back before the server finds a deadlock.

    If the server finds it in the update first, that try has failed too.
    """
    _migrate_to(5, postgres, schema, monkeypatch)
    tables = [sql.Identifier(schema, name) for name in ("lanes_logs", "lanes_log_messages")]
    with (
        psycopg.connect(postgres.url) as append,
        psycopg.connect(postgres.url) as update,
        ThreadPoolExecutor(1) as pool,
    ):
        update.execute(f"SET deadlock_timeout = '{deadlock_timeout}'")
        update.commit()
        append.execute(sql.SQL("SELECT FROM {}").format(tables[0]))
        updated = pool.submit(migrate, update, schema=schema)
        wait_until(lambda: _waits(postgres, update), "the update to wait for the transaction")
        append.execute(sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(tables[1]))
        append.commit()
        assert updated.result() == ALL[5:]


def test_an_update_that_waits_for_several_transactions_ends_none(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waits of a try for one table after the other are together shorter than the time to find a deadlock."""
    _migrate_to(5, postgres, schema, monkeypatch)
    names = [
        name
        for (name,) in _rows(
            postgres,
            "SELECT relname FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r' "
            "AND relname <> 'lanes_migrations' ORDER BY relname",
            schema,
        )
    ]
    lock = [sql.SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(sql.Identifier(schema, name)) for name in names]
    with (
        psycopg.connect(postgres.url) as first,
        psycopg.connect(postgres.url) as second,
        psycopg.connect(postgres.url) as append,
        psycopg.connect(postgres.url) as update,
        ThreadPoolExecutor(1) as pool,
    ):
        append.execute("SET deadlock_timeout = '700ms'")
        first.execute(lock[1])
        second.execute(lock[2])
        append.execute(lock[3])
        updated = pool.submit(migrate, update, schema=schema)
        wait_until(lambda: _waits(postgres, update), "the update to wait for the first transaction")
        ends = [threading.Timer(0.25, first.rollback), threading.Timer(0.5, second.rollback)]
        for end in ends:
            end.start()
        append.execute(lock[0])
        append.commit()
        assert updated.result() == ALL[5:]
        for end in ends:
            end.join()


def test_an_update_keeps_the_lock_timeout_of_its_connection(
    connection: psycopg.Connection, postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _migrate_to(5, postgres, schema, monkeypatch)
    seen = b"CREATE TABLE seen AS SELECT current_setting('lock_timeout') AS timeout"
    known = [*migrations.migrations(), Migration(len(ALL) + 1, "seen", seen)]
    monkeypatch.setattr(migrations, "migrations", lambda: known)
    connection.execute("SET lock_timeout = '7s'")
    connection.commit()
    migrate(connection, schema=schema)
    found = connection.execute(sql.SQL("SELECT timeout FROM {}.seen").format(sql.Identifier(schema)))
    assert found.fetchone() == ("7s",)


def test_an_update_names_the_transactions_that_it_waited_for(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _migrate_to(5, postgres, schema, monkeypatch)
    monkeypatch.setattr(
        migrations, "_LOCK_TABLES", migrations._LOCK_TABLES.replace("interval '60 s'", "interval '0 s'")
    )
    with psycopg.connect(postgres.url) as append, psycopg.connect(postgres.url) as update:
        append.execute(sql.SQL("SELECT FROM {}.lanes_logs").format(sql.Identifier(schema)))
        with pytest.raises(SourceError, match=r"55P03 other transactions have used the tables .*; end them") as refused:
            migrate(update, schema=schema)
        assert refused.value.retryable
        append.commit()
        assert migrate(update, schema=schema) == ALL[5:]


def _waits(server: PostgresServer, connection: psycopg.Connection) -> bool:
    waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE pid = %s AND NOT granted)"
    return _rows(server, waiting, connection.info.backend_pid) == [(True,)]


def _rows(server: PostgresServer, query: LiteralString, parameter: object) -> list[Any]:
    with psycopg.connect(server.url) as other:
        return other.execute(query, (parameter,)).fetchall()


def test_an_existing_schema_is_used(connection: psycopg.Connection, schema: str) -> None:
    connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    connection.commit()
    assert migrate(connection, schema=schema) == ALL


def test_a_failed_migration_changes_nothing(
    connection: psycopg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations.migrations()
    broken = [*known, Migration(len(ALL) + 1, "broken", b"CREATE TABLE half (a int); SELECT 1 / 0")]
    monkeypatch.setattr(migrations, "migrations", lambda: broken)
    with pytest.raises(SourceError, match="22012"):
        migrate(connection, schema=schema)
    monkeypatch.undo()
    assert connection.execute("SELECT to_regnamespace(%s)", (schema,)).fetchone() == (None,)
    connection.commit()
    assert migrate(connection, schema=schema) == ALL


def test_older_tables_are_updated(connection: psycopg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:1])
    assert migrate(connection, schema=schema) == ["positions"]
    with Positions("books", schema=schema).once(connection, message(5)) as fresh:
        assert fresh
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=rf"have version 1, and this lanes needs {len(ALL)}; run lanes_postgres\.migrate"
    ):
        check_schema(connection, schema=schema)
    assert migrate(connection, schema=schema) == ALL[1:]
    check_schema(connection, schema=schema)
    with Positions("books", schema=schema).once(connection, message(5)) as fresh:
        assert not fresh


@pytest.fixture
def service(postgres: PostgresServer, schema: str) -> Iterator[str]:
    """The name of a user with the mark ``?``, which must be quoted."""
    name = f"{schema}?"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name)))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(name)))


def test_the_users_of_older_tables_may_use_the_pieces_of_ranges(
    postgres: PostgresServer,
    connection: psycopg.Connection,
    schema: str,
    service: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every member reads them, so a service must not stop until somebody repeats the grants."""
    _migrate_to(ALL.index("ring_pieces"), postgres, schema, monkeypatch)
    place = {"schema": sql.Identifier(schema), "user": sql.Identifier(service)}
    for each in (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {user}",
        "GRANT SELECT ON {schema}.lanes_states TO PUBLIC",
    ):
        connection.execute(sql.SQL(each).format(**place))
    connection.commit()
    migrate(connection, schema=schema)

    def may(user: str, right: str, table: str, kind: str = "table") -> Any:
        text = f"SELECT has_{kind}_privilege(%s, %s, %s)"
        return connection.execute(text.encode(), (user, f"{schema}.{table}", right)).fetchall()[0][0]

    for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        assert may(service, right, "lanes_ring_pieces") and may(service, right, "lanes_ring_assignments")
    assert may(service, "USAGE", "lanes_ring_epochs", "sequence")
    assert not may(service, "TRUNCATE", "lanes_ring_pieces")
    assert may("public", "SELECT", "lanes_ring_pieces") and not may("public", "UPDATE", "lanes_ring_pieces")
    assert not may("public", "USAGE", "lanes_ring_epochs", "sequence")
    for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
        assert may(service, right, "lanes_ring_consumers") and not may("public", right, "lanes_ring_consumers")


def test_the_users_of_an_older_look_may_visit(
    postgres: PostgresServer,
    connection: psycopg.Connection,
    schema: str,
    service: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default privileges may give PUBLIC no right on new functions."""
    _migrate_to(ALL.index("log_visit"), postgres, schema, monkeypatch)
    place = {"schema": sql.Identifier(schema), "user": sql.Identifier(service)}
    for each in (
        "REVOKE EXECUTE ON FUNCTION {schema}.lanes_log_look FROM PUBLIC",
        "GRANT EXECUTE ON FUNCTION {schema}.lanes_log_look TO {user}",
    ):
        connection.execute(sql.SQL(each).format(**place))
    connection.commit()
    migrate(connection, schema=schema)
    granted = connection.execute(
        "SELECT count(*) FROM pg_proc, aclexplode(proacl) WHERE proname = 'lanes_log_visit' "
        "AND pronamespace = %s::regnamespace AND grantee = %s::regrole AND privilege_type = 'EXECUTE'",
        (f'"{schema}"', f'"{service}"'),
    ).fetchone()
    assert granted == (1,)


def test_tables_of_a_newer_version_are_refused(
    connection: psycopg.Connection, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = migrations.migrations()
    monkeypatch.setattr(migrations, "migrations", lambda: known[:1])
    refusing: list[Any] = [migrate, check_schema]
    for refused in refusing:
        with pytest.raises(
            ConfigError, match=rf"have version {len(ALL)} of a newer lanes, and this lanes supports 1; upgrade"
        ):
            refused(connection, schema=effects.schema)
    monkeypatch.undo()
    check_schema(connection, schema=effects.schema)


def test_a_connection_in_a_transaction_is_refused(connection: psycopg.Connection, schema: str) -> None:
    connection.execute("SELECT 1")
    with pytest.raises(ConfigError, match="in a transaction"):
        migrate(connection, schema=schema)
    with pytest.raises(ConfigError, match="schema="):
        migrate(connection, schema="")
