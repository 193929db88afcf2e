"""Consumers with positions have each effect exactly once, through retries, batches, lost servers and missing tables."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import anyio
import psycopg
import pytest

import lanes
from lanes.errors import ConfigError
from lanes_postgres import Positions
from memsource import MemoryBroker, MemorySource
from tests.components import PostgresServer
from tests.conftest import PostgresFactory
from tests.postgres.tables import Effects


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
async def test_a_killed_server_loses_and_doubles_no_effect(
    fresh_postgres: PostgresFactory, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_postgres()
    effects = Effects.make(server, schema)
    positions = Positions("books", schema=schema)
    broker, source = published(60, 7)
    downs: list[int] = []

    async def handler(message: lanes.Message) -> None:
        if message.position in (20, 40) and message.position not in downs:
            # Other handlers may be between claim and COMMIT.
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
    # The keys of both differ, so either may come first.
    assert sorted(downs) == [20, 40] and broker.unfinished == 0
    found = effects.all()
    assert sorted(found) == sorted(set(found)) and len(found) == 60
    of_keys = [[position for position in found if (position - found[0]) % 7 == key] for key in range(7)]
    assert all(each == sorted(each) for each in of_keys)


@pytest.mark.anyio
async def test_missing_tables_stop_a_consumer_before_any_effect(
    postgres: PostgresServer, schema: str, effects: Effects
) -> None:
    broker, source = published(5, 5)
    nowhere = Positions("books", schema=f"{schema}none")
    with pytest.raises(ConfigError, match="migrate"):
        await lanes.run(source, sync_handler(nowhere, effects, postgres.url, lambda _: None))
    assert broker.unfinished == 5 and effects.all() == []


@pytest.mark.anyio
async def test_a_retried_handler_has_each_effect_once(postgres: PostgresServer, effects: Effects) -> None:
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
async def test_a_redelivered_batch_has_each_effect_once(postgres: PostgresServer, effects: Effects) -> None:
    positions = Positions("books", schema=effects.schema)

    async def handler(messages: list[lanes.Message]) -> None:
        async with (
            await psycopg.AsyncConnection.connect(postgres.url) as connection,
            positions.once_all(connection, messages) as fresh,
        ):
            for each in fresh:
                await effects.add_async(connection, each.position)

    for _ in range(2):  # two whole runs, as if all acknowledgements were lost
        broker, source = published(40, 3)
        with anyio.fail_after(30):
            await lanes.run(source, handler, settings=lanes.Settings(batch=8, concurrency=8))
        assert broker.unfinished == 0
    assert sorted(effects.all()) == sorted(set(effects.all())) and len(effects.all()) == 40
