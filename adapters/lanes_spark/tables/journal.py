"""Reads a journal with Spark: its files, its columns and its selected positions.

All steps are DataFrames, so no Python code runs for single rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from lanes.errors import ConfigError, SourceError
from lanes.history.columns import row_tables

TYPES: Final = {one.name: one.dataType.simpleString() for one in from_arrow_schema(row_tables().schema(""))}
"""Spark's type of each column of a journal."""

FENCES: Final = ("drained", "revoked", "lost")
"""Events after which the results of an assignment have no effect."""

_READ: Final = "run member n event partition assignment position result incarnation floor count"
_DEAD: Final = ("dlq_confirmed", "archived")
_GIVEN_UP: Final = ("abandoned", "blocked")

MESSAGES: Final = ("delivered", "redelivered", "started", "ended", "retry", "dlq_sent", *_DEAD, "ack", *_GIVEN_UP)
"""Events of a message in an assignment that has not ended."""

_TOPICS: Final = 5
"""Maximum number of names of other topics in an error."""


def unfinished_files(spark: SparkSession, paths: Sequence[str]) -> int:
    """Count the files of journals that a running process still writes, or that a killed process has left.

    Call this function before ``read_journal``. In the reverse order, a file that a process completes between the calls
    would be in neither result. With Spark Connect, which cannot list hidden files, the result is 0.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:
        return 0
    found = 0
    for path in paths:
        pattern = jvm.org.apache.hadoop.fs.Path(f"{path.rstrip('/')}/.*.tmp")
        try:
            files = pattern.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration()).globStatus(pattern)
        except Py4JJavaError:
            # ``read_journal`` reads the folder next, and reports the error.
            continue
        found += 0 if files is None else len(files)
    return found


def read_journal(spark: SparkSession, paths: Sequence[str], unfinished: int) -> DataFrame:
    """Return the rows of complete files, with all their columns. Blocks while Spark lists the folders.

    Args:
        spark: Session that reads the files.
        paths: Folders of the journal.
        unfinished: Number of incomplete files, see ``unfinished_files``.

    Returns:
        The rows.

    Raises:
        ConfigError: The folders have no complete file, or a file of an earlier ``lanes``.
    """
    reader = spark.read.option("pathGlobFilter", "*.parquet")
    try:
        table = reader.parquet(*paths)
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        more = f", only {unfinished} incomplete files" if unfinished else ""
        raise ConfigError(
            f"journal {', '.join(paths)}: the folder has no complete file of a journal{more}; give the folder that "
            "lanes.run(journal=…) has written to, after its first file is complete"
        ) from None
    kinds = dict(table.dtypes)
    if kinds.get("epoch") == "bigint" == kinds.get("assignment", "bigint"):
        _check_written(reader, paths, old="assignment" not in kinds)
    return table


def _check_written(reader: DataFrameReader, paths: Sequence[str], *, old: bool) -> None:
    """Raise ``ConfigError`` for rows of an earlier ``lanes``, which counted assignments in the column epoch.

    Spark reads the column names from one file, and fills missing columns of other files with null. The schema here
    therefore names both columns. By the statistics of the files, Spark skips the parts of a journal without an epoch.

    Args:
        reader: Reader of the journal's files.
        paths: Folders of the journal.
        old: Whether the table has no column assignment.
    """
    rows = reader.schema("epoch bigint, assignment bigint").parquet(*paths)
    earlier = rows.where(F.col("epoch").isNotNull() & F.col("assignment").isNull())
    found = earlier.select(F.col("_metadata.file_path")).first()
    if found is not None or old:
        raise ConfigError(
            f"journal {', '.join(paths)}: {found[0] if found else 'a file'} was written by an earlier lanes, whose "
            "rows cannot be judged: remove the files of that run, or give only files of this version"
        )


def check_kinds(
    table: DataFrame,
    wanted: Mapping[str, str],
    named: str,
    remedy: str = "pass what lanes.run(journal=…) has written, unchanged",
) -> None:
    """Raise ``ConfigError`` for a missing column or a column of another type. The error text begins with ``named``."""
    kinds = {field.name: field.dataType.simpleString() for field in table.schema}
    for name, kind in wanted.items():
        if kinds.get(name) != kind:
            found = f"of type {kinds[name]}" if name in kinds else "missing"
            raise ConfigError(f"{named}: its column {name}, of type {kind}, is {found}; {remedy}")


def check_journal(spark: SparkSession, paths: Sequence[str], hidden: int) -> DataFrame:
    """Return the rows of a journal. Raises ``ConfigError`` if the files are no journal."""
    table = read_journal(spark, paths, hidden)
    check_kinds(table, {name: TYPES[name] for name in _READ.split()}, f"journal {', '.join(paths)}")
    return table.select(*_READ.split())


def doubts_of(
    table: DataFrame, topic: str, paths: Sequence[str], hidden: int, incarnation: str = ""
) -> tuple[int, tuple[str, ...]]:
    """Find reasons why the journal may be incomplete. Blocks.

    Args:
        table: Rows of the journal.
        topic: Topic name in the journal.
        paths: Folders of the journal, for error texts.
        hidden: Number of incomplete files.
        incarnation: Id of the topic in the source; "" = any id.

    Returns:
        The number of runs that read the topic, and the reasons.

    Raises:
        ConfigError: No run in the journal read the topic.
        SourceError: The topic was recreated.
    """
    event, n = F.col("event"), F.col("n")
    dropped = event == "dropped"
    facts = table.groupBy("run").agg(
        F.max("member").alias("member"),
        F.max(_of_topic(topic)).alias("speaks"),
        F.max((n == 1) & (event == "begin")).alias("begun"),
        F.max(event == "end").alias("ended"),
        F.sum(F.when(dropped, F.coalesce("count", F.lit(1))).otherwise(0)).alias("dropped"),
        # The row ``dropped`` has the number of the last dropped row.
        (F.max("n") - F.count(F.when(~dropped, n))).alias("missing"),
        F.sum(F.when(event.isNull() | n.isNull(), 1).otherwise(0)).alias("odd"),
    )
    reasons = {
        "rows": F.col("missing") > F.col("dropped"),
        "dropped": F.col("dropped") > 0,
        "end": ~F.coalesce("ended", F.lit(False)),
        "begin": ~F.coalesce("begun", F.lit(False)),
        "odd": F.col("odd") > 0,
    }
    told = facts.agg(
        F.sum(F.when(F.col("speaks"), 1).otherwise(0)).alias("speaking"),
        F.sum("dropped").alias("dropped_rows"),
        F.sum(F.greatest(F.col("missing") - F.col("dropped"), F.lit(0))).alias("missing_rows"),
        F.sum("odd").alias("odd_rows"),
        *[F.sum(F.when(reason, 1).otherwise(0)).alias(name) for name, reason in reasons.items()],
        *[F.min(F.when(reason, F.col("member"))).alias(f"{name}_as") for name, reason in reasons.items()],
    ).collect()[0]
    where = f"journal {', '.join(paths)}"
    if not told["speaking"]:
        raise ConfigError(f"{where}: the journal has no rows of {topic!r}{_others(table)}")
    _check_incarnations(table, topic, where, incarnation)
    texts = {
        "end": "{end} run(s) have no end, for example a run of {end_as}: their last rows may be missing",
        "dropped": "{dropped} run(s) have dropped {dropped_rows} rows, for example a run of {dropped_as}",
        "rows": "{rows} run(s) lack {missing_rows} rows in between, for example a run of {rows_as}: files are missing",
        "begin": "{begin} run(s) have no begin, for example a run of {begin_as}: files are missing",
        "odd": "{odd_rows} rows cannot be read, for example a row of {odd_as}",
    }
    doubts = [text.format(**told.asDict()) for name, text in texts.items() if told[name]]
    if hidden:
        doubts.append(f"{hidden} incomplete file(s) (.tmp) were not read")
    return told["speaking"], tuple(doubts)


def selected_positions(table: DataFrame, topic: str, of: str) -> DataFrame:
    """Return partition and offset of each selected position, without repeats. The call reads no file yet."""
    event = F.col("event")
    number = F.substring_index("partition", "/", -1).cast("int").alias("partition")
    mine = table.where(_of_topic(topic))
    place = (number, F.col("position").alias("offset"))
    if of == "dead_lettered":
        return mine.where(event.isin(*_DEAD) & F.col("position").isNotNull()).select(*place).distinct()
    assignment = ["run", "partition", "assignment"]
    fences = mine.where(event.isin(*FENCES)).groupBy(*assignment).agg(F.min("n").alias("fence"))
    counts = F.col("fence").isNull() | (F.col("n") < F.col("fence"))
    well = (event == "dlq_confirmed") | ((event == "ended") & (F.col("result") == "ok"))
    finished = F.coalesce((event == "ack") | (counts & well), F.lit(False))
    floors = mine.where(event == "commit_ok").groupBy("partition").agg(F.max("floor").alias("committed"))
    left = (
        mine.where(event.isin(*MESSAGES) & F.col("position").isNotNull())
        .join(F.broadcast(fences), assignment, "left")
        .groupBy("partition", "position")
        .agg(F.max(finished).alias("finished"), F.max(event.isin(*_GIVEN_UP)).alias("given_up"))
        .join(F.broadcast(floors), ["partition"], "left")
        .where(~F.col("finished") & (F.col("committed").isNull() | (F.col("position") >= F.col("committed"))))
    )
    if of == "abandoned":
        left = left.where("given_up")
    return left.select(*place)


def _of_topic(topic: str) -> Column:
    name = F.col("partition")
    # Split at the last slash, because a topic name may contain slashes.
    mine = name.startswith(f"{topic}/") & F.substring(name, len(topic) + 2, 10).rlike("^[0-9]{1,9}$")
    return F.coalesce(mine, F.lit(False))


def _others(table: DataFrame) -> str:
    name = F.regexp_replace("partition", "/[0-9]+$", "").alias("topic")
    rows = table.where(F.col("partition").contains("/")).select(name).distinct().orderBy("topic").limit(_TOPICS)
    topics = [repr(row["topic"]) for row in rows.collect()]
    if not topics:
        return ", nor of any other topic: give the journal of a run that has received messages"
    return f", but of {', '.join(topics)}: set topic= to the topic's name in the journal"


def _check_incarnations(table: DataFrame, topic: str, where: str, incarnation: str) -> None:
    assigned = table.where(_of_topic(topic) & (F.col("event") == "assigned") & (F.col("incarnation") != ""))
    names = (
        assigned.groupBy("partition")
        .agg(F.count_distinct("incarnation").alias("names"))
        .where("names > 1")
        .orderBy("partition")
        .first()
    )
    if names is not None:
        raise SourceError(
            f"{where}: {names['partition']} was recreated {names['names'] - 1} time(s), and its positions began again: "
            "give only the files of runs after the last recreation"
        )
    # A topic id may be in either alphabet of base 64.
    former = assigned.where(F.translate("incarnation", "+/", "-_") != incarnation) if incarnation else assigned.limit(0)
    if not former.isEmpty():
        raise SourceError(
            f"{where}: the journal is of a former {topic}, which was deleted and recreated, so the positions now have "
            f"other messages. If the messages are the same, as in a mirror, set topic={topic!r} of JournalSelection"
        )
