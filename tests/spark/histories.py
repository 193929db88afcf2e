"""Histories of all kinds in one table, so that one job audits all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from lanes.history.columns import row_tables
from lanes_spark.audits.judge import judge
from lanes_spark.audits.verdicts import AuditVerdict
from memsource import check
from memsource.checkers import (
    AtLeastOnce,
    DeadLetterBeforeSettle,
    ExclusiveOwner,
    NoCommitPastUnfinished,
    NoOverlap,
    PerKeyOrder,
)
from tests.memsource.checkers.commit_world import segments_of as commit_segments_of
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    ack,
    assigned,
    delivered,
    ended,
    handled,
    message,
    owned,
    parsed,
    produced,
    redelivered,
    renumbered,
    segment,
    sent,
    started,
)
from tests.memsource.checkers.worlds import segments_of

Histories = Mapping[str, list[Rows]]

MAKERS: tuple[Callable[[int], list[Rows]], ...] = (segments_of, commit_segments_of)
"""Functions that make a legal history from a number."""

CHECKERS = (PerKeyOrder, NoOverlap, ExclusiveOwner, AtLeastOnce, NoCommitPastUnfinished, DeadLetterBeforeSettle)

LETTERS = ("dlq_sent", "dlq_sent", "dlq_confirmed", "archived", "archived", "abandoned")
"""Events of a dead letter in random rows, the frequent ones more than once."""


def audited(
    spark: Any, histories: Histories, folder: Path
) -> tuple[dict[str, dict[str, AuditVerdict]], dict[str, Counter[str]]]:
    """Audit all histories in one table; return the verdicts and the figures of each history, by its name."""
    folder.mkdir()
    tables = []
    for name, segments in histories.items():
        for number, rows in enumerate(segments):
            lines = [json.dumps(row, separators=(",", ":")) + "\n" for row in rows]
            table = row_tables().table(lines, f"{number:04}", checked=True).replace_schema_metadata(None)
            tables.append(table.append_column("history", pa.array([name] * len(rows), pa.string())))
    pq.write_table(pa.concat_tables(tables), folder / "all.parquet")
    told = judge(spark.read.parquet(str(folder))).told()
    verdicts = {name: {verdict.name: verdict for verdict in found} for name, (found, _) in told.items()}
    return verdicts, {name: figures for name, (_, figures) in told.items()}


def checked(segments: list[Rows]) -> dict[str, str]:
    """Return the status of each promise by ``lanes check``, in the words of an audit."""
    verdicts = check(parsed(*segments), CHECKERS)
    return {verdict.name: verdict.status.replace("passed", "held") for verdict in verdicts}


def differing(
    histories: Histories, found: Mapping[str, Mapping[str, AuditVerdict]]
) -> tuple[dict[str, dict[str, tuple[str, str]]], Counter[tuple[str, str]]]:
    """Compare the audit's verdicts with the verdicts of ``lanes check``.

    Returns the different pairs by history and promise, and how often each promise had each status.
    """
    statuses: Counter[tuple[str, str]] = Counter()
    differ: dict[str, dict[str, tuple[str, str]]] = {}
    for name, segments in histories.items():
        expected, said = checked(segments), {one.name: str(one.status) for one in found[name].values()}
        statuses.update(expected.items())
        if said != expected:
            differ[name] = {one: (said[one], status) for one, status in expected.items() if said[one] != status}
    return differ, statuses


def disturbed(segments: list[Rows], random: Random) -> str:
    """Change a history in place, in a manner that no broker and no runtime produces; return the name of the change."""
    number = random.randrange(len(segments))
    rows = segments[number]
    events = [at for at, row in enumerate(rows) if "partition" in row]
    if len(events) < 2:
        return "nothing"
    how = random.choice(["swap", "drop", "duplicate", "overlap", "forge", "shift"])
    one, other = sorted(random.sample(events, 2))
    if how == "swap":
        moved = {name: rows[one][name] for name in ("n", "mono", "wall")}
        rows[one], rows[other] = rows[other] | moved, rows[one] | {name: rows[other][name] for name in moved}
    elif how == "drop":
        del rows[one]
    elif how == "duplicate":
        rows.insert(other, dict(rows[one]))
    elif how == "overlap":
        ends = [at for at in events if rows[at]["event"] == "ended"]
        if ends:
            end = random.choice(ends)
            row = rows.pop(end)
            rows.insert(min(len(rows) - 1, end + random.randint(1, 6)), row)
    elif how == "forge":
        named = [at for at in events if "assignment" in rows[at]]
        if named:
            rows[random.choice(named)]["assignment"] += random.choice([1, 2])
    else:
        later = random.choice([-5.0, -0.5, 0.5, 5.0])
        for row in rows:
            row["mono"] = max(0.0, row["mono"] + later)
    segments[number] = renumbered(rows)
    return how


def fresh(seed: int, number: int) -> dict[str, list[Rows]]:
    """Return histories, the same for the same seed: legal histories with up to three disturbances, and random rows."""
    found = {}
    for one in range(number):
        random = Random(f"{seed} {one}")
        if random.random() < 0.6:
            found[f"{one} scattered"] = scattered(random)
            continue
        make, world = random.choice(MAKERS), random.randrange(500)
        segments = make(world)
        done = [disturbed(segments, random) for _ in range(random.randint(0, 3))]
        found[f"{one} {make.__module__} {world} {done}"] = segments
    return found


def without(segments: list[Rows], *events: str, floors: bool = True) -> list[Rows]:
    """Return the history without the rows of these events. With ``floors=False``, the source does not commit either."""
    kept = [[row for row in rows if row["event"] not in events] for rows in segments]
    if not floors:
        kept = [
            [{name: row[name] for name in row if name != "floor" or row["event"] != "assigned"} for row in rows]
            for rows in kept
        ]
    return [renumbered(rows) for rows in kept]


def plain(random: Random) -> list[Rows]:
    """Return a history in which each key is handled in order by one process; the owner of the partition is random."""
    commits, leases = random.random() < 0.5, random.random() < 0.5
    segments, position = [], 0
    for number in range(random.randint(1, 3)):
        rows = [assigned(position if commits else None)]
        if leases:
            rows.append(owned("leased", deadline=100.0 + random.randint(0, 30) / 1000))
        for _ in range(random.randint(0, 5)):
            rows += handled(position, random.choice([None, f"k{number}", f"l{number}"]))
            position += random.choice([1, 1, 3])
            if commits and random.random() < 0.5:
                rows.append(sent(position))
            if leases and random.random() < 0.2:
                rows.append(owned("leased", deadline=100.0 + random.randint(10, 60) / 1000))
        rows += [owned(random.choice(["drained", "revoked", "lost"])) for _ in range(random.randint(0, 2))]
        start = 100.0 + random.choice([0, 0.002, 0.01, 0.03]) * number
        segments.append(segment(rows, member=f"m-{number}", pid=number, start=start))
    return segments


def scattered(random: Random) -> list[Rows]:
    """Return random rows of one or two processes, with few messages, so that rows often conflict."""
    rules = {"order": "none"} if random.random() < 0.1 else {}
    commits, leases = random.random() < 0.6, random.random() < 0.2
    segments = []
    for number in range(random.choice([1, 1, 2])):
        floor = 0 if commits else None
        twice = random.random() < 0.5
        rows = [assigned(floor, assignment=assignment) for assignment in ((1, 2) if twice else (1,))]
        floors = [0, 0]
        if leases:
            ends = {assignment: 100.0 + random.randint(0, 16) / 1000 for assignment in (1, 2)}
            rows += [owned("leased", assignment=assignment, deadline=end) for assignment, end in ends.items()]
        rows += [_any_row(random, floors if commits else None) for _ in range(random.randint(4, 16))]
        if leases and random.random() < 0.5:
            rows.insert(random.randint(3, len(rows)), owned("leased", deadline=100.0 + random.randint(4, 20) / 1000))
        start = 100.0 + random.choice([0, 0.0025, 0.0065]) * number
        segments.append(segment(rows, rules=rules, member=f"m-{number}", pid=number, start=start))
    return segments


def _any_row(random: Random, floors: list[int] | None) -> Fields:
    position, assignment = random.randint(0, 4), random.choice([1, 1, 1, 2])
    key = None if position == 4 else "other" if position == 3 else "k"
    name: dict[str, Any] = {"key": key, "assignment": assignment}
    kind = random.choice(
        ["delivered"] * 3
        + ["started"] * 3
        + ["ended"] * 4
        + ["redelivered"] * 3
        + ["letter"] * 2
        + ["ack", "rest", "rest"]
    )
    if floors is not None and random.random() < 0.2:
        floors[assignment - 1] = random.randint(floors[assignment - 1] if random.random() < 0.9 else 0, 5)
        return sent(floors[assignment - 1], assignment=assignment)
    if kind == "delivered":
        return delivered(position, **name)
    if kind == "started":
        return started(position, **name)
    if kind == "ended":
        return ended(position, result=random.choice(["ok", "ok", "ok", "error", "cancelled"]), **name)
    if kind == "redelivered":
        return redelivered(position, random.choice(["late", "late", "settled", "held"]), **name)
    if kind == "letter":
        return message(random.choice(LETTERS), position, **name)
    if kind == "ack":
        return ack(position, **name)
    if random.random() < 0.4:
        return produced(position, key)
    if random.random() < 0.2:
        return assigned(None if floors is None else floors[assignment - 1], assignment=assignment)
    return owned(random.choice(["drained", "revoked", "revoked", "lost"]), assignment=assignment)
