"""Tables of rows on disk, and a file in which handlers of several processes record their messages."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
from pyarrow import Table

from lanes_spark import ParquetTable
from tests.spark.rows import SCHEMA


def write_table(folder: Path, files: Sequence[Sequence[dict[str, Any]]], **more: Any) -> ParquetTable:
    """Write a table with these files; each file keeps the order of its rows."""
    folder.mkdir()
    for number, messages in enumerate(files):
        pq.write_table(Table.from_pylist(list(messages), schema=SCHEMA), folder / f"{number:03}.parquet")
    return ParquetTable(path=str(folder), topic="orders", **more)


def noting(path: Path, before: Callable[[Any], object] = lambda message: None) -> Callable[[Any], Any]:
    """Return a handler that appends each message to a file, which all processes share."""
    name = str(path)

    async def handler(message: Any) -> dict[str, object]:
        import anyio.lowlevel

        for _ in range(message.position % 3):
            await anyio.lowlevel.checkpoint()
        before(message)
        key = None if message.key is None else message.key.decode()
        # A single write to the end of a file is atomic, even if other processes write too.
        file = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{message.partition.id.number} {message.position} {key}\n".encode())
        os.close(file)
        return {"partition": message.partition.id.number, "position": message.position}

    return handler


def noted(path: Path) -> list[tuple[int, int, bytes | None]]:
    """Return the recorded messages, in order."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        partition, position, key = line.split(" ", 2)
        found.append((int(partition), int(position), None if key == "None" else key.encode()))
    return found


def by_key(calls: Sequence[tuple[int, int, bytes | None]]) -> dict[bytes, list[tuple[int, int]]]:
    """Return the partitions and positions of each key, in order."""
    found = defaultdict(list)
    for partition, position, key in calls:
        if key is not None:
            found[key].append((partition, position))
    return found


def positions(calls: Sequence[tuple[int, int, bytes | None]]) -> list[tuple[int, int]]:
    """Return the sorted positions, each as often as it was handled."""
    return sorted((partition, position) for partition, position, _ in calls)
