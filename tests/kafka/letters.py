"""Dead letters for tests, a topic of them read to its end, and handlers that the command line can name."""

from __future__ import annotations

import itertools
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

import lanes
from memsource.contract.dead_letter_harness import Origin, dead_letter_from
from tests.kafka.workload import Topic

_positions = itertools.count(1)


class _Orders:
    origin = Origin("orders", 3, "orders")


def letter(**changes: Any) -> lanes.DeadLetter:
    """A dead letter of a new position."""
    ours: dict[str, Any] = {
        "key": b"customer-42",
        "value": b"payload",
        "headers": (("color", b"red"), ("color", b"blue"), ("Lanes-Error", b"spoofed")),
        "attempts": 5,
    }
    return dead_letter_from(_Orders(), next(_positions), **(ours | changes))


def records(topic: Topic, config: dict[str, Any] | None = None) -> list[Message]:
    """All records of a topic, partition by partition. Blocks."""
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


# --- for the command line

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
