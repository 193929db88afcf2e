"""Handlers that use the CPU, in one process and in two processes, compared with the event loop; and the cost of a call.

The figure is messages a second, from the first to the last handled message, without the start of the processes. Every
handler uses 5 ms of CPU, or none. The handlers record their ends on the system's clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from bench.figures import Effort, Figure, interleaved, rate
from bench.source import FiniteSource
from lanes import Consumer, Message, Settings

CPU: Final = 0.005
GOAL: Final = 1.8
KEYS, BATCH, MESSAGES = 100, 100, 400
CALLS: Final = 4_000
_FOLDER: Final = "LANES_BENCH_FOLDER"


def burn(message: Message) -> None:
    """Use 5 ms of CPU."""
    end = time.thread_time() + CPU
    while time.thread_time() < end:
        pass
    _note()


def nothing(message: Message) -> None:
    """Use no CPU."""
    _note()


def _note() -> None:
    """Write the time into the file of this process."""
    file = _files.get(os.getpid())
    if file is None:
        path = Path(os.environ[_FOLDER]) / str(os.getpid())
        file = _files[os.getpid()] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{time.monotonic()}\n".encode())


_files: Final[dict[int, int]] = {}


def figures(effort: Effort) -> list[Figure]:
    """Measure each number of processes, interleaved with the event loop."""
    count, calls = effort.messages(MESSAGES), effort.messages(CALLS)
    inline, one, two = interleaved([partial(_rate, burn, count, processes) for processes in (0, 1, 2)], effort.repeats)
    inline_calls, one_call = interleaved(
        [partial(_rate, nothing, calls, processes) for processes in (0, 1)], effort.repeats
    )
    return [
        rate("processes 1, 5 ms of CPU", "messages/s", one, inline),
        rate("processes 2, 5 ms of CPU", "messages/s", two, inline, GOAL),
        rate("processes 1, no-op", "messages/s", one_call, inline_calls),
    ]


def _rate(handler: Callable[[Message], None], count: int, processes: int) -> float:
    """Return messages a second. ``processes``: number of processes; 0 = the event loop."""
    executor = Settings(sync_handlers="inline")
    if processes:
        executor = Settings(sync_handlers="processes", processes=processes)
    source = FiniteSource(count + 1, KEYS, BATCH)
    with TemporaryDirectory() as folder:
        os.environ[_FOLDER] = folder
        try:
            asyncio.run(Consumer(source, handler, settings=executor).run())
        finally:
            del os.environ[_FOLDER]
            for file in _files.values():
                os.close(file)
            _files.clear()
        ends = sorted(float(line) for path in Path(folder).iterdir() for line in path.read_text().splitlines())
    assert source.settled == len(ends) == count + 1
    return count / (ends[-1] - ends[0])
