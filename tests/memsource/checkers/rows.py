"""Histories written by hand: rows as dictionaries, segments as lists of rows, and both parsed by the reader."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from lanes.history.rules import Rules
from lanes.history.writer import FORMAT
from memsource import (
    AtLeastOnce,
    BoundedInFlight,
    DeadLetterBeforeSettle,
    NoCommitPastUnfinished,
    NoOverlap,
    NoSettleBeforeEnd,
    PerKeyOrder,
    Segment,
    Verdict,
    check,
    read_bytes,
)
from memsource.checkers import CommitsRise, MakeChecker, NoCommitAfterRevoke

Fields = dict[str, Any]
Rows = list[Fields]

PROMISES: tuple[MakeChecker, ...] = (
    PerKeyOrder,
    NoOverlap,
    AtLeastOnce,
    BoundedInFlight,
    DeadLetterBeforeSettle,
    NoSettleBeforeEnd,
    NoCommitPastUnfinished,
    CommitsRise,
    NoCommitAfterRevoke,
)
"""The checkers that judge any part of a history; the other checkers need the history from its begin."""

RULES = {
    "order": "key",
    "keyless": "any",
    "lanes": 0,
    "batch": 0,
    "timeout": 0,
    "poison": "skip",
    "attempts": 3,
    "backoff": 0.2,
    "max_backoff": 30.0,
    "max_ahead": 1000,
    "commit_interval": 1.0,
    "drain_timeout": 30.0,
    "grace": 2.0,
    "settles": "individual",
    "hands_over": True,
    "extend_interval": 0,
    "exclusive": True,
    "attempts_kept": False,
    "concurrency_per_partition": 0,
    "max_in_flight_per_partition": 0,
    "queues_share_bounds": False,
}
assert RULES.keys() == {field.name for field in dataclasses.fields(Rules)}


def key_hash(key: str | None) -> str | None:
    return None if key is None else blake3(key.encode()).hexdigest(length=8)


def message(event: str, position: int, key: str | None = "k", **more: Any) -> Fields:
    """A message row of partition ``S/0``, assignment 1, attempt 1, unless ``more`` says otherwise."""
    fields = {"partition": "S/0", "assignment": 1, "position": position, "key": key_hash(key), "attempt": 1}
    return {"event": event, **fields, **more}


def delivered(position: int, key: str | None = "k", **more: Any) -> Fields:
    return message("delivered", position, key, **{"size": 10, **more})


def started(position: int, key: str | None = "k", **more: Any) -> Fields:
    return message("started", position, key, **more)


def ended(position: int, key: str | None = "k", result: str = "ok", **more: Any) -> Fields:
    return message("ended", position, key, **{"result": result, **more})


def ack(position: int, key: str | None = "k", **more: Any) -> Fields:
    return message("ack", position, key, **more)


def redelivered(position: int, cause: str, key: str | None = "k", **more: Any) -> Fields:
    return message("redelivered", position, key, **{"cause": cause, **more})


def produced(position: int, key: str | None = "k", **more: Any) -> Fields:
    return {"event": "produced", "partition": "S/0", "position": position, "key": key_hash(key), **more}


def owned(event: str, **more: Any) -> Fields:
    epoch = {"epoch": 1 << 50} if event == "assigned" else {}
    return {"event": event, "partition": "S/0", "assignment": 1, **epoch, **more}


def handled(position: int, key: str | None = "k", **more: Any) -> Rows:
    """The rows of a message that succeeds at its first attempt."""
    return [
        delivered(position, key, **more),
        started(position, key, **more),
        ended(position, key, **more),
        ack(position, key, **more),
    ]


def assigned(floor: int | None = 0, **more: Any) -> Fields:
    """The row of an assignment; with a ``floor`` its source commits."""
    return owned("assigned", incarnation="", **({} if floor is None else {"floor": floor}), **more)


def in_queue(partition: str, number: int) -> Fields:
    """The row of an assignment of a partition of the physical queue with this number."""
    return assigned(None, partition=partition, queue="q", queue_partition=number)


QUEUES = [in_queue("S/0", 0), in_queue("S/1", 0), in_queue("T/0", 1), in_queue("T/1", 1)]
"""The assignments of two physical queues with two partitions each."""


def sent(floor: int, completed: int = 0, **more: Any) -> Fields:
    return owned("commit_sent", floor=floor, completed=completed, **more)


def confirmed(floor: int, **more: Any) -> Fields:
    return owned("commit_ok", floor=floor, **more)


def ran(position: int, key: str | None = "k", **more: Any) -> Rows:
    return [started(position, key, **more), ended(position, key, **more)]


def at(mono: float, *rows: Fields | Sequence[Fields]) -> Rows:
    """The rows with this time."""
    flat: Rows = []
    for row in rows:
        flat += [row] if isinstance(row, dict) else row
    return [{**row, "mono": mono} for row in flat]


def segment(
    *rows: Fields | Sequence[Fields],
    member: str = "m-1",
    pid: int = 1,
    boot: str = "boot-a",
    max_in_flight: int = 100,
    rules: Mapping[str, Any] | None = RULES,
    start: float = 100.0,
    wall: float = 1e9,
    end: str | None = "drained",
) -> Rows:
    """A whole segment: numbered, a millisecond between rows, ``wall`` = ``wall`` + ``mono``.

    ``rules``: the settings that differ from ``RULES``; None = the begin row has no settings.
    """
    head = {
        "event": "begin",
        "format": FORMAT,
        "version": "1",
        "pid": pid,
        "boot": boot,
        "source": "S",
        "concurrency": 10,
        "max_in_flight": max_in_flight,
        "max_in_flight_bytes": 1000,
        **({} if rules is None else RULES | {**rules}),
        "incomplete": 0,
    }
    flat: Rows = [head]
    for row in rows:
        flat += [row] if isinstance(row, dict) else row
    if end is not None:
        flat.append({"event": "end", "reason": end})
    numbered = []
    for index, row in enumerate(flat):
        mono = start + index / 1000
        common = {"n": index + 1, "event": "", "member": member, "mono": mono, "wall": wall + mono}
        numbered.append({**common, **row})
    return numbered


def renumbered(rows: Rows) -> Rows:
    """Renumber moved, added or removed rows, so that the segment has no holes and its time never falls."""
    latest = 0.0
    result = []
    for index, row in enumerate(rows):
        latest = max(latest, row["mono"])
        result.append({**row, "n": index + 1, "mono": latest})
    return result


def encoded(*segments: Rows) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for rows in segments for row in rows)


def parsed(*segments: Rows) -> list[Segment]:
    return read_bytes(encoded(*segments))


def verdicts(*segments: Rows) -> dict[str, Verdict]:
    """The verdicts of the promises, by name."""
    return {verdict.name: verdict for verdict in check(parsed(*segments), PROMISES)}


def judged(make: MakeChecker, *segments: Rows) -> Verdict:
    """The verdict of one checker."""
    (verdict,) = check(parsed(*segments), [make])
    return verdict


def violated(*segments: Rows) -> set[str]:
    return {name for name, verdict in verdicts(*segments).items() if verdict.status == "violated"}


def unproven(*segments: Rows) -> set[str]:
    return {name for name, verdict in verdicts(*segments).items() if verdict.status == "unproven"}


def rows_of(path: Path) -> Rows:
    """The rows of a file; a torn last line is left out."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def positions(rows: Iterable[Fields], event: str) -> list[int]:
    return [row["position"] for row in rows if row["event"] == event]
