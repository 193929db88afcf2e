"""The lag of a consumer on Kafka, in its status and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

import lanes
from lanes.core.types import Partition, PartitionId
from lanes_kafka import KafkaSource
from lanes_kafka.client import lag
from lanes_kafka.client.group import Assignment
from lanes_kafka.client.lag import ASK_AFTER, EndOffsets
from lanes_kafka.client.records import READER
from tests.fakes.telemetry import PARENT, TRACE, TRACEPARENT, Sdk, use
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic, produce, until


class Gate:
    """A handler that waits until it is opened."""

    def __init__(self) -> None:
        self.open = anyio.Event()
        self.running = 0

    async def __call__(self, message: lanes.Message) -> None:
        self.running += 1
        await self.open.wait()


@asynccontextmanager
async def running(topic: Topic, handler: Gate) -> AsyncIterator[lanes.Consumer]:
    config = {**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{topic.name}", "auto.offset.reset": "earliest"}
    settings = lanes.Settings(commit_interval=0.05)
    consumer = lanes.Consumer(KafkaSource(config, topics=topic.name), handler, settings=settings)
    async with consumer:
        with anyio.fail_after(30):
            await until(lambda: consumer.active)
            yield consumer
        handler.open.set()


def lags(consumer: lanes.Consumer) -> list[int | None]:
    """The lag of each partition."""
    partitions = consumer.status().partitions
    return [partitions[name].lag for name in sorted(partitions)]


@pytest.mark.anyio
async def test_the_status_has_the_lag_of_each_partition(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = Sdk()
    use(monkeypatch, sdk.tracers, sdk.meters)
    orders, handler = topic(3), Gate()
    produce(orders, 10, partition=0)
    produce(orders, 4, partition=2, headers=[TRACEPARENT])
    async with running(orders, handler) as consumer:
        await until(lambda: lags(consumer) == [10, 0, 4])
        await until(lambda: handler.running == 14)
        found = [consumer.status().partitions[f"{orders.name}/{number}"] for number in range(3)]
        assert [(each.floor, each.confirmed, each.holes, each.ahead) for each in found] == [
            (0, 0, 10, 10),
            (0, 0, 0, 0),
            (0, 0, 4, 4),
        ]
        oldest = [each.oldest and (each.oldest.position, each.oldest.attempt) for each in found]
        assert oldest == [(0, 1), None, (0, 1)]
        metrics = {
            (name, labels["messaging.destination.partition.id"]): value
            for name in ("lanes.lag", "lanes.oldest.position", "lanes.ahead")
            for value, labels in sdk.numbers(name)
        }
        assert metrics == {
            ("lanes.lag", "0"): 10,
            ("lanes.lag", "1"): 0,
            ("lanes.lag", "2"): 4,
            ("lanes.ahead", "0"): 10,
            ("lanes.ahead", "1"): 0,
            ("lanes.ahead", "2"): 4,
            ("lanes.oldest.position", "0"): 0,
            ("lanes.oldest.position", "2"): 0,
        }
        handler.open.set()
        await until(lambda: lags(consumer) == [0, 0, 0])
        await run_sync(lambda: produce(orders, 1, partition=1))
        await until(lambda: consumer.status().partitions[f"{orders.name}/1"].confirmed == 1)
        assert lags(consumer) == [0, 0, 0]
    assert orders.committed(f"g-{orders.name}") == [10, 1, 4]
    spans = sdk.spans()
    assert len(spans) == 15
    traced = [span for span in spans if (span.attributes or {})["messaging.destination.partition.id"] == "2"]
    parents = {span.parent and (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") for span in traced}
    assert (len(traced), parents) == (4, {(TRACE, PARENT)})
    assert {span.parent for span in spans if span not in traced} == {None}
    sdk.shutdown()


@pytest.mark.anyio
async def test_a_lag_grows_while_nothing_is_fetched(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "ASK_AFTER", 0.0)
    orders, handler = topic(2), Gate()
    produce(orders, 3, partition=0)
    async with running(orders, handler) as consumer:
        await until(lambda: handler.running == 3)
        consumer.pause()
        await run_sync(lambda: produce(orders, 5, partition=0))
        await run_sync(lambda: produce(orders, 7, partition=1))
        await until(lambda: lags(consumer) == [8, 7])
        assert handler.running == 3
        consumer.resume()
        handler.open.set()
        await until(lambda: lags(consumer) == [0, 0])


# --- end offsets alone


class FakeClient:
    """A client with the ends of its last fetches, and a broker. ``asked``: the partitions of each question."""

    def __init__(self) -> None:
        self.heard: dict[int, Any] = {}
        self.answers: dict[int, int | KafkaError] = {}
        self.down = False
        self.asked: list[list[int]] = []

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> Any:
        assert cached
        found = self.heard.get(partition.partition, OFFSET_INVALID)
        if isinstance(found, KafkaError):
            raise KafkaException(found)
        return None if found is None else (0, found)

    def offsets_for_times(self, partitions: list[TopicPartition], *, timeout: float) -> list[Any]:
        assert timeout <= 0.5 and {each.offset for each in partitions} == {OFFSET_END}
        self.asked.append([each.partition for each in partitions])
        if self.down:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [self._answer(each) for each in partitions]

    def _answer(self, asked: TopicPartition) -> Any:
        found = self.answers[asked.partition]
        if isinstance(found, KafkaError):
            return type("Answer", (), {"topic": asked.topic, "partition": asked.partition, "error": found})()
        return TopicPartition(asked.topic, asked.partition, found)


class Stand:
    """The end offsets of several partitions, with a manual clock."""

    def __init__(self, partitions: int) -> None:
        self.client = FakeClient()
        self.now = 100.0
        self.end_offsets = EndOffsets(lambda: self.now)
        self.owned = [Assignment(Partition(PartitionId("t", number), READER), 0, 0) for number in range(partitions)]

    def look(self, *, after: float = 0.0, ask: bool = True) -> list[int | None]:
        self.now += after
        client: Any = self.client
        self.end_offsets.refresh(client, self.owned, ask=ask)
        return [self.end_offsets.of(each.partition) for each in self.owned]


def test_an_end_offset_comes_from_the_last_fetch() -> None:
    stand = Stand(4)
    unknown = KafkaError(KafkaError._UNKNOWN_PARTITION)
    assert stand.look() == [None] * 4
    stand.client.heard = {0: 7, 1: None, 2: unknown, 3: 0}
    assert stand.look() == [7, None, None, 0]
    stand.client.heard = {0: 9, 1: 3, 2: 5, 3: unknown}
    assert stand.look() == [9, 3, 5, 0]
    assert stand.client.asked == []


def test_the_broker_is_asked_for_ends_without_news() -> None:
    stand = Stand(3)
    stand.client.heard = {0: 7, 1: 7, 2: 7}
    stand.client.answers = {0: 8, 1: 20, 2: KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)}
    stand.look()
    stand.client.heard[0] = 8
    assert stand.look(after=ASK_AFTER - 0.1) == [8, 7, 7]
    assert stand.client.asked == []
    assert stand.look(after=0.2) == [8, 20, 7]
    # A partition without a leader is not asked for at every refresh, because each question blocks.
    for _ in range(9):
        assert stand.look(after=0.5) == [8, 20, 7]
    assert stand.client.asked == [[1, 2]]
    stand.client.answers[2] = 9
    assert stand.look(after=0.5) == [8, 20, 7]
    assert stand.client.asked == [[1, 2], [0, 1]]
    assert stand.look(after=25.0) == [8, 20, 9]
    # The last fetch is older than the answer.
    assert stand.look(ask=False) == [8, 20, 9]
    stand.client.heard[1] = 21
    assert stand.look(ask=False) == [8, 21, 9]


@pytest.mark.parametrize("reachable", [True, False])
def test_an_unanswered_question_is_not_repeated_for_a_while(reachable: bool) -> None:
    stand = Stand(1)
    stand.client.heard, stand.client.answers = {0: 7}, {0: 9}
    stand.client.down = True
    stand.look()
    assert stand.look(after=ASK_AFTER, ask=reachable) == [7]
    assert stand.look(after=29.0, ask=reachable) == [7]
    assert len(stand.client.asked) == reachable
    stand.client.down = False
    assert stand.look(after=2.0) == [9]


def test_ends_of_former_partitions_are_dropped() -> None:
    stand = Stand(2)
    stand.client.heard = {0: 7, 1: 8}
    stand.look()
    (gone, kept), stand.owned = stand.owned, stand.owned[1:]
    assert stand.look() == [8]
    assert (stand.end_offsets.of(gone.partition), stand.end_offsets.of(kept.partition)) == (None, 8)
