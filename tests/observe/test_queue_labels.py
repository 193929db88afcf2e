"""Status, metrics, spans, dead letters and histories have the logical queue and partition that a source registers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lanes import Capacity, Consumer, History, Message, PartitionedQueue, Settings, SourceTraits, Stranded, Term
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import until
from tests.fakes.telemetry import LABELS, Sdk, count_everything, handle, message, status

EU = {"lanes.queue.name": "orders", "lanes.queue.partition": "1"}
QUEUE = PartitionedQueue.of("orders", physical_names=["ORDERS/US", "ORDERS/EU"])


class Registered(MemorySource):
    """A source whose one topic, ``memory``, belongs to a partitioned queue."""

    queues: tuple[PartitionedQueue, ...] = (PartitionedQueue.of("orders", ["elsewhere", "memory"]),)

    async def open(self) -> SourceTraits:
        return dataclasses.replace(await super().open(), queues=self.queues)


class Alarmed(Registered):
    """A source that knows stranded messages of two queues."""

    def stranded(self) -> list[Stranded]:
        return [Stranded("orders", "orders__p7", 5), Stranded("other", "other__p7", 6)]

    def findings(self) -> list[str]:
        return ["messages wait in 'orders__p7'"]


async def ignore(message: Message) -> None: ...


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_spans_and_counters_have_the_labels_of_the_queue(sdk: Sdk) -> None:
    telemetry = sdk.telemetry(queues=[QUEUE])
    count_everything(telemetry, message())
    handle(telemetry, message())
    assert (sdk.span().attributes or {}).items() >= (LABELS | EU).items()
    assert sdk.numbers("lanes.settled") == [(1, LABELS | EU)]
    assert (sdk.duration()[1].attributes or {}).items() >= EU.items()


@pytest.mark.parametrize("source", ["ORDERS/ASIA", "orders", "orders__p1"])
def test_a_topic_name_that_looks_like_a_queue_gives_no_queue_labels(sdk: Sdk, source: str) -> None:
    telemetry = sdk.telemetry(queues=[QUEUE])
    handle(telemetry, message(source=source))
    assert not EU.keys() & (sdk.span().attributes or {}).keys()


def test_a_batch_has_the_queue_only_if_its_messages_share_the_topic(sdk: Sdk) -> None:
    telemetry = sdk.telemetry(queues=[QUEUE])
    handle(telemetry, message(number=3), message(number=4))
    handle(telemetry, message(), message(source="ORDERS/US"))
    shared, different = (dict(span.attributes or {}) for span in sdk.spans())
    assert shared.items() >= EU.items()
    assert not EU.keys() & different.keys()


def test_a_gauge_has_the_labels_of_the_queue(sdk: Sdk) -> None:
    partitions = dict(status().partitions)
    name = "ORDERS/EU/3"
    partitions[name] = dataclasses.replace(partitions[name], queue="orders", queue_partition=1)
    now = status(partitions=partitions)
    telemetry = sdk.telemetry(lambda: now)
    assert sdk.numbers("lanes.floor") == [
        (903, LABELS | EU),
        (905, LABELS | {"messaging.destination.partition.id": "5"}),
    ]
    telemetry.close()


async def status_of(source: MemorySource, **settings: Any) -> Any:
    consumer = Consumer(source, ignore, settings=Settings(**settings))
    before = consumer.status()
    async with consumer:
        await until(lambda: len(consumer.status().partitions) == 4 and consumer.status().settled == 12)
        return before, consumer.status()


def broker() -> MemoryBroker:
    made = MemoryBroker(4)
    for number in range(12):
        made.publish(b"", key=str(number))
    return made


@pytest.mark.anyio
async def test_the_status_of_a_queue_sums_its_partitions() -> None:
    _, found = await status_of(Registered(broker()), concurrency=100, concurrency_per_partition=16)
    queue = found.queues["orders"]
    assert (queue.partitions, queue.assigned) == (2, (1,))
    # One topic, whose four partitions share one bound.
    assert queue.capacity == Capacity(concurrency=16, max_in_flight=2_000)
    assert (queue.in_flight, queue.running, queue.oldest) == (0, 0, None)
    assert {(each.queue, each.queue_partition) for each in found.partitions.values()} == {("orders", 1)}


async def give_up(message: Message) -> None:
    raise Term


@pytest.mark.anyio
@pytest.mark.parametrize("queued", [True, False])
async def test_dead_letters_and_histories_have_the_registered_queue(tmp_path: Path, queued: bool) -> None:
    made = broker()
    source = (Registered if queued else MemorySource)(made)
    history = History(tmp_path)
    consumer = Consumer(source, give_up, dead_letters=MemoryDeadLetters(made), history=history)
    async with consumer:
        await until(lambda: consumer.status().settled == 12)
    labels = ("orders", 1) if queued else (None, None)
    assert {(each.queue, each.queue_partition) for each in made.dead_letters} == {labels}
    assert history.path is not None
    rows = [json.loads(line) for line in history.path.read_text().splitlines()]
    assigned = [row for row in rows if row["event"] == "assigned"]
    assert {(row.get("queue"), row.get("queue_partition")) for row in assigned} == {labels}
    assert len(assigned) == 4
    # A row that has the assignment needs no labels of its own.
    assert not any("queue" in row for row in rows if row["event"] != "assigned")


@pytest.mark.anyio
async def test_a_source_without_a_queue_has_no_queue_in_its_status() -> None:
    before, found = await status_of(MemorySource(broker()))
    assert before.queues == found.queues == {}
    assert {(each.queue, each.queue_partition) for each in found.partitions.values()} == {(None, None)}


@pytest.mark.anyio
async def test_the_status_of_a_queue_has_its_stranded_messages() -> None:
    _, found = await status_of(Alarmed(broker()))
    assert found.queues["orders"].stranded == (Stranded("orders", "orders__p7", 5),)
    _, found = await status_of(Registered(broker()))
    assert found.queues["orders"].stranded == ()


@pytest.mark.anyio
async def test_a_finding_of_the_source_leaves_the_consumer_healthy() -> None:
    async with Consumer(Alarmed(broker()), ignore) as consumer:
        await until(lambda: consumer.active)
        health = consumer.health()
    assert health and health.findings == ("messages wait in 'orders__p7'",)
