"""With a partitioned queue, the bounds per partition bound each physical queue with all its partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import Attempt, Capacity, Message, Partition
from lanes.core.types import Room
from lanes.source import Assigned
from memsource import MemoryAttempts, MemoryBroker
from tests.effort import runs
from tests.fakes.queues import QueueSource
from tests.fakes.support import (
    Gated,
    acknowledge,
    consumer_of,
    deliver_beside_the_assignment,
    started,
    turns,
    until,
)

EMPTY, FULL, OTHER = 0, 1, 2
"""Two partitions of one topic, and one of another topic."""


def published(*counts: int) -> MemoryBroker:
    """A broker with this number of messages in each partition, each with a key of its own."""
    broker = MemoryBroker(len(counts))
    for partition, count in enumerate(counts):
        for number in range(count):
            broker.publish(key=f"{partition} {number}", partition=partition)
    return broker


@pytest.mark.anyio
@settings(max_examples=runs(40))
@given(
    counts=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    budgets=st.sampled_from([(1, None), (2, None), (None, 3), (1, 1), (2, 4), (3, 9)]),
    size=st.sampled_from([None, None, 3]),
    pauses=st.lists(st.integers(0, 4), min_size=1, max_size=5),
)
async def test_no_physical_queue_exceeds_its_bounds(
    counts: list[int], budgets: tuple[int | None, int | None], size: int | None, pauses: list[int]
) -> None:
    calls, messages = budgets
    broker = published(*counts)
    source = QueueSource(broker)
    source.finish()
    running: Counter[str] = Counter()
    highest: Counter[str] = Counter()

    async def handle(batch: list[Message]) -> None:
        topics = {message.partition.id.source for message in batch}
        running.update(topics)
        for _ in range(pauses[batch[0].position % len(pauses)]):
            in_flight: Counter[str] = Counter()
            for name, each in consumer.status().partitions.items():
                in_flight[name.partition("/")[0]] += each.in_flight
            highest["calls"] = max(highest["calls"], *running.values())
            highest["messages"] = max(highest["messages"], *in_flight.values())
            await anyio.lowlevel.checkpoint()
        running.subtract(topics)

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
async def test_a_backlog_of_one_topic_leaves_handlers_for_another() -> None:
    broker = published(50, 50, 0, 0)
    handler = Gated()
    consumer = consumer_of(
        QueueSource(broker), handler, concurrency_per_partition=3, max_in_flight_per_partition=10, max_in_flight=40
    )
    async with started(consumer):
        await until(lambda: len(handler.started) == 3)
        await turns()
        last = broker.publish(key="other", partition=OTHER)
        await until(lambda: last.position in handler.started and consumer.status().running == 4)
        await turns()
        status = consumer.status()
        both = [status.partitions[f"q/{number}"] for number in (EMPTY, FULL)]
        assert (sum(each.running for each in both), status.running) == (3, 4)
        assert (sum(each.in_flight for each in both), {each.full for each in both}) == (10, {True})
        assert not status.partitions[f"q__p1/{OTHER}"].full


@pytest.mark.anyio
async def test_topics_start_in_turn_and_so_do_the_partitions_of_a_topic() -> None:
    source = QueueSource(published(20, 20, 20, 0, 20, 0))
    source.finish()
    order: list[int] = []

    async def handler(message: Message) -> None:
        order.append(message.partition.id.number)

    # One handler at a time, and every message is delivered before the first one starts.
    consumer = consumer_of(source, handler, concurrency=1, concurrency_per_partition=1, max_in_flight=100)
    with anyio.fail_after(20):
        await consumer.run()
    topics = Counter(source.topic(number) for number in order[:30])
    assert sorted(topics.values()) == [10, 10, 10]
    assert Counter(order[:30])[0] == Counter(order[:30])[1] == 5


@pytest.mark.anyio
async def test_a_partition_that_is_assigned_to_a_full_topic_delivers_nothing() -> None:
    broker = published(40, 40, 5, 0)
    source = QueueSource(broker, assigned=[EMPTY])
    handler = Gated(free=[b"2 0", b"2 1", b"2 2", b"2 3", b"2 4"])
    consumer = consumer_of(
        source, handler, max_in_flight=40, concurrency_per_partition=2, max_in_flight_per_partition=8
    )
    async with started(consumer):
        await until(lambda: consumer.status().in_flight == 8)
        source.assign(FULL)
        source.assign(OTHER)
        await until(lambda: len(handler.ended) == 5)
        await turns()
        status = consumer.status()
        assert [status.partitions[f"q/{number}"].in_flight for number in (EMPTY, FULL)] == [8, 0]
        assert [status.partitions[f"q/{number}"].full for number in (EMPTY, FULL)] == [True, True]
        # When the first partition is given back, the topic has room for the second one.
        handler.free.update(b"1 %d" % number for number in range(40))
        source.revoke(EMPTY)
        handler.let(*handler.started)
        await until(lambda: len(handler.ended) >= 5 + 40)


@pytest.mark.anyio
async def test_a_source_delivers_nothing_of_a_full_queue_even_right_after_the_assignment() -> None:
    source = QueueSource(published(5, 5, 5, 0))
    await source.open()
    room = Room(10, 1_000, full_queues=frozenset({"q"}))
    assigned = await source.receive(room)
    assert {event.partition.id.source for event in assigned if isinstance(event, Assigned)} == {"q", "q__p1"}
    (delivered,) = await source.receive(room)
    assert getattr(delivered, "partition", None) in [e.partition for e in assigned if isinstance(e, Assigned)][2:]
    await source.aclose()


class HangsFor(MemoryAttempts):
    """A store that never answers for one partition."""

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        if partition.id.number == EMPTY:
            await anyio.sleep_forever()
        return await super().load(partition)


@pytest.mark.anyio
async def test_messages_that_wait_for_stored_attempts_use_the_bound_of_their_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = published(50, 50, 0, 0)
    source = QueueSource(broker)
    deliver_beside_the_assignment(source, monkeypatch)
    handler = Gated()
    consumer = consumer_of(source, handler, store=HangsFor(), max_in_flight=40, max_in_flight_per_partition=10)
    async with started(consumer):
        await until(lambda: consumer.active)
        await turns()
        last = broker.publish(key="other", partition=OTHER)
        await until(lambda: last.position in handler.started)
        await turns()
        delivered = [sum(broker.deliveries(at, number) > 0 for at in range(50)) for number in (EMPTY, FULL)]
        assert delivered[0] > 0 and sum(delivered) <= 10
        handler.let(*handler.started)


@pytest.mark.anyio
@pytest.mark.parametrize(("bounds", "expected"), [((None, None), (20, 100)), ((4, 30), (8, 60)), ((16, 60), (20, 100))])
async def test_the_capacity_is_that_of_each_topic_times_the_topics(
    bounds: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    consumer = consumer_of(
        QueueSource(published(1, 1, 1, 1)),
        acknowledge,
        concurrency=20,
        max_in_flight=100,
        concurrency_per_partition=bounds[0],
        max_in_flight_per_partition=bounds[1],
    )
    async with started(consumer):
        await until(lambda: consumer.ready and len(consumer.status().partitions) == 4)
        status = consumer.status()
    capacity = Capacity(concurrency=expected[0], max_in_flight=expected[1])
    assert status.queues["q"].capacity == status.capacity == capacity
    assert status.queues["q"].assigned == (0, 1)
