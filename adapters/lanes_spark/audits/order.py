"""Order and exclusion within a key, judged by windows over the rows of a journal. DataFrames only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.rows import ASSIGNMENT, SEGMENT, Known, computed, never

_KEY: Final = ("history", "partition", "key")
_LANE: Final = (*ASSIGNMENT, "key")
_PLACE: Final = ("history", "member", "run", "n", "partition", "assignment", "position", "key")


def finding(rows: DataFrame, checker: str, what: str) -> DataFrame:
    """These rows as findings: one violation each."""
    return rows.select(*_PLACE, F.lit(checker).alias("checker"), F.lit(what).alias("what"))


def intervals(rows: DataFrame, within: Sequence[str], opens: Column, mark: Column) -> DataFrame:
    """From when to when each position was unfinished within ``within``, which names positions too: ``open``, ``close``.

    ``mark``: ``F`` where it is finished, ``N`` where it has to be done anew, ``R`` where nothing is known of it any
    more, else null. It is unfinished from the first row on that ``opens`` while nothing is known of it.
    """
    return _unfinished(_turns(rows, within, opens, mark), within)


def _turns(rows: DataFrame, within: Sequence[str], opens: Column, mark: Column) -> DataFrame:
    """Each position from one mark to the next: ``begin``, ``close``, and ``opened``, the first row that ``opens``."""
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
    """The pairs of a point and an interval of the same ``within``, of a lower position, which holds the point's time.

    ``points`` has ``position``, ``ts`` and ``name``; ``unfinished`` has ``position``, ``open`` and ``close``. Two
    windows leave out whatever can be in no pair, so that only what is wrong, or nearly so, is joined.
    """
    both = points.select(*within, "position", "ts", "name").unionByName(
        unfinished.select(*within, "position", "open", "close"), allowMissingColumns=True
    )
    # A frame that ends at the end would be computed anew for each row.
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
    """Those that say something of the order of a key: with ``finished_at``, when their message first was, anywhere;
    ``repeats``, whether that was before; and ``mark``, what they make of it in their assignment."""
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
    return _turns(here, (*_LANE, "position"), (F.col("event") == "delivered") | F.col("begins"), F.col("mark"))


def _queued_again(turns: DataFrame) -> DataFrame:
    """From when to when what the broker forgot, and delivers once more after it had ended, was unfinished again.

    It is from its delivery on where nothing of its lane was unfinished then. Else what was delivered before it starts
    before it, and it is unfinished from its start on.
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
        # They hold up each other, too.
        after = F.coalesce(F.try_element_at(taken, F.lit(-1))["close"] <= one["open"], F.lit(True))
        return F.when(after, F.concat(taken, F.array(one))).otherwise(taken)

    taken = F.aggregate("repeats", F.slice("repeats", 1, 0), add)
    return in_turn.select(*_LANE, F.explode(taken).alias("one")).select(*_LANE, "one.position", "one.open", "one.close")


def per_key_order(rows: DataFrame) -> DataFrame:
    """The findings among these rows."""
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
    # Across assignments and processes: from when it was first seen until it was first finished.
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
    found = finding(after, "PerKeyOrder", "started after a later one of its key")
    for wrong, what in (
        (again, "started again after it had ended for good in the same assignment"),
        (early, "started before an earlier one of its key had ended for good"),
        (unseen, "first seen after the start of a later one of its key"),
    ):
        found = found.unionByName(finding(wrong, "PerKeyOrder", what))
    return found


def no_overlap(rows: DataFrame) -> DataFrame:
    """The findings among these rows."""
    event, ts = F.col("event"), F.col("ts")
    used = rows.where(event.isin("started", "ended", "zombie"))
    following = (
        Window.partitionBy(*ASSIGNMENT, "position").orderBy(F.desc("ts")).rowsBetween(Window.unboundedPreceding, -1)
    )
    end = F.min(F.when(event != "started", ts)).over(following)
    keyed = F.col("key").isNotNull() & F.col("ordered")
    known = F.col("lost_n").isNull() | (F.col("lost_n") < F.col("n"))
    # A lease keeps others away until it has run out, and no longer.
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
                # Without an order each message is kept from running beside itself alone.
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
            # One process beside itself is judged above; of a key it is nearly always one process.
            "lease": F.max(F.when(keyed, F.col("leased_until"))).over(all_of),
            "leases": F.when(~keyed, leases),
        }
    )
    in_process = judged.where(~F.col("gappy") & (F.col("here") > ts))
    others = F.exists("leases", lambda one: (one["run"] != F.col("run")) & (one["leased_until"] > ts))
    beside = F.coalesce(F.col("elsewhere") > ts, F.lit(False)) | F.coalesce(F.col("lease") > ts, F.lit(False))
    other = judged.where(
        (F.col("gappy") | F.col("here").isNull() | (F.col("here") <= ts)) & (beside | F.coalesce(others, F.lit(False)))
    )
    return finding(
        in_process, "NoOverlap", "started while another one of its key was running in its process"
    ).unionByName(finding(other, "NoOverlap", "started while another one of its key was running elsewhere"))


def behind_leases(known: Known) -> DataFrame:
    """The findings about assignments under leases: what started, or was acknowledged, when its own was over."""
    event = F.col("event")
    whole = known.segments.where(F.col("gap").isNull()).select(*SEGMENT)
    leased = known.assignments.where(F.col("leased")).select(
        *ASSIGNMENT, "lost_n", F.col("deadline").alias("last_deadline")
    )
    rows = known.rows.where(event.isin("leased", "started", "ack")).join(F.broadcast(whole), list(SEGMENT), "left_semi")
    held = rows.join(F.broadcast(leased), list(ASSIGNMENT))
    so_far = Window.partitionBy(*ASSIGNMENT).orderBy("n").rowsBetween(Window.unboundedPreceding, -1)
    told = F.last(F.when(event == "leased", F.col("deadline")), ignorenulls=True).over(so_far)
    starts = held.where(event != "ack").withColumn("told", told)
    over = (F.col("mono") >= F.col("last_deadline")) | F.coalesce(F.col("n") > F.col("lost_n"), F.lit(False))
    return finding(
        starts.where((event == "started") & (F.col("mono") >= F.col("told"))),
        "NoOverlap",
        "started when its own lease had run out",
    ).unionByName(
        finding(held.where((event == "ack") & over), "NoOverlap", "acknowledged when its lease had run out or was lost")
    )
