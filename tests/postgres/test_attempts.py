"""Attempts of failed messages outlive their process, for the next owner of the partition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

import lanes
from lanes.attempts import Attempt, AttemptState
from lanes.core.types import Message, Partition
from lanes.errors import ConfigError, SourceError
from lanes_postgres import Positions, PostgresAttempts
from memsource import MemoryBroker, MemorySource
from memsource.contract.attempts import ATTEMPTS_CHECKS, AttemptsCheck
from tests.fakes.support import until
from tests.postgres.tables import Effects, message, partition

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(effects: Effects) -> AsyncIterator[PostgresAttempts]:
    async with AsyncConnectionPool(effects.url, min_size=1, max_size=2) as pool:
        yield PostgresAttempts(pool.connection, "books", schema=effects.schema)


@pytest.mark.parametrize("check", ATTEMPTS_CHECKS, ids=lambda check: check.__name__)
async def test_the_store_keeps_the_contract(check: AttemptsCheck, effects: Effects) -> None:
    async with AsyncConnectionPool(effects.url, min_size=1, max_size=4) as pool:
        await check(lambda: PostgresAttempts(pool.connection, "books", schema=effects.schema))


def failed(position: int, attempts: int, of: Partition, state: AttemptState, error: str) -> tuple[Message, Attempt]:
    return message(position, b"k", of), Attempt(attempts, state, error)


async def test_a_new_owner_finds_the_kept_attempts(store: PostgresAttempts) -> None:
    owned = partition()
    assert await store.load(owned) == {}
    await store.keep(*failed(5, 1, owned, "held", "ValueError"))
    await store.keep(*failed(5, 2, owned, "blocked", "KeyError"))
    await store.keep(*failed(7, 3, owned, "parking", "Term"))
    kept = {5: Attempt(2, "blocked", "KeyError"), 7: Attempt(3, "parking", "Term")}
    assert await store.load(partition()) == kept
    assert await store.load(partition(1)) == {}
    await store.drop(owned, [5, 6])
    await store.drop(owned, [])
    assert await store.load(owned) == {7: kept[7]}


async def test_every_call_is_idempotent(store: PostgresAttempts) -> None:
    owned = partition(epoch=1)
    for _ in range(2):
        await store.keep(*failed(5, 2, owned, "held", "ValueError"))
    assert await store.load(owned) == {5: Attempt(2, "held", "ValueError")}
    # A late write of an earlier attempt does not lower the count.
    await store.keep(*failed(5, 1, owned, "held", "ValueError"))
    assert await store.load(owned) == {5: Attempt(2, "held", "ValueError")}
    # The state may change between attempts.
    await store.keep(*failed(5, 2, owned, "blocked", "ValueError"))
    assert await store.load(owned) == {5: Attempt(2, "blocked", "ValueError")}
    for _ in range(2):
        await store.drop(owned, [5])
    assert await store.load(owned) == {}


async def test_a_former_owner_changes_nothing(store: PostgresAttempts) -> None:
    former, owner = partition(epoch=1), partition(epoch=2)
    await store.keep(*failed(5, 2, former, "held", "ValueError"))
    await store.keep(*failed(5, 2, owner, "blocked", "ValueError"))
    await store.keep(*failed(5, 9, former, "held", "ValueError"))
    await store.drop(former, [5])
    assert await store.load(owner) == {5: Attempt(2, "blocked", "ValueError")}
    await store.drop(owner, [5])
    assert await store.load(owner) == {}


async def test_restarted_epochs_need_unfence(store: PostgresAttempts, effects: Effects) -> None:
    before, anew = partition(epoch=7), partition(epoch=1)
    await store.keep(*failed(5, 1, before, "held", "ValueError"))
    await store.keep(*failed(5, 2, anew, "held", "ValueError"))
    assert await store.load(anew) == {5: Attempt(1, "held", "ValueError")}
    async with await psycopg.AsyncConnection.connect(effects.url) as connection:
        await Positions("books", schema=effects.schema).unfence(connection, "orders")
    await store.keep(*failed(5, 2, anew, "held", "ValueError"))
    assert await store.load(anew) == {5: Attempt(2, "held", "ValueError")}
    await store.drop(anew, [5])
    assert await store.load(anew) == {}


async def test_subscriptions_are_independent_and_error_names_are_cleaned(effects: Effects) -> None:
    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(effects.url, autocommit=True) as connection:
            yield connection

    books, mails = (PostgresAttempts(connect, name, schema=effects.schema) for name in ("books", "mails"))
    await books.keep(*failed(5, 1, partition(), "held", "a\0b\ud800" + "x" * 300))
    assert await mails.load(partition()) == {}
    (kept,) = (await books.load(partition())).values()
    assert kept.error_type.startswith("ab\\ud800xxx") and len(kept.error_type) == 200
    assert repr(books) == f"<PostgresAttempts of 'books' in the schema {effects.schema!r}>"
    async with connect() as connection, connection.transaction():
        await Positions("books", schema=effects.schema).forget(connection, "orders", partition=0)
    assert await books.load(partition()) == {}


async def test_invalid_attempts_are_refused(store: PostgresAttempts, effects: Effects) -> None:
    with pytest.raises(ConfigError, match="state='lost' is unknown; use 'held', 'blocked', 'parking'"):
        await store.keep(message(1), Attempt(1, "lost", "E"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="connect is a str; pass a function") as refused:
        PostgresAttempts("postgresql://me:canary@db/x", "books")  # type: ignore[arg-type]
    assert "canary" not in str(refused.value)
    await store.keep(*failed(1, 1, partition(incarnation="made-1"), "held", "E"))
    with pytest.raises(ConfigError, match="'made-2'"):
        await store.load(partition(incarnation="made-2"))


async def test_missing_tables_or_servers_are_reported(effects: Effects) -> None:
    async with AsyncConnectionPool(effects.url, min_size=1) as pool:
        with pytest.raises(ConfigError, match="migrate"):
            await PostgresAttempts(pool.connection, "books", schema=f"{effects.schema}none").load(partition())
    with pytest.raises(SourceError, match="attempts of 'books'") as failed_:
        await PostgresAttempts(pool.connection, "books", schema=effects.schema).load(partition())
    assert failed_.value.retryable


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:canary%zz@127.0.0.1:1/x", 'token: "…"'),
        ("postgresql://me:1@canary@127.0.0.1:1/x", "…@127.0.0.1"),
        ("postgresql://me:canary@127.0.0.1:1/x", "127.0.0.1"),
    ],
)
async def test_no_error_shows_a_part_of_the_password(url: str, said: str) -> None:
    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection

    with pytest.raises(SourceError) as refused:
        await PostgresAttempts(connect, "books").load(partition())
    assert said in str(refused.value) and "canary" not in str(refused.value)


async def test_a_consumer_continues_the_attempts_of_earlier_ones(store: PostgresAttempts) -> None:
    broker = MemoryBroker()
    broker.publish(key="a")
    calls: list[int] = []

    async def handler(message: Message) -> None:
        calls.append(message.attempt)
        raise lanes.Nak(delay=3600.0)

    async def kept() -> list[Attempt]:
        return list((await store.load(partition(topic="memory"))).values())

    settings = lanes.Settings(retry=lanes.Retry(attempts=3), poison="block")
    for number, state in ((1, "held"), (2, "held"), (3, "blocked"), (4, "blocked")):
        async with lanes.Consumer(MemorySource(broker), handler, settings=settings, attempts=store) as consumer:
            await until(lambda c=consumer: c.ready and c.status().blocked + c.status().held == 1)  # type: ignore[misc]
            if number == 4:
                assert calls == [1, 2, 3]
                assert consumer.unblock("a") == 1
            await until(lambda n=number: len(calls) == n)  # type: ignore[misc]
        assert calls == list(range(1, number + 1))
        assert await kept() == [Attempt(number, state, "Nak")]  # type: ignore[arg-type]
