"""Retries: how often, how soon, and who waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from memsource.checkers.assignments import Assignments, lane_of
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["AttemptsCount", "RetryHoldsLane"]

_ROUNDING: Final = 2e-6
"""Seconds: rows and delays are written in whole microseconds."""


class _Attempts:
    """Of one assignment: position -> the latest attempt, negative when cancelled; ``unlimited``: were blocked once."""

    __slots__ = ("latest", "unlimited")

    def __init__(self) -> None:
        self.latest: dict[int, int] = {}
        self.unlimited: set[int] = set()


class AttemptsCount:
    """Attempts of a message count 1, 2, 3 … in an assignment, and are no more than ``attempts`` (46).

    One that was cancelled does not count where the message goes back to its lane. Each ``unblock`` of a blocked message
    allows one more. What the broker delivers anew begins anew; but where attempts are kept they go on: the first one of
    an assignment is no lower than what was handed over, and may be one beyond ``attempts``.
    """

    name = "AttemptsCount"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Attempts)
        self._handed: dict[tuple[str, int], int] = {}  # of partition and position, where attempts are kept

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "blocked": self._blocked,
            "redelivered": self._redelivered,
            "revoked": self._revoked,
            "lost": self._over,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        attempt = row.attempt
        before = state.latest.get(row.position, 0)
        state.latest[row.position] = attempt
        if not before and segment.rules.attempts_kept:
            handed = self._handed.pop((row.partition, row.position), 1)
            if attempt < handed:
                self._findings.violation(segment, row, f"attempt {attempt}, attempt {handed} was handed over")
        elif attempt != (before + 1 if before >= 0 else -before):
            what = f"attempt {attempt} follows attempt {abs(before)}" if before else f"attempt {attempt} is the first"
            self._findings.violation(segment, row, what)
        elif attempt > 1:
            limit = segment.rules.attempts
            if limit is None:
                self._findings.unsaid(segment, "attempts")
            elif attempt > limit and row.position not in state.unlimited:
                self._findings.violation(segment, row, f"attempt {attempt}, attempts is {limit}")

    def _ended(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        if row.text == "ok":
            state.latest.pop(row.position, None)
        elif row.text == "cancelled":
            state.latest[row.position] = -row.attempt

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.latest.pop(row.position, None)
            state.unlimited.discard(row.position)

    def _blocked(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.unlimited.add(row.position)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "late":
            self._finished(segment, row)

    def _revoked(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is not None and segment.rules.attempts_kept:
            self._handed.update(((row.partition, position), abs(latest)) for position, latest in state.latest.items())

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class _Head(NamedTuple):
    """What a lane waits behind. ``due``: when it may start again; None = not before it is unblocked."""

    position: int
    key: str | None
    due: float | None


class RetryHoldsLane:
    """A failed message stays the head of its lane (45): nothing else of the lane starts before it has, it starts when
    its backoff is over and not sooner, and the backoff is what the policy allows. A blocked one starts when it is
    unblocked (47).

    The backoff before attempt n + 1 is at most ``backoff`` doubled n - 1 times, and ``max_backoff``; a handler may ask
    for another one. That other lanes go on meanwhile is for ``LaneProgress`` to say.
    """

    name = "RetryHoldsLane"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._heads: dict[Assignment, dict[str, _Head]] = {}
        self._failed: dict[Assignment, dict[int, float]] = defaultdict(dict)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "retry": self._retry,
            "blocked": self._blocked,
            "unblocked": self._unblocked,
            "dlq_sent": self._left,
            "abandoned": self._left,
            "drained": self._over,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
            "over": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _started(self, segment: Segment, row: Row) -> None:
        if not self._heads:
            return
        heads = self._heads.get((segment, row.partition, row.assignment))
        if not heads:
            return
        lane = _lane(segment, row)
        head = heads.get(lane)
        if head is None:
            return
        if head.position != row.position:
            why = "blocked" if head.due is None else "held for a retry"
            self._findings.violation(segment, row, f"started while position {head.position} of its lane was {why}")
            return
        del heads[lane]
        if head.due is None:
            self._findings.violation(segment, row, "started though it was blocked")
        elif row.mono < head.due - _ROUNDING:
            self._findings.violation(segment, row, f"started {head.due - row.mono:.6f} s before its backoff was over")

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "error":
            self._failed[segment, row.partition, row.assignment][row.position] = row.mono

    def _retry(self, segment: Segment, row: Row) -> None:
        rules = segment.rules
        self._findings.checked += 1
        if rules.order is None or rules.keyless is None or rules.backoff is None or rules.max_backoff is None:
            self._findings.unsaid(segment, "order, keyless, backoff and max_backoff")
            return
        limit = min(rules.max_backoff, rules.backoff * 2.0 ** min(max(row.attempt - 1, 0), 60))
        if row.text != "asked" and row.number > limit + _ROUNDING:
            what = f"held for {row.number:g} s after attempt {row.attempt}, the policy allows {limit:g} s"
            self._findings.violation(segment, row, what)
        failed = self._failed[segment, row.partition, row.assignment].pop(row.position, None)
        if failed is not None:
            self._hold(segment, row, failed + row.number)

    def _blocked(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if segment.rules.order is None or segment.rules.keyless is None:
            self._findings.unsaid(segment, "order and keyless")
        else:
            self._hold(segment, row, None)

    def _hold(self, segment: Segment, row: Row, due: float | None) -> None:
        heads = self._heads.setdefault((segment, row.partition, row.assignment), {})
        heads[_lane(segment, row)] = _Head(row.position, row.key, due)

    def _unblocked(self, segment: Segment, row: Row) -> None:
        for assignment, heads in self._heads.items():
            if assignment[0] is segment:
                for lane in [lane for lane, head in heads.items() if head.due is None and head.key == row.key]:
                    del heads[lane]

    def _left(self, segment: Segment, row: Row) -> None:
        """It is parked, or runs again elsewhere; what is behind it is not let past."""
        heads = self._heads.get((segment, row.partition, row.assignment))
        if heads:
            lane = _lane(segment, row)
            head = heads.get(lane)
            if head is not None and head.position == row.position:
                del heads[lane]

    def _over(self, segment: Segment, row: Row) -> None:
        self._heads.pop((segment, row.partition, row.assignment), None)
        self._failed.pop((segment, row.partition, row.assignment), None)

    def _gap(self, segment: Segment, row: Row) -> None:
        for assignment in [one for one in self._heads if one[0] is segment]:
            del self._heads[assignment]
        for assignment in [one for one in self._failed if one[0] is segment]:
            del self._failed[assignment]


def _lane(segment: Segment, row: Row) -> str:
    """The name of its lane; what has none waits for itself alone."""
    return lane_of(segment.rules, row) or f"position {row.position}"
