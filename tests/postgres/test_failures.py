"""Tables missing, rights missing, servers that are replicas or gone: a clear error, and nothing lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import psycopg
import pytest
from psycopg import sql

import lanes
from lanes.errors import ConfigError, SourceError
from lanes_postgres import Positions, check_schema, migrate
from memsource import MemoryBroker, MemorySource
from tests.components import PostgresServer
from tests.conftest import PostgresFactory
from tests.postgres.tables import Effects, message

PASSWORD = "canary-password-5e1f"

Connection = psycopg.Connection


def once(positions: Positions, connection: Connection, position: int = 1) -> bool:
    with positions.once(connection, message(position)) as fresh:
        return fresh


@pytest.fixture
def stranger(postgres: PostgresServer, schema: str) -> Iterator[str]:
    """A user who may do nothing yet."""
    name = f"u{schema}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE USER {} PASSWORD {}").format(sql.Identifier(name), PASSWORD))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {0}; DROP USER {0}").format(sql.Identifier(name)))


def test_without_tables_the_remedy_is_named(connection: Connection, schema: str) -> None:
    positions = Positions("books", schema=schema)
    with pytest.raises(ConfigError, match=rf"the schema '{schema}': 42P01 .*run lanes_postgres\.migrate"):
        once(positions, connection)
    with pytest.raises(ConfigError, match=r"no tables of lanes; run lanes_postgres\.migrate"):
        check_schema(connection, schema=schema)
    migrate(connection, schema=schema)
    check_schema(connection, schema=schema)
    assert once(positions, connection), "the same connection works on"
    connection.execute(effects_of(schema, "ALTER TABLE {} DROP COLUMN epoch"))
    connection.commit()
    with pytest.raises(ConfigError, match="42703"):
        once(positions, connection)


def effects_of(schema: str, text: str) -> sql.Composed:
    return Effects("", schema).query(text, "lanes_positions")


def test_without_rights_the_grants_are_named(postgres: PostgresServer, effects: Effects, stranger: str) -> None:
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
        assert migrate_is_refused(connection, effects.schema) == []
        with pytest.raises(ConfigError, match="42501"):
            migrate(connection, schema=f"{effects.schema}new")


def migrate_is_refused(connection: Connection, schema: str) -> list[str]:
    """With nothing left to do it needs no right to create."""
    return migrate(connection, schema=schema)


def test_a_transaction_that_may_only_read_is_refused_by_name(connection: Connection, effects: Effects) -> None:
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
    assert not once(positions, connection, 2), "it was committed"


def test_a_connection_that_is_gone_is_retryable(connection: Connection, effects: Effects) -> None:
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


def published(count: int, keys: int) -> tuple[MemoryBroker, MemorySource]:
    broker = MemoryBroker()
    for number in range(count):
        broker.publish(str(number), key=number % keys)
    source = MemorySource(broker)
    source.finish()
    return broker, source


def sync_handler(positions: Positions, effects: Effects, url: str, after: Callable[[int], None]) -> Any:
    def handler(message: lanes.Message) -> None:
        with psycopg.connect(url) as connection, positions.once(connection, message) as fresh:
            if fresh:
                effects.add(connection, message.position)
                after(message.position)

    return handler


@pytest.mark.anyio
async def test_a_server_that_goes_down_in_mid_run_loses_and_doubles_nothing(
    fresh_postgres: PostgresFactory, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_postgres()
    effects = Effects.make(server, schema)
    positions = Positions("books", schema=schema)
    broker, source = published(60, 7)
    downs: list[int] = []

    async def handler(message: lanes.Message) -> None:
        if message.position in (20, 40) and message.position not in downs:
            # Between claim and COMMIT of others, too.
            downs.append(message.position)
            await anyio.to_thread.run_sync(server.kill)
            await anyio.to_thread.run_sync(server.start)
        async with (
            await psycopg.AsyncConnection.connect(server.url) as connection,
            positions.once(connection, message) as fresh,
        ):
            if fresh:
                await effects.add_async(connection, message.position)

    retry = lanes.Retry(attempts=1_000, backoff=0.05, max_backoff=0.2)
    caplog.set_level(logging.CRITICAL)
    with anyio.fail_after(40):
        await lanes.run(source, handler, settings=lanes.Settings(concurrency=8, retry=retry))
    assert downs == [20, 40] and broker.unfinished == 0
    found = effects.all()
    assert sorted(found) == sorted(set(found)) and len(found) == 60
    of_keys = [[position for position in found if (position - found[0]) % 7 == key] for key in range(7)]
    assert all(each == sorted(each) for each in of_keys)


@pytest.mark.anyio
async def test_missing_tables_stop_a_consumer_and_nothing_is_given_up(
    postgres: PostgresServer, schema: str, effects: Effects
) -> None:
    broker, source = published(5, 5)
    nowhere = Positions("books", schema=f"{schema}none")
    with pytest.raises(ConfigError, match="migrate"):
        await lanes.run(source, sync_handler(nowhere, effects, postgres.url, lambda _: None))
    assert broker.unfinished == 5 and effects.all() == []


@pytest.mark.anyio
async def test_a_handler_that_fails_and_is_retried_has_each_effect_once(
    postgres: PostgresServer, effects: Effects
) -> None:
    broker, source = published(30, 4)
    failed: set[int] = set()

    def fail_once(position: int) -> None:
        if position % 3 == 0 and position not in failed:
            failed.add(position)
            raise lanes.Nak(delay=0)

    positions = Positions("books", schema=effects.schema)
    with anyio.fail_after(30):
        await lanes.run(
            source,
            sync_handler(positions, effects, postgres.url, fail_once),
            settings=lanes.Settings(concurrency=4),
        )
    assert broker.unfinished == 0 and len(failed) == 10
    assert sorted(effects.all()) == sorted(set(effects.all())) and len(effects.all()) == 30


@pytest.mark.anyio
async def test_a_batch_handler_has_each_effect_once_although_all_of_it_comes_twice(
    postgres: PostgresServer, effects: Effects
) -> None:
    positions = Positions("books", schema=effects.schema)

    async def handler(messages: list[lanes.Message]) -> None:
        async with (
            await psycopg.AsyncConnection.connect(postgres.url) as connection,
            positions.once_all(connection, messages) as fresh,
        ):
            for each in fresh:
                await effects.add_async(connection, each.position)

    for _ in range(2):  # two runs of the whole, as after the loss of everything that was acknowledged
        broker, source = published(40, 3)
        with anyio.fail_after(30):
            await lanes.run(source, handler, settings=lanes.Settings(batch=8, concurrency=8))
        assert broker.unfinished == 0
    assert sorted(effects.all()) == sorted(set(effects.all())) and len(effects.all()) == 40


def test_rows_that_a_policy_hides_are_no_endless_loop(
    postgres: PostgresServer, effects: Effects, stranger: str
) -> None:
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
