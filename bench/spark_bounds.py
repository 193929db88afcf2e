"""The bounds of a replay on Spark: memory with a hot key, and the fixed cost of a batch.

Memory: one worker handles 3,000,000 messages of 496 bytes in Arrow batches, and one key has 95 % of them. The figure is
the peak of the worker's resident memory at the end, and the baseline is its peak after the first fifth.

Batches: the figure is the fixed seconds of a batch with a checkpoint, from two replays of the same few rows, in 21
batches and in one batch. A further case compares the no-op rate with the default ``rows_per_batch`` and the rate
without a checkpoint, where all rows are one batch.
"""

from __future__ import annotations

import itertools
import os
import resource
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from bench.figures import Effort, Figure, cost, interleaved, rate
from bench.spark import KEYS, MESSAGES, SIZE, nothing
from bench.spark_session import PARTITIONS, session, write_table
from lanes import Message
from lanes_spark import ParquetTable, replay
from lanes_spark.driver.run import ROWS_PER_BATCH

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MEMORY_GOAL: Final = 1.1
HOT_MESSAGES, HOT, HOT_SIZE, HOT_KEYS = 3_000_000, 0.95, 496, 1_000
LOOKS: Final = 100
BATCHES, ROWS = 21, 2_100


class Watching:
    """A handler that records the peak of its process's memory after each ``every`` messages."""

    def __init__(self, folder: str, every: int) -> None:
        self._folder = folder
        self._every = every
        self._handled = 0

    async def __call__(self, message: Message) -> None:
        self._handled += 1
        if self._handled % self._every == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with (Path(self._folder) / str(os.getpid())).open("a") as file:
                file.write(f"{peak}\n")


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases. The function measures the memory only once, because this measurement takes a minute."""
    with TemporaryDirectory() as folder, session() as spark:
        peak, early = _memory(spark, Path(folder), effort.messages(HOT_MESSAGES))
        count = effort.messages(MESSAGES)
        few = write_table(Path(folder) / "few", ROWS, keys=100, size=SIZE)
        table = write_table(Path(folder) / "table", count, keys=KEYS, size=SIZE)
        places = (Path(folder) / f"checkpoint-{number}" for number in itertools.count())
        runs = [
            partial(_seconds, spark, few, places, ROWS // BATCHES),
            partial(_seconds, spark, few, places, ROWS),
            partial(_seconds, spark, table, places, ROWS_PER_BATCH),
            partial(_seconds, spark, table, places, None),
        ]
        for run in runs:
            run()
        many, one, batched, whole = interleaved(runs, effort.repeats)
    fixed = (many - one) / (BATCHES - 1)
    return [
        cost("spark-bounds hot key", "MiB peak", peak / 1024, early / 1024).within(MEMORY_GOAL),
        cost("spark-bounds batch", "s/batch", fixed, one),
        rate(f"spark-bounds {ROWS_PER_BATCH:,} rows a batch", "messages/s", count / batched, count / whole),
    ]


def _memory(spark: SparkSession, folder: Path, count: int) -> tuple[int, int]:
    """Return the memory of the worker with the hot key, at the end and after the first fifth, in KiB."""
    peaks = folder / "peaks"
    peaks.mkdir()
    table = write_table(folder / "hot", count, keys=HOT_KEYS, size=HOT_SIZE, hot=HOT)
    # One task for each partition's worth of keys: the hot key's task has nearly all of the table.
    report = replay(spark, table, Watching(str(peaks), max(1, count // LOOKS)), tasks=PARTITIONS, effects="none")
    assert report.finished == count
    noted = [[int(line) for line in file.read_text().split()] for file in peaks.iterdir()]
    longest = max(noted, key=len)
    return longest[-1], longest[len(longest) // 5]


def _seconds(spark: SparkSession, table: ParquetTable, places: Iterator[Path], rows: int | None) -> float:
    begin = time.perf_counter()
    if rows is None:
        replay(spark, table, nothing, effects="none")
    else:
        replay(spark, table, nothing, effects="none", checkpoint=str(next(places)), rows_per_batch=rows)
    return time.perf_counter() - begin
