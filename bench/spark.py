"""Replays of a table on Spark, two tasks at once: messages a second, from the call of ``replay`` to its return.

No-op: the replay has 1,000,000 messages of 208 bytes, 20,000 keys, and a handler that does nothing. The two baselines
read, shuffle and sort the same table by the same plan. The first baseline is a task that only awaits the handler for
each row of its Arrow batches, without threads, bounds, settling and counts. The second baseline is
``foreachPartition``, which handles rows sequentially.

5 ms: each of two tasks runs 4,096 sleeping handlers at once, over 200,000 messages of 50,000 keys. The baseline has
4,096 asyncio tasks instead of the lanes. The asyncio tasks take rows from one iterator, in any order of keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from bench.figures import Effort, Figure, interleaved, rate
from bench.spark_session import CORES, session, write_table
from lanes import Message, Settings
from lanes_spark import ParquetTable, replay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GOAL: Final = 0.7
ONE_AT_A_TIME_GOAL: Final = 3.0
HANDLERS_GOAL: Final = 0.85
MESSAGES, KEYS, SIZE = 1_000_000, 20_000, 208
SLEEP, LANES, SLEEPING_MESSAGES, SLEEPING_KEYS = 0.005, 4_096, 200_000, 50_000

_SCHEMA: Final = "rows bigint"

Row = dict[str, Any]


async def nothing(message: object) -> None:
    """Do nothing."""


async def sleep(message: object) -> None:
    """Wait."""
    await asyncio.sleep(SLEEP)


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baselines."""
    count, sleeping = effort.messages(MESSAGES), effort.messages(SLEEPING_MESSAGES)
    many = Settings(concurrency=LANES, max_in_flight=2 * LANES)
    with TemporaryDirectory() as folder, session() as spark:
        table = write_table(Path(folder) / "no-op", count, keys=KEYS, size=SIZE)
        other = write_table(Path(folder) / "waiting", sleeping, keys=SLEEPING_KEYS, size=SIZE)
        noop = [
            partial(_replayed, spark, table, count, nothing, None),
            partial(_mapped, spark, table, count, _bare),
            partial(_one_at_a_time, spark, table, count),
        ]
        waiting = [
            partial(_replayed, spark, other, sleeping, sleep, many),
            partial(_mapped, spark, other, sleeping, _bare_tasks),
        ]
        for run in (*noop, *waiting):
            # The JVM compiles code that it has run before.
            run()
        figure, bare, single = interleaved(noop, effort.repeats)
        handlers, tasks = interleaved(waiting, effort.repeats)
    return [
        rate("spark no-op", "messages/s", figure, bare, GOAL),
        rate("spark no-op, foreachPartition", "messages/s", figure, single, ONE_AT_A_TIME_GOAL),
        rate(f"spark 5 ms handler, {LANES:,} lanes a task", "messages/s", handlers, tasks, HANDLERS_GOAL),
    ]


def _replayed(
    spark: SparkSession,
    table: ParquetTable,
    count: int,
    handler: Callable[[Message], Awaitable[None]],
    settings: Settings | None,
) -> float:
    begin = time.perf_counter()
    report = replay(spark, table, handler, settings=settings, tasks=_tasks(settings))
    seconds = time.perf_counter() - begin
    assert report.finished == count
    return count / seconds


def _tasks(settings: Settings | None) -> int | None:
    """Return the number of tasks: one for each core, so that all tasks start with empty lanes; None = the default."""
    return None if settings is None else CORES


def _mapped(
    spark: SparkSession, table: ParquetTable, count: int, loop: Callable[[Iterator[Any]], Iterator[Any]]
) -> float:
    begin = time.perf_counter()
    tasks = CORES if loop is _bare_tasks else None
    found = _arranged(spark, table, tasks).mapInArrow(loop, _SCHEMA).groupBy().sum("rows").collect()[0][0]
    seconds = time.perf_counter() - begin
    assert found == count
    return count / seconds


def _one_at_a_time(spark: SparkSession, table: ParquetTable, count: int) -> float:
    begin = time.perf_counter()
    _arranged(spark, table, None).foreachPartition(_each)
    return count / (time.perf_counter() - begin)


def _arranged(spark: SparkSession, table: ParquetTable, tasks: int | None) -> DataFrame:
    """Return the rows as ``replay`` arranges them."""
    from pyspark.sql import functions as F  # noqa: N812

    plan = replay(spark, table, nothing, tasks=tasks, explain=True)
    assert plan.bucket is not None
    assert plan.tasks is not None
    rows = table.rows(spark, table.spans(spark).by_partition)
    columns = rows.columns
    rows = rows.withColumn("bucket", F.expr(plan.bucket)).repartitionById(plan.tasks, "bucket")
    return rows.sortWithinPartitions(*plan.sort).select(*columns)


def _bare(batches: Iterator[Any]) -> Iterator[Any]:
    """Await the handler for each row, as the least work of a task."""
    import pyarrow as pa  # type: ignore[import-untyped]

    async def loop() -> int:
        count = 0
        for batch in batches:
            for row in batch.to_pylist():
                await nothing(row)
                count += 1
        return count

    yield pa.RecordBatch.from_pylist([{"rows": asyncio.run(loop())}])


def _bare_tasks(batches: Iterator[Any]) -> Iterator[Any]:
    """Run asyncio tasks, each of which takes the next row."""
    import pyarrow as pa

    async def task(rows: Iterator[Row]) -> int:
        count = 0
        for row in rows:
            await sleep(row)
            count += 1
        return count

    async def loop() -> int:
        rows = (row for batch in batches for row in batch.to_pylist())
        return sum(await asyncio.gather(*[task(rows) for _ in range(LANES)]))

    yield pa.RecordBatch.from_pylist([{"rows": asyncio.run(loop())}])


def _each(rows: Iterator[Any]) -> None:
    async def loop() -> None:
        for row in rows:
            await nothing(row)

    asyncio.run(loop())
