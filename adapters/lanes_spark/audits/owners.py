"""Checks the ownership of partitions, over rows of a journal. Uses only DataFrames."""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.order import finding
from lanes_spark.audits.rows import ASSIGNMENT, SEGMENT, Known

_PARTITION: Final = ("history", "partition")
_OWNERSHIP: Final = (*ASSIGNMENT, "since")


def exclusive_owner(known: Known) -> DataFrame:
    """Return the violations of ExclusiveOwner. Reads few rows if no owners overlap."""
    events = _events(known)
    ownerships = _ownerships(events)
    same = Window.partitionBy(*SEGMENT, "partition").orderBy("since").rowsBetween(Window.unboundedPreceding, -1)
    twice = ownerships.withColumn("held", F.max("until").over(same)).where(F.col("held") > F.col("since"))
    return finding(twice, "ExclusiveOwner", "assigned while the process already owned the partition").unionByName(
        _rivals(known, events, ownerships)
    )


def _events(known: Known) -> DataFrame:
    """Return the ownership rows of processes with a complete journal. The column ``ts`` orders all rows."""
    processes = known.segments.where(~F.col("gappy")).select(
        *SEGMENT, "member", "process", "shift", "whole", "shares", (F.col("last") + F.col("shift")).alias("gone_at")
    )
    apart = known.partitions.select(*_PARTITION, F.lit(True).alias("apart"))
    used = known.owned.where(F.col("event").isin("assigned", "drained", "revoked", "lost"))
    time = F.col("mono") + F.col("shift")
    return (
        used.join(F.broadcast(processes), list(SEGMENT))
        .join(F.broadcast(apart), list(_PARTITION), "left")
        .withColumns(
            {
                "ts": F.struct(time.alias("time"), "process", "n"),
                "rival": F.col("whole") & F.col("apart").isNull() & ~F.col("shares"),
                "position": F.lit(-1).cast("bigint"),
                "key": F.lit(None).cast("string"),
            }
        )
    )


def _ownerships(events: DataFrame) -> DataFrame:
    """Return each ownership with its begin ``since``, its end ``until``, and the time ``revoked`` of its hand-over.

    An ownership without a final row ends with its process.
    """
    event, ts = F.col("event"), F.col("ts")
    backwards = Window.partitionBy(*ASSIGNMENT).orderBy(F.desc("ts")).rowsBetween(Window.unboundedPreceding, -1)
    gone = F.struct(F.col("gone_at").alias("time"), "process", F.lit(2**62).alias("n"))

    def following(*names: str) -> Column:
        return F.min(F.when(event.isin(*names), ts)).over(backwards)

    ends = events.withColumns(
        {
            "until": F.coalesce(following("drained", "revoked", "lost"), gone),
            "revoked": following("revoked"),
            "lost": following("lost"),
            "again": following("assigned"),
        }
    )
    return ends.where(event == "assigned").withColumn("since", ts)


def _rivals(known: Known, events: DataFrame, ownerships: DataFrame) -> DataFrame:
    """Find owners that worked while another process owned the partition, and that later handed the partition over."""
    # If the assignment begins again before its hand-over, only the later ownership matters.
    revoked = F.col("revoked")
    own = ownerships.where(
        F.col("rival")
        & revoked.isNotNull()
        & (F.col("again").isNull() | (F.col("again") > revoked))
        & (F.col("lost").isNull() | (F.col("lost") > revoked))
    )
    behind = Window.partitionBy(*_PARTITION).orderBy(F.desc("since")).rowsBetween(Window.unboundedPreceding, -1)
    # The next ownership of a partition nearly always begins after the end of the previous ownership.
    crowded = (
        ownerships.where("rival")
        .withColumn("nearest", F.min("since").over(behind))
        .where(F.col("nearest") < F.col("until"))
        .select(*_OWNERSHIP)
    )
    contested = own.join(crowded, list(_OWNERSHIP), "left_semi").select(
        *_OWNERSHIP, "until", "revoked", "process", "member"
    )
    others = events.where(F.col("rival") & F.col("event").isin("assigned", "lost")).select(
        *_PARTITION, F.col("process").alias("other"), F.col("assignment").alias("its"), F.col("ts").alias("at"), "event"
    )
    near = contested.join(others, list(_PARTITION)).where(
        (F.col("other") != F.col("process"))
        & (F.col("since") < F.col("at"))
        & (F.col("at") < F.col("revoked"))
        & ((F.col("event") == "lost") | (F.col("at") < F.col("until")))
    )
    told = near.groupBy(*_OWNERSHIP, "revoked").agg(
        F.array_sort(F.collect_list(F.struct("at", "event", "other", "its"))).alias("told")
    )

    nobody = F.lit(None).cast("struct<at:struct<time:double,process:int,n:bigint>,other:int,its:bigint>")

    def turn(state: Column, one: Column) -> Column:
        # The first other owner remains the rival until it loses the partition.
        lost = (one["event"] == "lost") & (state["other"] == one["other"]) & (state["its"] == one["its"])
        taken = (one["event"] == "assigned") & state["at"].isNull()
        return (
            F.when(lost, nobody)
            .when(taken, F.struct(*(one[name].alias(name) for name in ("at", "other", "its"))))
            .otherwise(state)
        )

    rival = told.withColumn("rival", F.aggregate("told", nobody, turn)["at"]).where(F.col("rival").isNotNull())
    acts = known.rows.where(F.col("event").isin("started", "commit_sent")).join(
        F.broadcast(known.segments.select(*SEGMENT, "process", "shift")), list(SEGMENT)
    )
    acting = (
        acts.join(F.broadcast(rival), list(ASSIGNMENT))
        .withColumn("ts", F.struct((F.col("mono") + F.col("shift")).alias("time"), "process", "n"))
        # Rows of two processes with the same time have no order.
        .where((F.col("ts.time") > F.col("rival.time")) & (F.col("n") < F.col("revoked.n")))
    )
    first = acting.groupBy(*_OWNERSHIP).agg(F.min(F.struct("n", "member", "position", "key")).alias("act"))
    return finding(
        first.select(*ASSIGNMENT, "act.*"),
        "ExclusiveOwner",
        "acted while another process owned the partition, and then handed the partition over",
    )
