"""The report of a run on Spark: figures and broken promises, as a table and as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from demo.history import Verdict
from demo.ledger import Step
from demo.report import named
from demo.spark.judge import Judgement

AUDIT: Final = {0: "pass", 1: "violated", 2: "unproven"}
"""Word in the report for each exit status of an audit."""

NO_AUDIT: Final = "none"
"""Word in the report for a missing audit."""


@dataclass(frozen=True, kw_only=True)
class SparkReport:
    """The outcome of a run on Spark.

    Attributes:
        events: Number of events of the log.
        keys: Number of keys of the log.
        seconds: Seconds from the start of the first driver to the end of the replay or of a failed run.
        judged: Comparison of effects, dead letters and states with the log, by SQL.
        poison: Events that never succeed.
        drivers: Number of drivers started.
        workers_killed: Number of workers killed with -9 during a task.
        drivers_killed: Number of drivers killed with -9 during a batch.
        missed: Planned kills that did not happen.
        tried_again: Number of task attempts after a failed attempt.
        batches: Number of finished batches.
        interrupted: Number of batches that the kill of a driver interrupted.
        resumed: Number of interrupted batches that a later driver finished.
        rss_mb: Peak memory of a worker in MiB.
        audit: Verdict of the audit in one word.
        verdicts: Verdicts of the audit for each promise.
        duplicates: Cause → number of repeated runs, by the audit.
        unfinished: Number of incomplete journal files, for example of a killed worker. The verdicts ignore incomplete
            files.
        failure: Reason why the run ended early; None = the run did not end early.
    """

    events: int
    keys: int
    seconds: float
    judged: Judgement
    poison: Sequence[Step]
    drivers: int
    workers_killed: int
    drivers_killed: int
    missed: Sequence[str]
    tried_again: int
    batches: int
    interrupted: int
    resumed: int
    rss_mb: float
    audit: str
    verdicts: Sequence[Verdict] = ()
    duplicates: Mapping[str, int] = field(default_factory=dict)
    unfinished: int = 0
    failure: str | None = None

    @property
    def done(self) -> int:
        """Number of stored or dead-lettered events."""
        return self.events - len(self.judged.lost)

    @property
    def rate(self) -> float:
        """Events done per second."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def ok(self) -> bool:
        """Whether the run kept every promise."""
        return not self.broken

    @property
    def broken(self) -> list[str]:
        """Broken promises, one line each."""
        judged, letters = self.judged, set(self.judged.dead_letters)
        doubled = [(case, step) for case, step, _ in judged.doubled]
        lines = []
        for name, steps, meaning in (
            ("order violations", judged.violations, "after a later step of its case"),
            ("lost", judged.lost, "neither stored nor dead-lettered"),
            ("double effects", doubled, "stored more than once"),
            ("foreign", judged.foreign, "stored, but not in the log"),
            ("states", judged.states, "the state of a case differs from its effects"),
            ("dead letters missing", sorted(set(self.poison) - letters), "never succeeds, and has no dead letter"),
            (
                "dead letters unexpected",
                sorted(letters - set(self.poison)),
                "has a dead letter, and would have succeeded",
            ),
        ):
            if steps:
                lines.append(f"{name}: {len(steps)} ({meaning}): {named(steps)}")
        lines += [f"kills: {missed}" for missed in self.missed]
        if self.workers_killed and not self.tried_again:
            lines.append("kills: a worker was killed in a task, and no task was tried again")
        if self.resumed < self.interrupted:
            lines.append(f"resumed batches: {self.resumed} of {self.interrupted} interrupted batches")
        if self.audit != AUDIT[0]:
            lines.append(f"audit: {self.audit}")
        lines += [f"audit {v.name}: {v.status}: {v.detail}" for v in self.verdicts if v.status != "held"]
        if self.failure is not None:
            lines.append(f"ended early: {self.failure}")
        return lines

    def json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(
            {
                "rows": self.done,
                "seconds": round(self.seconds, 2),
                "rows_per_s": round(self.rate, 1),
                "order_violations": len(self.judged.violations),
                "lost": len(self.judged.lost),
                "double_effects": self.judged.double_effects,
                "resumed_batches": self.resumed,
                "audit": self.audit,
            }
        )

    def rows(self) -> list[tuple[str, str, bool]]:
        """Return the rows of the table: name, value, and whether the value is as promised."""
        judged = self.judged
        repeated = ", ".join(f"{count} {cause}" for cause, count in self.duplicates.items() if count) or "none"
        held = sum(verdict.status == "held" for verdict in self.verdicts)
        return [
            ("events", f"{self.events:,}", True),
            ("cases (keys)", f"{self.keys:,}", True),
            ("drivers", f"{self.drivers}, {self.drivers_killed} killed with -9", not self.missed),
            ("workers killed with -9", str(self.workers_killed), not self.missed),
            ("tasks tried again", str(self.tried_again), not self.workers_killed or self.tried_again > 0),
            ("batches", str(self.batches), True),
            ("batches resumed", f"{self.resumed} of {self.interrupted}", self.resumed == self.interrupted),
            ("seconds, JVMs and kills included", f"{self.seconds:.2f}", True),
            ("rows/s", f"{self.rate:,.0f}", True),
            ("order violations", str(len(judged.violations)), not judged.violations),
            ("lost", str(len(judged.lost)), not judged.lost),
            ("double effects", str(judged.double_effects), not judged.double_effects),
            ("repeats (refused, harmless)", f"{judged.repeats:,}", True),
            ("delivered again", repeated, True),
            (
                "dead letters",
                f"{len(judged.dead_letters)} of {len(self.poison)}",
                set(judged.dead_letters) == set(self.poison),
            ),
            ("peak memory of a worker", f"{self.rss_mb:.0f} MiB", True),
            (
                "audit",
                f"{self.audit}: {held} of {len(self.verdicts)} promises held",
                self.audit == AUDIT[0],
            ),
            ("unfinished files", f"{self.unfinished:,}{', not judged' if self.unfinished else ''}", True),
        ]
