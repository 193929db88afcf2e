"""Positions to start from: asked for until the broker answers, decided once for a group, never over a commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewPartitions

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.client.group import Group
from lanes_kafka.client.topics import Topic as KnownTopic
from lanes_kafka.config import client_config
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import reading, topic_of
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

Make = Callable[[dict[str, Any]], Consumer]


class Refused(Consumer):
    """A client whose first ``times`` questions for committed positions fail with ``code``."""

    def __init__(self, config: dict[str, Any], code: int, times: float) -> None:
        super().__init__(config)
        self.code = code
        self.times = times
        self.asked = 0

    def committed(self, *arguments: Any, **named: Any) -> Any:
        self.asked += 1
        if self.asked <= self.times:
            raise KafkaException(KafkaError(self.code))
        return super().committed(*arguments, **named)


class Case:
    """A consumer of three messages, its clients, and the positions that its handler ran."""

    def __init__(self, topic: Topic, code: int, times: float) -> None:
        produce(topic, 3)
        self.clients: list[Refused] = []
        self.ended: list[int] = []
        config = {**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{topic.name}"}
        source = KafkaSource(config, topics=topic.name, client=self._make)
        self.consumer = lanes.Consumer(source, self._handle)
        self._code, self._times = code, times

    def _make(self, config: dict[str, Any]) -> Refused:
        self.clients.append(Refused(config, self._code, self._times))
        return self.clients[-1]

    async def _handle(self, message: lanes.Message) -> None:
        self.ended.append(message.position)


async def test_start_positions_are_asked_for_until_the_broker_answers(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.NOT_COORDINATOR, 5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(case.consumer.run)
        await until(lambda: len(case.ended) == 3)
        case.consumer.stop()
    assert case.ended == [0, 1, 2] and case.clients[0].asked == 6


async def test_a_stop_ends_the_wait_for_start_positions(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.NOT_COORDINATOR, inf)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(case.consumer.run)
        await until(lambda: bool(case.clients) and case.clients[0].asked > 4)
        case.consumer.stop()
    assert case.ended == []


async def test_a_permanent_error_is_not_retried(topic: MakeTopic) -> None:
    case = Case(topic(), KafkaError.GROUP_AUTHORIZATION_FAILED, inf)
    with pytest.raises(lanes.SourceError, match=r"assigning partitions failed: .*GROUP_AUTHORIZATION_FAILED"):
        await case.consumer.run()
    assert case.clients[0].asked == 1


class Asked:
    """A client of a group in which another member commits after the first question."""

    def __init__(self, later: int) -> None:
        self.later = later
        self.asked = 0
        self.commits: list[list[tuple[int, int]]] = []

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.asked += 1
        found = {1: self.later} if self.asked > 1 else {}
        return [TopicPartition(each.topic, each.partition, found.get(each.partition, -1001)) for each in partitions]

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 3) for each in partitions]

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.commits.append(sorted((each.partition, each.offset) for each in offsets))

    def assignment(self) -> list[TopicPartition]:
        return []

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        pass

    def resume(self, partitions: list[TopicPartition]) -> None:
        pass


@pytest.mark.parametrize(("later", "decided"), [(-1001, [(0, 3), (1, 3)]), (7, [(0, 3)])])
def test_start_positions_do_not_overwrite_commits_of_other_members(later: int, decided: list[tuple[int, int]]) -> None:
    client: Any = Asked(later)
    config = client_config({"bootstrap.servers": "b:1", "group.id": "g", "group.protocol": "consumer"}, start="next")
    topics: Any = SimpleNamespace(
        known={"t": KnownTopic("id", 2)},
        wait=lambda timeout: True,
        appears=lambda topic, timeout: True,
        id_of=lambda topic: "id",
    )
    failures: list[Exception] = []
    owning = Group(
        config,
        topics,
        lambda events: None,
        lambda seconds: None,
        failures.append,
        lambda: 0.0,
        "kafka g",
        is_full=lambda: False,
        hands_over=True,
    )
    owning.on_assign(client, [TopicPartition("t", 0)])
    assert failures == [] and client.commits == [decided]


async def test_the_start_of_a_group_is_decided_once(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 3)
    for first, count in ((3, 0), (3, 2), (5, 0)):
        async with reading(cluster, "848", name, start="next") as reader:
            (partition,) = await reader.assigned()
            assert partition.floor == first
            assert [message.position for message in await reader.take(count)] == list(range(first, first + count))
            if count:
                await reader.settle(partition, first + count)
        if not count and first == 3:
            # Between the first run and the second.
            produce(reader.topic, 2)


@pytest.mark.parametrize("start", ["next", "beginning"])
async def test_a_partition_without_a_position_is_newer_than_the_first_run(start: str, topic: MakeTopic) -> None:
    events = topic(1)
    produce(events, 5, partition=0)
    story = Story()
    work = Work(story)
    async with group(events, "848", work) as members:
        first = members.start("first", start=start)
        first.consumer.pause()
        await members.owning(first=1)
        await first.consumer.drain()
        # The start positions are committed before the first message, or the next run would decide again.
        assert members.committed() == [5 if start == "next" else 0]
        events.admin.create_partitions([NewPartitions(events.name, 2)])[events.name].result(10)
        events.partitions = 2
        produce(events, 5, partition=0)
        produce(events, 5, partition=1)
        members.start("second", start=start)
        await members.owning(second=2)
        await until(lambda: len(work.ended) == (10 if start == "next" else 15))
    assert set(work.ended.values()) == {1} and members.committed() == [10, 5]
