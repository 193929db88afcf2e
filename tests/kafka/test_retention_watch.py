"""A held or blocked message raises an alarm before ``retention.ms`` or ``retention.bytes`` deletes it at the broker."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import TopicPartition
from confluent_kafka.admin import OffsetSpec

import lanes
from lanes.observe.status import Expiring
from lanes_kafka import KafkaSource
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

PROMPT = {"log.retention.check.interval.ms": 300, "log.initial.task.delay.ms": 300}
"""A broker that looks for expired segments all the time."""


def log_start(topic: Topic) -> int:
    """The first offset of partition 0, as the broker has it."""
    earliest: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
    (found,) = topic.admin.list_offsets({TopicPartition(topic.name, 0): earliest}).values()
    return int(found.result(10).offset)


def expiring(consumer: lanes.Consumer) -> Expiring | None:
    return next((each.expiring for each in consumer.status().partitions.values()), None)


def consumer_of(topic: Topic, handler: Any, **settings: Any) -> lanes.Consumer:
    config = {**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{topic.name}", "auto.offset.reset": "earliest"}
    return lanes.Consumer(KafkaSource(config, topics=topic.name), handler, settings=lanes.Settings(**settings))


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_blocked_message_raises_an_alarm_before_its_retention_ends(
    fresh_kafka: KafkaFactory, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_kafka(warm=True, properties=PROMPT)
    orders = topic(on=server, config={"retention.ms": "20000", "segment.ms": "5000"})

    async def handle(message: lanes.Message) -> None:
        if message.key == b"poison":
            raise ValueError("no")

    written = time.time()
    produce(orders, 1, keys=[b"poison"])
    produce(orders, 20, keys=5)
    consumer = consumer_of(orders, handle, poison="block", retry=lanes.Retry(attempts=1))
    async with consumer:
        with anyio.fail_after(60):
            await until(lambda: consumer.active and consumer.status().blocked == 1)
            await until(lambda: expiring(consumer) is not None)
            raised, left = time.time() - written, expiring(consumer)
            assert left is not None and (left.position, left.key, left.attempt) == (0, b"poison", 1)
            assert left.rule == "retention.ms=20000"
            # A tenth of 20 s is left at least, and not much more.
            assert 2.0 <= left.left <= 5.0 and raised <= 18.0
            assert await run_sync(log_start, orders) == 0
            while not await run_sync(log_start, orders):
                await anyio.sleep(0.1)
            assert time.time() - written >= raised + left.left - 0.5
            await until(lambda: "may have deleted it" in caplog.text)
            now = expiring(consumer)
            assert now is not None and now.left == 0.0
            # The message is in memory, and finishes as long as the process lives.
            assert consumer.status().blocked == 1
    first, last = [line for line in caplog.messages if " is unfinished for " in line]
    assert f"{orders.name}/0 position 0, key " in first and "by retention.ms=20000" in first
    assert "may delete it in" in first and "may have deleted it" in last and "poison" not in first


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_held_message_raises_an_alarm_before_the_log_is_too_large(
    fresh_kafka: KafkaFactory, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_kafka(warm=True, properties=PROMPT)
    size = 1 << 20
    limits = {"retention.bytes": str(4 * size), "segment.bytes": str(size), "retention.ms": "-1"}
    orders = topic(on=server, config=limits)

    async def handle(message: lanes.Message) -> None:
        if message.key == b"held":
            raise lanes.Nak("later", delay=600)

    produce(orders, 1, keys=[b"held"])
    consumer = consumer_of(orders, handle)
    alarm: Expiring | None = None
    rounds = at = 0
    async with consumer:
        with anyio.fail_after(90):
            await until(lambda: consumer.active and consumer.status().held == 1)
            while not await run_sync(log_start, orders):
                await run_sync(lambda: produce(orders, 64, keys=5, value=lambda _: b"x" * 1_500))
                await anyio.sleep(0.5)
                rounds += 1
                if alarm is None and (alarm := expiring(consumer)) is not None:
                    at = rounds
    assert alarm is not None and (alarm.position, alarm.key) == (0, b"held")
    assert alarm.rule == f"retention.bytes={4 * size}"
    # The pace is even, so the number of rounds is the time: at the alarm a tenth of it was left.
    assert alarm.left > 0.0 and 0.5 * rounds <= at <= 0.9 * rounds, (at, rounds, alarm)


async def test_a_large_message_in_a_small_log_raises_no_alarm(topic: MakeTopic) -> None:
    limits = {"retention.ms": "-1", "retention.bytes": str(16 << 20), "segment.bytes": str(16 << 20)}
    orders = topic(config=limits)

    async def handle(message: lanes.Message) -> None:
        if message.key == b"held":
            raise lanes.Nak("later", delay=600)

    await run_sync(lambda: produce(orders, 1, keys=[b"held"], value=lambda _: b"x" * 500_000))
    await run_sync(lambda: produce(orders, 200, keys=5, value=lambda _: b"x" * 500))
    consumer = consumer_of(orders, handle)
    async with consumer:
        with anyio.fail_after(30):
            await until(lambda: consumer.active and consumer.status().held == 1)
            for _ in range(14):
                await run_sync(lambda: produce(orders, 20, keys=5, value=lambda _: b"x" * 500))
                await anyio.sleep(0.5)
                assert expiring(consumer) is None


async def test_a_topic_that_keeps_its_messages_raises_no_alarm(topic: MakeTopic) -> None:
    compacted = topic(config={"cleanup.policy": "compact", "retention.ms": "1000"})
    kept = topic(config={"retention.ms": "-1"})
    for orders in (compacted, kept):
        produce(orders, 1)
        release = anyio.Event()

        async def hold(message: lanes.Message) -> None:
            await release.wait()  # noqa: B023

        consumer = consumer_of(orders, hold)
        async with consumer:
            with anyio.fail_after(20):
                await until(lambda: consumer.active and consumer.status().running == 1)  # noqa: B023
                await anyio.sleep(4.0)
                assert expiring(consumer) is None
                release.set()
