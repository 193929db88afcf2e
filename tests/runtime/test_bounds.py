"""``max_in_flight`` is a hard bound in messages and in bytes; intake stops and resumes once for each crossing."""

from __future__ import annotations

import itertools

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import Message, Nak
from lanes.core.types import Room
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.effort import runs
from tests.fakes.support import Gated, consumer_of, published, started, turns, until


def rooms(source: MemorySource) -> list[Room]:
    return [call.room for call in source.called("receive") if call.room is not None]


@pytest.mark.anyio
@settings(max_examples=runs(40))
@given(
    count=st.integers(0, 80),
    bound=st.integers(1, 12),
    batch=st.integers(1, 30),
    pauses=st.lists(st.integers(0, 5), min_size=1, max_size=7),
)
async def test_in_flight_is_bounded_in_messages(count: int, bound: int, batch: int, pauses: list[int]) -> None:
    broker = published(*[number % 5 for number in range(count)])
    source = MemorySource(broker, batch=batch)
    source.finish()
    highest = 0

    async def handler(message: Message) -> None:
        nonlocal highest
        for _ in range(pauses[message.position % len(pauses)]):
            await anyio.lowlevel.checkpoint()
            # The broker's count includes messages between the source and the engine.
            highest = max(highest, len(broker.unacked()))

    consumer = consumer_of(source, handler, concurrency=min(3, bound), max_in_flight=bound)
    with anyio.fail_after(20):
        await consumer.run()
    assert broker.unfinished == 0
    assert highest <= bound
    assert consumer.status().peak_in_flight <= bound
    assert all(room.messages <= bound for room in rooms(source))


@pytest.mark.anyio
@settings(max_examples=runs(40))
@given(
    sizes=st.lists(st.integers(0, 400), max_size=40),
    bound=st.integers(1, 1000),
    batch=st.integers(1, 30),
    turns=st.integers(0, 3),
)
async def test_in_flight_is_bounded_in_bytes(sizes: list[int], bound: int, batch: int, turns: int) -> None:
    broker = MemoryBroker()
    for number, size in enumerate(sizes):
        broker.publish(b"x" * size, key=number % 5)
    source = MemorySource(broker, batch=batch)
    source.finish()

    async def handler(message: Message) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()

    consumer = consumer_of(source, handler, max_in_flight_bytes=bound)
    with anyio.fail_after(20):
        await consumer.run()
    assert broker.unfinished == 0
    largest = max((size + 16 for size in sizes), default=0)  # including the key of a message
    # The message that crosses the bound may be larger than the bound.
    assert consumer.status().peak_in_flight_bytes < bound + largest or not sizes


@pytest.mark.anyio
async def test_intake_stops_at_the_bound_and_resumes_at_the_low_water_mark() -> None:
    broker = published(*[None] * 30)
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=2, max_in_flight=8)) as run:
        await until(lambda: handler.running == 2)
        await until(lambda: rooms(source)[-1][:2] == (0, 0))
        # The low-water mark: half of the bound beyond the two running handlers, 5.
        for position, left in ((0, 7), (1, 6)):
            handler.let(position)
            await until(lambda: len(broker.acked()) == position + 1)  # noqa: B023 - awaited before it changes
            await turns()
            assert run.consumer.status().in_flight == left
            assert not run.consumer.status().taking
            assert rooms(source)[-1][:2] == (0, 0)
        handler.let(2)
        await until(lambda: run.consumer.status().in_flight == 8)
        status = run.consumer.status()
        assert (status.in_flight, status.peak_in_flight) == (8, 8)
        handler.let(*range(30))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    with_room = [room.messages > 0 for room in rooms(source)]
    switches = sum(before != after for before, after in itertools.pairwise(with_room))
    # The source delivers 8 messages at first, then 3 or more at a time. The bound is reached and left once each time.
    assert switches <= 2 * (1 + (30 - 8) // 3)


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["hangs", "is held", "is blocked"])
async def test_a_stuck_key_stops_no_other_key_below_the_bound(how: str) -> None:
    """The messages of the stuck key keep the count above the low-water mark of 12, but below the bound of 20."""
    broker = published(*["stuck"] * 15)
    gated = Gated()

    async def handler(message: Message) -> None:
        if message.key == b"stuck":
            if how == "is held":
                raise Nak(delay=3600.0)
            if how == "is blocked":
                raise ValueError("poison")
            await gated(message)

    attempts = 2 if how == "is held" else 1
    consumer = consumer_of(MemorySource(broker), handler, max_in_flight=20, poison="block", attempts=attempts)
    async with started(consumer):
        await until(lambda: consumer.ready and consumer.status().in_flight == 15)
        for number in range(12):
            broker.publish(key=f"other {number}")
        await until(lambda: len(broker.acked()) == 12)
        assert consumer.status().peak_in_flight == 20
        gated.let(*range(15))


@pytest.mark.anyio
async def test_a_message_larger_than_the_bound_runs_alone() -> None:
    broker = MemoryBroker()
    broker.publish(b"small", key="a")
    broker.publish(b"x" * 5000, key="b")
    broker.publish(b"small", key="c")
    handler = Gated()
    source = MemorySource(broker)
    async with started(consumer_of(source, handler, max_in_flight_bytes=100)) as run:
        await until(lambda: handler.running)
        await turns()
        # The first message leaves room, so the large one may cross the bound; then no room is left.
        assert handler.started == [0, 1]
        assert not run.consumer.status().taking
        handler.let(0)
        await until(lambda: broker.acked() == [0])
        await turns()
        assert handler.started == [0, 1]
        handler.let(1, 2)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_lower_limit_of_the_broker_is_the_bound() -> None:
    broker = MemoryBroker(max_unacked=6)
    for _ in range(20):
        broker.publish()
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=4)) as run:
        await until(lambda: handler.running == 4)
        await turns()
        assert run.consumer.status().max_in_flight == 6
        assert len(broker.unacked()) == 6
        handler.let(*range(20))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_clients_are_paused_while_every_handler_hangs() -> None:
    source = MemorySource(published(*range(10)))
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=2, max_in_flight=2)) as run:
        await until(lambda: handler.running == 2)
        await until(lambda: any(call.room is not None and call.room.paused for call in source.calls))
        handler.let(*range(10))
        run.scope.cancel()
        await run.end()
