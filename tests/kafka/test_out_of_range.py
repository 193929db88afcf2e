"""Positions that the log does not reach: the source fails, or continues where the configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.offset_map import LIMIT, encode
from lanes.core.types import Message, PartitionId
from lanes.source import Assigned, Delivered, Lost, SourceEvent
from lanes_kafka.client import group
from lanes_kafka.client.offsets import StartPosition, log_bounds, start_positions
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import ROOM, reading, topic_of
from tests.kafka.workload import produce

pytestmark = pytest.mark.anyio


def out_of_range(topic: str, number: int, offset: int) -> Raw:
    return Raw(topic=topic, partition=number, offset=offset, error=KafkaError(KafkaError._AUTO_OFFSET_RESET))


async def test_messages_before_a_gap_are_delivered(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(topic_of(cluster, name, 1), 10)
    ids = {PartitionId(name, 0)}
    monkeypatch.setattr(group, "log_bounds", lambda client, asked: (dict.fromkeys(ids, 8), dict.fromkeys(ids, 10)))
    async with reading(cluster, "848", name, out_of_range="earliest") as reader:

        def deleted(raws: list[Raw]) -> list[Raw]:
            """Replace the messages from offset 5 by an error; the log now starts at 8."""
            before = [raw for raw in raws if (raw.offset() or 0) < 5]
            if len(before) == len(raws):
                return raws
            reader.client.change = lambda raws: raws
            return [*before, out_of_range(name, 0, 5)]

        await reader.assigned()
        reader.client.change = deleted
        assert [message.position for message in await reader.take(7)] == [0, 1, 2, 3, 4, 8, 9]


async def test_completed_messages_are_committed_after_another_partition_failed(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 2), 3, partition=0)
    async with reading(cluster, "848", name, 2, out_of_range="fail") as reader:
        partitions = {each.id.number: each for each in await reader.assigned(2)}
        await reader.take(3)
        reader.client.change = lambda raws: [*raws, out_of_range(name, 1, 99)]
        with pytest.raises(lanes.SourceError, match=f"{name}/1: offset 99 is out of range"):
            await reader.receive()
        await reader.settle(partitions[0], 3)
        assert await reader.committed() == [3, 0]


async def test_a_start_out_of_range_after_a_presumed_loss_leaves_the_client_for_the_last_commits(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(topic_of(cluster, name, 1), 3)
    async with reading(cluster, "848", name, out_of_range="fail") as reader:
        (partition,) = await reader.assigned()
        await reader.take(3)

        def refuse(*arguments: Any, **named: Any) -> None:
            raise lanes.SourceError(f"{name}/0: offset 99 is out of range")

        monkeypatch.setattr(group.Group, "reclaim", refuse)
        with pytest.raises(lanes.SourceError, match=f"^{name}/0: offset 99 is out of range"):
            await reader.receive()
        await reader.settle(partition, 3)
        assert await reader.committed() == [3]


async def test_a_position_out_of_range_ends_the_source(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.settle(partition, 99)
    async with reading(cluster, "848", name) as reader:
        with pytest.raises(lanes.SourceError, match=f"{name}/0: offset 99 is out of range, because the log has 0 to 5"):
            await reader.receive()
    async with reading(cluster, "848", name, out_of_range="earliest") as reader:
        (partition,) = await reader.assigned()
        assert partition.floor == 0


@pytest.mark.parametrize("passes", [True, False])
async def test_the_log_bounds_are_asked_for_until_the_broker_answers(
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
        # One receive may return all events.
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


class Deleted:
    """A client whose group has committed position 2, and 4, 5 and 8 as completed, in a log of other bounds."""

    def __init__(self, low: int, high: int) -> None:
        self._bounds = {OFFSET_BEGINNING: low, OFFSET_END: high}

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [
            TopicPartition(each.topic, each.partition, 2, encode(2, [(4, 6), (8, 9)], LIMIT)) for each in partitions
        ]

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, self._bounds[each.offset]) for each in partitions]


@pytest.mark.parametrize(
    ("low", "high", "start"),
    [
        pytest.param(3, 10, StartPosition(3, [(4, 6), (8, 9)], uncommitted=False), id="below all completed"),
        pytest.param(4, 10, StartPosition(6, [(8, 9)], uncommitted=False), id="at a completed run"),
        pytest.param(5, 10, StartPosition(6, [(8, 9)], uncommitted=False), id="within a completed run"),
        pytest.param(8, 10, StartPosition(9, [], uncommitted=True), id="at the last completed run"),
        pytest.param(10, 10, StartPosition(10, [], uncommitted=True), id="above all completed"),
        pytest.param(0, 1, StartPosition(0, [], uncommitted=True), id="a truncated log has other messages"),
    ],
)
def test_a_start_above_deleted_messages_keeps_what_is_completed(low: int, high: int, start: StartPosition) -> None:
    one = PartitionId("t", 0)
    client: Any = Deleted(low, high)
    found = start_positions(
        client, [one], start="beginning", sizes={}, out_of_range="earliest", hands_over=True, name="n"
    )
    assert found == {one: start}
