"""A Python worker that Spark uses for many tasks keeps no thread or descriptor, and its memory does not grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
from lanes_spark import ParquetTable, replay
from tests.spark.conftest import session
from tests.spark.hot_key import MARGIN, SIZE, peak
from tests.spark.rows import rows
from tests.spark.tables import write_table

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

TASKS = 50
HELD = pa.schema([("pid", pa.int64()), ("threads", pa.int64()), ("files", pa.int64())])
PEAK = pa.schema([("pid", pa.int64()), ("peak", pa.int64())])


@pytest.fixture(scope="module")
def one_core() -> Iterator[Any]:
    """A session that runs one task at a time, all of them in one Python worker."""
    with session("local[1]", {"spark.python.worker.reuse": "true"}) as found:
        yield found


async def held(message: lanes.Message) -> dict[str, object]:
    return {"pid": os.getpid(), "threads": threading.active_count(), "files": len(os.listdir("/dev/fd"))}


def in_a_thread(message: lanes.Message) -> dict[str, object]:
    return {"pid": os.getpid(), "threads": 0, "files": 0}


def test_fifty_tasks_in_one_worker_of_spark_leak_no_thread_or_fd(one_core: Any, tmp_path: Path) -> None:
    # Enough keys for every task.
    table = write_table(tmp_path / "table", [rows(1_000, keys=300)])
    seen: dict[str, list[dict[str, int]]] = {}
    for name, handler, tasks in (
        ("first", held, 2),
        ("fifty", held, TASKS),
        ("threads", in_a_thread, TASKS),
        ("last", held, 2),
    ):
        path = str(tmp_path / name)
        report = replay(one_core, table, handler, tasks=tasks, results=HELD, results_to=path)
        assert (report.finished, report.plan.tasks) == (1_000, tasks)
        files = sorted(Path(path).glob("*.parquet"))
        assert tasks * 0.9 <= len(files) <= tasks
        seen[name] = pq.read_table(path).to_pylist()
        # Spark ends a worker that was idle for a minute, so two replays may have two workers.
        assert len({one["pid"] for one in seen[name]}) == 1
    for what in ("threads", "files"):
        first = max(one[what] for one in seen["first"])
        assert max(one[what] for one in [*seen["fifty"], *seen["last"]]) <= first, what


def hot_table(spark: Any, path: Path, count: int) -> ParquetTable:
    """Write a table with ``count`` rows of 500 bytes in one partition; one key has 95 % of the rows."""
    spark.range(count).selectExpr(
        "CAST(IF(id % 20 = 0, concat('key-', id % 7), 'hot') AS BINARY) AS key",
        "0 AS partition",
        "id AS offset",
        f"CAST(rpad(CAST(id AS STRING), {SIZE}, 'x') AS BINARY) AS value",
    ).write.parquet(str(path))
    return ParquetTable(path=str(path), topic="orders")


async def peaking(message: lanes.Message) -> dict[str, object] | None:
    assert len(message.value) == SIZE
    return None if message.position % 1_000 else {"pid": os.getpid(), "peak": peak()}


def test_the_memory_of_a_worker_of_spark_does_not_grow_with_a_hot_key(one_core: Any, tmp_path: Path) -> None:
    peaks = []
    for count in (60_000, 300_000):
        table = hot_table(one_core, tmp_path / f"table-{count}", count)
        path = str(tmp_path / f"peaks-{count}")
        report = replay(one_core, table, peaking, tasks=2, results=PEAK, results_to=path)
        assert report.finished == count
        found = pq.read_table(path).to_pylist()
        # Spark ends a worker that was idle for a minute, so two replays may have two workers.
        assert len({one["pid"] for one in found}) == 1
        peaks.append(max(one["peak"] for one in found))
    # The values alone differ by 120 MB.
    assert peaks[1] - peaks[0] < MARGIN, peaks
