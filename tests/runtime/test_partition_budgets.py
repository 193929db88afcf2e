"""Bounds per partition keep one partition from taking all handlers and all messages in flight of a consumer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import Attempt, Capacity, Message, Partition
from memsource import GroupSource, MemoryAttempts, MemoryBroker, MemorySource
from tests.effort import runs
from tests.fakes.grouped import group_of
from tests.fakes.support import (
    Gated,
    acknowledge,
    consumer_of,
    deliver_beside_the_assignment,
    published,
    started,
    turns,
    until,
)

BUSY, QUIET = 0, 1


@pytest.mark.anyio
@settings(max_examples=runs(40))
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    budgets=st.sampled_from([(1, None), (2, None), (None, 3), (1, 1), (2, 4), (3, 9)]),
    size=st.sampled_from([None, None, 3]),
    pauses=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
async def test_no_partition_exceeds_its_bounds(
    counts: list[int], budgets: tuple[int | None, int | None], size: int | None, pauses: list[int]
) -> None:
    calls, messages = budgets
    broker = MemoryBroker(len(counts))
    for partition, count in enumerate(counts):
        for number in range(count):
            broker.publish(key=number % 7, partition=partition)
    source = MemorySource(broker)
    source.finish()
    running: Counter[int] = Counter()
    highest: Counter[str] = Counter()

    async def handle(batch: list[Message]) -> None:
        partitions = {message.partition.id.number for message in batch}
        running.update(partitions)
        for _ in range(pauses[batch[0].position % len(pauses)]):
            status = consumer.status()
            assert status.running <= 4
            assert sum(each.in_flight for each in status.partitions.values()) == status.in_flight <= 12
            highest["calls"] = max(highest["calls"], *running.values())
            for each in status.partitions.values():
                highest["messages"] = max(highest["messages"], each.in_flight)
            await anyio.lowlevel.checkpoint()
        running.subtract(partitions)

    async def handle_one(message: Message) -> None:
        await handle([message])

    consumer = consumer_of(
        source,
        handle_one if size is None else handle,
        max_in_flight=12,
        concurrency_per_partition=calls,
        max_in_flight_per_partition=messages,
        batch=size,
    )
    with anyio.fail_after(20):
        await consumer.run()
    assert broker.unfinished == 0
    assert highest["calls"] <= (calls or 4)
    assert highest["messages"] <= (messages or 12)


@pytest.mark.anyio
async def test_a_backlog_of_one_partition_leaves_handlers_for_another() -> None:
    broker = published(*range(50), partitions=2, partition=BUSY)
    handler = Gated()
    consumer = consumer_of(
        MemorySource(broker), handler, concurrency_per_partition=3, max_in_flight_per_partition=10, max_in_flight=40
    )
    async with started(consumer):
        await until(lambda: len(handler.started) == 3)
        await turns()
        last = broker.publish(key="quiet", partition=QUIET)
        await until(lambda: last.position in handler.started)
        await turns()
        status = consumer.status()
        busy, quiet = (status.partitions[f"memory/{number}"] for number in (BUSY, QUIET))
        assert (busy.running, quiet.running, status.running) == (3, 1, 4)
        assert (busy.in_flight, busy.full, quiet.in_flight, quiet.full) == (10, True, 1, False)


@pytest.mark.anyio
@pytest.mark.parametrize("messages", [11, 13, 18, 20])
async def test_a_stuck_partition_does_not_stop_the_intake_of_another(messages: int) -> None:
    """The low-water mark of the consumer, 12, lies above the messages of the full partition."""
    broker = published(*["stuck"] * 40, partitions=2, partition=BUSY)
    handler = Gated(free=[b"quiet"])
    consumer = consumer_of(MemorySource(broker), handler, max_in_flight=20, max_in_flight_per_partition=messages)
    async with started(consumer):
        await until(lambda: len(handler.started) == 1)
        await turns()
        for _ in range(100):
            broker.publish(key="quiet", partition=QUIET)
        # A partition with the whole bound of the consumer leaves no room.
        wanted = 100 if messages < 20 else 0
        await until(lambda: len(handler.ended) == wanted and consumer.status().in_flight == messages)
        await turns()
        assert len(handler.ended) == wanted
        assert consumer.status().partitions["memory/0"].full
        handler.let(*handler.started)


class HangsFor(MemoryAttempts):
    """A store that never answers for one partition."""

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        if partition.id.number == BUSY:
            await anyio.sleep_forever()
        return await super().load(partition)


@pytest.mark.anyio
async def test_a_partition_that_loads_its_attempts_uses_no_room_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = published(*range(50), partitions=2, partition=BUSY)
    source = MemorySource(broker)
    deliver_beside_the_assignment(source, monkeypatch)
    handler = Gated()
    consumer = consumer_of(source, handler, store=HangsFor(), max_in_flight=40, max_in_flight_per_partition=10)
    async with started(consumer):
        await until(lambda: consumer.active)
        await turns()
        last = broker.publish(key="quiet", partition=QUIET)
        await until(lambda: handler.started == [last.position])


@pytest.mark.anyio
async def test_a_full_partition_receives_again_when_messages_are_settled() -> None:
    broker = published(*range(40), partitions=2, partition=BUSY)
    source = MemorySource(broker)
    source.finish()
    handler = Gated()
    consumer = consumer_of(source, handler, max_in_flight=20, max_in_flight_per_partition=4)
    async with started(consumer):
        while len(handler.ended) < 40:
            await until(lambda: len(handler.started) > len(handler.ended))
            await turns()
            assert consumer.status().partitions["memory/0"].in_flight <= 4
            handler.let(*handler.started)
            await turns()
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_draining_partition_counts_no_abandoned_message() -> None:
    """A source that commits keeps the place of each abandoned message, but such a message has left the bounds."""
    handler = Gated()
    consumer = consumer_of(GroupSource(group_of("abcdefgh"), "m"), handler)
    async with started(consumer):
        await until(lambda: handler.running == 4)
        consumer.stop()
        await turns()
        status = consumer.status()
        (partition,) = status.partitions.values()
        assert (partition.in_flight, partition.running, status.in_flight) == (4, 4, 4)
        handler.let(*handler.started)


@pytest.mark.anyio
async def test_partitions_start_in_turn() -> None:
    broker = published(*range(20), partitions=3, partition=0)
    for partition in (1, 2):
        for number in range(5):
            broker.publish(key=number, partition=partition)
    source = MemorySource(broker)
    source.finish()
    order: list[int] = []

    async def handler(message: Message) -> None:
        order.append(message.partition.id.number)

    # One handler at a time, and every message is delivered before the first one starts.
    consumer = consumer_of(source, handler, concurrency=1, concurrency_per_partition=1, max_in_flight=100)
    with anyio.fail_after(20):
        await consumer.run()
    assert sorted(Counter(order[:15]).values()) == [5, 5, 5]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("budgets", "each", "all_three"),
    [
        ((None, None), (6, 30), (6, 30)),
        ((1, None), (1, 30), (3, 30)),
        ((1, 5), (1, 5), (3, 15)),
        ((4, 20), (4, 20), (6, 30)),
    ],
)
async def test_the_status_shows_the_capacity(
    budgets: tuple[int | None, int | None], each: tuple[int, int], all_three: tuple[int, int]
) -> None:
    consumer = consumer_of(
        MemorySource(MemoryBroker(3)),
        acknowledge,
        concurrency=6,
        max_in_flight=30,
        concurrency_per_partition=budgets[0],
        max_in_flight_per_partition=budgets[1],
    )
    async with started(consumer):
        await until(lambda: consumer.ready and len(consumer.status().partitions) == 3)
        status = consumer.status()
    assert {partition.capacity for partition in status.partitions.values()} == {
        Capacity(concurrency=each[0], max_in_flight=each[1])
    }
    assert status.capacity == Capacity(concurrency=all_three[0], max_in_flight=all_three[1])
