"""Reads Parquet tables of messages as sources of a replay."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final

from lanes.errors import ConfigError
from lanes_spark.plan import Eras, check_eras
from lanes_spark.positions import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

_NEEDED: Final = ("key", "partition", "offset", "value")
_OPTIONAL: Final = ("timestamp", "headers")
_HEADERS: Final = "array<struct<key:string,value:binary>>"
_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "key": ("binary", "string"),
    "partition": ("int", "bigint", "smallint", "tinyint"),
    "offset": ("bigint", "int"),
    "value": ("binary", "string"),
    "timestamp": ("timestamp",),
    "headers": (_HEADERS,),
}


@dataclass(frozen=True, kw_only=True)
class ParquetTable:
    """The messages of a topic in Parquet files.

    The columns are key, partition, offset and value, and optionally timestamp and headers. Keys and values are binary
    or strings. A string becomes UTF-8 bytes. The column headers has the type that Spark's Kafka connector writes. If a
    key is in two partitions of one era, its messages have no order.

    Args:
        path: Path of the table, or several paths.
        topic: Topic of the messages. If the table has a column ``topic``, a replay reads only rows of this topic.
        columns: Names of columns that differ in the table, by message column. Default: no differences.
        aligned: Whether every partition is one file, in the order of the positions, and one task can read this file. An
            aligned table needs no shuffle. A replay checks that one task reads each partition.
        eras: Changes of the number of partitions, see ``lanes_spark.Eras``.

    Raises:
        ConfigError: An argument has a wrong value.
    """

    path: str | Sequence[str]
    topic: str
    columns: Mapping[str, str] = field(default_factory=dict)
    aligned: bool = False
    eras: Eras = ()

    def __post_init__(self) -> None:
        strange = [name for name in self.columns if name not in (*_NEEDED, *_OPTIONAL, "topic")]
        if strange:
            known = ", ".join((*_NEEDED, *_OPTIONAL, "topic"))
            raise ConfigError(f"columns has {strange[0]!r}, which is no message column: use {known}")
        if not self.topic:
            raise ConfigError("topic is empty: give the name of the topic")
        check_eras(self.eras)

    def spans(self, spark: SparkSession) -> Spans:
        """Read the positions of the table by one pass, without keys and values. Blocks.

        Args:
            spark: Session that reads the table.

        Returns:
            The positions by partition.

        Raises:
            ConfigError: A column is missing or has a wrong type, or a partition or an offset is missing or negative.
        """
        return spans_of(self._all(spark))

    def rows(self, spark: SparkSession, ranges: Mapping[int, Span], incarnation: str = "") -> DataFrame:
        """Return the messages of these positions, with the columns of ``ParquetTable``. The call reads no row yet.

        Args:
            spark: Session that reads the table.
            ranges: Positions by partition, the end exclusive.
            incarnation: Unused, because a table has no id.

        Returns:
            The rows.

        Raises:
            ConfigError: A column is missing or has a wrong type.
        """
        return self._all(spark).where(within(ranges))

    def since(self, spark: SparkSession, time: datetime, spans: Mapping[int, Span]) -> dict[int, int]:
        """Return no positions. A table needs no start positions, because Spark skips files by their statistics.

        Args:
            spark: Not used.
            time: Not used.
            spans: Not used.

        Returns:
            An empty dict.
        """
        return {}

    def check_aligned(self, rows: DataFrame) -> None:
        """Check, by one pass over the rows, that one task reads each partition. Blocks.

        Args:
            rows: Rows of this table.

        Raises:
            ConfigError: Several tasks read one partition.
        """
        from pyspark.sql import functions as F  # noqa: N812

        shared = (
            rows.select("partition", F.spark_partition_id().alias("task"))
            .distinct()
            .groupBy("partition")
            .count()
            .where("count > 1")
            .orderBy("partition")
            .first()
        )
        if shared is not None:
            raise ConfigError(
                f"aligned=True, and {self.topic}/{shared['partition']} is read by {shared['count']} tasks, without an "
                "order between them. Leave out aligned, or write one file for each partition and raise "
                "spark.sql.files.maxPartitionBytes and openCostInBytes above the size of the file"
            )

    def _all(self, spark: SparkSession) -> DataFrame:
        paths = [self.path] if isinstance(self.path, str) else list(self.path)
        return known_rows(spark.read.parquet(*paths), self.topic, self.columns)


def within(ranges: Mapping[int, Span] | Sequence[tuple[int, Span]]) -> Column:
    """Return the condition that a row is in one of these ranges. A partition may have several ranges."""
    from pyspark.sql import functions as F  # noqa: N812

    partition, offset = F.col("partition"), F.col("offset")
    pairs = ranges.items() if isinstance(ranges, Mapping) else ranges
    conditions = [F.lit(False)] + [
        (partition == number) & (offset >= first) & (offset < end) for number, (first, end) in sorted(pairs)
    ]
    while len(conditions) > 1:
        # Spark traverses the tree of conditions recursively. A balanced tree is shallow even for thousands of
        # partitions.
        conditions = [functools.reduce(operator.or_, conditions[at : at + 2]) for at in range(0, len(conditions), 2)]
    return conditions[0]


def known_rows(table: DataFrame, topic: str, columns: Mapping[str, str]) -> DataFrame:
    """Return the message columns of the rows of ``topic``, under the names of ``ParquetTable``."""
    from pyspark.sql import functions as F  # noqa: N812

    kinds: dict[str, DataType] = {one.name: one.dataType for one in table.schema}
    named_topic = columns.get("topic", "topic")
    if named_topic in kinds:
        table = table.where(F.col(_quoted(named_topic)) == topic)
    elif "topic" in columns:
        raise ConfigError(
            f"the table has no column {named_topic!r} for topic, only {', '.join(kinds)}: correct columns="
        )
    selected = []
    for name in (*_NEEDED, *_OPTIONAL):
        called = columns.get(name, name)
        if called not in kinds:
            if name in _NEEDED or name in columns:
                raise ConfigError(
                    f"the table has no column {called!r} for {name}, only {', '.join(kinds)}: name the column by "
                    f"columns={{{name!r}: …}}"
                )
            continue
        kind = kinds[called].simpleString()
        if kind not in _TYPES[name]:
            raise ConfigError(
                f"the column {called!r} for {name} is {kind}, not {' or '.join(_TYPES[name])}: write the table with a "
                "column of that type"
            )
        selected.append(F.col(_quoted(called)).alias(name))
    return table.select(*selected)


@dataclass(frozen=True, kw_only=True)
class Spans:
    """The positions of a source.

    Attributes:
        by_partition: Positions by partition, the end exclusive.
        rows: Number of rows; for a Kafka topic, number of positions.
        timed: Whether rows have a timestamp.
        cut: Whether the source may have lost positions below its first position; False for a table.
        incarnation: Id of the topic, which differs after a recreation of the topic; "" = unknown.
    """

    by_partition: Mapping[int, Span]
    rows: int
    timed: bool
    cut: bool = False
    incarnation: str = ""


def spans_of(rows: DataFrame) -> Spans:
    """Read the positions of rows, by one pass over two columns. Raises ``ConfigError`` for a row without a position."""
    from pyspark.sql import functions as F  # noqa: N812

    found = (
        rows.groupBy("partition")
        .agg(
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
            F.count("*").alias("rows"),
            F.count("offset").alias("placed"),
        )
        .collect()
    )
    for row in found:
        if row["partition"] is None or row["placed"] < row["rows"] or row["first"] < 0 or row["partition"] < 0:
            raise ConfigError(
                f"partition {row['partition']} of the table has rows without a partition or an offset of 0 or more, "
                "which cannot be ordered; remove these rows"
            )
    return Spans(
        by_partition={row["partition"]: (row["first"], row["last"] + 1) for row in found},
        rows=sum(row["rows"] for row in found),
        timed="timestamp" in rows.columns,
    )


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
