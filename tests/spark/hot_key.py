"""Tasks of which one key has 95 % of the rows: `python -m tests.spark.hot_key ROWS…`.

One task after the other, of so many rows of 500 bytes. Prints the highest memory of the process, in bytes, after each.
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
"""Bytes by which the peak may differ from one task to the next, whatever their rows: blocks of the allocator."""

_BATCH: Final = 1_000
_SCHEMA: Final = pa.schema(
    [("key", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())]
)


def peak() -> int:
    """The highest memory that this process has had, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # What getrusage says on Linux is never less than what the process had before it became this program.
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
