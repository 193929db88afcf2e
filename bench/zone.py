"""Gains and losses of `lanes`: handlers from no-op to 100 ms, over 1 to 1,000 keys; `bench.plots` draws the figures.

A figure is messages a second, by the wall clock. Two programs without `lanes` are the baselines of every handler that
waits:

- A plain loop awaits the handler for each message in sequence. The rate of the loop does not depend on keys.
- ``…, tasks`` is a bare task for each key, over a prepared list of that key's messages. The tasks also keep the order
  of keys. The tasks need all keys before the start, and have neither bound nor settlement.

Ratios below 1 form the loss zone. ``… of CPU`` are handlers that compute instead of waiting, compared with the plain
loop alone.

Keys alternate, so all keys can be busy at once. The figure is therefore the highest gain for that number of keys. All
three programs run on an event loop whose timers are exact to 0.1 ms. The usual loop, on epoll, rounds each wait up to a
millisecond.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Final

from bench.figures import Effort, Figure, Run, interleaved, rate
from bench.runtime import nothing
from bench.source import FiniteSource, messages_of, new_partition
from lanes import Consumer, Settings
from lanes.core.types import Message

WAITS: Final = {"0 ms": 0.0, "0.1 ms": 0.000_1, "1 ms": 0.001, "10 ms": 0.010, "100 ms": 0.100}
COMPUTING: Final = {"0.1 ms": 0.000_1, "1 ms": 0.001, "10 ms": 0.010}
KEYS: Final = (1, 10, 100, 1_000)

SECONDS: Final = 0.5
"""Seconds for which a key is busy in one run, within ``LEAST`` and ``MOST``."""
LEAST, MOST = 10, 50_000
"""Lowest number of messages of a key, and highest number of messages of all keys, in one run."""
BATCH: Final = 500
# As many handlers as the largest number of keys, and room for four messages of each key.
SETTINGS: Final = Settings(concurrency=1_000, max_in_flight=4_000)

Handler = Callable[[Message], Awaitable[None]]


def figures(effort: Effort) -> list[Figure]:
    """Measure all handler times over all numbers of keys, each interleaved with its baselines."""
    made: list[Figure] = []
    for wait, seconds in WAITS.items():
        made += _waiting(wait, seconds, effort)
    for wait, seconds in COMPUTING.items():
        count = effort.messages(round(SECONDS / seconds))
        handler = _computes(seconds)
        loop, lanes = interleaved(
            [partial(_loop, handler, count), partial(_lanes, handler, count, KEYS[-1])], effort.repeats
        )
        made.append(rate(name(f"{wait} of CPU", KEYS[-1]), "messages/s", lanes, loop))
    return made


def name(wait: str, keys: int, beside: str = "") -> str:
    """Return the name of a case; ``beside`` names any baseline other than the plain loop."""
    return f"zone {wait}, {keys:,} key{'s' if keys > 1 else ''}{beside and f', {beside}'}"


def _waiting(wait: str, seconds: float, effort: Effort) -> list[Figure]:
    handler = _waits(seconds) if seconds else nothing
    runs: list[Run] = [partial(_loop, handler, _count(seconds, 1, effort))]
    for keys in KEYS:
        count = _count(seconds, keys, effort)
        runs += [partial(_lanes, handler, count, keys), partial(_tasks, handler, count, keys)]
    loop, *others = interleaved(runs, effort.repeats)
    made = []
    for keys, lanes, tasks in zip(KEYS, others[::2], others[1::2], strict=True):
        made.append(rate(name(wait, keys), "messages/s", lanes, loop))
        made.append(rate(name(wait, keys, "tasks"), "messages/s", lanes, tasks))
    return made


def _count(seconds: float, keys: int, effort: Effort) -> int:
    if not seconds:
        return effort.messages(MOST)
    return effort.messages(min(MOST, keys * max(LEAST, round(SECONDS / seconds))))


def _waits(seconds: float) -> Handler:
    async def handler(message: Message) -> None:
        await asyncio.sleep(seconds)

    return handler


def _computes(seconds: float) -> Handler:
    async def handler(message: Message) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return handler


def _lanes(handler: Handler, count: int, keys: int) -> float:
    source = FiniteSource(count, keys, BATCH, "turns")
    speed = _speed(Consumer(source, handler, settings=SETTINGS).run(), count)
    assert source.settled == count
    return speed


def _loop(handler: Handler, count: int) -> float:
    return _speed(_each(handler, messages_of(new_partition(), count, 1, "turns")), count)


def _tasks(handler: Handler, count: int, keys: int) -> float:
    queues: defaultdict[object, list[Message]] = defaultdict(list)
    for message in messages_of(new_partition(), count, keys, "turns"):
        queues[message.key].append(message)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for queue in queues.values():
                tasks.create_task(_each(handler, queue))

    return _speed(main(), count)


async def _each(handler: Handler, messages: Sequence[Message]) -> None:
    for message in messages:
        await handler(message)


def _speed(work: Coroutine[object, object, object], count: int) -> float:
    """Return messages a second."""
    with asyncio.Runner(loop_factory=_exact_loop) as runner:
        begin = time.perf_counter()
        runner.run(work)
        return count / (time.perf_counter() - begin)


def _exact_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
