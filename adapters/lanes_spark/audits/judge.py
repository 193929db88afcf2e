"""Makes verdicts from findings and counts.

The driver receives a number of rows that depends on the findings and doubts. The number of messages does not matter.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812

from lanes_spark.audits.order import behind_leases, finding, no_overlap, per_key_order
from lanes_spark.audits.owners import exclusive_owner
from lanes_spark.audits.rows import computed, know, partition_number
from lanes_spark.audits.screen import MESSAGE, Screened, committed, screen, suspects
from lanes_spark.audits.settling import (
    LEFT,
    at_least_once,
    dead_letter_before_settle,
    duplicates,
    no_commit_past_unfinished,
    passed,
)
from lanes_spark.audits.verdicts import AUDITED, WITNESSES, AuditStatus, AuditVerdict
from lanes_spark.tables.journal import TYPES

_ACROSS: Final = ("PerKeyOrder", "NoOverlap", "ExclusiveOwner")
_NOTHING_DUE: Final = "messages are in the source, so no message had to be handled"
_UNSEEN: Final = "messages of the source have no row of a finished handler, and other rows are missing"
_RECREATED: Final = "partitions were recreated, so positions do not tell messages apart"

_POSITION: Final = ("history", "partition", "position")

_SHOWN: Final = 200


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Findings and counts of several histories.

    Attributes:
        findings: One row for each violation.
        tallies: Counts of checks and doubts, and the figures of each history.
        sourced: Whether a source lists the messages that handlers had to handle.
    """

    findings: DataFrame
    tallies: DataFrame
    sourced: bool

    def told(self) -> dict[str, tuple[tuple[AuditVerdict, ...], Counter[str]]]:
        """Return verdicts and figures of each history. The call blocks while Spark works."""
        counts: dict[tuple[str, str], int] = {
            (row["history"], row["checker"]): row["count"]
            for row in self.findings.groupBy("history", "checker").count().collect()
        }
        witnesses = defaultdict(list)
        if counts:
            first = Window.partitionBy("history", "checker").orderBy("partition", "position", "run", "n")
            named = self.findings.withColumn("rank", F.row_number().over(first)).where(F.col("rank") <= WITNESSES)
            for row in named.orderBy("rank").collect():
                place = f"{_shown(row['partition'])} position {row['position']} key {_shown(row['key'] or 'none')}"
                at = "no row" if row["member"] is None else f"{_shown(row['member'])} row {row['n']}"
                witnesses[row["history"], row["checker"]].append(f"{place}, {at}: {row['what']}")
        figures: dict[str, Counter[str]] = defaultdict(Counter)
        checked: Counter[tuple[str, str]] = Counter()
        doubts = defaultdict(list)
        for row in self.tallies.collect():
            history, checker, what, count = row["history"], row["checker"], row["what"], row["count"]
            if row["kind"] == "figure":
                figures[history][what] += count
            elif row["kind"] == "checked":
                checked[history, checker] += count
            else:
                doubts[history].append((row["kind"], checker, what, count))
        told = {}
        for history, figure in figures.items():
            verdicts = []
            if self.sourced and not checked[history, "AtLeastOnce"]:
                doubts[history].append(("doubt", "AtLeastOnce", _NOTHING_DUE, 0))
            for name in AUDITED:
                reasons = _reasons(name, sorted(doubts[history]))
                violations = counts.get((history, name), 0)
                status: AuditStatus = "violated" if violations else "unproven" if reasons else "held"
                verdicts.append(
                    AuditVerdict(
                        name=name,
                        status=status,
                        checked=checked[history, name],
                        violations=violations,
                        witnesses=tuple(witnesses[history, name]),
                        reasons=reasons,
                    )
                )
            told[history] = tuple(verdicts), figure
        return told


def judge(raw: DataFrame, due: DataFrame | None = None) -> Judged:
    """Judge rows that have ``COLUMNS`` and the column ``history``. Blocks.

    Args:
        raw: The rows.
        due: Columns ``history``, ``partition`` and ``position`` of each message that handlers had to handle, without
            repeats; None = unknown.

    Returns:
        Findings and counts.
    """
    known = know(raw)
    screened = screen(known)
    rows = None if screened.messages.where("suspect").isEmpty() else suspects(known, screened)
    passes = None
    if screened.assignments is not None and not screened.assignments.isEmpty():
        passes = computed(passed(committed(known, screened.assignments)))
    findings = [exclusive_owner(known)]
    per_history = screened.messages.groupBy("history")
    ordered = per_history.agg(F.sum("in_order").alias("PerKeyOrder"), F.sum("starts").alias("NoOverlap"))
    gaps = known.segments.where("gap IS NOT NULL")
    tallies = [
        _counts(ordered.unpivot("history", ["PerKeyOrder", "NoOverlap"], "checker", "count"), "checked"),
        _tally(known.owned.where(F.col("event") == "assigned"), "checked", "ExclusiveOwner"),
        _tally(known.owned.where(F.col("event") == "commit_sent"), "checked", "NoCommitPastUnfinished"),
        _tally(known.partitions.where("recreated"), "doubt", "AtLeastOnce", F.lit(_RECREATED)),
        _tally(gaps, "gap", what=F.concat("member", F.lit(": "), "gap")),
        _tally(known.partitions, "apart", what=F.concat("partition", F.lit(" across processes: "), "why")),
        _tally(known.segments, "figure", what=F.lit("processes")),
        _counts(known.segments.groupBy("history").agg(F.sum("rows").alias("count")), "figure", what="rows"),
    ]
    if known.leased:
        findings.append(behind_leases(known))
    if rows is not None:
        lost, left = at_least_once(known, rows, passes)
        findings += [per_key_order(rows), no_overlap(rows), dead_letter_before_settle(rows, passes)]
        stored = rows.where(F.col("event").isin("dlq_confirmed", "archived"))
        tallies += [
            _counts(duplicates(rows), "figure"),
            _tally(stored, "checked", "DeadLetterBeforeSettle"),
        ]
        if due is not None:
            left = left.join(due, list(_POSITION), "left_anti")
        findings.append(lost)
        tallies.append(_tally(left, "doubt", "AtLeastOnce", F.lit(LEFT)))
    if passes is not None:
        findings.append(no_commit_past_unfinished(passes))
    found = _all(findings)
    if due is not None:
        found = computed(found)
        whole = known.segments.select("history", "whole").distinct()
        missing = _missing(due, screened, rows, found).join(F.broadcast(whole), "history")
        tallies += [
            _tally(due, "checked", "AtLeastOnce"),
            _tally(missing.where(~F.col("whole")), "doubt", "AtLeastOnce", F.lit(_UNSEEN)),
        ]
        found = found.unionByName(finding(missing.where("whole"), "AtLeastOnce", "in the source, and never handled"))
    else:
        tallies.append(_tally(screened.messages.where("first"), "checked", "AtLeastOnce"))
    return Judged(findings=computed(found), tallies=_all(tallies), sourced=due is not None)


def _missing(due: DataFrame, screened: Screened, rows: DataFrame | None, found: DataFrame) -> DataFrame:
    """Find messages of the source that no handler has finished and no finding names."""
    numbered = due.withColumn("partition_number", partition_number())
    handled = screened.messages.where("plain").select(*MESSAGE)
    if rows is not None:
        closely = rows.where("final").select(partition_number().alias("partition_number"), "position")
        handled = handled.unionByName(closely)
    lost = found.where(F.col("checker") == "AtLeastOnce").select(*_POSITION)
    missing = numbered.join(handled, list(MESSAGE), "left_anti").join(lost, list(_POSITION), "left_anti")
    return missing.select(
        *_POSITION,
        *(F.lit(None).cast(TYPES[name]).alias(name) for name in ("member", "run", "key", "n", "assignment")),
    )


def _tally(rows: DataFrame, kind: str, checker: str = "", what: Column | None = None) -> DataFrame:
    """Count rows by history and by ``what``."""
    return _counts(rows.groupBy("history", (F.lit("") if what is None else what).alias("what")).count(), kind, checker)


def _counts(counted: DataFrame, kind: str, checker: str = "", what: str = "") -> DataFrame:
    """Return counts by history as tallies. Missing columns of ``counted`` get default values."""
    given = {"kind": kind, "checker": checker, "what": what}
    columns = [name if name in counted.columns else F.lit(text).alias(name) for name, text in given.items()]
    return counted.select("history", *columns, "count")


def _all(frames: list[DataFrame]) -> DataFrame:
    return functools.reduce(DataFrame.unionByName, frames)


def _reasons(name: str, doubts: list[tuple[str, str, str, int]]) -> tuple[str, ...]:
    reasons = [f"{count} {what}" for kind, checker, what, count in doubts if kind == "doubt" and checker == name]
    for kind, wanted in (("gap", True), ("apart", name in _ACROSS)):
        said = [_shown(what) for found, _, what, _ in doubts if found == kind and wanted]
        reasons += said[:WITNESSES]
        if len(said) > WITNESSES:
            reasons.append(f"and {len(said) - WITNESSES} more of these")
    return tuple(reasons)


def _shown(text: str) -> str:
    """Return the text as one short line without control characters of a terminal."""
    shown = text if text.isprintable() else text.encode("unicode_escape").decode()
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
