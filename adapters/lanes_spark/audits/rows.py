"""Reads the rows of a journal, and facts about the processes that wrote the rows. Uses only DataFrames.

The column ``history`` separates journals, so that one job can judge several journals.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.tables import journal
from lanes_spark.tables.kafka_topic import KafkaTopic
from lanes_spark.tables.table import ParquetTable

SEGMENT: Final = ("history", "run")
"""Columns that name a process; each run of a consumer counts as a process."""

ASSIGNMENT: Final = (*SEGMENT, "partition", "assignment")
"""Columns that name an assignment of a partition to a process."""

_READ: Final = (
    "run member n event mono wall partition assignment position key cause result incarnation floor deadline detail"
)
COLUMNS: Final = {name: journal.TYPES[name] for name in _READ.split()}
"""Columns of a journal that the audit reads, with their types."""

MESSAGES: Final = (*journal.MESSAGES, "zombie")
"""Events of one message at a process."""

_COMMITS: Final = ("commit_sent", "commit_ok", "commit_failed")
_OWNED: Final = ("assigned", "leased", "revoking", "hastened", *journal.FENCES, *_COMMITS)

_STRETCH: Final = 64
"""Number of rows of a process in one group, which is the number of bits of a ``bigint``."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """Facts about a journal that do not depend on single messages.

    Attributes:
        rows: All rows, with ``COLUMNS`` and ``history``.
        segments: One row for each process. ``process`` is the number of the process, by the time of its begin.
            ``shift`` is the number of seconds to add to the clock of a process, to compare it with other clocks.
            ``slack`` is the largest number of seconds by which the clock of a process may have gone back. ``gap``
            describes missing or unreadable rows, or is null.
        owned: Rows about ownership and commits.
        assignments: Assignments with their ``number``.
        partitions: Partitions that the audit cannot judge across processes, with ``why`` and ``recreated``.
        produced: Whether a producer wrote rows.
        committing: Whether an assignment commits positions.
        leased: Whether an assignment has a lease.
    """

    rows: DataFrame
    segments: DataFrame
    owned: DataFrame
    assignments: DataFrame
    partitions: DataFrame
    produced: bool
    committing: bool
    leased: bool


def check_columns(table: DataFrame) -> None:
    """Raise ``ConfigError`` if the table is no journal."""
    journal.check_kinds(table, COLUMNS, "the table is no journal")


def journal_rows(table: DataFrame) -> DataFrame:
    """Return the columns that the audit needs, without rows of copies of files.

    Blocks while Spark reads two columns.
    """
    file = F.col("_metadata.file_path")
    files = table.groupBy("run", file.alias("file")).agg(F.min("n").alias("first"), F.count("*").alias("rows"))
    same = Window.partitionBy("run", "first", "rows").orderBy("file")
    copies = files.withColumn("which", F.row_number().over(same)).where(F.col("which") > 1).select("file")
    found = [row["file"] for row in copies.collect()]
    rows = table.where(~file.isin(found)) if found else table
    return rows.select(F.lit("").alias("history"), *COLUMNS)


def due_positions(spark: SparkSession, source: ParquetTable | KafkaTopic | DataFrame) -> DataFrame:
    """Return the positions of a source, without repeats."""
    if isinstance(source, ParquetTable | KafkaTopic):
        rows = source.rows(spark, source.spans(spark).by_partition)
        partition = F.concat(F.lit(f"{source.topic}/"), F.col("partition"))
        named = rows.select(partition.alias("partition"), F.col("offset").alias("position"))
    else:
        kinds = {"partition": "string", "position": "bigint"}
        journal.check_kinds(source, kinds, "source", "write a partition as orders/3, and a position as 120")
        named = source.select("partition", "position")
    nowhere = F.raise_error(F.lit("source: a row has no partition or no position; leave it out"))
    partition, position = F.coalesce("partition", nowhere), F.coalesce("position", nowhere).cast("bigint")
    return named.distinct().select(F.lit("").alias("history"), partition.alias("partition"), position.alias("position"))


def any_of(condition: Column) -> Column:
    """Return an aggregate that is true if the condition is true for at least one row."""
    return F.coalesce(F.max(condition), F.lit(False))


def never() -> Column:
    """Return a value of ``ts`` that is later than all other values."""
    end = F.lit(float("inf")), F.lit(0), F.lit(0).cast("bigint")
    return F.struct(*(value.alias(name) for value, name in zip(end, ("time", "process", "n"), strict=True)))


def computed(frame: DataFrame) -> DataFrame:
    """Compute the DataFrame and keep its rows, so that later steps do not read the files again. Blocks."""
    return frame.localCheckpoint()


def partition_number() -> Column:
    """Return a number for the partition of a row, a hash of its history and partition."""
    return F.xxhash64("history", "partition")


def assignment_number() -> Column:
    """Return a number for the assignment of a row. The rows need the column ``process``.

    Two assignments may have the same number. The audit then examines all messages of both assignments.
    """
    return F.xxhash64("process", "partition_number", "assignment")


def know(raw: DataFrame) -> Known:
    """Collect facts about rows with ``COLUMNS`` and ``history``. Blocks for a few passes without a shuffle of rows."""
    rows = raw.select("history", *COLUMNS).withColumn("run", F.coalesce("run", F.lit("")))
    stretches = _stretches(rows)
    segments = computed(_ordered(_segments(rows, stretches)))
    owned = rows.where(F.col("event").isin(*_OWNED) & F.col("partition").isNotNull() & F.col("assignment").isNotNull())
    owned = computed(owned.select(*ASSIGNMENT, "n", "event", "mono", "incarnation", "floor", "deadline"))
    assignments = computed(_assignments(owned, segments))
    figures = segments.agg(any_of(F.col("produced") > 0).alias("produced"), any_of(F.col("several")).alias("several"))
    modes = assignments.agg(any_of(F.col("committing")).alias("committing"), any_of(F.col("leased")).alias("leased"))
    (told,) = figures.crossJoin(modes).collect()
    partitions = computed(_incomparable(rows, owned, segments, several=told["several"]))
    flags = {name: told[name] for name in ("produced", "committing", "leased")}
    return Known(rows=rows, segments=segments, owned=owned, assignments=assignments, partitions=partitions, **flags)


def _stretches(rows: DataFrame) -> DataFrame:
    """Summarise the rows of each process in groups of consecutive numbers, without a shuffle of rows."""
    event, n = F.col("event"), F.col("n")
    places = event.isin(*MESSAGES) & (
        F.col("assignment").isNull() | F.col("position").isNull() | F.col("partition").isNull()
    )
    owners = event.isin(*_OWNED) & (F.col("assignment").isNull() | F.col("partition").isNull())
    commits = event.isin(*_COMMITS) & F.col("floor").isNull()
    results = (event == "ended") & F.col("result").isNull() | (event == "redelivered") & F.col("cause").isNull()
    nameless = event.isNull() | n.isNull() | F.col("mono").isNull() | F.col("wall").isNull()
    bad = F.coalesce(functools.reduce(operator.or_, (nameless, places, owners, commits, results)), F.lit(True))
    return rows.groupBy(*SEGMENT, "member", F.floor(n / _STRETCH).alias("stretch")).agg(
        F.count("*").alias("rows"),
        F.bit_or(F.expr(f"shiftleft(1L, cast(pmod(n, {_STRETCH}) AS int))")).alias("seen"),
        F.min("n").alias("first"),
        F.max("n").alias("last"),
        F.min_by("mono", "n").alias("mono_first"),
        F.min("mono").alias("mono_least"),
        F.max("mono").alias("mono_most"),
        F.min("wall").alias("wall_first"),
        F.max("wall").alias("wall_last"),
        F.count_if(bad).alias("bad"),
        F.count_if(event == "end").alias("ended"),
        F.count_if(event == "dropped").alias("dropped"),
        F.count_if(event == "produced").alias("produced"),
    )


def _segments(rows: DataFrame, stretches: DataFrame) -> DataFrame:
    """Return one row for each process."""
    so_far = Window.partitionBy(*SEGMENT).orderBy("stretch").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    facts = (
        stretches.withColumn("slack", F.max("mono_most").over(so_far) - F.col("mono_least"))
        .groupBy(*SEGMENT)
        .agg(
            F.max("member").alias("member"),
            (F.min("member") != F.max("member")).alias("members"),
            *(F.sum(name).alias(name) for name in ("rows", "bad", "ended", "dropped", "produced")),
            F.sum(F.bit_count("seen")).alias("distinct"),
            F.min("first").alias("first"),
            F.max("last").alias("last_n"),
            F.min_by("mono_first", "first").alias("mono_first"),
            F.min("wall_first").alias("wall_first"),
            F.max("wall_last").alias("wall_last"),
            F.max("mono_most").alias("last"),
            F.max("slack").alias("slack"),
        )
    )
    begins = rows.where((F.col("n") == 1) & (F.col("event") == "begin"))
    facts = facts.join(begins.groupBy(*SEGMENT).agg(F.max("detail").alias("begin")), list(SEGMENT), "left")
    boot = F.get_json_object("begin", "$.boot")
    incomplete = F.coalesce(F.get_json_object("begin", "$.incomplete") == "1", F.lit(False))
    missing = F.col("last_n") - F.col("first") + 1 > F.col("distinct")
    unreadable = (F.col("bad") > 0) | F.col("members") | (F.col("rows") > F.col("distinct"))
    gap = (
        F.when(F.col("begin").isNull(), "no begin row: the first rows are missing")
        .when(
            missing | (incomplete & (F.col("dropped") > 0)),
            "rows are missing in between: dropped, or in a missing file",
        )
        .when(unreadable, "rows that cannot be read")
        .when(incomplete & (F.col("ended") == 0), "no end row: the last rows may be missing")
    )
    return facts.select(
        *SEGMENT,
        "member",
        F.when(boot != "", boot).otherwise(F.col("run")).alias("boot"),
        (F.coalesce(F.get_json_object("begin", "$.order"), F.lit("")) != "none").alias("ordered"),
        (F.coalesce(F.get_json_object("begin", "$.exclusive"), F.lit("true")) == "false").alias("shares"),
        gap.alias("gap"),
        *("rows", "produced", "mono_first", "wall_first", "wall_last", "last", "last_n", "slack"),
    )


def _ordered(segments: DataFrame) -> DataFrame:
    """Add the columns ``shift``, ``process``, ``whole`` (the history has all rows) and ``several`` (several boots)."""
    all_of = Window.partitionBy("history")
    first = Window.partitionBy("history", "boot").orderBy("wall_first", "member", "run")
    way = F.first(F.col("wall_first") - F.col("mono_first")).over(first)
    several = F.min("boot").over(all_of) != F.max("boot").over(all_of)
    shifted = segments.withColumns(
        {
            "several": several,
            "shift": F.when(several, way).otherwise(F.lit(0.0)),
            "gappy": F.col("gap").isNotNull(),
            "whole": F.max("gap").over(all_of).isNull(),
        }
    )
    # The numbers need only be unique within a history, so one numbering serves all histories.
    begun = Window.orderBy(F.col("mono_first") + F.col("shift"), "member", *SEGMENT)
    return shifted.withColumn("process", F.row_number().over(begun))


def _assignments(owned: DataFrame, segments: DataFrame) -> DataFrame:
    event, n, floor = F.col("event"), F.col("n"), F.col("floor")
    told = event.isin("leased", "lost") & (F.col("deadline") != 0)
    facts = owned.groupBy(*ASSIGNMENT).agg(
        F.min(F.when(event.isin(*journal.FENCES), n)).alias("fence_n"),
        F.max(F.when(event == "lost", n)).alias("lost_n"),
        F.max_by("deadline", F.when(told, n)).alias("deadline"),
        any_of(floor >= 0).alias("committing"),
        F.max_by(floor, F.when((event == "assigned") & floor.isNotNull(), n)).alias("begun"),
        F.max(F.when(event == "commit_sent", floor)).alias("committed"),
    )
    processes = segments.select(*SEGMENT, "process")
    numbered = facts.join(F.broadcast(processes), list(SEGMENT)).withColumn("partition_number", partition_number())
    return numbered.withColumns({"number": assignment_number(), "leased": F.col("deadline").isNotNull()})


def _incomparable(rows: DataFrame, owned: DataFrame, segments: DataFrame, *, several: bool) -> DataFrame:
    """Find partitions of overlapping processes of different boots, and recreated partitions."""
    assigned = owned.where(F.col("event") == "assigned")
    names = F.count_distinct(F.coalesce("incarnation", F.lit("")))
    recreated = (
        assigned.groupBy("history", "partition").agg(names.alias("names")).where(F.col("names") > 1).drop("names")
    )
    found = recreated.withColumn("recreated", F.lit(True))
    if several:
        found = found.unionByName(_overlapping(rows, segments).withColumn("recreated", F.lit(False)))
    why = F.when(F.col("recreated"), "recreated: its positions started again").otherwise(
        "in overlapping processes of different boots"
    )
    both = found.groupBy("history", "partition").agg(F.max("recreated").alias("recreated"))
    return both.withColumn("why", why)


def _overlapping(rows: DataFrame, segments: DataFrame) -> DataFrame:
    # Do not order a producer's rows, because their times do not matter.
    seen = rows.where((F.col("event") != "produced") & (F.col("partition") != ""))
    held = seen.select("history", "partition", "run").distinct()
    spans = held.join(F.broadcast(segments), list(SEGMENT)).select(
        *("history", "partition", "run", "boot", "wall_first", "wall_last"),
        (F.col("mono_first") + F.col("shift")).alias("begin"),
        (F.col("last") + F.col("shift")).alias("end"),
    )
    one, other = spans.alias("one"), spans.alias("other")
    first = F.struct("one.wall_first", "one.run") < F.struct("other.wall_first", "other.run")
    together = (F.col("other.wall_first") <= F.col("one.wall_last")) | (F.col("other.begin") <= F.col("one.end"))
    pairs = one.join(
        other,
        (F.col("one.history") == F.col("other.history"))
        & (F.col("one.partition") == F.col("other.partition"))
        & (F.col("one.boot") != F.col("other.boot"))
        & first
        & together,
    )
    return pairs.select("one.history", "one.partition").distinct()
