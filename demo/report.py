"""The report of a run: figures and broken promises, as a table and as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from demo.group.findings import EXCUSED, GroupFindings
from demo.history import Verdict
from demo.ledger import Step
from demo.membership import Moves

NAMED_LIMIT: Final = 3
"""Most events that one line of the report names."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of a run.

    Attributes:
        events: Number of events of the log.
        keys: Number of keys of the log.
        done: Number of stored or dead-lettered events.
        seconds: Seconds from the start of the first worker to the last finished event, with crashes and restarts.
        serial_rate: Events per second of a serial loop; 0.0 without a measurement.
        repeats: Number of writes that the ledger refused as repeats.
        dead_letters: Number of events with a dead letter.
        max_in_flight_seen: Highest number of messages that one worker had in flight.
        max_in_flight: Bound on the messages in flight.
        rss_mb: Peak memory of a worker in MiB.
        kills: Number of workers killed with -9 on purpose.
        killed: A line for each kill: the worker, the time of the kill, and the time until another worker continued.
        width: Number of physical queues that hold the events.
        stranded: Number of published events that no worker has handled, by the histories; None without a history.
        workers: Number of workers started.
        violations: Steps whose write the ledger refused as an order violation.
        lost: Events neither stored nor dead-lettered.
        doubled: Events stored more than once.
        foreign: Stored steps outside the log.
        missing_letters: Events that always fail and have no dead letter.
        unexpected_letters: Dead letters of events that can succeed.
        redelivered: Cause → number of redeliveries.
        verdicts: Verdicts of the checkers over the histories.
        failure: Reason why the run ended early; None = the run did not end early.
        group: Figures of a group or cohort; None without a group.
    """

    events: int
    keys: int
    done: int
    seconds: float
    serial_rate: float
    repeats: int
    dead_letters: int
    max_in_flight_seen: int
    max_in_flight: int
    rss_mb: float
    kills: int
    workers: int
    violations: Sequence[Step] = ()
    lost: Sequence[Step] = ()
    doubled: Sequence[Step] = ()
    foreign: Sequence[Step] = ()
    missing_letters: Sequence[Step] = ()
    unexpected_letters: Sequence[Step] = ()
    redelivered: Mapping[str, int] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()
    failure: str | None = None
    group: GroupFindings | None = None
    killed: Sequence[str] = ()
    width: int = 1
    stranded: int | None = 0

    @property
    def rate(self) -> float:
        """Events done per second."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def speedup(self) -> float:
        """Rate divided by the rate of a serial loop; 0.0 without a measurement of the serial loop."""
        return self.rate / self.serial_rate if self.serial_rate > 0 else 0.0

    @property
    def ok(self) -> bool:
        """Whether the run kept every promise."""
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Broken promises, one line each."""
        lines = []
        for name, steps, meaning in (
            ("order violations", self.violations, "refused, because a later step of its case was stored"),
            ("lost", self.lost, "neither stored nor dead-lettered"),
            ("doubled", self.doubled, "stored more than once"),
            ("foreign", self.foreign, "stored, but not in the log"),
            ("dead letters missing", self.missing_letters, "never succeeds, and has no dead letter"),
            ("dead letters unexpected", self.unexpected_letters, "has a dead letter, and would have succeeded"),
        ):
            if steps:
                lines.append(f"{name}: {len(steps)} ({meaning}): {named(steps)}")
        if self.max_in_flight_seen > self.max_in_flight:
            lines.append(f"in flight: {self.max_in_flight_seen} seen, above the bound of {self.max_in_flight}")
        if self.group is not None:
            lines += _broken_by(self.group)
        lines += [f"history {v.name}: {v.status}: {v.detail}" for v in self.verdicts if v.status != "passed"]
        if self.failure is not None:
            lines.append(f"ended early: {self.failure}")
        return lines

    def json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(
            {
                "events": self.events,
                "keys": self.keys,
                "seconds": round(self.seconds, 2),
                "rate": round(self.rate, 1),
                "serial_rate": round(self.serial_rate, 1),
                "speedup": round(self.speedup, 1),
                "width": self.width,
                "stranded": self.stranded,
                "order_violations": len(self.violations),
                "lost": len(self.lost),
                "doubled": len(self.doubled),
                "redelivered": sum(self.redelivered.values()),
                "dead_letters": self.dead_letters,
                "max_in_flight_seen": self.max_in_flight_seen,
                "max_in_flight": self.max_in_flight,
                "rss_mb": round(self.rss_mb, 1),
                **(_figures(self.group) if self.group is not None else {}),
            }
        )

    def rows(self) -> list[tuple[str, str, bool]]:
        """Return the rows of the table: name, value, and whether the value is as promised."""
        causes = ", ".join(f"{count} {cause}" for cause, count in self.redelivered.items() if count) or "none"
        expected = self.dead_letters + len(self.missing_letters) - len(self.unexpected_letters)
        rows = [
            ("events", f"{self.events:,}", True),
            ("cases (keys)", f"{self.keys:,}", True),
            ("workers", f"{self.workers}", True),
            *(("kill -9", killed, True) for killed in self.killed or [str(self.kills)]),
            ("seconds", f"{self.seconds:.2f}", True),
            ("messages/s", f"{self.rate:,.0f}", True),
            (
                "measured one at a time",
                f"{self.serial_rate:,.1f} messages/s, in a sample before the run"
                if self.serial_rate
                else "not measured",
                True,
            ),
            ("speed-up", f"{self.speedup:.1f} ×" if self.serial_rate else "not measured", True),
            *self._rows_of_the_queue(),
            ("order violations", str(len(self.violations)), not self.violations),
            ("lost", str(len(self.lost)), not self.lost),
            ("doubled effects", str(len(self.doubled)), not self.doubled),
            ("repeats (refused, harmless)", f"{self.repeats:,}", True),
            ("redelivered", causes, True),
            (
                "dead letters",
                f"{self.dead_letters} of {expected}",
                not (self.missing_letters or self.unexpected_letters),
            ),
            (
                "peak in flight",
                f"{self.max_in_flight_seen:,} of {self.max_in_flight:,}",
                self.max_in_flight_seen <= self.max_in_flight,
            ),
            ("peak memory of a worker", f"{self.rss_mb:.0f} MiB", True),
        ]
        if self.group is not None:
            rows += _rows_of(self.group)
        passed = sum(verdict.status == "passed" for verdict in self.verdicts)
        rows.append(("history", f"{passed} of {len(self.verdicts)} promises kept", passed == len(self.verdicts)))
        rows += [(f"history: {v.name}", v.status, False) for v in self.verdicts if v.status != "passed"]
        return rows

    def _rows_of_the_queue(self) -> list[tuple[str, str, bool]]:
        """Return the rows of a partitioned queue. The plain stream has a row only if it has stranded events."""
        stranded = "unknown" if self.stranded is None else str(self.stranded)
        rows = [("physical queues", str(self.width), True), ("stranded", stranded, self.stranded == 0)]
        return rows if self.width > 1 else [row for row in rows if not row[2]]


def _unexcused(group: GroupFindings) -> int:
    return sum(count for cause, count in group.duplicates.items() if cause not in EXCUSED)


def _broken_by(group: GroupFindings) -> list[str]:
    lines = []
    if group.overlaps:
        named = "; ".join(group.witnesses)
        lines.append(f"overlaps: {group.overlaps} (two runs of a key, or a result after the loss): {named}")
    if count := _unexcused(group):
        lines.append(f"duplicates: {count} (repeated runs that no fault explains)")
    for kind, seconds in group.recovery.items():
        if seconds == inf:
            lines.append(f"recovery: after a {kind}, a partition never started again")
    return lines


def _figures(group: GroupFindings) -> dict[str, object]:
    return {
        "duplicates_by_cause": dict(group.duplicates),
        "rebalances": group.rebalances,
        # JSON has no infinity.
        "recovery_s": {kind: round(each, 2) if each < inf else None for kind, each in group.recovery.items()},
        "overlaps": group.overlaps,
        "overlaps_at_loss": group.overlaps_at_loss,
        **_figures_of(group.moves, group.handover),
    }


def _figures_of(moves: Moves | None, handover: float | None) -> dict[str, object]:
    if moves is None:
        return {}
    milliseconds = None if handover is None else round(handover * 1000, 1)
    return {"moved": moves.made, "moved_minimum": moves.least, "handover_ms": milliseconds}


def _rows_of(group: GroupFindings) -> list[tuple[str, str, bool]]:
    repeated = ", ".join(f"{count} {cause}" for cause, count in group.duplicates.items())
    recovery = ", ".join(f"{seconds:.2f} {kind}" for kind, seconds in group.recovery.items()) or "no fault"
    rows = [
        ("run again, by cause", repeated, not _unexcused(group)),
        ("rebalances", str(group.rebalances), True),
        ("seconds to recover", recovery, inf not in group.recovery.values()),
        ("overlaps", str(group.overlaps), not group.overlaps),
        ("overlaps at a loss (not settled)", str(group.overlaps_at_loss), True),
    ]
    if group.moves is not None:
        made, least = group.moves
        rows.append(("partitions moved", f"{made:,}, and at least {least:,} had to move", made <= least))
    if group.handover is not None:
        rows.append(("clean hand-over, median", f"{group.handover * 1000:,.0f} ms", True))
    return rows


def named(steps: Sequence[Step]) -> str:
    """Return the names of the first ``NAMED_LIMIT`` steps, separated by commas."""
    named = ", ".join(f"{case} step {step}" for case, step in steps[:NAMED_LIMIT])
    return named + (", …" if len(steps) > NAMED_LIMIT else "")
