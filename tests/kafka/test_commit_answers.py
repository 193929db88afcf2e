"""Each answer belongs to its commit, and each error of a commit has its effect."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

import lanes
from lanes.core.types import Partition, PartitionId, Settlement
from lanes.source import Lost, Revoking
from lanes_kafka.client.commits import COMMIT_TIMEOUT, Commit, Commits
from lanes_kafka.client.records import READER
from tests.kafka.fakes import FakeAnswer
from tests.kafka.mock_cluster import OFFSET_COMMIT, MockCluster
from tests.kafka.reader import Called, reading, topic_of
from tests.kafka.workload import QUIET, produce

pytestmark = pytest.mark.anyio


class Sent:
    """A client that accepts commits and does nothing else."""

    def commit(self, **named: Any) -> None:
        assert named["asynchronous"]


def test_a_commit_after_an_abandoned_one_gets_its_own_answer() -> None:
    commits = Commits(lambda partition: True, lambda reason: None, lambda: 0.0, "kafka g", {})
    client: Any = Sent()
    places = [Partition(PartitionId("t", number), READER, floor=0) for number in range(2)]
    first, second = FakeAnswer(), FakeAnswer()
    commits.send(client, Commit([Settlement(each, [], 5) for each in places], first))
    # One of the two partitions was lost, so the commit of the other one is sent again.
    first.given_up = True
    commits.send(client, Commit([Settlement(places[1], [], 6)], second))
    commits.on_commit(None, [TopicPartition("t", 0, 5), TopicPartition("t", 1, 5)])
    assert second.given == [] and commits.unanswered
    commits.on_commit(None, [TopicPartition("t", 1, 6)])
    assert second.given == [None] and not commits.unanswered


def test_a_late_answer_does_not_answer_a_newer_commit() -> None:
    now = 0.0
    commits = Commits(lambda partition: True, lambda reason: None, lambda: now, "kafka g", {})
    client: Any = Sent()
    partition = Partition(PartitionId("t", 0), READER, floor=0)
    first, second = FakeAnswer(), FakeAnswer()
    commits.send(client, Commit([Settlement(partition, [], 5)], first))
    now = COMMIT_TIMEOUT
    commits.expire(now)
    newer = Commit([Settlement(partition, [], 5, [(7, 9)])], second)
    commits.send(client, newer)
    commits.on_commit(None, [TopicPartition("t", 0, 5)])
    assert isinstance(first.given[0], lanes.SourceError) and second.given == [] and commits.unanswered
    commits.on_commit(None, newer.offsets)
    assert second.given == [None] and not commits.unanswered


async def test_a_revoke_commits_after_an_outage(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        await reader.assigned(2)
        # The outage is over, but nothing was read or committed since.
        reader.client.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        async with reading(cluster, "848", name, 2):
            event = await reader.next_event()
            assert isinstance(event, Revoking)
            await reader.settle(event.partition, 5)
            await reader.source.release(event.partition)
        assert 5 in await reader.committed()


KINDS = {
    "lost": [KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_INSTANCE_ID, KafkaError.FENCED_MEMBER_EPOCH],
    "metadata": [KafkaError.OFFSET_METADATA_TOO_LARGE],
    "permanent": [
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INVALID_GROUP_ID,
        KafkaError.UNSUPPORTED_VERSION,
    ],
    "retry": [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.INVALID_COMMIT_OFFSET_SIZE,
        KafkaError.POLICY_VIOLATION,
    ],
    # The client retries these by itself.
    "made": [KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.REQUEST_TIMED_OUT],
}


@pytest.mark.parametrize("synchronous", [False, True], ids=["sent", "awaited"])
@pytest.mark.parametrize(("kind", "code"), [(kind, code) for kind, codes in KINDS.items() for code in codes])
def test_commit_errors_are_classified(kind: str, code: int, synchronous: bool, cluster: MockCluster) -> None:
    topic_of(cluster, "T", 1)
    lost: list[str] = []
    commits = Commits(lambda partition: True, lost.append, lambda: 0.0, "kafka g/T", {})
    before = commits.limit
    # FENCED_INSTANCE_ID needs a static member; closing another client would never end. An instance id stays reserved
    # until the end of its session, so each client has a separate group.
    group_id = f"g{time.monotonic_ns()}"
    config = {**QUIET, "bootstrap.servers": cluster.url, "group.id": group_id, "group.instance.id": "i"}
    client = Consumer({**config, "enable.auto.commit": False, "on_commit": commits.on_commit})
    answer = FakeAnswer()
    try:
        client.subscribe(["T"])
        while not client.assignment():
            client.poll(0.01)
        # A synchronous commit is sent again to learn the error.
        cluster.fail(OFFSET_COMMIT, [code] * (1 + synchronous))
        partition = Partition(PartitionId("T", 0), READER, floor=0)
        commits.send(client, Commit([Settlement(partition, [], 7)], answer), timeout=20.0 if synchronous else None)
        while not answer.given:
            client.poll(0.01)
    finally:
        cluster.calm(OFFSET_COMMIT)
        client.close()
    (error,) = answer.given
    assert not commits.unanswered
    assert bool(lost) == (kind == "lost") and (commits.limit < before) == (kind == "metadata")
    if kind == "made":
        assert error is None
        return
    assert isinstance(error, lanes.SourceError) and error.retryable == (kind != "permanent")
    # A client that is fenced by its instance id has ended before the second commit.
    names = [KafkaError(code).name()] + ["_FATAL"] * (synchronous and code == KafkaError.FENCED_INSTANCE_ID)
    assert any(name in str(error) for name in names) and "T/0" in str(error)


async def test_only_callbacks_commit_synchronously(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        partitions = await reader.assigned(2)
        del reader.client.calls[:]
        for floor in (1, 2, 3):
            await reader.settle(partitions[0], floor)
        assert reader.client.calls == [Called("commit", inside=False, asynchronous=True)] * 3
        async with reading(cluster, "848", name, 2):
            event = await reader.next_event()
            assert isinstance(event, Revoking)
            await reader.settle(event.partition, 5)
            # The call does not block for the answer, which may never arrive; committed() has a timeout.
            assert reader.client.calls[-2:] == [
                Called("commit", inside=True, asynchronous=True),
                Called("committed", inside=True),
            ]
            await reader.source.release(event.partition)
            assert 5 in await reader.committed()


async def test_completed_runs_are_committed_with_their_own_position(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 10)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(10)
        await reader.settle(partition, 1, [(3, 4)])
        await reader.settle(partition, 2, [(3, 4), (6, 8)])
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        assert (partition.floor, list(partition.completed)) == (2, [(3, 4), (6, 8)])


async def test_a_commit_by_a_former_member_fences_at_once(cluster: MockCluster, name: str) -> None:
    produce(topic_of(cluster, name, 1), 5)
    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(5)
        cluster.fail(OFFSET_COMMIT, [KafkaError.UNKNOWN_MEMBER_ID])
        with pytest.raises(lanes.SourceError, match="UNKNOWN_MEMBER_ID"):
            await reader.settle(partition, 5)
        # No callback has reported the loss.
        event = await reader.next_event()
        assert isinstance(event, Lost) and event.partition is partition
        with pytest.raises(lanes.SourceError, match="no longer owns"):
            await reader.settle(partition, 5)
