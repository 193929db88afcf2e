"""The checkers of retries: the number of attempts, the backoff between them, and the lane that waits meanwhile."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

from memsource.checkers.assignments import AssignmentChecker, lane_of, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Assignment, Timeline

_ROUNDING: Final = 2e-6
"""Tolerance in seconds, because rows state times and delays in whole microseconds."""


class _Attempts:
    """The attempts of the messages of one assignment.

    Attributes:
        latest: The latest attempt of each position; negative after a cancellation.
        unlimited: Positions of messages that were blocked at least once and therefore have no limit of attempts.
    """

    __slots__ = ("latest", "unlimited")

    def __init__(self) -> None:
        self.latest: dict[int, int] = {}
        self.unlimited: set[int] = set()


class AttemptsCount(AssignmentChecker[_Attempts]):
    """The attempts of a message count 1, 2, 3 … in an assignment, and are at most ``attempts`` (46).

    A cancelled attempt does not count if the message returns to its lane. Each ``unblock`` of a blocked message
    allows one more attempt. A new delivery begins at attempt 1. If a store keeps attempts, the first attempt of an
    assignment is at least the attempt that the store handed over. The first attempt exceeds all former attempts by at
    most one. The checker does not judge this upper bound if the history has no former attempts of the message, or if
    rows of another process may be missing.

    Args:
        timeline: History to judge.
    """

    _state_class = _Attempts

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        # By partition and position, if a store keeps attempts: the attempt that was handed over, and the highest one.
        self._handed: dict[tuple[str, int], int] = {}
        self._highest: dict[tuple[str, int], int] = {}
        self._unsure = [each for each in timeline.segments if each.gaps or each.crashed]

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: _Attempts) -> None:
        self._findings.checked += 1
        attempt = row.attempt
        before = state.latest.get(row.position, 0)
        state.latest[row.position] = attempt
        place = whole(row.partition), row.position
        highest = 0
        if segment.rules.attempts_kept:
            highest = self._highest.get(place, 0)
            self._highest[place] = max(highest, attempt)
        if not before and segment.rules.attempts_kept:
            handed = self._handed.pop(place, 1)
            if attempt < handed:
                self._findings.violation(segment, row, f"attempt {attempt}, attempt {handed} was handed over")
            elif highest and attempt > highest + 1 and all(each is segment for each in self._unsure):
                self._findings.violation(segment, row, f"attempt {attempt}, the highest former attempt is {highest}")
        elif attempt != (before + 1 if before >= 0 else -before):
            what = f"attempt {attempt} follows attempt {abs(before)}" if before else f"attempt {attempt} is the first"
            self._findings.violation(segment, row, what)
        elif attempt > 1:
            limit = segment.rules.attempts
            if limit is None:
                self._findings.unsaid(segment, "attempts")
            elif attempt > limit and row.position not in state.unlimited:
                self._findings.violation(segment, row, f"attempt {attempt}, attempts is {limit}")

    @with_state("ended")
    def _ended(self, segment: Segment, row: Row, state: _Attempts) -> None:
        if row.text == "ok":
            state.latest.pop(row.position, None)
            self._highest.pop((whole(row.partition), row.position), None)
        elif row.text in ("cancelled", "outputs"):
            # The next owner of unconfirmed outputs makes the same attempt again.
            state.latest[row.position] = -row.attempt

    @with_state("published")
    def _published(self, segment: Segment, row: Row, state: _Attempts) -> None:
        state.latest.pop(row.position, None)
        self._highest.pop((whole(row.partition), row.position), None)

    @with_state("redelivered late", "dlq_confirmed")
    def _finished(self, segment: Segment, row: Row, state: _Attempts) -> None:
        state.latest.pop(row.position, None)
        state.unlimited.discard(row.position)

    @with_state("blocked")
    def _blocked(self, segment: Segment, row: Row, state: _Attempts) -> None:
        state.unlimited.add(row.position)
        if row.position in state.latest:
            state.latest[row.position] = row.attempt

    @with_state("revoked", find="end")
    def _revoked(self, segment: Segment, row: Row, state: _Attempts) -> None:
        if segment.rules.attempts_kept:
            partition = whole(row.partition)
            self._handed.update(((partition, position), abs(latest)) for position, latest in state.latest.items())


class _Head(NamedTuple):
    """The message that a lane waits for.

    Attributes:
        position: Position of the message.
        key: Hash of the message's key; None = no key.
        due: Time at which the message may start again; None = only after ``unblock``.
    """

    position: int
    key: str | None
    due: float | None


class RetryHoldsLane(PromiseChecker):
    """A failed message stays the head of its lane until it starts again, after its backoff (45).

    A blocked message waits for ``unblock`` (47). No other message of the lane starts before the head. The backoff
    before attempt n + 1 is at most ``backoff`` doubled n - 1 times, and at most ``max_backoff``. A handler may ask for
    another delay. ``LaneProgress`` judges that other lanes continue.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._heads: dict[Assignment, dict[str, _Head]] = {}
        self._failed: dict[Assignment, dict[int, float]] = defaultdict(dict)

    @on("started")
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

    @on("ended error")
    def _ended(self, segment: Segment, row: Row) -> None:
        self._failed[segment, row.partition, row.assignment][row.position] = row.mono

    @on("retry")
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

    @on("blocked")
    def _blocked(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if segment.rules.order is None or segment.rules.keyless is None:
            self._findings.unsaid(segment, "order and keyless")
        else:
            self._hold(segment, row, None)

    def _hold(self, segment: Segment, row: Row, due: float | None) -> None:
        heads = self._heads.setdefault((segment, row.partition, row.assignment), {})
        heads[_lane(segment, row)] = _Head(row.position, row.key, due)

    @on("unblocked")
    def _unblocked(self, segment: Segment, row: Row) -> None:
        for assignment, heads in self._heads.items():
            if assignment[0] is segment:
                for lane in [lane for lane, head in heads.items() if head.due is None and head.key == row.key]:
                    del heads[lane]

    @on("dlq_sent", "dlq_confirmed", "abandoned")
    def _left(self, segment: Segment, row: Row) -> None:
        """Forget a head that has a dead letter or runs again in another assignment."""
        heads = self._heads.get((segment, row.partition, row.assignment))
        if heads:
            lane = _lane(segment, row)
            head = heads.get(lane)
            if head is not None and head.position == row.position:
                del heads[lane]

    @on("drained", "revoked", "lost")
    def _over(self, segment: Segment, row: Row) -> None:
        self._heads.pop((segment, row.partition, row.assignment), None)
        self._failed.pop((segment, row.partition, row.assignment), None)

    @on("gap", "over")
    def _gap(self, segment: Segment, row: Row) -> None:
        for assignment in [one for one in self._heads if one[0] is segment]:
            del self._heads[assignment]
        for assignment in [one for one in self._failed if one[0] is segment]:
            del self._failed[assignment]


def _lane(segment: Segment, row: Row) -> str:
    """Return the name of the message's lane. A message without a lane counts as a lane of its own."""
    return lane_of(segment.rules, row) or f"position {row.position}"
