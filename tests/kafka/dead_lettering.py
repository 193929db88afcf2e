"""Writing dead letters in the tests of the Kafka adapter."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.to_thread import run_sync

import lanes
from lanes_kafka import KafkaDeadLetters, read_dead_letter
from lanes_kafka.dead_letters.box import message_at
from tests.kafka.letters import records
from tests.kafka.workload import Topic


@contextlib.asynccontextmanager
async def opened(config: Any, topic: str) -> AsyncIterator[KafkaDeadLetters]:
    target = KafkaDeadLetters(config, topic)
    await target.open()
    try:
        yield target
    finally:
        await target.aclose()


async def confirmed(target: KafkaDeadLetters, one: lanes.DeadLetter) -> None:
    """Write it as a consumer does: again and again. The first write to a new broker takes a second by itself."""
    with anyio.fail_after(30):
        while True:
            with contextlib.suppress(NotYet):
                await attempt(target, one)
                return


class NotYet(Exception):
    """A write that may be tried again."""


async def attempt(target: KafkaDeadLetters, one: lanes.DeadLetter) -> None:
    try:
        await target.put(one)
    except lanes.SourceError as error:
        if not error.retryable:
            raise
        raise NotYet from error


def config_of(topic: Topic, **more: Any) -> dict[str, Any]:
    """What a team has: a consumer's dictionary."""
    return {"bootstrap.servers": topic.url, "group.id": "g", "auto.offset.reset": "earliest"} | more


async def stored(topic: Topic) -> list[lanes.DeadLetter]:
    return [read_dead_letter(message_at(topic.name, raw)) for raw in await run_sync(records, topic)]
