"""What a source says, reads and commits of a partition that comes, goes and comes again: on a mock cluster."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Message, Room
from lanes.source import Assigned, Delivered, Lost, Revoking, SourceEvent
from lanes_kafka.client import group, thread
from lanes_kafka.client.offsets import log_bounds
from tests.kafka.mock_cluster import OFFSET_COMMIT, MockCluster
from tests.kafka.sourced import NOTHING, ROOM, Called, reading, topic_of
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

FIND_COORDINATOR = 10


async def test_what_is_lost_is_neither_asked_back_nor_committed(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        before = await reader.committed()
        await reader.removed()
        event = await reader.told()
        assert isinstance(event, Lost) and event.partition is partition
        with pytest.raises(lanes.SourceError, match="given up") as failed:
            await reader.settle(partition, 5)
        assert failed.value.retryable
        assert await reader.committed() == before
        (again,) = await reader.assigned()
        assert again is not partition and again.floor == 0


async def test_nothing_is_committed_of_what_was_given_back(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        await reader.settle(partition, 2)
        await reader.source.release(partition)
        with pytest.raises(lanes.SourceError, match="given up"):
            await reader.settle(partition, 5)
        assert await reader.committed() == [2]


async def test_a_pause_ends_with_its_assignment(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        paused = Room(10, 1 << 20, frozenset(await reader.assigned(2)))
        with anyio.move_on_after(0.1):
            await reader.source.receive(paused)
        await until(lambda: reader.rests)
        async with reading(cluster, "848", name, 2) as peer:
            event = await reader.told(paused)
            assert isinstance(event, Revoking)
            await reader.source.release(event.partition)
            await peer.assigned()
        (again,) = await reader.assigned()
        assert again.id == event.partition.id
        produce(reader.topic, 5, partition=again.id.number)
        assert [message.partition for message in await reader.take(5)] == [again] * 5


async def test_what_was_read_for_a_former_assignment_is_read_again(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 10)
    old: list[Raw] = []
    async with reading(cluster, "848", name) as reader:
        client = reader.client

        def keep(raws: list[Raw]) -> list[Raw]:
            old.extend(raw for raw in raws if raw.error() is None)
            return raws

        def mix(raws: list[Raw]) -> list[Raw]:
            if [call for call in client.calls if call.name == "incremental_assign"][1:] and old:
                # Its tail, in the very call in which the partition was assigned anew.
                raws, old[:] = [*old[5:], *raws], []
            return raws

        client.change = keep
        await reader.assigned()
        assert len(await reader.take(10)) == len(old) == 10
        client.change = mix
        await reader.removed()
        assert isinstance(await reader.told(), Lost)
        await reader.assigned()
        assert [message.position for message in await reader.take(10)] == list(range(10))
        assert old == []


async def test_a_revoke_asks_for_what_leaves_alone(cluster: MockCluster, name: str) -> None:
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


async def test_only_callbacks_commit_synchronously(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        partitions = await reader.assigned(2)
        del reader.client.calls[:]
        for floor in (1, 2, 3):
            await reader.settle(partitions[0], floor)
        assert reader.client.calls == [Called("commit", inside=False, asynchronous=True)] * 3
        async with reading(cluster, "848", name, 2):
            event = await reader.told()
            assert isinstance(event, Revoking)
            await reader.settle(event.partition, 5)
            # It blocks for no answer, which might never come; what is committed is asked with a deadline.
            assert reader.client.calls[-2:] == [
                Called("commit", inside=True, asynchronous=True),
                Called("committed", inside=True),
            ]
            await reader.source.release(event.partition)
            assert 5 in await reader.committed()


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


async def test_where_a_group_begins_is_decided_once(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 3)
    for first, count in ((3, 0), (3, 2), (5, 0)):
        async with reading(cluster, "848", name, start="next") as reader:
            (partition,) = await reader.assigned()
            assert partition.floor == first
            assert [message.position for message in await reader.take(count)] == list(range(first, first + count))
            if count:
                await reader.settle(partition, first + count)
        if not count and first == 3:
            # After the first run, before the second.
            produce(reader.topic, 2)


async def test_a_stop_closes_the_client_when_all_is_drained(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    for number in range(2):
        produce(topic, 3, partition=number)
    async with reading(cluster, "848", name, 2) as reader:
        partitions = await reader.assigned(2)
        await reader.take(6)
        for partition in partitions:
            await reader.settle(partition, 3)
            await reader.source.release(partition)
    assert await reader.committed() == [3, 3]


async def test_what_is_held_of_a_lost_partition_is_not_delivered(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    for number in range(2):
        produce(topic, 20, partition=number)
    async with reading(cluster, "848", name, 2) as reader:
        former = await reader.assigned(2)
        # Of two partitions it reads ahead.
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


async def test_what_is_completed_goes_with_its_own_position(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 10)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(10)
        await reader.settle(partition, 1, [(3, 4)])
        await reader.settle(partition, 2, [(3, 4), (6, 8)])
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        assert (partition.floor, list(partition.completed)) == (2, [(3, 4), (6, 8)])


async def test_a_commit_of_no_member_fences_at_once(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        cluster.fail(OFFSET_COMMIT, [KafkaError.UNKNOWN_MEMBER_ID])
        with pytest.raises(lanes.SourceError, match="UNKNOWN_MEMBER_ID"):
            await reader.settle(partition, 5)
        # Nobody has called it back.
        event = await reader.told()
        assert isinstance(event, Lost) and event.partition is partition
        with pytest.raises(lanes.SourceError, match="given up"):
            await reader.settle(partition, 5)


async def test_an_error_that_does_not_pass_ends_the_source(cluster: MockCluster, name: str) -> None:
    topic_of(cluster, name, 1)
    cluster.fail(FIND_COORDINATOR, [KafkaError.GROUP_AUTHORIZATION_FAILED] * 100)
    try:
        async with reading(cluster, "848", name) as reader:
            with pytest.raises(lanes.SourceError, match="GROUP_AUTHORIZATION_FAILED") as failed:
                await reader.receive()
    finally:
        cluster.calm(FIND_COORDINATOR)
    assert not failed.value.retryable and f"g-{name}" in str(failed.value)


async def test_a_position_out_of_range_ends_the_source(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.settle(partition, 99)
    async with reading(cluster, "848", name) as reader:
        with pytest.raises(lanes.SourceError, match=f"{name}/0: offset 99 is out of range, the log has 0 to 5"):
            await reader.receive()
    async with reading(cluster, "848", name, out_of_range="earliest") as reader:
        (partition,) = await reader.assigned()
        assert partition.floor == 0


@pytest.mark.parametrize("passes", [True, False])
async def test_where_to_go_on_is_asked_until_the_broker_says_it(
    passes: bool, cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_ASK_BOUNDS_EVERY", 0.0)
    refusals = 2
    code = KafkaError._TRANSPORT if passes else KafkaError.TOPIC_AUTHORIZATION_FAILED

    def refuse(client: Consumer, places: Any) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise KafkaException(KafkaError(code))
        return log_bounds(client, places)

    monkeypatch.setattr(group, "log_bounds", refuse)
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name, out_of_range="earliest") as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        client = reader.client

        def stray(raws: list[Raw]) -> list[Raw]:
            client.change = lambda raws: raws
            client.seek(TopicPartition(name, 0, 99))
            return raws

        client.change = stray
        if not passes:
            with pytest.raises(lanes.SourceError, match=r"offset range of a log failed.*TOPIC_AUTHORIZATION_FAILED"):
                await reader.receive()
            return
        events: list[SourceEvent] = []
        found: list[Message] = []
        # One receive may bring all of it.
        while len(found) < 5:
            new = await reader.receive(ROOM)
            events += new
            found += [message for event in new if isinstance(event, Delivered) for message in event.run]
        lost, again = events[0], events[1]
        assert isinstance(lost, Lost) and lost.partition is partition and "truncated" in lost.reason
        assert isinstance(again, Assigned) and refusals == 0
        assert [(message.partition, message.position) for message in found] == [
            (again.partition, position) for position in range(5)
        ]


@pytest.mark.parametrize(("completed", "committed"), [([], 3), ([(1, 2)], 0)])
async def test_a_gap_is_committed_with_the_release_where_nothing_is_completed_above(
    completed: list[tuple[int, int]],
    committed: int,
    cluster: MockCluster,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.settle(partition, 0, completed)
        # No mock has markers.
        monkeypatch.setattr(reader.client, "position", lambda partitions: [TopicPartition(name, 0, 3)])
        await reader.source.release(partition)
        assert await reader.committed() == [committed]
