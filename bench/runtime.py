"""The runtime on an in-process source: a handler that does nothing, and a plain one that sleeps, in threads.

No-op: microseconds of CPU a message. The figure holds everything from ``run()`` to its return, the event loop
included. The baseline awaits the same handler on the same messages in a bare loop.

Threads: messages a second, everything from ``run()`` to its return. The baseline maps the same handler over the same
messages in a bare thread pool of as many threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from bench.figures import Effort, Figure, cost, interleaved, rate
from bench.source import FiniteSource, messages_of, new_partition
from lanes import Consumer, Settings
from lanes.core.types import Message

GOAL: Final = 2.0
THREADS_GOAL: Final = 0.8
KEYS, BATCH, MESSAGES = 10_000, 500, 100_000
THREADS, SLEEP, THREADS_MESSAGES = 50, 0.001, 20_000


async def nothing(message: Message) -> None:
    """The handler."""


def sleep(message: Message) -> None:
    """The handler in threads."""
    time.sleep(SLEEP)


def figures(effort: Effort) -> list[Figure]:
    """The cases, each interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    baseline, figure = interleaved([partial(_bare, count), partial(_runtime, count)], effort.repeats)
    count = effort.messages(THREADS_MESSAGES)
    pool, threads = interleaved([partial(_pool, count), partial(_threads, count)], effort.repeats)
    return [
        cost("runtime no-op", "µs CPU/message", figure, baseline, GOAL),
        rate("runtime threads", "messages/s", threads, pool, THREADS_GOAL),
    ]


def _runtime(count: int) -> float:
    source = FiniteSource(count, KEYS, BATCH)
    consumer = Consumer(source, nothing, settings=Settings())
    micros = asyncio.run(_timed(consumer.run(), count))
    assert source.settled == count
    return micros


def _threads(count: int) -> float:
    source = FiniteSource(count, KEYS, BATCH)
    consumer = Consumer(source, sleep, settings=Settings(concurrency=THREADS))
    begin = time.perf_counter()
    asyncio.run(consumer.run())
    seconds = time.perf_counter() - begin
    assert source.settled == count
    return count / seconds


def _pool(count: int) -> float:
    messages = messages_of(new_partition(), count, KEYS)
    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.perf_counter()
        for _ in pool.map(sleep, messages):
            pass
        return count / (time.perf_counter() - begin)


def _bare(count: int) -> float:
    return asyncio.run(_timed(_loop(messages_of(new_partition(), count, KEYS)), count))


async def _loop(messages: Sequence[Message]) -> None:
    for message in messages:
        await nothing(message)


async def _timed(work: Awaitable[None], count: int) -> float:
    begin = time.thread_time_ns()
    await work
    return (time.thread_time_ns() - begin) / 1_000 / count
