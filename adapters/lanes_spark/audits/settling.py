"""Checks settlements, over rows of a journal. Uses only DataFrames."""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.order import finding, intervals, passing
from lanes_spark.audits.rows import ASSIGNMENT, Known, any_of

LEFT: Final = "messages were left at the broker: neither settled nor handled"

_MESSAGE: Final = (*ASSIGNMENT, "position")
_PLACE: Final = ("member", "run", "n", "partition", "assignment", "position", "key")


def passed(committed: DataFrame) -> DataFrame:
    """Find messages that a commit passed too early.

    A commit passes a message if it is the assignment's first commit above that message and above all earlier
    deliveries. Within an assignment, a source that commits never delivers a position below an earlier delivery.

    Args:
        committed: Rows of ``screen.committed``.

    Returns:
        The messages, with the commit, and with ``what``: ``unfinished`` or ``unconfirmed``.
    """
    event = F.col("event")
    rows = committed.where(F.col("committing") & ~F.col("gappy"))
    ends = F.col("final") | (event == "redelivered") & (F.col("cause") == "settled")
    handled = rows.where(ends | (event == "delivered"))
    # Treat a redelivered message as unfinished, because the reason for the redelivery is unknown.
    unfinished = intervals(handled, _MESSAGE, event == "delivered", F.when(ends, "R"))
    told = event.isin("dlq_confirmed", "archived")
    unconfirmed = intervals(rows.where(told | (event == "dlq_sent")), _MESSAGE, event == "dlq_sent", F.when(told, "R"))
    wrong = unfinished.withColumn("what", F.lit("unfinished")).unionByName(
        unconfirmed.withColumn("what", F.lit("unconfirmed"))
    )
    commits = rows.where(event == "commit_sent").select(
        *ASSIGNMENT, "ts", F.col("floor").alias("position"), F.struct("ts", "member", "n", "floor").alias("commit")
    )
    named = commits.withColumn("name", F.struct(*ASSIGNMENT[1:]))
    # Pairs are very rare. Examine only assignments in a pair further.
    pairs = passing(named, wrong, ASSIGNMENT)
    suspects = pairs.select("history", "name.*", F.col("unfinished").alias("position")).distinct()
    concerned = F.broadcast(suspects.select(*ASSIGNMENT).distinct())
    in_time = Window.partitionBy(*ASSIGNMENT).orderBy("ts")
    so_far = in_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    deliveries = (
        rows.where(event == "delivered")
        .join(concerned, list(ASSIGNMENT), "left_semi")
        .select(*ASSIGNMENT, "ts", "position", "key", F.max("position").over(so_far).alias("level"))
    )
    both = deliveries.unionByName(
        commits.withColumnRenamed("position", "level").join(concerned, list(ASSIGNMENT), "left_semi"),
        allowMissingColumns=True,
    )
    # Spark would recompute a window frame that extends to the end of the partition for each row.
    behind = Window.partitionBy(*ASSIGNMENT).orderBy(F.desc("ts")).rowsBetween(Window.unboundedPreceding, -1)
    above = Window.partitionBy(*ASSIGNMENT).orderBy(F.desc("level")).rangeBetween(Window.unboundedPreceding, -1)
    following = both.withColumns({"following": F.min("commit").over(behind), "higher": F.min("commit").over(above)})
    later = F.when(F.col("higher") >= F.col("following"), F.col("higher")).when(
        F.col("higher") < F.col("following"), F.col("following")
    )
    last = (
        following.where(F.col("commit").isNull())
        .withColumn("by", later)
        .select(*_MESSAGE, "key", "ts", "level", "by")
        .join(suspects, list(_MESSAGE), "left_semi")
    )
    # If the floor has fallen, the commit that passed the message may be neither of the two candidates.
    fell = (
        last.where(F.col("by.floor") <= F.col("level")).drop("by").join(commits.drop("ts", "position"), [*ASSIGNMENT])
    )
    risen = fell.where((F.col("commit.ts") > F.col("ts")) & (F.col("commit.floor") > F.col("level")))
    passes = (
        last.where(F.col("by.floor") > F.col("level"))
        .select(*_MESSAGE, "ts", "key", "by")
        .unionByName(risen.groupBy(*_MESSAGE, "ts", "key").agg(F.min("commit").alias("by")))
        .drop("ts")
    )
    at = F.col("by.ts")
    then = passes.join(wrong, list(_MESSAGE)).where((F.col("open") < at) & (at < F.col("close")))
    return then.select(*_MESSAGE, "what", "key", "by.ts", "by.member", "by.n")


def no_commit_past_unfinished(passes: DataFrame) -> DataFrame:
    """Return the violations of NoCommitPastUnfinished among the messages of ``passed``."""
    what = "a position above the message was committed before the message had finished"
    return finding(passes.where(F.col("what") == "unfinished"), "NoCommitPastUnfinished", what)


def dead_letter_before_settle(rows: DataFrame, passes: DataFrame | None) -> DataFrame:
    """Return the violations of DeadLetterBeforeSettle among these rows and the messages of ``passed``."""
    event = F.col("event")
    letters = event.isin("dlq_sent", "dlq_confirmed", "archived")
    # A finished or abandoned message is no longer blocked, so the assignment may write its dead letter again.
    blocks = F.col("final") | event.isin("archived", "abandoned")
    before = Window.partitionBy(*_MESSAGE).orderBy("ts").rowsBetween(Window.unboundedPreceding, -1)
    used = rows.where((letters | blocks | (event == "ack")) & ~F.col("gappy")).withColumns(
        {
            "latest": F.last(F.when(letters, event), ignorenulls=True).over(before),
            "blocked": F.last(F.when(blocks, event == "archived"), ignorenulls=True).over(before),
        }
    )
    unconfirmed = "settled while its dead letter was not confirmed"
    what = F.when((event == "ack") & (F.col("latest") == "dlq_sent"), unconfirmed).when(
        (event == "dlq_sent") & F.col("blocked"), "has a second dead letter in the same assignment"
    )
    found = finding(used.where(what.isNotNull()), "DeadLetterBeforeSettle", what)
    if passes is None:
        return found
    committed = passes.where(F.col("what") == "unconfirmed")
    return found.unionByName(finding(committed, "DeadLetterBeforeSettle", unconfirmed))


def at_least_once(known: Known, rows: DataFrame, passes: DataFrame | None) -> tuple[DataFrame, DataFrame]:
    """Return the violations of AtLeastOnce among these rows, and the messages without settlement and handling."""
    event = F.col("event")
    acked = (event == "ack") | (event == "redelivered") & (F.col("cause") == "settled") & F.col("committing")
    used = rows.where(event.isin("produced", "delivered", "started") | F.col("final") | acked)
    place = ("history", "partition", "position")
    whole = known.segments.select("history", "whole").distinct()
    unhandled = (
        used.groupBy(*place)
        .agg(
            any_of(F.col("final")).alias("handled"),
            F.min(F.when(acked, F.struct("ts", *_PLACE))).alias("acked"),
        )
        .where(~F.col("handled"))
    )
    if known.committing:
        named = _settled(known, unhandled, passes, place)
    else:
        judged = unhandled.withColumn("by", F.col("acked")).withColumn("settled", F.col("by").isNotNull())
        by = ("member", "run", "n", "assignment", "key")
        named = judged.select(*place, "settled", *(f"by.{name}" for name in by))
    told = named.join(F.broadcast(whole), "history")
    lost = told.where(F.col("settled") & F.col("whole"))
    return finding(lost, "AtLeastOnce", "settled, and never handled"), told.where(~F.col("settled"))


def _settled(known: Known, unhandled: DataFrame, passes: DataFrame | None, place: tuple[str, ...]) -> DataFrame:
    """Mark the settled messages among the unhandled messages, and add a row of the process that settled each message.

    A commit also settles messages that its assignment never received. The function ``passed`` finds no such message.
    The function therefore also compares the committed ranges.
    """
    if passes is None:
        marked = unhandled.withColumn("passed", F.when(F.lit(False), F.col("acked")))
    else:
        unfinished = passes.where(F.col("what") == "unfinished")
        by_commit = unfinished.groupBy(*place).agg(F.min(F.struct("ts", *_PLACE)).alias("passed"))
        marked = unhandled.join(by_commit, list(place), "left")
    members = known.segments.select("history", "run", "member", F.col("last_n").alias("n"))
    spans = (
        known.assignments.where(F.col("begun") < F.col("committed"))
        .join(F.broadcast(members), ["history", "run"])
        .select(
            F.col("history").alias("of"),
            F.col("partition").alias("at"),
            *("begun", "committed", "member", "run", "n", "assignment"),
        )
    )
    covers = (
        (F.col("of") == F.col("history"))
        & (F.col("at") == F.col("partition"))
        & (F.col("begun") <= F.col("position"))
        & (F.col("position") < F.col("committed"))
    )
    covered = (
        marked.join(F.broadcast(spans), covers, "left")
        .groupBy(*place, "acked", "passed")
        .agg(F.min(F.struct("member", "run", "n", "assignment")).alias("span"), any_of(covers).alias("spanned"))
    )
    by = F.coalesce("acked", "passed")
    span = F.when(F.col("spanned"), F.col("span"))
    return covered.select(
        *place,
        (by.isNotNull() | F.col("spanned")).alias("settled"),
        *(F.coalesce(by[name], span[name]).alias(name) for name in ("member", "run", "n", "assignment")),
        by["key"].alias("key"),
    )


def duplicates(rows: DataFrame) -> DataFrame:
    """Count repeated messages. The column ``what`` is the cause, see ``Audit.duplicates``."""
    event = F.col("event")
    in_time = Window.partitionBy("history", "partition", "position").orderBy("ts")
    so_far = in_time.rowsBetween(Window.unboundedPreceding, -1)
    owner = F.struct("run", "assignment")
    starts = (
        rows.where((event == "started") | F.col("final"))
        .withColumns(
            {
                "before": F.last(F.when(event == "started", owner), ignorenulls=True).over(so_far),
                "finished": F.coalesce(F.max("final").over(so_far), F.lit(False)),
            }
        )
        .where((event == "started") & F.col("before").isNotNull())
    )
    cause = F.when(F.col("before") == owner, "retry").when(F.col("finished"), "repeat").otherwise("takeover")
    again = rows.where(event == "redelivered").groupBy("history", F.col("cause").alias("what")).count()
    return again.unionByName(starts.groupBy("history", cause.alias("what")).count())
