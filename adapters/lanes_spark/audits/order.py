"""Checks the order and the exclusion within a key, by windows over rows of a journal. Uses only DataFrames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.rows import ASSIGNMENT, SEGMENT, Known, computed, never

_KEY: Final = ("history", "partition", "key")
_LANE: Final = (*ASSIGNMENT, "key")
_PLACE: Final = ("history", "member", "run", "n", "partition", "assignment", "position", "key")


def finding(rows: DataFrame, checker: str, what: str | Column) -> DataFrame:
    """Return a finding for each row: one violation of ``checker``, described by ``what``."""
    return rows.select(*_PLACE, F.lit(checker).alias("checker"), F.lit(what).alias("what"))


def intervals(rows: DataFrame, within: Sequence[str], opens: Column, mark: Column) -> DataFrame:
    """Return the intervals in which each position was unfinished, from ``open`` to ``close``.

    An unknown position is unfinished from the first row that opens the position.

    Args:
        rows: Rows of a journal.
        within: Columns that identify a position.
        opens: Whether a row opens an unknown position.
        mark: Column with ``F`` in the row that finishes a position, and ``N`` in a row that starts its handling again.
            The column has ``R`` in a row after which the position is unknown, and null in other rows.

    Returns:
        The intervals.
    """
    return _unfinished(_turns(rows, within, opens, mark), within)


def _turns(rows: DataFrame, within: Sequence[str], opens: Column, mark: Column) -> DataFrame:
    """Split the rows of each position at its marks, and return ``begin``, ``close`` and ``opened`` of each part."""
    in_time = Window.partitionBy(*within).orderBy("ts")
    so_far = in_time.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    turned = rows.withColumns({"mark": mark, "opens": opens})
    turned = turned.withColumn("turn", F.count("mark").over(so_far))
    turns = turned.groupBy(*within, "turn").agg(
        F.min_by("mark", "ts").alias("mark"),
        F.min("ts").alias("begin"),
        F.min(F.when(F.col("opens"), F.col("ts"))).alias("opened"),
    )
    close = F.coalesce(F.lead("begin").over(Window.partitionBy(*within).orderBy("turn")), never())
    return turns.withColumn("close", close)


def _unfinished(turns: DataFrame, within: Sequence[str]) -> DataFrame:
    open_ = F.when(F.col("mark") == "N", F.col("begin")).when(F.col("mark") == "F", None).otherwise(F.col("opened"))
    return turns.select(*within, open_.alias("open"), "close").where(F.col("open").isNotNull())


def passing(points: DataFrame, unfinished: DataFrame, within: Sequence[str]) -> DataFrame:
    """Pair each point with the intervals at lower positions that contain the point's time.

    Two windows drop rows without a pair, so that the join receives only violations and a few other rows.

    Args:
        points: Rows with ``position``, ``ts`` and ``name``.
        unfinished: Intervals with ``position``, ``open`` and ``close``.
        within: Columns whose values a point and its interval must share.

    Returns:
        The pairs: ``history``, ``name`` of the point and ``unfinished``, the lower position.
    """
    both = points.select(*within, "position", "ts", "name").unionByName(
        unfinished.select(*within, "position", "open", "close"), allowMissingColumns=True
    )
    # Spark would recompute a window frame that extends to the end of the partition for each row.
    below = Window.partitionBy(*within).orderBy("position").rangeBetween(Window.unboundedPreceding, -1)
    above = Window.partitionBy(*within).orderBy(F.desc("position")).rangeBetween(Window.unboundedPreceding, -1)
    marked = both.withColumns(
        {
            "latest_close": F.max("close").over(below),
            "first_point": F.min("ts").over(above),
            "last_point": F.max("ts").over(above),
        }
    )
    suspects = marked.where(F.col("ts") < F.col("latest_close")).select(*within, "position", "ts", "name")
    causes = marked.where((F.col("first_point") < F.col("close")) & (F.col("last_point") > F.col("open"))).select(
        *within, F.col("position").alias("unfinished"), "open", "close"
    )
    meets = (F.col("unfinished") < F.col("position")) & (F.col("open") < F.col("ts")) & (F.col("ts") < F.col("close"))
    return suspects.join(causes, list(within)).where(meets).select("history", "name", "unfinished")


def _keyed(rows: DataFrame) -> DataFrame:
    """Return the rows that the check of a key's order needs.

    The column ``finished_at`` contains the time of the message's first finish in any assignment. ``repeats`` is true if
    ``finished_at`` is before the row. ``mark`` contains the effect of the row in its assignment, see ``intervals``.
    """
    event, ts = F.col("event"), F.col("ts")
    begins = (event == "started") & F.col("ordered")
    late = (event == "redelivered") & (F.col("cause") == "late")
    known = event.isin("produced", "delivered") | begins | late | F.col("final")
    used = known | (event == "redelivered") & (F.col("cause") == "settled")
    everywhere = Window.partitionBy(*_KEY, "position")
    keyed = rows.where(F.col("key").isNotNull() & used).withColumns(
        {
            "begins": begins,
            "known": known,
            "late": late,
            "finished_at": F.min(F.when(F.col("final"), ts)).over(everywhere),
        }
    )
    repeats = F.coalesce(F.col("finished_at") < ts, F.lit(False))
    mark = F.when(F.col("late"), F.when(repeats, "R").otherwise("N")).when(
        ~F.col("begins") & ~event.isin("produced", "delivered"), "F"
    )
    return keyed.withColumns({"repeats": repeats, "mark": mark})


def _turns_of_lanes(keyed: DataFrame) -> DataFrame:
    here = keyed.where((F.col("event") != "produced") & ~F.col("gappy"))
    of_position = Window.partitionBy(*_LANE, "position").orderBy("ts")
    so_far = of_position.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    # A finished message that arrived late waits after queued messages, even if the broker redelivers it.
    waits = F.coalesce(F.last("mark", ignorenulls=True).over(so_far) == "R", F.lit(False))
    opens = (F.col("event") == "delivered") & ~waits | F.col("begins")
    return _turns(here, (*_LANE, "position"), opens, F.col("mark"))


def _queued_again(turns: DataFrame) -> DataFrame:
    """Return the intervals in which a finished message is unfinished again after a redelivery by the broker.

    In an idle lane, the interval begins with the delivery. In a busy lane, earlier deliveries start first, so
    ``_unfinished`` returns the interval from the start of the message.
    """
    repeats = turns.where(F.col("mark") == "R").withColumn("open", F.col("begin"))
    known = _unfinished(turns, (*_LANE, "position"))
    both = repeats.select(*_LANE, "position", "open", F.col("close").alias("until")).unionByName(
        known.select(*_LANE, "open", "close"), allowMissingColumns=True
    )
    before = Window.partitionBy(*_LANE).orderBy("open").rowsBetween(Window.unboundedPreceding, -1)
    busy = F.coalesce(F.max("close").over(before) > F.col("open"), F.lit(False))
    alone = both.withColumn("busy", busy).where(F.col("until").isNotNull() & ~F.col("busy"))
    in_turn = alone.groupBy(*_LANE).agg(
        F.array_sort(F.collect_list(F.struct("open", F.col("until").alias("close"), "position"))).alias("repeats")
    )

    def add(taken: Column, one: Column) -> Column:
        # Redelivered messages also wait for each other.
        after = F.coalesce(F.try_element_at(taken, F.lit(-1))["close"] <= one["open"], F.lit(True))
        return F.when(after, F.concat(taken, F.array(one))).otherwise(taken)

    taken = F.aggregate("repeats", F.slice("repeats", 1, 0), add)
    return in_turn.select(*_LANE, F.explode(taken).alias("one")).select(*_LANE, "one.position", "one.open", "one.close")


def per_key_order(rows: DataFrame) -> DataFrame:
    """Return the violations of PerKeyOrder among these rows."""
    ts, position = F.col("ts"), F.col("position")
    keyed = computed(_keyed(rows))
    turns = computed(_turns_of_lanes(keyed))
    of_position = Window.partitionBy(*_LANE, "position").orderBy("ts")
    so_far = of_position.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    by_time = Window.partitionBy(*_LANE).orderBy("ts").rowsBetween(Window.unboundedPreceding, -1)
    judged = keyed.where((F.col("event") != "produced") & ~F.col("gappy")).withColumns(
        {
            "state": F.last("mark", ignorenulls=True).over(so_far),
            "was_late": F.max("late").over(so_far),
            "highest": F.max(F.when(F.col("begins"), position)).over(by_time),
        }
    )
    excused = F.col("was_late") & (F.col("repeats") | ~F.col("comparable"))
    starts = computed(judged.where(F.col("begins") & ~excused))
    after = starts.where(position < F.col("highest"))
    again = starts.where((position == F.col("highest")) & (F.col("state") == "F"))
    name = F.struct(*_PLACE[1:])
    points = starts.where(F.col("highest").isNull() | (position > F.col("highest"))).withColumn("name", name)
    within = _unfinished(turns, (*_LANE, "position")).unionByName(_queued_again(turns))
    in_lane = passing(points, within, _LANE).select("history", "name")
    # Across assignments and processes, a message is unfinished from its first row to its first finish.
    first = F.struct("ts", F.struct(*_PLACE[1:]).alias("name"))
    across = (
        keyed.where(F.col("known") & F.col("comparable"))
        .groupBy(*_KEY, "position")
        .agg(
            F.min(first).alias("first"),
            F.min("finished_at").alias("finished_at"),
            F.min(F.when(F.col("begins"), ts)).alias("started_at"),
        )
        .select(*_KEY, "position", "first", "started_at", F.coalesce("finished_at", never()).alias("close"))
    )
    unfinished = across.where(F.col("first.ts") < F.col("close")).withColumn("open", F.col("first.ts"))
    anywhere = passing(points.where(F.col("comparable")), unfinished, _KEY).select("history", "name")
    early = in_lane.unionByName(anywhere).distinct().select("history", "name.*")
    above = Window.partitionBy(*_KEY).orderBy(F.desc("position")).rangeBetween(Window.unboundedPreceding, -1)
    overtaken = across.withColumn("higher_start", F.min("started_at").over(above))
    unseen = overtaken.where(F.col("higher_start") < F.col("first.ts")).select("history", "first.name.*")
    found = finding(after, "PerKeyOrder", "started after a later message of its key")
    for wrong, what in (
        (again, "started again after it had ended for good in the same assignment"),
        (early, "started before an earlier message of its key had ended for good"),
        (unseen, "first seen after the start of a later message of its key"),
    ):
        found = found.unionByName(finding(wrong, "PerKeyOrder", what))
    return found


def no_overlap(rows: DataFrame) -> DataFrame:
    """Return the violations of NoOverlap among these rows."""
    event, ts = F.col("event"), F.col("ts")
    used = rows.where(event.isin("started", "ended", "zombie"))
    following = (
        Window.partitionBy(*ASSIGNMENT, "position").orderBy(F.desc("ts")).rowsBetween(Window.unboundedPreceding, -1)
    )
    end = F.min(F.when(event != "started", ts)).over(following)
    keyed = F.col("key").isNotNull() & F.col("ordered")
    known = F.col("lost_n").isNull() | (F.col("lost_n") < F.col("n"))
    # A lease excludes other processes only until the lease expires.
    expires = F.struct(
        (F.col("deadline") + F.col("shift")).alias("time"),
        F.lit(0).alias("process"),
        F.lit(0).cast("bigint").alias("n"),
    )
    starts = (
        used.withColumn("until", F.coalesce(end, F.col("gone")))
        .where(event == "started")
        .withColumns(
            {
                # Without an order, only two handlers of the same message must not overlap.
                "name": F.when(keyed, F.col("key")).otherwise(F.concat(F.lit("position "), F.col("position"))),
                "beside": F.when(~keyed, F.col("assignment")),
                "barred": F.when(F.col("comparable") & ~F.col("leased") & known, F.col("until")),
                "leased_until": F.when(F.col("comparable") & F.col("leased"), F.least("until", expires)),
            }
        )
    )
    lane = (*SEGMENT, "partition", "name", "beside")
    same = Window.partitionBy(*lane).orderBy("ts").rowsBetween(Window.unboundedPreceding, -1)
    all_of = Window.partitionBy("history", "partition", "name").orderBy("ts").rowsBetween(Window.unboundedPreceding, -1)
    leases = F.collect_list(F.when(F.col("leased_until").isNotNull(), F.struct("run", "leased_until"))).over(all_of)
    judged = computed(starts).withColumns(
        {
            "here": F.max("until").over(same),
            "elsewhere": F.max("barred").over(all_of),
            # The column ``here`` shows overlaps within a process. A key nearly always has one process.
            "lease": F.max(F.when(keyed, F.col("leased_until"))).over(all_of),
            "leases": F.when(~keyed, leases),
        }
    )
    others = F.exists("leases", lambda one: (one["run"] != F.col("run")) & (one["leased_until"] > ts))
    beside = F.coalesce(F.col("elsewhere") > ts, F.lit(False)) | F.coalesce(F.col("lease") > ts, F.lit(False))
    where = F.when(~F.col("gappy") & (F.col("here") > ts), "in its process").when(
        beside | F.coalesce(others, F.lit(False)), "elsewhere"
    )
    what = F.concat(F.lit("started while another message of its key was running "), where)
    return finding(judged.where(where.isNotNull()), "NoOverlap", what)


def behind_leases(known: Known) -> DataFrame:
    """Return the findings about starts and acknowledgements of messages after the end of their lease."""
    event = F.col("event")
    whole = known.segments.where(F.col("gap").isNull()).select(*SEGMENT)
    leased = known.assignments.where(F.col("leased")).select(
        *ASSIGNMENT, "lost_n", F.col("deadline").alias("last_deadline")
    )
    rows = known.rows.where(event.isin("leased", "started", "ack")).join(F.broadcast(whole), list(SEGMENT), "left_semi")
    held = rows.join(F.broadcast(leased), list(ASSIGNMENT))
    so_far = Window.partitionBy(*ASSIGNMENT).orderBy("n").rowsBetween(Window.unboundedPreceding, -1)
    told = F.last(F.when(event == "leased", F.col("deadline")), ignorenulls=True).over(so_far)
    over = (F.col("mono") >= F.col("last_deadline")) | F.coalesce(F.col("n") > F.col("lost_n"), F.lit(False))
    what = F.when(
        (event == "started") & (F.col("mono") >= F.col("told")), "started when its own lease had run out"
    ).when((event == "ack") & over, "acknowledged when its lease had run out or was lost")
    return finding(held.withColumn("told", told).where(what.isNotNull()), "NoOverlap", what)
