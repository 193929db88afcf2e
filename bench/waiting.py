"""The runtime with handlers that wait: throughput compared with the limit that the waiting time sets, and delays.

10 ms: the figure is messages a second with 1,000 handlers at once, on asyncio and on uvloop. The baseline is 1,000 bare
tasks that take the same messages from one iterator and await the same handler on the same loop. All runs use the
settings of the garbage collector that `lanes.main` sets.

Zipf: the figure is messages a second over keys, one of which has 15 % of the traffic. The messages of a key run one at
a time, so the busiest key limits every program. The baseline is the rate for all messages if a bare task handles the
messages of this key.

Stuck key: messages arrive at a fixed rate, and the handler of one key hangs until the handlers of all other keys have
ended. The figure is the p99 of the time from the delivery of a message to the end of its handler, for the other keys.
The baseline is the same run without the hang.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from bench.figures import Effort, Figure, Pair, cost, interleaved, middle, pairs, rate
from bench.source import FiniteSource, messages_of, new_partition
from lanes import Consumer, Settings
from lanes.clock import monotonic
from lanes.core.types import Message
from lanes.runtime.garbage import tuned_gc

Loop = Callable[[], asyncio.AbstractEventLoop]
"""A function that makes an event loop."""

Result = TypeVar("Result")

BATCH: Final = 500

WAITING_GOAL: Final = 0.95
WAITING_KEYS, WAITING_MESSAGES = 100_000, 100_000
CONCURRENCY, IN_FLIGHT, WAIT = 1_000, 2_000, 0.010

ZIPF_GOAL: Final = 0.85
ZIPF_KEYS, ZIPF_MESSAGES, ZIPF_WAIT = 10_000, 20_000, 0.001

STUCK_GOAL: Final = 1.25
STUCK_PAIRS_MORE: Final = 2
"""Number of additional pairs, because the tail of a distribution is less steady than its mean."""
# A hundredth of all messages has the stuck key. These messages stay fewer than ``max_in_flight`` to the end.
STUCK_KEYS, STUCK_MESSAGES, STUCK_WAIT, STUCK_BATCH, PER_SECOND = 100, 10_000, 0.001, 20, 5_000.0
STUCK_KEY: Final = b"key-0"


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each with its baseline."""
    count = effort.messages(WAITING_MESSAGES)
    waiting = []
    for name, loop in loops().items():
        tasks, lanes = interleaved([partial(tasks_alone, count, loop), partial(_waiting, count, loop)], effort.repeats)
        goal = WAITING_GOAL if name == "asyncio" else None
        waiting.append(rate(f"runtime 10 ms handler{shown(name)}", "messages/s", lanes, tasks, goal))
    zipf = middle([_zipf(effort.messages(ZIPF_MESSAGES)) for _ in range(effort.repeats)])
    count = effort.messages(STUCK_MESSAGES)
    stuck = middle(
        pairs(partial(_p99, count, hangs=True), partial(_p99, count, hangs=False), effort.repeats + STUCK_PAIRS_MORE)
    )
    name = f"runtime stuck key with {100 / STUCK_KEYS:g} % of the traffic"
    return [
        *waiting,
        rate("runtime zipf", "messages/s", *zipf, ZIPF_GOAL),
        cost(name, "ms to the end, p99 of the others", *stuck).within(STUCK_GOAL),
    ]


def loops() -> dict[str, Loop]:
    """Return the measured event loops by name. Print a line if uvloop is missing."""
    found: dict[str, Loop] = {"asyncio": asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop") is not None:
        # The package may be missing.
        uvloop: Any = importlib.import_module("uvloop")
        found["uvloop"] = uvloop.new_event_loop
    else:
        print("bench: uvloop is missing and not measured: pip install uvloop", file=sys.stderr)
    return found


def shown(loop: str) -> str:
    """Return the event loop's part of a row's name."""
    return "" if loop == "asyncio" else f", {loop}"


def tuned_run(work: Coroutine[Any, Any, Result], loop: Loop = asyncio.new_event_loop) -> Result:
    """Run a coroutine on a new event loop, with the garbage collector of `lanes.main`."""
    with tuned_gc(freeze=True), asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(work)


# --- 10 ms handler


async def wait(message: Message) -> None:
    """Wait."""
    await asyncio.sleep(WAIT)


def _waiting(count: int, loop: Loop) -> float:
    source = FiniteSource(count, WAITING_KEYS, BATCH)
    settings = Settings(concurrency=CONCURRENCY, max_in_flight=IN_FLIGHT)
    begin = time.perf_counter()
    tuned_run(Consumer(source, wait, settings=settings).run(), loop)
    seconds = time.perf_counter() - begin
    assert source.settled == count
    return count / seconds


def tasks_alone(count: int, loop: Loop) -> float:
    """Return messages a second of bare tasks, one task for each handler that ``lanes`` may run at once."""
    messages = iter(messages_of(new_partition(), count, WAITING_KEYS))
    begin = time.perf_counter()
    tuned_run(_bare(messages), loop)
    return count / (time.perf_counter() - begin)


async def _bare(messages: Iterator[Message]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(_each(messages))


async def _each(messages: Iterator[Message]) -> None:
    for message in messages:
        await wait(message)


# --- one busy key


def _zipf(count: int) -> Pair:
    """Return messages a second, and the highest rate that the busiest key allows."""
    source = FiniteSource(count, ZIPF_KEYS, BATCH, "zipf")
    ((_busiest, times),) = Counter(message.key for message in source.messages).most_common(1)

    async def handler(message: Message) -> None:
        await asyncio.sleep(ZIPF_WAIT)

    begin = time.perf_counter()
    tuned_run(Consumer(source, handler, settings=Settings()).run())
    seconds = time.perf_counter() - begin
    assert source.settled == count
    return count / seconds, count / one_by_one(times)


def one_by_one(times: int) -> float:
    """Return the seconds in which one bare task waits for ``ZIPF_WAIT`` the given number of times."""

    async def busiest() -> None:
        for _ in range(times):
            await asyncio.sleep(ZIPF_WAIT)

    begin = time.perf_counter()
    tuned_run(busiest())
    return time.perf_counter() - begin


# --- one stuck key


def _p99(count: int, *, hangs: bool) -> float:
    """Return the p99 of the milliseconds from delivery to the handler's end, for the keys that are not stuck."""
    source = FiniteSource(count, STUCK_KEYS, STUCK_BATCH, per_second=PER_SECOND)
    others = sum(message.key != STUCK_KEY for message in source.messages)
    times: list[float] = []

    async def main() -> None:
        ended = asyncio.Event()

        async def handler(message: Message) -> None:
            if message.key == STUCK_KEY and hangs:
                await ended.wait()
                return
            await asyncio.sleep(STUCK_WAIT)
            if message.key != STUCK_KEY:
                times.append(monotonic() - message.received)
                if len(times) == others:
                    ended.set()

        await Consumer(source, handler, settings=Settings()).run()

    asyncio.run(main())
    assert source.settled == count
    return 1_000 * sorted(times)[len(times) * 99 // 100]
