"""Large, empty and undecodable records are handled in order, or block only their key."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from confluent_kafka import Message as Raw
from confluent_kafka import Producer

import lanes
from lanes.core.types import Message, Partition, PartitionId
from lanes_kafka import KafkaSource
from lanes_kafka.client.records import READER, messages, record_key
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.workload import QUIET, produce, until

pytestmark = pytest.mark.anyio

MEGABYTES = 1_000_000


async def test_large_records_are_read(topic: MakeTopic) -> None:
    events = topic(config={"max.message.bytes": str(12 * MEGABYTES)})
    producer = Producer({**QUIET, "bootstrap.servers": events.url, "message.max.bytes": 12 * MEGABYTES})
    for size in (1, 10 * MEGABYTES, 1):
        producer.produce(events.name, bytes(size), key=b"%d" % size)
    assert not producer.flush(20)
    sizes: list[int] = []

    class Weighing(Work):
        async def run(self, member: str, message: Message) -> None:
            sizes.append(len(message.value))
            await super().run(member, message)

    work = Weighing(Story())
    async with group(events, "848", work) as members:
        # The byte limit is smaller than one record.
        members.start("one", settings=lanes.Settings(max_in_flight_bytes=MEGABYTES))
        await until(lambda: len(work.ended) == 3)
    assert sorted(sizes) == [1, 1, 10 * MEGABYTES]
    assert members.committed() == [3]


async def test_null_keys_and_values_are_read(topic: MakeTopic) -> None:
    events = topic()
    produce(events, 6, keys=[None, b"", b"k"], value=lambda number: None if number % 2 else b"v")
    seen: dict[int, tuple[bytes | None, bytes]] = {}

    class Noting(Work):
        async def run(self, member: str, message: Message) -> None:
            seen[message.position] = (message.key, message.value)
            await super().run(member, message)

    work = Noting(Story())
    async with group(events, "848", work) as members:
        members.start("one")
        await until(lambda: len(work.ended) == 6)
    assert seen == {0: (None, b"v"), 1: (b"", b""), 2: (b"k", b"v"), 3: (None, b""), 4: (b"", b"v"), 5: (b"k", b"")}
    assert members.committed() == [6]


async def test_a_value_that_cannot_be_decoded_blocks_its_key_alone(topic: MakeTopic) -> None:
    events = topic()
    good = [b"1", b"\xff\xfe", b"3", b"4", b"5", b"6"]
    produce(events, 6, keys=3, value=good.__getitem__)
    decoded: list[int] = []

    def decode(message: Message) -> Any:
        return json.loads(message.value)

    async def handle(message: Message) -> None:
        decoded.append(int(str(message.data)))

    config = {**QUIET, "bootstrap.servers": events.url, "group.id": f"g-{events.name}", "group.protocol": "consumer"}
    settings = lanes.Settings(poison="block", drain_timeout=0.0)
    consumer = lanes.Consumer(KafkaSource(config, topics=events.name), handle, settings=settings, decode=decode)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        await until(lambda: sorted(decoded) == [1, 3, 4, 6])
        await until(lambda: consumer.status().blocked == 1)
        consumer.stop()
    assert events.committed(f"g-{events.name}") == [1]


def test_the_size_of_a_record_is_in_bytes() -> None:
    raw = Raw("orders", 0, 5, b"key", b"value", [("Größe", b"5"), ("none", None), ("a", b"12")])
    run, total = messages(Partition(PartitionId("orders", 0), READER), [raw], record_key)
    assert [message.size for message in run] == [total] == [3 + 5 + (7 + 1) + 4 + (1 + 2)]
