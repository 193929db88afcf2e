"""What a committed position must not say, and when nothing may be committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["CommitsRise", "NoCommitAfterRevoke", "NoCommitPastUnfinished", "OneCommitAtATime"]


class NoCommitPastUnfinished:
    """No floor is committed above a message of its assignment that has not finished (8).

    Finished is: its handler returned, its dead letter was confirmed, or a predecessor had completed it. A commit counts
    when it is sent, whatever became of it.
    """

    name = "NoCommitPastUnfinished"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._committing = timeline.committing
        self._unfinished: dict[Assignment, set[int]] = defaultdict(set)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "passed": self._passed,
            "commit_sent": self._sent,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _delivered(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if assignment in self._committing:
            self._unfinished[assignment].add(row.position)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._finished(segment, row)

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        unfinished = self._unfinished.get((segment, row.partition, row.assignment))
        if unfinished is not None:
            unfinished.discard(row.position)

    def _passed(self, segment: Segment, row: Row) -> None:
        if row.position in self._unfinished[segment, row.partition, row.assignment]:
            self._findings.violation(segment, row, "a position above it was committed before it had finished")

    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1

    def _gap(self, segment: Segment, row: Row) -> None:
        for assignment, unfinished in self._unfinished.items():
            if assignment[0] is segment:
                # They may have finished unseen.
                unfinished.clear()


class CommitsRise:
    """Within an assignment the floors that are committed never fall, nor below the one it began with (9).

    One that stays may be committed again: what is completed above it has changed, or the last commit is unknown.
    """

    name = "CommitsRise"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._floors: dict[Assignment, int] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {"assigned": self._assigned, "commit_sent": self._sent}

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._floors[segment, row.partition, row.assignment] = row.floor

    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        before = self._floors.get(assignment, row.floor)
        if row.floor < before:
            _violation(self._findings, segment, row, f"the floor fell, it was {before}")
        self._floors[assignment] = row.floor


class OneCommitAtATime:
    """No commit of an assignment is sent while another one of it is on its way: they could cross (10).

    A commit is on its way until the broker has confirmed it, or it has failed, was cancelled, or nobody waits for it
    any longer.
    """

    name = "OneCommitAtATime"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._sent: dict[Assignment, Row] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "commit_sent": self._send,
            "commit_ok": self._answered,
            "commit_failed": self._answered,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _send(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        other = self._sent.get(assignment)
        if other is not None:
            what = f"committed while the commit of {other.floor} (row {other.n}) was on its way"
            _violation(self._findings, segment, row, what)
        self._sent[assignment] = row

    def _answered(self, segment: Segment, row: Row) -> None:
        self._sent.pop((segment, row.partition, row.assignment), None)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._sent = {assignment: sent for assignment, sent in self._sent.items() if assignment[0] is not segment}


class NoCommitAfterRevoke:
    """A commit is of the assignment that the process has: after it was lost, handed over or followed by another one of
    its partition nothing more of it is committed (11, 12)."""

    name = "NoCommitAfterRevoke"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._over: dict[Assignment, str] = {}
        self._newest: dict[tuple[Segment, str], int] = {}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "commit_sent": self._sent,
            "revoked": self._given_up,
            "lost": self._given_up,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        self._newest[segment, row.partition] = row.assignment

    def _given_up(self, segment: Segment, row: Row) -> None:
        self._over[segment, row.partition, row.assignment] = row.event

    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        over = self._over.get((segment, row.partition, row.assignment))
        newest = self._newest.get((segment, row.partition), row.assignment)
        if over is not None:
            _violation(self._findings, segment, row, f"committed after its assignment was {over}")
        elif row.assignment < newest:
            _violation(self._findings, segment, row, f"committed in assignment {row.assignment}, it is {newest} by now")


def _violation(findings: Findings, segment: Segment, row: Row, what: str) -> None:
    findings.violation(segment, row._replace(position=row.floor), what)
