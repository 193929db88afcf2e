"""Messages that share a call have separate attempts, and only outcomes that count are stored."""

from __future__ import annotations

import threading

import anyio
import pytest

from lanes import Attempt, Consumer, Message, Retry, Settings, Term
from memsource import MemoryAttempts, MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import started, turns, until

pytestmark = pytest.mark.anyio


class Call:
    """A handler whose first call fails as a whole; ``calls`` are positions and attempts.

    ``begun``: the first call has begun; it ends when ``go_on`` is set.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.calls: list[list[tuple[int, int]]] = []
        self.begun = anyio.Event()
        self.go_on = anyio.Event()

    async def __call__(self, batch: list[Message]) -> None:
        self.calls.append([(message.position, message.attempt) for message in batch])
        self.begun.set()
        await self.go_on.wait()
        if batch[0].position == 0:
            raise self.error


@pytest.mark.parametrize("stopped", [False, True], ids=["to its end", "stopped"])
@pytest.mark.parametrize("kept", [False, True], ids=["no store", "store"])
@pytest.mark.parametrize(("error", "attempts"), [(Term("poison"), 3), (ValueError("no"), 1)], ids=["term", "last try"])
async def test_a_stop_gives_up_only_the_head_of_a_failed_call(
    error: Exception, attempts: int, kept: bool, stopped: bool
) -> None:
    broker = MemoryBroker(1)
    for number in range(4):
        broker.publish(b"%d" % number, key="k")
    handler, store = Call(error), MemoryAttempts() if kept else None
    settings = Settings(batch=4, linger=0.05, retry=Retry(attempts=attempts), poison="skip")

    def member() -> Consumer:
        dead_letters = MemoryDeadLetters(broker)
        return Consumer(MemorySource(broker), handler, settings=settings, dead_letters=dead_letters, attempts=store)

    if stopped:
        async with started(member()) as run:
            await handler.begun.wait()
            run.consumer.stop()
            handler.go_on.set()
            await run.end()
    handler.go_on.set()
    async with started(member()) as run:
        await until(lambda: broker.unfinished == 0)
        run.consumer.stop()
        await run.end()
    assert handler.calls[0] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]
    # These messages were never handled, so they have no attempt.
    assert handler.calls[-1] == [(1, 1), (2, 1), (3, 1)]


@pytest.mark.parametrize("in_threads", [False, True], ids=["tasks", "threads"])
async def test_a_drain_writes_no_second_dead_letter_for_a_blocked_message(
    in_threads: bool,
) -> None:
    broker, store = MemoryBroker(1), MemoryAttempts()
    broker.publish(b"0", key="bad")
    begun, go_on = threading.Event(), threading.Event()

    def refuse(batch: list[Message]) -> None:
        if batch[0].key == b"bad":
            raise ValueError("no")
        begun.set()

    def plain(batch: list[Message]) -> None:
        refuse(batch)
        go_on.wait(10)

    async def waits(batch: list[Message]) -> None:
        refuse(batch)
        await until(go_on.is_set)

    def member() -> tuple[Consumer, MemoryDeadLetters]:
        dead_letters = MemoryDeadLetters(broker)
        settings = Settings(batch=2, linger=0.05, retry=Retry(attempts=1), poison="block_and_dlq")
        handler = plain if in_threads else waits
        return Consumer(
            MemorySource(broker), handler, settings=settings, dead_letters=dead_letters, attempts=store
        ), dead_letters

    blocked = [{0: Attempt(1, "blocked", "ValueError")}]
    first, dead_letters = member()
    async with started(first) as run:
        await until(lambda: list(store.kept().values()) == blocked)
        assert await run.stop() is None
    assert len(dead_letters.called("put")) == 1
    broker.publish(b"1", key="other")
    second, _ = member()
    async with started(second) as run:
        await until(begun.is_set)
        second.stop()
        await turns()
        go_on.set()
        assert await run.end() is None
    assert list(store.kept().values()) == blocked
    third, dead_letters = member()
    async with started(third) as run:
        await until(lambda: third.ready and third.status().blocked == 1)
        assert await run.stop() is None
    assert dead_letters.called("put") == []
