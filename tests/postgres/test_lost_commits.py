"""A lost COMMIT, or the lost answer to one, doubles and loses no effect and no attempt, and its message ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import psycopg
import pytest

import lanes
from lanes.attempts import Attempt
from lanes.errors import SourceError
from lanes_postgres import Positions, PostgresAttempts
from memsource import MemoryBroker, MemorySource
from tests.components import PostgresServer
from tests.postgres.lost_commits import Lost, LostCommits
from tests.postgres.tables import Effects, message, partition

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("lost", ["answer", "request"])]

MESSAGES: Final = 24
KEYS: Final = 4
LOSSES: Final = 5
RETRY: Final = lanes.Retry(attempts=100, backoff=0.01, max_backoff=0.02)


class Handler:
    """Adds one effect for each message; ``known`` holds the positions that had their effect before."""

    def __init__(self, effects: Effects, url: str) -> None:
        self._effects = effects
        self._url = url
        self._positions = Positions("books", schema=effects.schema)
        self.known: list[int] = []

    def connect(self) -> Any:
        return psycopg.AsyncConnection.connect(self._url)

    async def once(self, each: lanes.Message) -> None:
        async with await self.connect() as connection, self._positions.once(connection, each) as fresh:
            await self._add(connection, each, fresh=fresh)

    async def claim(self, each: lanes.Message) -> None:
        async with await self.connect() as connection, connection.transaction():
            await self._add(connection, each, fresh=await self._positions.claim(connection, each))

    async def once_all(self, batch: list[lanes.Message]) -> None:
        async with await self.connect() as connection, self._positions.once_all(connection, batch) as fresh:
            for each in batch:
                await self._add(connection, each, fresh=each in fresh)

    def blocking(self, each: lanes.Message) -> None:
        with psycopg.connect(self._url) as connection, self._positions.once(connection, each) as fresh:
            if fresh:
                self._effects.add(connection, each.position)
            else:
                self.known.append(each.position)

    async def _add(self, connection: psycopg.AsyncConnection[Any], each: lanes.Message, *, fresh: bool) -> None:
        if fresh:
            await self._effects.add_async(connection, each.position)
        else:
            self.known.append(each.position)


def published() -> tuple[MemoryBroker, MemorySource]:
    broker = MemoryBroker()
    for number in range(MESSAGES):
        broker.publish(str(number), key=number % KEYS)
    source = MemorySource(broker)
    source.finish()
    return broker, source


@pytest.mark.parametrize("kind", ["once", "claim", "once_all", "blocking"])
async def test_an_effect_with_a_lost_commit_is_stored_once(
    postgres: PostgresServer, effects: Effects, lost: Lost, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    broker, source = published()
    async with LostCommits(postgres, lost).open() as proxy:
        handler = Handler(effects, proxy.url)
        proxy.losing = LOSSES
        batch = 4 if kind == "once_all" else None
        settings = lanes.Settings(concurrency=8, batch=batch, retry=RETRY)
        with anyio.fail_after(30):
            await lanes.run(source, getattr(handler, kind), settings=settings)
        assert (proxy.losing, proxy.cut) == (0, LOSSES)
    assert broker.unfinished == 0
    found = effects.all()
    assert sorted(found) == sorted(set(found)) and len(found) == MESSAGES
    of_keys = [[position for position in found if (position - found[0]) % KEYS == key] for key in range(KEYS)]
    assert all(each == sorted(each) for each in of_keys)
    # After a lost answer the next attempt finds the effect; after a lost COMMIT the next attempt adds the effect.
    assert len(handler.known) >= LOSSES if lost == "answer" else handler.known == []


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_lost_commit_is_reported_as_retryable(
    postgres: PostgresServer, effects: Effects, lost: Lost, blocking: bool
) -> None:
    async with LostCommits(postgres, lost).open() as proxy:
        handler = Handler(effects, proxy.url)
        proxy.losing = 1
        with pytest.raises(SourceError, match=r"'books'.*, at the COMMIT: OperationalError") as failed:
            await (anyio.to_thread.run_sync(handler.blocking, message(1)) if blocking else handler.once(message(1)))
        assert failed.value.retryable
        assert effects.all() == ([1] if lost == "answer" else [])
        await handler.once(message(1))
    assert handler.known == ([1] if lost == "answer" else [])
    assert effects.all() == [1]


async def test_an_attempt_with_a_lost_commit_is_counted_once(
    postgres: PostgresServer, effects: Effects, lost: Lost
) -> None:
    owned = partition(epoch=1)
    async with LostCommits(postgres, lost).open() as proxy:
        store = attempts(effects, proxy.url)
        proxy.losing = 1
        with pytest.raises(SourceError, match=r"attempts of 'books'.*, at the COMMIT") as failed:
            await store.keep(message(5, b"k", owned), Attempt(2, "held", "ValueError"))
        assert failed.value.retryable
        await store.keep(message(5, b"k", owned), Attempt(2, "held", "ValueError"))
        assert await store.load(owned) == {5: Attempt(2, "held", "ValueError")}
        proxy.losing = 1
        with pytest.raises(SourceError, match=r"attempts of 'books'.*, at the COMMIT"):
            await store.drop(owned, [5])
        await store.drop(owned, [5])
        assert await store.load(owned) == {}


@pytest.mark.long
async def test_a_consumer_counts_attempts_with_lost_commits_once(
    postgres: PostgresServer, effects: Effects, lost: Lost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    broker, source = published()
    seen: dict[int, list[int]] = {}

    async def fail_twice(each: lanes.Message) -> None:
        seen.setdefault(each.position, []).append(each.attempt)
        if each.attempt <= 2:
            raise ValueError("not yet")

    async with LostCommits(postgres, lost).open() as proxy:
        # The consumer repeats a write after a second, then after two.
        proxy.losing = 2
        with anyio.fail_after(30):
            await lanes.run(
                source,
                fail_twice,
                settings=lanes.Settings(concurrency=8, retry=RETRY),
                attempts=attempts(effects, proxy.url),
            )
        assert (proxy.losing, proxy.cut) == (0, 2)
    assert broker.unfinished == 0
    assert len(seen) == MESSAGES
    assert all(each == [1, 2, 3] for each in seen.values())
    assert effects.kept()["lanes_attempts"] == 0


def attempts(effects: Effects, url: str) -> PostgresAttempts:
    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection

    return PostgresAttempts(connect, "books", schema=effects.schema)
