"""Dead letters of Kafka tests: written to a topic, and read back."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

import lanes
from lanes_kafka import KafkaDeadLetters, read_dead_letter
from lanes_kafka.dead_letters.box import message_at
from tests.kafka.workload import Topic


def records(topic: Topic, config: dict[str, Any] | None = None) -> list[Message]:
    """All records of a topic, one partition after the other. Blocks."""
    found = []
    consumer = Consumer(
        {"bootstrap.servers": topic.url, "group.id": "x", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
        | (config or {})
    )
    try:
        for number in range(topic.partitions):
            consumer.assign([TopicPartition(topic.name, number, 0)])
            while True:
                message = consumer.poll(20)
                assert message is not None, f"no end of {topic!r}"
                error = message.error()
                if error is None:
                    found.append(message)
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    break
    finally:
        consumer.close()
    return found


@contextlib.asynccontextmanager
async def opened(config: Any, topic: str) -> AsyncIterator[KafkaDeadLetters]:
    target = KafkaDeadLetters(config, topic)
    await target.open()
    try:
        yield target
    finally:
        await target.aclose()


async def confirmed(target: KafkaDeadLetters, one: lanes.DeadLetter) -> None:
    """Write a dead letter as a consumer does, with retries. The first write to a new broker takes a second."""
    with anyio.fail_after(30):
        while True:
            with contextlib.suppress(NotYet):
                await attempt(target, one)
                return


class NotYet(Exception):
    """Try one write; a failure must be retryable."""


async def attempt(target: KafkaDeadLetters, one: lanes.DeadLetter) -> None:
    try:
        await target.put(one)
    except lanes.SourceError as error:
        if not error.retryable:
            raise
        raise NotYet from error


def config_of(topic: Topic, **more: Any) -> dict[str, Any]:
    """A typical configuration of a consumer."""
    return {"bootstrap.servers": topic.url, "group.id": "g", "auto.offset.reset": "earliest"} | more


async def stored(topic: Topic) -> list[lanes.DeadLetter]:
    return [read_dead_letter(message_at(topic.name, raw)) for raw in await run_sync(records, topic)]
