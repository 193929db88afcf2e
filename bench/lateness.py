"""The lateness of a timer while handlers wait 10 ms, compared with bare tasks at the same rate.

A probe repeatedly sleeps for 1 ms. The figure is the p99 of the probe's lateness: the time after the millisecond until
the probe runs. Each turn of the event loop that starts or ends hundreds of handlers makes the probe and every other
task of the program late.

Full load: 1,000 handlers run at once. The baseline has bare tasks with the same rate of messages.

Half load: messages arrive at half the rate of 1,000 bare tasks. The baseline is 500 bare tasks.

Each run has a separate process, because a collection of garbage also visits the objects of earlier cases. All runs use
the settings of the garbage collector that `lanes.main` sets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from bench.alone import alone
from bench.figures import Effort, Figure, Pair, cost, middle
from bench.source import FiniteSource, messages_of, new_partition
from bench.waiting import BATCH, CONCURRENCY, IN_FLIGHT, WAITING_KEYS, tuned_run, wait
from lanes import Consumer, Settings

GOAL: Final = 1.5
HALF_GOAL: Final = 5.0
MESSAGES: Final = 300_000
PROBE: Final = 0.001
ARRIVING: Final = 100
"""Number of messages that arrive at once at half load."""


def figures(effort: Effort) -> list[Figure]:
    """Measure both cases, each with its baseline."""
    count = effort.messages(MESSAGES)
    measured = [_measured(count) for _ in range(effort.repeats)]
    unit = "ms late, p99"
    return [
        cost("runtime lateness", unit, *middle([full for full, _ in measured])).within(GOAL),
        cost("runtime lateness, half load", unit, *middle([half for _, half in measured]), HALF_GOAL),
    ]


def _measured(count: int) -> tuple[Pair, Pair]:
    """Return the figures at full and at half load, each with its baseline."""
    full, rate = alone(_beside, partial(_lanes, count), count)
    _, most = alone(_beside, partial(_tasks, count, CONCURRENCY), count)
    equal, _ = alone(_beside, partial(_tasks, count, max(1, round(CONCURRENCY * min(1.0, rate / most)))), count)
    half, _ = alone(_beside, partial(_lanes, count, most / 2), count)
    beside_half, _ = alone(_beside, partial(_tasks, count, CONCURRENCY // 2), count)
    return (full, equal), (half, beside_half)


def _beside(work: Callable[[], Awaitable[None]], count: int) -> tuple[float, float]:
    """Return the p99 of the probe's lateness in milliseconds, and the messages a second."""
    late: list[float] = []

    async def probe() -> None:
        while True:
            due = time.perf_counter() + PROBE
            await asyncio.sleep(PROBE)
            late.append(time.perf_counter() - due)

    async def main() -> float:
        probing = asyncio.create_task(probe())
        begin = time.perf_counter()
        await work()
        seconds = time.perf_counter() - begin
        probing.cancel()
        return seconds

    seconds = tuned_run(main())
    return 1_000 * sorted(late)[len(late) * 99 // 100], count / seconds


async def _lanes(count: int, per_second: float | None = None) -> None:
    batch = BATCH if per_second is None else ARRIVING
    source = FiniteSource(count, WAITING_KEYS, batch, per_second=per_second)
    await Consumer(source, wait, settings=Settings(concurrency=CONCURRENCY, max_in_flight=IN_FLIGHT)).run()
    assert source.settled == count


async def _tasks(count: int, tasks: int) -> None:
    messages = iter(messages_of(new_partition(), count, WAITING_KEYS))

    async def each() -> None:
        for message in messages:
            await wait(message)

    async with asyncio.TaskGroup() as group:
        for _ in range(tasks):
            group.create_task(each())
