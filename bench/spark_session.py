"""A Spark session on this machine with two tasks at once, and the tables that it reads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from lanes_spark import ParquetTable
from tests.components.spark_session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CORES", "session", "write_table"]

CORES: Final = 2
PARTITIONS: Final = 12

_ROWS_AT_ONCE: Final = 100_000


@contextmanager
def session(conf: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """Start a session in a separate JVM, whose workers find this folder. Raises ``ComponentError`` without Java."""
    settings = {"spark.driver.memory": "1g", "spark.log.level": "ERROR", **(conf or {})}
    with spark_session(f"local[{CORES}]", settings) as found:
        yield found


def write_table(folder: Path, count: int, *, keys: int, size: int, hot: float = 0.0) -> ParquetTable:
    """Write a table of ``count`` messages of ``size`` bytes, in two files for each of 12 partitions.

    ``hot`` is an additional share of key 0; the other messages alternate among all keys, including key 0.
    """
    chance = random.Random(count)
    folder.mkdir()
    schema = pa.schema(
        [("key", pa.binary()), ("partition", pa.int32()), ("offset", pa.int64()), ("value", pa.binary())]
    )
    writers = [pq.ParquetWriter(folder / f"{number:02}.parquet", schema) for number in range(2 * PARTITIONS)]
    ends = [0] * PARTITIONS
    for first in range(0, count, _ROWS_AT_ONCE):
        rows: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        for _ in range(min(_ROWS_AT_ONCE, count - first)):
            key = 0 if chance.random() < hot else chance.randrange(keys)
            # A key stays in its partition.
            rows[key % PARTITIONS].append(b"key-%d" % key)
        for partition, found in enumerate(rows):
            offsets = range(ends[partition], ends[partition] + len(found))
            ends[partition] = offsets.stop
            values = [chance.randbytes(16) * (size // 16)] * len(found)
            columns = [found, [partition] * len(found), list(offsets), values]
            half = 2 * partition + (first >= count // 2)
            arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
            writers[half].write_table(pa.Table.from_arrays(arrays, schema=schema))
    for writer in writers:
        writer.close()
    return ParquetTable(path=str(folder), topic="bench")
