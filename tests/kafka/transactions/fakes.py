"""Producers and a coordinator of transactions as data, for tests without a broker."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from lanes.core.types import Partition, PartitionId
from lanes.outputs.publisher import Output

RETRIABLE = KafkaError(KafkaError._TIMED_OUT, "simulated", retriable=True)
ABORTABLE = KafkaError(KafkaError.NOT_ENOUGH_REPLICAS, "simulated", txn_requires_abort=True)
MOVED = KafkaError(KafkaError.ILLEGAL_GENERATION, "simulated", txn_requires_abort=True)
FATAL = KafkaError(KafkaError._FENCED, "simulated", fatal=True)
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "simulated", txn_requires_abort=True)
FORBIDDEN = KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "simulated", fatal=True)
NO_GROUP = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED, "simulated", txn_requires_abort=True)
NO_TOPIC = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "simulated", txn_requires_abort=True)
PURGED = KafkaError(KafkaError._PURGE_QUEUE, "simulated")

Answers = dict[str, list[KafkaError | None]]


class Cluster:
    """Producers and a coordinator as data.

    ``answers`` are the errors of the next calls by name. A failed ``commit`` commits all the same if ``commits`` is
    True. ``visible`` are the positions of the committed outputs. ``missing`` are topics that do not exist.
    """

    def __init__(self) -> None:
        self.answers: Answers = {}
        self.calls: list[str] = []
        self.commits = False
        self.visible: list[int] = []
        self.stored: dict[PartitionId, tuple[int, str]] = {}
        self.metadata: list[object] = []
        self.before: dict[str, Any] = {}
        self.missing: set[str] = set()

    def answer(self, call: str) -> None:
        self.calls.append(call)
        if call in self.before:
            self.before.pop(call)()
        errors = self.answers.get(call)
        error = errors.pop(0) if errors else None
        if error is not None:
            raise KafkaException(error)


class FakeProducer:
    """A producer of the cluster."""

    def __init__(self, cluster: Cluster, settings: dict[str, Any]) -> None:
        self._cluster = cluster
        self._outputs: list[int] = []
        self._offsets: list[TopicPartition] = []
        cluster.calls.append("make")

    def init_transactions(self, timeout: float) -> None:
        self._cluster.answer("init")

    def begin_transaction(self) -> None:
        self._cluster.answer("begin")
        self._outputs, self._offsets = [], []

    def produce(self, topic: str, **options: Any) -> None:
        errors = self._cluster.answers.get("produce")
        error = errors.pop(0) if errors else None
        if error is not None:
            options["on_delivery"](error, None)
        self._outputs.append(int(options["value"]))

    def poll(self, timeout: float) -> int:
        return 0

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], metadata: object, timeout: float) -> None:
        self._cluster.metadata.append(metadata)
        self._cluster.answer("offsets")
        self._offsets = offsets

    def commit_transaction(self, timeout: float) -> None:
        if self._cluster.commits:
            self._apply()
        self._cluster.answer("commit")
        self._apply()

    def _apply(self) -> None:
        self._cluster.visible += self._outputs
        for each in self._offsets:
            self._cluster.stored[PartitionId(each.topic, each.partition)] = each.offset, each.metadata or ""
        self._outputs, self._offsets = [], []

    def abort_transaction(self, timeout: float) -> None:
        self._cluster.answer("abort")
        self._outputs, self._offsets = [], []

    def purge(self) -> None:
        raise KafkaException(FATAL)

    def flush(self, timeout: float) -> int:
        # A client that has failed for good raises its error from every call.
        raise KafkaException(FATAL)


class FakeAdmin:
    """An admin client of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def describe_cluster(self, request_timeout: float) -> Any:
        return SimpleNamespace(result=lambda: SimpleNamespace(cluster_id="c"))

    def list_topics(self, topic: str, timeout: float) -> Any:
        error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if topic in self._cluster.missing else None
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error)})

    def list_consumer_group_offsets(self, asked: Sequence[Any], **options: Any) -> dict[str, Any]:
        assert options["require_stable"]
        found = []
        for each in asked[0].topic_partitions:
            offset, metadata = self._cluster.stored.get(PartitionId(each.topic, each.partition), (-1001, ""))
            found.append(
                SimpleNamespace(
                    topic=each.topic, partition=each.partition, offset=offset, metadata=metadata, error=None
                )
            )

        def result() -> Any:
            self._cluster.answer("look")
            return SimpleNamespace(topic_partitions=found)

        return {asked[0].group_id: SimpleNamespace(result=result)}


def installed(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster, which replaces the clients of the thread of the transactions."""
    made = Cluster()
    monkeypatch.setattr("lanes_kafka.transactions.performer.Producer", lambda settings: FakeProducer(made, settings))
    monkeypatch.setattr("lanes_kafka.transactions.performer.AdminClient", lambda settings: FakeAdmin(made))
    monkeypatch.setattr("lanes_kafka.transactions.performer.SNAPSHOT_WAIT", 0.2)
    return made


def output(partition: Partition, position: int) -> Output:
    return Output(
        target="out",
        value=b"%d" % (position + 100 * partition.id.number),
        key=None,
        headers=(),
        trace=(),
        number=1,
        source=partition.id,
        incarnation="",
        position=position,
        attempt=1,
        message_key=None,
    )
