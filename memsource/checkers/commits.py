"""What a committed position must not say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history import Segment
from memsource.rows import Row
from memsource.timeline import Assignment, Timeline


class NoCommitPastUnfinished:
    """No floor is committed above a message of its assignment that has not finished.

    Finished is: its handler returned, its dead letter was confirmed, or a predecessor had completed it. Within an
    assignment floors never fall, not below the one it began with either; and when it was lost or handed over,
    nothing more of it is committed. A commit counts when it is sent, whatever became of it.
    """

    name = "NoCommitPastUnfinished"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._unfinished: dict[Assignment, set[int]] = defaultdict(set)
        self._floors: dict[Assignment, int] = {}
        self._over: dict[Assignment, str] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "passed": self._passed,
            "commit_sent": self._sent,
            "revoked": self._given_up,
            "lost": self._given_up,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._floors[segment, row.partition, row.epoch] = row.floor

    def _delivered(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.epoch
        if assignment in self._committing:
            self._unfinished[assignment].add(row.position)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._finished(segment, row)

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        unfinished = self._unfinished.get((segment, row.partition, row.epoch))
        if unfinished is not None:
            unfinished.discard(row.position)

    def _passed(self, segment: Segment, row: Row) -> None:
        if row.position in self._unfinished[segment, row.partition, row.epoch]:
            self._findings.violation(segment, row, "a position above it was committed before it had finished")

    def _sent(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.epoch
        self._findings.checked += 1
        before = self._floors.get(assignment, row.floor)
        if row.floor < before:
            self._violation(segment, row, f"the floor fell, it was {before}")
        self._floors[assignment] = row.floor
        if assignment in self._over:
            self._violation(segment, row, f"committed after its assignment was {self._over[assignment]}")

    def _violation(self, segment: Segment, row: Row, what: str) -> None:
        self._findings.violation(segment, row._replace(position=row.floor), what)

    def _given_up(self, segment: Segment, row: Row) -> None:
        self._over[segment, row.partition, row.epoch] = row.event

    def _gap(self, segment: Segment, row: Row) -> None:
        for assignment, unfinished in self._unfinished.items():
            if assignment[0] is segment:
                # They may have finished unseen.
                unfinished.clear()
