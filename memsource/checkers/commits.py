"""The checkers of commits: their positions, order and deadlines, and the times without commits."""

from __future__ import annotations

from collections import defaultdict

from lanes.runtime.settle import SETTLE_RETRY
from memsource.checkers.assignments import begin_committing, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import TimedChecker
from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline


class NoCommitPastUnfinished(PromiseChecker):
    """A process commits no floor above an unfinished message of its assignment (8).

    A message is finished after its handler has returned, after the confirmation of its dead letter, or if a former
    owner has finished it. A commit counts from its sending, before its result.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._unfinished: dict[Assignment, set[int]] = defaultdict(set)

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if assignment in self._committing:
            self._unfinished[assignment].add(row.position)

    @on("ended ok", "redelivered settled", "dlq_confirmed")
    def _finished(self, segment: Segment, row: Row) -> None:
        unfinished = self._unfinished.get((segment, row.partition, row.assignment))
        if unfinished is not None:
            unfinished.discard(row.position)

    @on("passed")
    def _passed(self, segment: Segment, row: Row) -> None:
        if row.position in self._unfinished[segment, row.partition, row.assignment]:
            self._findings.violation(segment, row, "a position above it was committed before it had finished")

    @on("commit_sent")
    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        for assignment, unfinished in self._unfinished.items():
            if assignment[0] is segment:
                # The messages may have finished in the gap.
                unfinished.clear()


class CommitsRise(PromiseChecker):
    """The committed floors of an assignment never decrease, and are never below its first position (9).

    A process may commit the same floor again after a change of the completed set, or after an unknown result.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._floors: dict[Assignment, int] = {}

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        if row.floor >= 0:
            self._floors[segment, row.partition, row.assignment] = row.floor

    @on("commit_sent")
    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        before = self._floors.get(assignment, row.floor)
        if row.floor < before:
            _violation(self._findings, segment, row, f"the floor fell from {before}")
        self._floors[assignment] = row.floor


class OneCommitAtATime(PromiseChecker):
    """An assignment sends no commit while a commit is in transit, because the second could overtake the first (10).

    A commit is in transit until its confirmation, failure or cancellation, or until its sender stops waiting.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._sent: dict[Assignment, Row] = {}

    @on("commit_sent")
    def _send(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        other = self._sent.get(assignment)
        if other is not None:
            what = f"committed while the commit of {other.floor} (row {other.n}) was under way"
            _violation(self._findings, segment, row, what)
        self._sent[assignment] = row

    @on("commit_ok", "commit_failed")
    def _answered(self, segment: Segment, row: Row) -> None:
        self._sent.pop((segment, row.partition, row.assignment), None)

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        self._sent = {assignment: sent for assignment, sent in self._sent.items() if assignment[0] is not segment}


class NoCommitAfterRevoke(PromiseChecker):
    """A process sends commits only for its current assignment of a partition (11, 12).

    An assignment sends no commit after its loss or handover, or after the process received a newer assignment.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._over: dict[Assignment, str] = {}
        self._newest: dict[tuple[Segment, str], int] = {}

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        self._newest[segment, row.partition] = row.assignment

    @on("revoked", "lost")
    def _given_up(self, segment: Segment, row: Row) -> None:
        self._over[segment, row.partition, row.assignment] = row.event

    @on("commit_sent")
    def _sent(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        over = self._over.get((segment, row.partition, row.assignment))
        newest = self._newest.get((segment, row.partition), row.assignment)
        if over is not None:
            _violation(self._findings, segment, row, f"committed after its assignment was {over}")
        elif row.assignment < newest:
            _violation(
                self._findings, segment, row, f"committed in assignment {row.assignment}, the newest is {newest}"
            )


def _violation(findings: Findings, segment: Segment, row: Row, what: str) -> None:
    findings.violation(segment, row._replace(position=row.floor), what)


class _Waiting:
    """Times of an assignment: the first uncommitted finish, the last answer to a commit, and the last failed commit."""

    __slots__ = ("answered", "failed", "sending", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.answered = 0.0
        self.sending = False
        self.failed: float | None = None


class CommitsInTime(TimedChecker[_Waiting]):
    """A member commits a finished message within ``commit_interval``, even if no more messages arrive (14).

    While a commit is under way, the next commit waits for its answer. ``UnknownCommitRepeated`` judges the time after a
    failed commit. ``NoDuplicateCleanly`` judges the time of a drain.
    """

    _state_class = _Waiting

    @on("assigned")
    def _assigned(self, segment: Segment, row: Row) -> None:
        interval = segment.rules.commit_interval
        begin_committing(self._assignments, self._findings, segment, row, "commit_interval", interval)

    @with_state("ended ok", "redelivered settled", "dlq_confirmed", find="known")
    def _finished(self, segment: Segment, row: Row, state: _Waiting) -> None:
        if state.since is None:
            state.since = row.mono

    @with_state("commit_sent", find="known")
    def _sent(self, segment: Segment, row: Row, state: _Waiting) -> None:
        self._findings.checked += 1
        self._judge(segment, row, state)
        state.since = state.failed = None
        state.sending = True

    @with_state("commit_ok", "commit_failed", find="known")
    def _answered(self, segment: Segment, row: Row, state: _Waiting) -> None:
        state.sending = False
        state.answered = row.mono
        state.failed = row.mono if row.event == "commit_failed" else None

    @with_state("revoking", "lost", find="end")
    def _over(self, segment: Segment, row: Row, state: _Waiting) -> None:
        self._judge(segment, row, state)

    @on("over")
    def _end(self, segment: Segment, row: Row) -> None:
        for last, state in self._assignments.ending(segment, row):
            self._judge(segment, last, state)
        self._assignments.drop(segment)

    def _judge(self, segment: Segment, row: Row, state: _Waiting) -> None:
        interval = segment.rules.commit_interval
        if state.since is None or state.sending or state.failed is not None or interval is None:
            return
        due = max(state.since + interval, state.answered)
        self._deadlines.check(segment, row, due, "a finished message was not committed in time,")


class UnknownCommitRepeated(TimedChecker[_Waiting]):
    """A member repeats a commit within a second after a failure or an unknown result (15).

    A member need not repeat the commit after the loss of the partition or the beginning of its drain.
    """

    _state_class = _Waiting

    @with_state("commit_failed")
    def _failed(self, segment: Segment, row: Row, state: _Waiting) -> None:
        self._findings.checked += 1
        state.failed = row.mono

    @with_state("commit_sent", find="known")
    def _sent(self, segment: Segment, row: Row, state: _Waiting) -> None:
        self._judge(segment, row, state)
        state.failed = None

    @with_state("revoking", "drained", "revoked", "lost", find="end")
    def _over(self, segment: Segment, row: Row, state: _Waiting) -> None:
        self._judge(segment, row, state)

    @on("over")
    def _end(self, segment: Segment, row: Row) -> None:
        for last, state in self._assignments.ending(segment, row):
            self._judge(segment, last, state)
        self._assignments.drop(segment)

    def _judge(self, segment: Segment, row: Row, state: _Waiting) -> None:
        if state.failed is not None:
            due = state.failed + SETTLE_RETRY[1]
            self._deadlines.check(segment, row, due, "a commit that had failed was not repeated,")
