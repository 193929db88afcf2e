"""The runtime on an in-process source: a handler that does nothing, in microseconds of CPU a message.

The figure holds everything from ``run()`` to its return, the event loop included. The baseline awaits the same
handler on the same messages in a bare loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Final

from bench.figures import Effort, Figure, cost, interleaved
from bench.source import FiniteSource, messages_of, new_partition
from lanes import Consumer, Settings
from lanes.core.types import Message

GOAL: Final = 2.0
KEYS, BATCH, MESSAGES = 10_000, 500, 100_000


async def nothing(message: Message) -> None:
    """The handler."""


def figures(effort: Effort) -> list[Figure]:
    """The case, interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    baseline, figure = interleaved([partial(_bare, count), partial(_runtime, count)], effort.repeats)
    return [cost("runtime no-op", "µs CPU/message", figure, baseline, GOAL)]


def _runtime(count: int) -> float:
    source = FiniteSource(count, KEYS, BATCH)
    consumer = Consumer(source, nothing, settings=Settings())
    micros = asyncio.run(_timed(consumer.run(), count))
    assert source.settled == count
    return micros


def _bare(count: int) -> float:
    return asyncio.run(_timed(_loop(messages_of(new_partition(), count, KEYS)), count))


async def _loop(messages: Sequence[Message]) -> None:
    for message in messages:
        await nothing(message)


async def _timed(work: Awaitable[None], count: int) -> float:
    begin = time.thread_time_ns()
    await work
    return (time.thread_time_ns() - begin) / 1_000 / count
