"""On a mock cluster, partitions are assigned, paused, revoked, lost and assigned again in order."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Partition, PartitionId, Room
from lanes.source import Lost, Revoking, SourceEvent
from lanes_kafka import KafkaSource
from lanes_kafka.client import thread
from lanes_kafka.client.records import READER
from tests.kafka.conftest import MakeTopic
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import NOTHING, reading, topic_of
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio


async def test_a_lost_partition_is_neither_revoked_nor_committed(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        before = await reader.committed()
        await reader.removed()
        event = await reader.next_event()
        assert isinstance(event, Lost) and event.partition is partition
        with pytest.raises(lanes.SourceError, match="no longer owns") as failed:
            await reader.settle(partition, 5)
        assert failed.value.retryable
        assert await reader.committed() == before
        (again,) = await reader.assigned()
        assert again is not partition and again.floor == 0


async def test_a_released_partition_is_not_committed(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        await reader.settle(partition, 2)
        await reader.source.release(partition)
        with pytest.raises(lanes.SourceError, match="no longer owns"):
            await reader.settle(partition, 5)
        assert await reader.committed() == [2]


async def test_a_pause_ends_with_its_assignment(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        paused = Room(10, 1 << 20, frozenset(await reader.assigned(2)))
        with anyio.move_on_after(0.1):
            await reader.source.receive(paused)
        await until(lambda: reader.rests)
        async with reading(cluster, "848", name, 2) as peer:
            event = await reader.next_event(paused)
            assert isinstance(event, Revoking)
            await reader.source.release(event.partition)
            await peer.assigned()
        (again,) = await reader.assigned()
        assert again.id == event.partition.id
        produce(reader.topic, 5, partition=again.id.number)
        assert [message.partition for message in await reader.take(5)] == [again] * 5


async def test_messages_of_a_former_assignment_are_read_again(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 10)
    old: list[Raw] = []
    async with reading(cluster, "848", name) as reader:
        client = reader.client

        def keep(raws: list[Raw]) -> list[Raw]:
            old.extend(raw for raw in raws if raw.error() is None)
            return raws

        def mix(raws: list[Raw]) -> list[Raw]:
            if [call for call in client.calls if call.name == "incremental_assign"][1:] and old:
                # Return the end of the old run in the same call that assigns the partition again.
                raws, old[:] = [*old[5:], *raws], []
            return raws

        client.change = keep
        await reader.assigned()
        assert len(await reader.take(10)) == len(old) == 10
        client.change = mix
        await reader.removed()
        assert isinstance(await reader.next_event(), Lost)
        await reader.assigned()
        assert [message.position for message in await reader.take(10)] == list(range(10))
        assert old == []


async def test_a_revoke_concerns_the_leaving_partitions_alone(cluster: MockCluster, name: str) -> None:
    async with AsyncExitStack() as readers:
        one = await readers.enter_async_context(reading(cluster, "848", name, 2))
        await one.assigned(2)
        other = await readers.enter_async_context(reading(cluster, "848", name, 2))
        asked = await one.receive(NOTHING)
        assert [type(event) for event in asked] == [Revoking]
        (event,) = asked
        assert isinstance(event, Revoking)
        await one.settle(event.partition, 0)
        await one.source.release(event.partition)
        (moved,) = await other.assigned()
        assert moved.id == event.partition.id


async def test_without_room_nothing_is_resumed(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "PAUSE_AFTER", 0.01)
    async with reading(cluster, "848", name) as reader:
        await reader.assigned()
        for size in range(5):
            with anyio.move_on_after(0.1):
                await reader.source.receive(Room(0, size))
        await until(lambda: reader.rests)
        calls = list(reader.client.calls)
        for size in range(5, 10):
            with anyio.move_on_after(0.1):
                await reader.source.receive(Room(0, size))
        assert reader.client.calls == calls
        produce(reader.topic, 1)
        await reader.take(1)


async def test_prefetched_messages_of_a_lost_partition_are_dropped(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    for number in range(2):
        produce(topic, 20, partition=number)
    async with reading(cluster, "848", name, 2) as reader:
        former = await reader.assigned(2)
        # The source reads ahead when there are two partitions.
        await reader.take(1)
        await reader.removed()
        lost: list[SourceEvent] = []
        while len(lost) < 2:
            lost += await reader.receive(NOTHING)
        assert [type(event) for event in lost] == [Lost, Lost]
        again = await reader.assigned(2)
        messages = await reader.take(40)
    assert {message.partition for message in messages} == set(again) and not set(again) & set(former)
    for partition in again:
        assert [message.position for message in messages if message.partition is partition] == list(range(20))


@pytest.mark.parametrize(("completed", "committed"), [([], 3), ([(1, 2)], 0)])
async def test_a_gap_is_committed_with_the_release_unless_messages_above_are_completed(
    completed: list[tuple[int, int]],
    committed: int,
    cluster: MockCluster,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.settle(partition, 0, completed)
        # A mock cluster has no transaction markers.
        monkeypatch.setattr(reader.client, "position", lambda partitions: [TopicPartition(name, 0, 3)])
        await reader.source.release(partition)
        assert await reader.committed() == [committed]


async def test_an_opened_source_joins_no_group_before_its_first_receive(topic: MakeTopic) -> None:
    """A run may be refused after ``open``, and must not decide start positions then."""
    there = topic(1)
    polled: list[int] = []

    class Counting(Consumer):
        def consume(self, num_messages: int = 1, timeout: float = -1.0) -> list[Any]:
            polled.append(num_messages)
            return super().consume(num_messages, timeout)

    source = KafkaSource(there.config(), topics=there.name, client=Counting)
    await source.open()
    foreign = Partition(PartitionId(there.name, 0), READER)
    for _ in range(3):
        # The client's thread answers, with a whole turn between two answers.
        await source.release(foreign)
    assert not polled
    with anyio.move_on_after(10.0) as scope:
        await source.receive(lanes.core.types.Room(1, 1_000))
    assert polled and not scope.cancelled_caught
    await source.aclose()
