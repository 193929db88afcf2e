"""The cost of a journal with a handler that does nothing: microseconds of CPU a message, on an in-process source.

`loop` is the event loop's thread alone, from `run()` to its return. `process` counts all threads, including the writing
thread, until the last file is complete. The baseline is the same run without a journal. The baseline of a run with a
journal and a history is the run with a history alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Final

from bench.figures import Effort, Figure, cost, interleaved
from bench.runtime import nothing
from bench.source import FiniteSource
from lanes import Consumer, History, Settings
from lanes.history.journal import Journal, recorder
from lanes.history.recorder import history_of

# Each message has four rows. All rows fit into the buffer, even when the thread waits for a processor.
KEYS, BATCH, MESSAGES = 10_000, 500, 25_000
WRITING_LIMIT: Final = 60.0

Clock = Callable[[], int]


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    loop, process = time.thread_time_ns, time.process_time_ns
    medians = interleaved(
        [
            partial(_measured, count, clock, history=history, journal=journal)
            for clock in (loop, process)
            for history in (False, True)
            for journal in (False, True)
        ],
        effort.repeats,
    )
    names = [f"journal {where}, {beside}" for where in ("loop", "process") for beside in ("no-op", "beside a history")]
    return [
        cost(name, "µs CPU/message", figure, baseline)
        for name, baseline, figure in zip(names, medians[::2], medians[1::2], strict=True)
    ]


def _measured(count: int, clock: Clock, *, history: bool, journal: bool) -> float:
    with TemporaryDirectory() as folder:
        written = Journal(folder) if journal else None
        source = FiniteSource(count, KEYS, BATCH)
        kept = recorder(History(folder) if history else None, written)
        passed = None if kept is None else history_of(kept)
        micros = asyncio.run(_timed(Consumer(source, nothing, settings=Settings(), history=passed), written, clock))
        assert source.settled == count
        assert written is None or not written.dropped
        return micros / count


async def _timed(consumer: Consumer, written: Journal | None, clock: Clock) -> float:
    begin = clock()
    await consumer.run()
    took = clock() - begin
    if written is not None:
        assert written.join(WRITING_LIMIT)
        if clock is time.process_time_ns:
            took = clock() - begin
    return took / 1_000
