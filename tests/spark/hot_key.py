"""Tasks in which one key has 95 % of the rows: `python -m tests.spark.hot_key ROWS…`.

Runs a task for each number of rows, one task after the other; a row has 500 bytes. After each task, prints the highest
memory of the process in bytes.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]

import lanes
from lanes_spark import run_task
from tests.spark.rows import job

SIZE: Final = 500
MARGIN: Final = 16 * 1024 * 1024
"""Bytes by which the peaks of two tasks may differ because the allocator reserves blocks."""

_BATCH: Final = 1_000
_SCHEMA: Final = pa.schema(
    [("key", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())]
)


def peak() -> int:
    """Return the highest memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # On Linux, getrusage includes the memory of the process before its exec.
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def batches(rows: int) -> Iterator[Any]:
    for start in range(0, rows, _BATCH):
        offsets = range(start, min(rows, start + _BATCH))
        keys = [b"hot" if at % 20 else b"key-%d" % (at % 7) for at in offsets]
        values = [b"%d" % at * (SIZE // len(b"%d" % at)) for at in offsets]
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(keys, pa.binary()),
                pa.array([0] * len(keys), pa.int32()),
                pa.array(offsets, pa.int64()),
                pa.array(values, pa.binary()),
            ],
            schema=_SCHEMA,
        )


async def handler(message: lanes.Message) -> None:
    assert message.value


def main(sizes: list[int]) -> None:
    for rows in sizes:
        *_, counts = run_task(batches(rows), job(handler))
        assert counts["finished"].to_pylist() == [rows]
        print(peak())


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
