"""The runtime on an in-process source: handlers that do nothing, that sleep, or that run in threads. The handlers that
sleep are in `bench.waiting` and `bench.lateness`.

No-op: the unit is microseconds of CPU a message. The figure covers everything from ``run()`` to its return, the event
loop included. The baseline awaits the same handler on the same messages in a bare loop; with a history, it is the same
run without the history.

Threads: the figure is messages a second, from ``run()`` to its return. The baseline maps the same handler over the same
messages in a bare thread pool of as many threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

from bench import lateness, waiting
from bench.figures import Effort, Figure, cost, interleaved, rate
from bench.source import FiniteSource, messages_of, new_partition
from lanes import Consumer, History, Settings
from lanes.core.types import Message

GOAL: Final = 2.0
THREADS_GOAL: Final = 0.8
KEYS, BATCH, MESSAGES = 10_000, 500, 100_000
THREADS, SLEEP, THREADS_MESSAGES = 50, 0.001, 20_000


async def nothing(message: Message) -> None:
    """Do nothing."""


def sleep(message: Message) -> None:
    """Sleep."""
    time.sleep(SLEEP)


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    baseline, figure, commits, history = interleaved(
        [partial(in_loop, count), partial(in_run, count), partial(_commits, count), partial(_history, count)],
        effort.repeats,
    )
    threads_count = effort.messages(THREADS_MESSAGES)
    pool, threads = interleaved([partial(_pool, threads_count), partial(_threads, threads_count)], effort.repeats)
    unit = "µs CPU/message"
    return [
        cost("runtime no-op", unit, figure, baseline, GOAL),
        cost("runtime no-op, commits", unit, commits, baseline, GOAL),
        cost("runtime no-op, history on", unit, history, figure),
        *waiting.figures(effort),
        *lateness.figures(effort),
        rate("runtime threads", "messages/s", threads, pool, THREADS_GOAL),
    ]


def in_run(count: int, keys: int = KEYS) -> float:
    """Return microseconds of CPU a message of a whole run with a handler that does nothing."""
    return _consume(FiniteSource(count, keys, BATCH), count)


def _commits(count: int) -> float:
    return _consume(FiniteSource(count, KEYS, BATCH, commits=True), count)


def _history(count: int) -> float:
    with TemporaryDirectory() as folder:
        return _consume(FiniteSource(count, KEYS, BATCH), count, History(folder))


def _consume(source: FiniteSource, count: int, history: History | None = None) -> float:
    consumer = Consumer(source, nothing, settings=Settings(), history=history)
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


def in_loop(count: int, keys: int = KEYS) -> float:
    """Return microseconds of CPU a message of the plain loop."""
    return asyncio.run(_timed(_loop(messages_of(new_partition(), count, keys)), count))


async def _loop(messages: Sequence[Message]) -> None:
    for message in messages:
        await nothing(message)


async def _timed(work: Awaitable[None], count: int) -> float:
    begin = time.thread_time_ns()
    await work
    return (time.thread_time_ns() - begin) / 1_000 / count
