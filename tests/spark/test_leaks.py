"""Tasks leave no thread, descriptor or memory in a worker process that Spark uses again; no JVM runs."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import lanes
from lanes_spark import run_task
from tests.spark.hot_key import MARGIN
from tests.spark.rows import ONCE, Seen, batches, job, rows
from tests.spark.test_task import RESULTS, handlers

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "lanes",
    "lanes_spark",
    "asyncio",
    "anyio",
    "selectors",
    "threading",
    "socket",
    "_queue",
    "concurrent",
    "pyarrow",
)


def one_of_many_tasks(number: int) -> None:
    """Run one task, which succeeds, fails in its handler, or is abandoned by Spark; tasks alternate the kinds of
    handlers."""
    handler, settings = list(handlers(Seen()).values())[number % 4]

    def failing(message: lanes.Message) -> None:
        raise ValueError("no")

    if number % 5 == 3:
        with pytest.raises(lanes.HandlerHalted):
            list(run_task(batches(rows(100)), job(failing, settings=ONCE)))
        return
    task = job(handler, settings=settings, results=RESULTS if settings.batch is None else None)
    generator = run_task(batches(rows(6_000 if number % 5 == 4 else 100), size=1_000), task)
    if number % 5 == 4:
        next(iter(generator))
        generator.close()  # type: ignore[attr-defined]
    else:
        list(generator)


def open_files() -> list[str]:
    return sorted(os.listdir("/dev/fd"))


def objects() -> Counter[str]:
    """Count the live objects of each type that tasks create."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        module = str(kind.__module__)
        if module.startswith("tests.spark") or module.split(".")[0] in OURS:
            found[f"{module}.{kind.__qualname__}"] += 1
        elif kind.__name__ in ("coroutine", "generator", "async_generator"):
            found[f"{kind.__name__} {one.__qualname__}"] += 1
    return found


def test_fifty_tasks_in_one_worker_leak_no_thread_or_fd(monkeypatch: pytest.MonkeyPatch) -> None:
    # The records that pytest captures keep what they name, such as a partition.
    monkeypatch.setattr(logging.getLogger("lanes"), "propagate", False)
    for number in range(5):
        one_of_many_tasks(number)  # warm-up: objects that a process creates once
    threads, files, before = threading.enumerate(), open_files(), objects()
    for number in range(50):
        one_of_many_tasks(number)
    # A thread of another test may have ended in the meantime.
    assert [thread for thread in threading.enumerate() if thread not in threads] == []
    assert set(open_files()) <= set(files)
    # No event loop, message or other object of a task remains.
    assert objects() - before == Counter()


def test_the_memory_of_a_worker_does_not_grow_with_its_hot_key() -> None:
    # A separate process, because the peak includes all earlier work of a process.
    command = [sys.executable, "-m", "tests.spark.hot_key", "10000", "100000"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=True)
    small, large = map(int, made.stdout.split())
    # The values alone differ by 45 MB.
    assert large - small < MARGIN, (small, large)
