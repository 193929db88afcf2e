"""A failed attempt holds only its lane; attempts are counted, and ``Nak`` and ``Term`` are obeyed."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from lanes import HandlerHalted, Message, Nak, Term
from lanes.clock import monotonic
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import consumer_of, published, started, turns, until


@pytest.mark.anyio
async def test_a_held_message_stops_only_its_own_key() -> None:
    broker = published("a", "b", "a", "b", "c")
    source = MemorySource(broker)
    ended: list[int] = []

    async def handler(message: Message) -> None:
        if message.position == 0:
            raise Nak(delay=3600.0)
        ended.append(message.position)

    async with started(consumer_of(source, handler, attempts=5)) as run:
        await until(lambda: broker.acked() == [1, 3, 4])
        await turns()
        status = run.consumer.status()
        assert (status.held, status.running, status.in_flight, status.retries) == (1, 0, 2, 1)
        assert sorted(ended) == [1, 3, 4]
        assert await run.stop() is None
    # Neither message was settled: both are redelivered at the next start.
    assert broker.unacked() == [0, 2]


@pytest.mark.anyio
async def test_attempts_are_counted_and_the_successor_waits_for_the_last() -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    source.finish()
    attempts: list[tuple[int, int]] = []

    async def handler(message: Message) -> None:
        attempts.append((message.position, message.attempt))
        if message.position == 0 and message.attempt < 4:
            raise ValueError("not yet")

    await consumer_of(source, handler, attempts=4, backoff=0.001).run()
    assert attempts == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1)]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_nak_replaces_the_backoff_by_its_delay() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    times: list[float] = []

    async def handler(message: Message) -> None:
        times.append(monotonic())
        if message.attempt == 1:
            raise Nak(delay=0.05)
        if message.attempt == 2:
            raise Nak(delay=0.0)

    # With the backoff instead of the delays this would take an hour.
    with anyio.fail_after(20):
        await consumer_of(source, handler, attempts=3, backoff=30.0).run()
    assert len(times) == 3
    assert times[1] - times[0] >= 0.05
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_the_longest_delay_of_naks_in_a_task_group_holds() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    times: list[float] = []

    async def busy(delay: float | None) -> None:
        raise Nak("busy", delay=delay)

    async def handler(message: Message) -> None:
        times.append(monotonic())
        if message.attempt == 1:
            async with anyio.create_task_group() as tasks:
                for delay in (0.2, None, 0.1):
                    tasks.start_soon(busy, delay)

    await consumer_of(source, handler, attempts=2, backoff=0.001).run()
    assert len(times) == 2
    assert times[1] - times[0] >= 0.2
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_nak_without_a_delay_takes_the_backoff() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()

    async def handler(message: Message) -> None:
        if message.attempt < 3:
            raise Nak

    await consumer_of(source, handler, attempts=3, backoff=0.001).run()
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_naks_use_up_attempts() -> None:
    broker = published("a")

    async def handler(message: Message) -> None:
        raise Nak(delay=0.0)

    consumer = consumer_of(MemorySource(broker), handler, attempts=3)
    with pytest.raises(HandlerHalted, match=r"failed 3 time\(s\)") as caught:
        await consumer.run()
    assert isinstance(caught.value.__cause__, Nak)


@pytest.mark.anyio
async def test_term_gives_a_message_up_at_once() -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    source.finish()
    handled: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.position)
        if message.position == 0:
            raise Term("no such customer")

    dead_letters = MemoryDeadLetters(broker)
    await consumer_of(source, handler, attempts=5, dead_letters=dead_letters).run()
    assert handled == [0, 1]
    (dead_letter,) = broker.dead_letters
    assert (dead_letter.position, dead_letter.attempts, dead_letter.error_type) == (0, 1, "Term")
    assert dead_letter.error_text == "no such customer"


class Unspeakable(Exception):
    """An exception whose text cannot be rendered."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        lambda: ValueError("wrong"),
        lambda: TimeoutError(),
        lambda: OSError(5, "gone"),
        lambda: ExceptionGroup("two", [ValueError("one"), KeyError("other")]),
        lambda: StopAsyncIteration(),
        lambda: AssertionError(),
        lambda: RecursionError("deep"),
        lambda: Unspeakable(),
    ],
    ids=lambda make: type(make()).__name__,
)
async def test_every_exception_goes_to_the_retry_policy(make: Callable[[], Exception]) -> None:
    broker = MemoryBroker()
    for key in ("a", "b", "a", "a"):
        broker.publish(key=key)
    source = MemorySource(broker)
    source.finish()
    ended: list[int] = []

    async def handler(message: Message) -> None:
        if message.position == 0 and message.attempt == 1:
            raise make()
        ended.append(message.position)

    await consumer_of(source, handler, attempts=2, backoff=0.001).run()
    assert sorted(ended) == [0, 1, 2, 3]
    assert [position for position in ended if position != 1] == [0, 2, 3]
    assert broker.unfinished == 0
