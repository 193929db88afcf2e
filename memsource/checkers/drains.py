"""How a partition is handed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from memsource.checkers.assignments import Assignments, closes_prefix
from memsource.checkers.deadlines import MARGIN, Deadlines, Drain, timeout_of, well_nigh
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["DrainInTime", "DrainStartsNothing", "DrainWaitsForRunning", "HandedOverAfterDrain"]

_HAND_OVER: Final = SETTLE_WITHIN + RELEASE_WITHIN


class DrainInTime:
    """A drain takes its timeout and the grace at most, and the hand-over behind it as long as settling and releasing
    may (38, 39).

    Not where the partition is lost meanwhile, or the whole run is cancelled. ``margin``: seconds it may be late.
    """

    name = "DrainInTime"

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        self._findings = Findings(self.name, timeline)
        self._deadlines = Deadlines(self._findings, margin)
        self._assignments = Assignments(Drain)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "revoking": self._revoking,
            "hastened": self._revoking,
            "drained": self._drained,
            "revoked": self._revoked,
            "lost": self._lost,
            "gap": self._gap,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _revoking(self, segment: Segment, row: Row) -> None:
        timeout = timeout_of(segment, row)
        if timeout is None or segment.rules.grace is None:
            self._findings.unsaid(segment, "drain_timeout and grace")
            return
        state = self._assignments.of(segment, row)
        if state is not None:
            self._findings.checked += row.event == "revoking"
            state.begin(row.mono, timeout)

    def _drained(self, segment: Segment, row: Row) -> None:
        self._judge(segment, row, self._assignments.known(segment, row), "drained")

    def _revoked(self, segment: Segment, row: Row) -> None:
        self._judge(segment, row, self._assignments.end(segment, row), "handed over", _HAND_OVER)

    def _judge(self, segment: Segment, row: Row, state: Drain | None, what: str, more: float = 0.0) -> None:
        grace = segment.rules.grace
        if state is not None and state.since is not None and grace is not None:
            self._deadlines.check(segment, row, state.deadline + grace + more, what)

    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)

    def _over(self, segment: Segment, row: Row) -> None:
        for state in self._assignments.drop(segment):
            if segment.crashed:
                self._judge(segment, row, state, "handed over", _HAND_OVER)


class _Closing(Drain):
    """Of a drain: ``highest`` is what had started when it began. ``over``: handlers of it were cancelled, because its
    time was over."""

    __slots__ = ("highest", "over")

    def __init__(self, highest: int) -> None:
        super().__init__()
        self.highest = highest
        self.over = False


class DrainStartsNothing:
    """From ``revoking`` on no handler of the partition starts (37).

    Where the completed set cannot be handed over, what is queued below the highest message that had started still
    runs, until the time of the drain is over and its handlers are cancelled. What follows the head of its lane in a
    batch has its rows when the call has ended: so they may come then, and which message was the highest is not known.
    """

    name = "DrainStartsNothing"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._highest: dict[Assignment, int] = {}
        self._draining: dict[Assignment, _Closing] = {}
        self._ended: dict[Segment, float] = {}
        self._gaps: set[Segment] = set()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._end,
            "revoking": self._revoking,
            "hastened": self._hastened,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
            "over": self._forget,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if self._draining and assignment in self._draining:
            self._judge(segment, row, self._draining[assignment])
        elif row.position > self._highest.get(assignment, -1):
            self._highest[assignment] = row.position

    def _judge(self, segment: Segment, row: Row, drain: _Closing) -> None:
        rules = segment.rules
        if rules.batch is None:
            self._findings.unsaid(segment, "batch, and whether the completed set is handed over")
            return
        if rules.batch and self._ended.get(segment) == row.mono:
            return
        what = "started while its partition was drained"
        if row.position < drain.highest or rules.batch or segment in self._gaps:
            closes = closes_prefix(rules)
            if closes is None:
                self._findings.unsaid(segment, "batch, and whether the completed set is handed over")
            if closes is not False and (rules.batch or not drain.over):
                return
            if closes:
                what = "started when the time of its drain was over, and its handlers were cancelled"
        self._findings.violation(segment, row, what)

    def _end(self, segment: Segment, row: Row) -> None:
        if not self._draining:
            return
        self._ended[segment] = row.mono
        drain = self._draining.get((segment, row.partition, row.assignment))
        if drain is not None and drain.since is not None and row.text == "cancelled":
            # A handler may cancel itself, too.
            drain.over |= well_nigh(row.mono - drain.since, drain.timeout)

    def _revoking(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        self._draining[assignment] = _Closing(self._highest.pop(assignment, -1))
        self._hastened(segment, row)

    def _hastened(self, segment: Segment, row: Row) -> None:
        drain, timeout = self._draining.get((segment, row.partition, row.assignment)), timeout_of(segment, row)
        if drain is not None and timeout is not None:
            drain.begin(row.mono, timeout)

    def _over(self, segment: Segment, row: Row) -> None:
        self._highest.pop((segment, row.partition, row.assignment), None)
        self._draining.pop((segment, row.partition, row.assignment), None)

    def _gap(self, segment: Segment, row: Row) -> None:
        # The highest may be in it.
        self._gaps.add(segment)
        self._forget(segment, row)

    def _forget(self, segment: Segment, row: Row) -> None:
        for assignment in [one for one in self._highest if one[0] is segment]:
            del self._highest[assignment]
        for assignment in [one for one in self._draining if one[0] is segment]:
            del self._draining[assignment]


class DrainWaitsForRunning:
    """A drain ends when the last running handler does (36): it waits for nothing that is held, blocked or parking.

    ``margin``: seconds it may be late.
    """

    name = "DrainWaitsForRunning"

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        self._findings = Findings(self.name, timeline)
        self._deadlines = Deadlines(self._findings, margin)
        self._assignments = Assignments(Drain)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "revoking": self._revoking,
            "drained": self._drained,
            "lost": self._lost,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.running += 1

    def _ended(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.running -= 1
            state.deadline = row.mono

    def _revoking(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.since = state.deadline = row.mono

    def _drained(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is not None and state.since is not None and state.running <= 0:
            self._findings.checked += 1
            self._deadlines.check(segment, row, state.deadline, "drained when its last handler had ended,")

    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class HandedOverAfterDrain:
    """A partition is handed over when it is drained (36), and it is drained when none of its handlers runs any more, or
    its timeout has passed."""

    name = "HandedOverAfterDrain"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(Drain)
        self._drained: set[Assignment] = set()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "revoking": self._revoking,
            "hastened": self._revoking,
            "drained": self._drain,
            "revoked": self._revoked,
            "lost": self._lost,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.running += 1

    def _ended(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.running -= 1

    def _revoking(self, segment: Segment, row: Row) -> None:
        state, timeout = self._assignments.of(segment, row), timeout_of(segment, row)
        if timeout is None:
            self._findings.unsaid(segment, "drain_timeout")
        elif state is not None:
            state.begin(row.mono, timeout)

    def _drain(self, segment: Segment, row: Row) -> None:
        self._drained.add((segment, row.partition, row.assignment))
        state = self._assignments.known(segment, row)
        if state is None or state.running <= 0 or state.since is None:
            return
        took = row.mono - state.since
        if not well_nigh(took, state.timeout):
            what = f"drained {took:.3f} s after its drain began while {state.running} of its handlers ran"
            self._findings.violation(segment, row, f"{what}; its timeout is {state.timeout:g} s")

    def _revoked(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        self._assignments.end(segment, row)
        if (segment, row.partition, row.assignment) not in self._drained:
            self._findings.violation(segment, row, "handed over before it was drained")

    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
