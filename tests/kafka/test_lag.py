"""The status and the metrics of a consumer on Kafka have the lag of each partition."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicPartition

import lanes
from lanes.core.types import Partition, PartitionId
from lanes_kafka import KafkaSource
from lanes_kafka.client import lag
from lanes_kafka.client.group import Assignment
from lanes_kafka.client.lag import ASK_AFTER, EndOffsets, isolation_of
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
    """A client with the ends of its last fetches."""

    def __init__(self) -> None:
        self.heard: dict[int, Any] = {}

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> Any:
        assert cached
        found = self.heard.get(partition.partition, OFFSET_INVALID)
        if isinstance(found, KafkaError):
            raise KafkaException(found)
        return None if found is None else (0, found)


class FakeEnds:
    """A broker that answers questions about ends. ``asked`` has the partitions of each; ``slow`` delays the answers."""

    def __init__(self) -> None:
        self.answers: dict[int, int | KafkaError] = {}
        self.asked: list[list[int]] = []
        self.levels: set[IsolationLevel] = set()
        self.slow = False
        self.open: list[tuple[TopicPartition, Future[Any]]] = []

    def list_offsets(self, wanted: dict[TopicPartition, Any], *, isolation_level: Any, request_timeout: float) -> Any:
        assert request_timeout == lag.ASK_TIMEOUT
        self.levels.add(isolation_level)
        self.asked.append([each.partition for each in wanted])
        futures: dict[TopicPartition, Future[Any]] = {each: Future() for each in wanted}
        self.open += futures.items()
        if not self.slow:
            self.answer()
        return futures

    def answer(self) -> None:
        for asked, future in self.open:
            found = self.answers[asked.partition]
            if isinstance(found, KafkaError):
                future.set_exception(KafkaException(found))
            else:
                future.set_result(type("Found", (), {"offset": found})())
        self.open = []


class Stand:
    """The end offsets of several partitions, with a manual clock."""

    def __init__(self, partitions: int, level: object = None) -> None:
        self.client = FakeClient()
        self.broker = FakeEnds()
        self.now = 100.0
        admin: Any = self.broker
        self.end_offsets = EndOffsets(lambda: self.now, lambda: admin, isolation_of(level))
        self.owned = [Assignment(Partition(PartitionId("t", number), READER), 0, 0) for number in range(partitions)]

    def look(self, *, after: float = 0.0, ask: bool = True) -> list[int | None]:
        self.now += after
        client: Any = self.client
        self.end_offsets.refresh(client, self.owned, ask=ask)
        return [self.end_offsets.of(each.partition) for each in self.owned]

    def unread(self) -> list[int | None]:
        return [self.end_offsets.unread(each.partition) for each in self.owned]


def test_an_end_offset_comes_from_the_last_fetch() -> None:
    stand = Stand(4)
    unknown = KafkaError(KafkaError._UNKNOWN_PARTITION)
    assert stand.look() == [None] * 4
    stand.client.heard = {0: 7, 1: None, 2: unknown, 3: 0}
    assert stand.look() == [7, None, None, 0]
    stand.client.heard = {0: 9, 1: 3, 2: 5, 3: unknown}
    assert stand.look() == [9, 3, 5, 0]
    assert stand.broker.asked == []


def test_the_broker_is_asked_for_ends_that_no_fetch_has_raised() -> None:
    stand = Stand(3)
    stand.client.heard = {0: 7, 1: 7, 2: 7}
    stand.broker.answers = {0: 8, 1: 20, 2: KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION)}
    stand.look()
    stand.client.heard[0] = stand.owned[0].position = 8
    assert stand.look(after=ASK_AFTER - 0.1) == [8, 7, 7]
    assert stand.broker.asked == []
    stand.look(after=0.2)
    # The answer is taken by the next look, so that no look waits.
    assert stand.look() == [8, 20, 7]
    # A partition without a leader is not asked for at every refresh.
    for _ in range(10):
        assert stand.look(after=0.5) == [8, 20, 7]
    assert stand.broker.asked == [[1, 2], [0, 1]]
    stand.broker.answers[2] = 9
    stand.look(after=25.0)
    assert stand.look() == [8, 20, 9]
    # The last fetch is older than the answer.
    assert stand.look(ask=False) == [8, 20, 9]
    stand.client.heard[1] = 21
    assert stand.look(ask=False) == [8, 21, 9]


def test_one_question_is_open_at_a_time_and_is_not_asked_of_a_broker_that_is_down() -> None:
    stand = Stand(1)
    stand.client.heard, stand.broker.answers = {0: 7}, {0: 9}
    stand.look()
    assert stand.look(after=ASK_AFTER, ask=False) == [7]
    assert stand.broker.asked == []
    stand.broker.slow = True
    for _ in range(9):
        assert stand.look(after=ASK_AFTER) == [7]
    assert stand.broker.asked == [[0]]
    stand.broker.answer()
    assert stand.look() == [9]


def test_a_failed_question_is_not_repeated_for_a_while() -> None:
    stand = Stand(1)
    stand.client.heard, stand.broker.answers = {0: 7}, {0: KafkaError(KafkaError._TIMED_OUT)}
    stand.look()
    stand.look(after=ASK_AFTER)
    assert stand.look() == [7]
    assert stand.look(after=29.0) == [7]
    assert len(stand.broker.asked) == 1
    stand.broker.answers[0] = 9
    stand.look(after=2.0)
    assert stand.look() == [9]


def test_the_ends_of_many_partitions_are_asked_for_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "PORTION", 3)
    stand = Stand(8)
    stand.broker.answers = dict.fromkeys(range(8), 9)
    stand.look()
    stand.look(after=ASK_AFTER)
    # Each question follows the answer to the one before. A second answer comes only after five seconds.
    for _ in range(7):
        stand.look(after=1.0)
    assert stand.broker.asked == [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1, 2], [3, 4, 5]]
    assert stand.look() == [9] * 8
    # More partitions than the broker answers for in five seconds have their turns too.
    stand.broker.asked.clear()
    for _ in range(6):
        stand.look(after=ASK_AFTER)
    assert [number for asked in stand.broker.asked for number in asked][:16].count(7) == 2


def test_ends_of_former_partitions_are_dropped() -> None:
    stand = Stand(2)
    stand.client.heard = {0: 7, 1: 8}
    stand.broker.answers, stand.broker.slow = {0: 9, 1: 9}, True
    stand.look()
    stand.look(after=ASK_AFTER)
    (gone, kept), stand.owned = stand.owned, stand.owned[1:]
    assert stand.look() == [8]
    stand.broker.answer()
    assert stand.look() == [9]
    assert (stand.end_offsets.of(gone.partition), stand.end_offsets.of(kept.partition)) == (None, 9)


def test_the_unread_messages_are_those_between_the_position_to_deliver_and_the_end() -> None:
    stand = Stand(2, "read_uncommitted")
    assert stand.unread() == [None, None]
    stand.client.heard = {0: 7}
    stand.owned[0].position = 5
    stand.look()
    assert stand.unread() == [2, None]
    # A fetch may report an end that is older than the position.
    stand.owned[0].position = 9
    stand.look()
    assert stand.unread() == [0, None]


def test_the_messages_of_an_open_transaction_are_in_the_lag_and_not_unread() -> None:
    stand = Stand(1)
    stand.client.heard, stand.broker.answers = {0: 5}, {0: 5}
    stand.owned[0].position = 5
    stand.look()
    stand.look(after=ASK_AFTER)
    assert (stand.look(), stand.unread()) == ([5], [0])
    # A transaction from offset 5 on is open, and its end rises with each fetch.
    for end in range(6, 46):
        stand.client.heard = {0: end}
        assert (stand.look(after=1.0), stand.unread()) == ([end], [0])
    assert len(stand.broker.asked) == 7
    # The transaction ends, and its messages do not arrive.
    stand.broker.answers = {0: 46}
    stand.look(after=ASK_AFTER)
    assert (stand.look(), stand.unread()) == ([46], [41])


def test_an_end_that_only_a_fetch_reported_gives_no_number_of_unread_messages() -> None:
    stand = Stand(1)
    stand.client.heard = {0: 7}
    assert (stand.look(), stand.unread()) == ([7], [None])


def test_ends_are_asked_for_at_the_isolation_level_of_the_fetches() -> None:
    for level, wanted in (
        (None, IsolationLevel.READ_COMMITTED),
        ("read_committed", IsolationLevel.READ_COMMITTED),
        ("READ_UNCOMMITTED", IsolationLevel.READ_UNCOMMITTED),
    ):
        stand = Stand(1, level)
        stand.broker.answers = {0: 9}
        stand.look()
        stand.look(after=ASK_AFTER)
        assert stand.broker.levels == {wanted}
