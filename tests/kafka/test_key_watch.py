"""A source warns once about a topic to which two kinds of producers write."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import anyio
import pytest
from confluent_kafka import Message as Raw
from confluent_kafka import Producer

import lanes
from lanes.core.types import Message, Partition, PartitionId
from lanes.source import Delivered
from lanes_kafka import KafkaSource
from lanes_kafka.client.key_watch import KeyWatch
from lanes_kafka.client.records import READER
from lanes_kafka.client.topics import Topic
from lanes_kafka.partitioners import crc32_partition, murmur2_partition
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, until

SECRET = "canary5e1f"
KEYS = [f"{SECRET}-{number}".encode() for number in range(200)]
FOUND = "two kinds of producers write topic"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if FOUND in record.getMessage()]


@pytest.mark.anyio
async def test_mixed_producers_are_reported_once(topic: MakeTopic, caplog: pytest.LogCaptureFixture) -> None:
    there = topic(8)
    for partitioner in ("murmur2_random", "consistent_random"):
        producer = Producer({**QUIET, "bootstrap.servers": there.url, "partitioner": partitioner, "linger.ms": 5})
        for key in KEYS:
            producer.produce(there.name, key=key, value=SECRET.encode())
        assert producer.flush(20) == 0
    seen = 0

    async def handler(message: lanes.Message) -> None:
        nonlocal seen
        seen += 1

    config = {**QUIET, "bootstrap.servers": there.url, "group.id": f"g-{there.name}", "auto.offset.reset": "earliest"}
    # The key function of the consumer does not matter.
    source = KafkaSource(config, topics=there.name, key=lambda raw: b"one")
    with caplog.at_level(logging.WARNING), anyio.fail_after(30):
        async with lanes.Consumer(source, handler):
            await until(lambda: bool(said(caplog)) and seen == 2 * len(KEYS))
    (report,) = said(caplog)
    assert f"{FOUND} {there.name}" in report
    assert "murmur2 puts it into" in report and "CRC-32 into" in report and "partitioner=murmur2_random" in report
    assert SECRET not in caplog.text


# --- the watch alone


def events(placed: Iterable[tuple[int, bytes | str | None]], topic: str = "orders") -> list[Delivered]:
    """One run of messages for each partition."""
    runs: dict[int, list[Message]] = {}
    for number, key in placed:
        raw = Raw(topic=topic, partition=number, offset=0, key=key)  # type: ignore[arg-type]
        partition = Partition(PartitionId(topic, number), READER)
        runs.setdefault(number, []).append(Message(partition, 0, b"other", 1, raw, None))
    return [Delivered(run[0].partition, run, len(run)) for run in runs.values()]


def mixed(partitions: int, keys: Sequence[bytes] = KEYS) -> list[tuple[int, bytes | str | None]]:
    java = [(murmur2_partition(key, partitions), key) for key in keys[::2]]
    return [*java, *((crc32_partition(key, partitions), key) for key in keys[1::2])]


def test_mixed_producers_of_a_topic_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    known = {"orders": Topic("1", 8), "bills": Topic("2", 8)}
    watch = KeyWatch("kafka g")
    for _ in range(3):
        watch.observe(events(mixed(8)), known)
        watch.report(known)
    watch.observe(events(mixed(8), "bills"), known)
    watch.report(known)
    assert ["topic orders" in each for each in said(caplog)] == [True, False]
    assert ["topic bills" in each for each in said(caplog)] == [False, True]
    assert all(each.startswith("kafka g: ") for each in said(caplog))


def test_a_topic_with_one_kind_of_producers_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    known = {"orders": Topic("1", 8)}
    watch = KeyWatch("kafka g")
    watch.observe(events((murmur2_partition(key, 8), key) for key in KEYS), known)
    watch.report(known)
    assert caplog.records == []


def test_more_partitions_restart_the_census_of_a_topic(caplog: pytest.LogCaptureFixture) -> None:
    watch = KeyWatch("kafka g")
    few = KEYS[:8]
    watch.observe(events(mixed(8, few)), {"orders": Topic("1", 8)})
    watch.report({"orders": Topic("1", 64)})
    watch.observe(events((murmur2_partition(key, 64), key) for key in KEYS), {"orders": Topic("1", 64)})
    watch.report({"orders": Topic("1", 64)})
    assert caplog.records == []
    watch.observe(events((crc32_partition(key, 64), key) for key in KEYS), {"orders": Topic("1", 64)})
    watch.report({"orders": Topic("1", 64)})
    assert len(said(caplog)) == 1


def test_unknown_keys_and_topics_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    watch = KeyWatch("kafka g")
    watch.observe(
        events([(0, None), (0, ""), (1, "a text that a client of the user's has made")]), {"orders": Topic("", 2)}
    )
    watch.observe(events(mixed(8), "unknown"), {"orders": Topic("", 2)})
    watch.report({})
    assert caplog.records == []
