"""When commits are due."""

from __future__ import annotations

from collections.abc import Mapping

from lanes.runtime.settle import SETTLE_RETRY
from memsource.checkers.assignments import Assignments, begin_committing
from memsource.checkers.deadlines import MARGIN, Deadlines
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["CommitsInTime", "UnknownCommitRepeated"]


class _Waiting:
    """``since``: when the first message finished that no commit has, if any. ``answered``: when the last one was."""

    __slots__ = ("answered", "failed", "sending", "since")

    def __init__(self) -> None:
        self.since: float | None = None
        self.answered = 0.0
        self.sending = False
        self.failed: float | None = None


class CommitsInTime:
    """What has finished is committed within ``commit_interval``, also when nothing more is delivered (14).

    While a commit is on its way the next one waits for its answer; behind one that failed it is for
    ``UnknownCommitRepeated`` to say, and of a drain for ``NoDuplicateCleanly``. ``margin``: seconds it may be late.
    """

    name = "CommitsInTime"

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        self._findings = Findings(self.name, timeline)
        self._deadlines = Deadlines(self._findings, margin)
        self._assignments = Assignments(_Waiting)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "redelivered": self._redelivered,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "commit_sent": self._sent,
            "commit_ok": self._answered,
            "commit_failed": self._answered,
            "revoking": self._over,
            "lost": self._over,
            "gap": self._gap,
            "over": self._end,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        interval = segment.rules.commit_interval
        begin_committing(self._assignments, self._findings, segment, row, "commit_interval", interval)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            self._finished(segment, row)

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None and state.since is None:
            state.since = row.mono

    def _sent(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            self._findings.checked += 1
            self._judge(segment, row, state)
            state.since = state.failed = None
            state.sending = True

    def _answered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            state.sending = False
            state.answered = row.mono
            state.failed = row.mono if row.event == "commit_failed" else None

    def _over(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is not None:
            self._judge(segment, row, state)

    def _end(self, segment: Segment, row: Row) -> None:
        for last, state in self._assignments.ending(segment, row):
            self._judge(segment, last, state)
        self._assignments.drop(segment)

    def _judge(self, segment: Segment, row: Row, state: _Waiting) -> None:
        interval = segment.rules.commit_interval
        if state.since is None or state.sending or state.failed is not None or interval is None:
            return
        due = max(state.since + interval, state.answered)
        self._deadlines.check(segment, row, due, "what had finished was not committed in time,")

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class UnknownCommitRepeated:
    """A commit that failed, or whose result is unknown, counts as not made: it is repeated within a second (15).

    Not when its partition was lost or is being drained meanwhile. ``margin``: seconds it may be late.
    """

    name = "UnknownCommitRepeated"

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        self._findings = Findings(self.name, timeline)
        self._deadlines = Deadlines(self._findings, margin)
        self._assignments = Assignments(_Waiting)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "commit_failed": self._failed,
            "commit_sent": self._sent,
            "revoking": self._over,
            "drained": self._over,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
            "over": self._end,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _failed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            self._findings.checked += 1
            state.failed = row.mono

    def _sent(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            self._judge(segment, row, state)
            state.failed = None

    def _over(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is not None:
            self._judge(segment, row, state)

    def _end(self, segment: Segment, row: Row) -> None:
        for last, state in self._assignments.ending(segment, row):
            self._judge(segment, last, state)
        self._assignments.drop(segment)

    def _judge(self, segment: Segment, row: Row, state: _Waiting) -> None:
        if state.failed is not None:
            due = state.failed + SETTLE_RETRY[1]
            self._deadlines.check(segment, row, due, "a commit that had failed was not repeated,")

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
