"""Dead letters for tests: made, written, read back, and handlers that commands can name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

import lanes
from lanes_kafka import KafkaDeadLetters, read_dead_letter
from lanes_kafka.dead_letters.box import message_at
from memsource.contract.dead_letter_harness import Origin, dead_letter_from
from tests.kafka.workload import Topic

_positions = itertools.count(1)


class _Orders:
    origin = Origin("orders", 3, "orders")


def dead_letter(**changes: Any) -> lanes.DeadLetter:
    """A dead letter with a new position."""
    ours: dict[str, Any] = {
        "key": b"customer-42",
        "value": b"payload",
        "headers": (("color", b"red"), ("color", b"blue"), ("Lanes-Error", b"spoofed")),
        "attempts": 5,
    }
    return dead_letter_from(_Orders(), next(_positions), **(ours | changes))


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
    """A write that may be retried."""


async def attempt(target: KafkaDeadLetters, one: lanes.DeadLetter) -> None:
    try:
        await target.put(one)
    except lanes.SourceError as error:
        if not error.retryable:
            raise
        raise NotYet from error


def config_of(topic: Topic, **more: Any) -> dict[str, Any]:
    """A consumer's dictionary, as a team has it."""
    return {"bootstrap.servers": topic.url, "group.id": "g", "auto.offset.reset": "earliest"} | more


async def stored(topic: Topic) -> list[lanes.DeadLetter]:
    return [read_dead_letter(message_at(topic.name, raw)) for raw in await run_sync(records, topic)]


# --- handlers for commands

SEEN: list[tuple[int, bytes | None, bytes, object]] = []


async def remember(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, getattr(message, "data", None)))


def remember_too(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, getattr(message, "data", None)))


def refuse(message: lanes.Message) -> None:
    SEEN.append((message.position, message.key, message.value, None))
    raise ValueError("still no such customer \x1b[2J")


def first_word(message: lanes.Message) -> object:
    return message.value.split()[0].decode()


def wrong(message: lanes.Message) -> object:
    return remember(message)


NOT_A_FUNCTION = 5
