"""Finds suspect messages by one pass over the messages of a journal. Uses only DataFrames.

A regular message has one delivery, one start and one end, all after the end of its key's previous message. The numbers
of the message's first and last rows prove this order. The audit suspects all other messages. If a key has a start out
of order, the audit suspects all messages of the key. Apart from commits and leases, only suspects can break a promise
about order, exclusion or settlement. The audit may also suspect messages of two keys with the same hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.rows import (
    ASSIGNMENT,
    MESSAGES,
    SEGMENT,
    Known,
    assignment_number,
    computed,
    partition_number,
)

MESSAGE: Final = ("partition_number", "position")
"""Columns that name a message."""

_DELIVERED: Final = 1
_STARTED: Final = 2
_ENDED: Final = 4
_ACK: Final = 8
_PRODUCED: Final = 16
_OTHER: Final = 32
_DEAD_LETTER: Final = 64
_CONFIRMED: Final = 128
_PLAIN: Final = _DELIVERED | _STARTED | _ENDED


@dataclass(frozen=True, kw_only=True)
class Screened:
    """Result of the pass.

    Attributes:
        messages: One row for each message and assignment. ``starts`` counts the starts, and ``in_order`` counts the
            starts to which an order applies. ``first`` marks one row of each position. ``plain`` marks a message with
            one delivery, one start and one end. ``suspect`` marks a message that the audit must examine row by row.
        assignments: Assignments in which a commit may have passed an unfinished message; None without commits.
    """

    messages: DataFrame
    assignments: DataFrame | None


def screen(known: Known) -> Screened:
    """Screen all messages. Blocks for one pass, with a shuffle by key."""
    fences = (
        known.assignments.where(F.col("fence_n").isNotNull()).groupBy("number").agg(F.min("fence_n").alias("fence_n"))
    )
    processes = known.segments.select("process", "history", "shift", "slack", "ordered")
    begun_n, last_n = F.col("begun_n"), F.col("last_n")
    fenced = F.coalesce(F.col("final_n") > F.col("fence_n"), F.lit(False))
    final = F.coalesce(F.col("final_n") == last_n, F.lit(False)) & ~fenced
    settled = F.coalesce(F.col("settled_n") == last_n, F.lit(False))
    # A dead letter may be confirmed before the handler of its message has ended. The next start of the key then
    # overlaps the handler.
    ended = F.coalesce(F.col("stopped_n") > F.col("started_n"), F.col("started_n").isNull())
    # A message with an unconfirmed dead letter is unfinished, regardless of its result.
    dead_lettered = F.col("kinds").bitwiseAND(F.lit(_DEAD_LETTER)) != 0
    unconfirmed = dead_lettered & F.coalesce(F.col("confirmed_n") != last_n, F.lit(True))
    acked = F.col("kinds").bitwiseAND(F.lit(_ACK)) != 0
    kinds, rows = F.col("kinds").bitwiseAND(F.lit(~_ACK)), F.col("rows") - F.when(acked, 1).otherwise(0)
    in_turn = (kinds == _PLAIN) & (rows == 3) & (F.col("delivered_n") < begun_n) & final
    placed = (
        _grouped(known)
        .withColumn("number", assignment_number())
        .join(F.broadcast(fences), "number", "left")
        .join(F.broadcast(processes), "process")
        .select(
            *("history", "lane", *MESSAGE, "process", "number", "starts", "delivered_n", "begun_n", "last_n"),
            F.when(F.col("keyed") & F.col("ordered"), F.col("starts")).otherwise(0).alias("in_order"),
            (F.col("begun_mono") + F.col("shift")).alias("begun"),
            (F.col("last_mono") + F.col("shift") + F.col("slack")).alias("over"),
            (final & ended).alias("final"),
            F.when((final | settled) & ~unconfirmed, last_n).alias("closed_n"),
            in_turn.alias("plain"),
            (F.col("kinds") == _PRODUCED).alias("told"),
        )
    )
    if known.produced:
        # A delivered message does not need a row of its producer.
        alone = F.min("told").over(Window.partitionBy("lane", "position"))
        placed = placed.withColumn("alone", alone).where(F.col("alone") | ~F.col("told")).drop("alone")
    lane = Window.partitionBy("lane")
    by_position = lane.orderBy("position", "begun")
    names = ("process", "last_n", "over", "final", "position")
    near = placed.withColumns(
        {
            **{f"before_{name}": F.lag(name).over(by_position) for name in names},
            "next_position": F.lead("position").over(by_position),
        }
    )
    behind = F.when(F.col("before_process") == F.col("process"), F.col("before_last_n") < begun_n).otherwise(
        F.col("before_over") < F.col("begun")
    )
    first = F.coalesce(F.col("before_position") != F.col("position"), F.lit(True))
    alone = first & F.coalesce(F.col("next_position") != F.col("position"), F.lit(True))
    broken = begun_n.isNotNull() & F.coalesce(~(F.col("before_final") & behind), F.col("before_position").isNotNull())
    messages = computed(
        near.withColumns({"first": first, "broken": broken, "alone": alone})
        .withColumn("suspect", F.max("broken").over(lane) | ~F.col("plain") | ~F.col("alone"))
        .select(
            *("history", *MESSAGE, "number", "starts", "in_order", "delivered_n", "last_n", "closed_n"),
            *("first", "plain", "suspect"),
        )
    )
    return Screened(messages=messages, assignments=_passed(known, messages) if known.committing else None)


def _grouped(known: Known) -> DataFrame:
    """Return one row for each message and assignment."""
    event, n, mono = F.col("event"), F.col("n"), F.col("mono")
    ended = (event == "ended") & (F.col("result") == "ok")
    settled = (event == "redelivered") & (F.col("cause") == "settled")
    kind = (
        F.when(event == "delivered", _DELIVERED)
        .when(event == "started", _STARTED)
        .when(ended, _ENDED)
        .when(event == "ack", _ACK)
        .when(event == "produced", _PRODUCED)
        .when(event == "dlq_sent", _DEAD_LETTER)
        .when(event == "dlq_confirmed", _CONFIRMED)
        .otherwise(_OTHER)
    )
    used = known.rows.where(event.isin(*MESSAGES, "produced") if known.produced else event.isin(*MESSAGES))
    processes = known.segments.select(*SEGMENT, "process")
    named = used.join(F.broadcast(processes), list(SEGMENT)).select(
        F.xxhash64("history", "partition", "key", F.when(F.col("key").isNull(), F.col("position"))).alias("lane"),
        partition_number().alias("partition_number"),
        *("position", "process", "assignment", "n", "mono"),
        kind.alias("kind"),
        F.col("key").isNotNull().alias("keyed"),
        F.coalesce(ended | (event == "dlq_confirmed"), F.lit(False)).alias("ends"),
        F.coalesce(settled, F.lit(False)).alias("settles"),
        event.isin("ended", "zombie").alias("stops"),
    )
    kind = F.col("kind")
    acts, lasts = ~kind.isin(_DELIVERED, _ACK, _PRODUCED), ~kind.isin(_ACK, _PRODUCED)
    return named.groupBy("lane", *MESSAGE, "process", "assignment").agg(
        F.bit_or("kind").alias("kinds"),
        F.count("*").alias("rows"),
        F.count_if(kind == _STARTED).alias("starts"),
        F.max("keyed").alias("keyed"),
        F.max(F.when(kind == _DELIVERED, n)).alias("delivered_n"),
        F.max(F.when(F.col("ends"), n)).alias("final_n"),
        F.max(F.when(F.col("settles"), n)).alias("settled_n"),
        F.max(F.when(kind == _STARTED, n)).alias("started_n"),
        F.max(F.when(F.col("stops"), n)).alias("stopped_n"),
        F.max(F.when(kind == _CONFIRMED, n)).alias("confirmed_n"),
        F.min(F.when(acts, n)).alias("begun_n"),
        F.min(F.when(acts, mono)).alias("begun_mono"),
        F.max(F.when(lasts, n)).alias("last_n"),
        F.max(F.when(lasts, mono)).alias("last_mono"),
    )


def _passed(known: Known, messages: DataFrame) -> DataFrame:
    """Find assignments with a commit before the end of a message below the commit's floor."""
    numbers = known.assignments.where(F.col("committing")).select(*ASSIGNMENT, "number")
    commits = known.owned.where(F.col("event") == "commit_sent").join(F.broadcast(numbers), list(ASSIGNMENT))
    both = (
        messages.where(F.col("delivered_n").isNotNull())
        .join(F.broadcast(numbers.select("number").distinct()), "number", "left_semi")
        .select("number", "position", "closed_n")
        .unionByName(
            commits.select("number", F.col("floor").alias("position"), F.col("n").alias("commit_n")),
            allowMissingColumns=True,
        )
    )
    # Spark would recompute a window frame that extends to the end of the partition for each row.
    above = Window.partitionBy("number").orderBy(F.desc("position")).rangeBetween(Window.unboundedPreceding, -1)
    by = both.withColumn("by", F.min("commit_n").over(above)).where(F.col("commit_n").isNull())
    early = by.where(F.col("by").isNotNull() & F.coalesce(F.col("closed_n") >= F.col("by"), F.lit(True)))
    return numbers.join(F.broadcast(early.select("number").distinct()), "number", "left_semi").select(*ASSIGNMENT)


def suspects(known: Known, screened: Screened) -> DataFrame:
    """Return the rows of suspect messages, with facts about their processes and assignments. Blocks.

    ``ts`` orders the rows of a key, and ``gone`` is the ``ts`` of the end of the process. The function replaces the
    event ``ended`` or ``dlq_confirmed`` after a fence by ``zombie``.
    """
    wanted = screened.messages.where(F.col("suspect")).select(*MESSAGE).distinct()
    rows = known.rows.where(F.col("event").isin(*MESSAGES, "produced")).withColumn(
        "partition_number", partition_number()
    )
    lane = Window.partitionBy(*SEGMENT, "partition", "key", F.when(F.col("key").isNull(), F.col("position")))
    # The clock reading of a row may be slightly earlier than the reading of the previous row.
    latest = F.max("mono").over(lane.orderBy("n").rowsBetween(Window.unboundedPreceding, Window.currentRow))
    return computed(_known_of(known, rows.join(wanted, list(MESSAGE), "left_semi").withColumn("time", latest)))


def committed(known: Known, assignments: DataFrame) -> DataFrame:
    """Return the rows about commits of these assignments, with the added columns of ``suspects``. Blocks."""
    used = ("delivered", "redelivered", "ended", "dlq_sent", "dlq_confirmed", "archived", "commit_sent")
    rows = known.rows.where(F.col("event").isin(*used)).join(assignments, list(ASSIGNMENT), "left_semi")
    return computed(_known_of(known, rows.withColumn("time", F.lit(0.0))))


def _known_of(known: Known, rows: DataFrame) -> DataFrame:
    processes = known.segments.select(
        *SEGMENT, *("shift", "process", "ordered", "gappy", "whole", "last", F.col("last_n").alias("process_last_n"))
    )
    owned = known.assignments.select(
        *ASSIGNMENT, "fence_n", "lost_n", "committing", "leased", F.col("deadline").alias("expiry")
    )
    apart = known.partitions.select("history", "partition", F.lit(True).alias("apart"))
    joined = (
        rows.join(F.broadcast(processes), list(SEGMENT))
        .join(F.broadcast(owned), list(ASSIGNMENT), "left")
        .join(F.broadcast(apart), ["history", "partition"], "left")
    )
    fenced = F.col("event").isin("ended", "dlq_confirmed") & (F.col("n") > F.col("fence_n"))
    named = joined.withColumn("event", F.when(fenced, "zombie").otherwise(F.col("event")))
    ended_well = (F.col("event") == "ended") & (F.col("result") == "ok")
    return named.select(
        *("history", "run", "member", "n", "event", "partition", "assignment", "position", "key"),
        *("cause", "floor", "mono"),
        *("gappy", "lost_n", "ordered", "shift", F.col("expiry").alias("deadline")),
        F.coalesce("committing", F.lit(False)).alias("committing"),
        F.coalesce("leased", F.lit(False)).alias("leased"),
        (F.col("whole") & F.col("apart").isNull()).alias("comparable"),
        F.coalesce(ended_well | (F.col("event") == "dlq_confirmed"), F.lit(False)).alias("final"),
        _ts(F.col("time") + F.col("shift"), F.col("n")).alias("ts"),
        _ts(F.col("last") + F.col("shift"), F.col("process_last_n") + 1).alias("gone"),
    )


def _ts(time: Column, n: Column) -> Column:
    return F.struct(time.alias("time"), F.col("process"), n.alias("n"))
