"""The checkers of the drain and the handover of a partition."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from typing import Final

from lanes.config import RELEASE_WITHIN, SETTLE_WITHIN
from memsource.checkers.assignments import AssignmentChecker, closes_prefix, lane_of, with_state
from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import Drain, TimedChecker, timeout_of, well_nigh
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

_HAND_OVER: Final = SETTLE_WITHIN + RELEASE_WITHIN


class DrainInTime(TimedChecker[Drain]):
    """A drain takes at most its timeout plus the grace (38), and the handover follows in time (39).

    The handover takes at most the time for settlement plus the time for the release. The checker does not judge a drain
    that ends in a loss, or a drain in a cancelled run.
    """

    _state_class = Drain

    @on("revoking", "hastened")
    def _revoking(self, segment: Segment, row: Row) -> None:
        timeout = timeout_of(segment, row)
        if timeout is None or segment.rules.grace is None:
            self._findings.unsaid(segment, "drain_timeout and grace")
            return
        state = self._assignments.of(segment, row)
        if state is not None:
            self._findings.checked += row.event == "revoking"
            state.begin(row.mono, timeout)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        self._judge(segment, row, self._assignments.known(segment, row), "drained")

    @on("revoked")
    def _revoked(self, segment: Segment, row: Row) -> None:
        self._judge(segment, row, self._assignments.end(segment, row), "handed over", _HAND_OVER)

    def _judge(self, segment: Segment, row: Row, state: Drain | None, what: str, more: float = 0.0) -> None:
        grace = segment.rules.grace
        if state is not None and state.since is not None and grace is not None:
            self._deadlines.check(segment, row, state.deadline + grace + more, what)

    @on("over")
    def _over(self, segment: Segment, row: Row) -> None:
        for state in self._assignments.drop(segment):
            if segment.crashed:
                self._judge(segment, row, state, "handed over", _HAND_OVER)


class _Closing(Drain):
    """A drain with the highest position that started before it, and whether its timeout has passed.

    Args:
        highest: Highest started position.

    Attributes:
        highest: Highest started position.
        over: Whether the timeout has cancelled the handlers.
    """

    __slots__ = ("highest", "over")

    def __init__(self, highest: int) -> None:
        super().__init__()
        self.highest = highest
        self.over = False


class DrainStartsNothing(PromiseChecker):
    """No handler of a partition starts after ``revoking``, or after the handover or loss of the partition (37).

    A source that commits positions without the completed set is an exception. Queued messages below the highest started
    message still run until the drain times out. A process writes only the row of a batch's first message at the start
    of the batch. If the process writes the other rows during the drain, the highest started message is unknown.

    Args:
        timeline: History to judge.
    """

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._highest: dict[Assignment, int] = {}
        self._draining: dict[Assignment, _Closing] = {}
        self._given_up: dict[Segment, dict[tuple[str, int], str]] = defaultdict(dict)
        self._ended: dict[Segment, float] = {}
        self._gaps: set[Segment] = set()

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        if self._draining and assignment in self._draining:
            self._judge(segment, row, self._draining[assignment])
        elif segment in self._given_up and (row.partition, row.assignment) in self._given_up[segment]:
            # The row of a batch's later message may be written at the end of the call.
            if segment.rules.batch == 0:
                event = self._given_up[segment][row.partition, row.assignment]
                what = "was lost" if event == "lost" else "was handed over"
                self._findings.violation(segment, row, f"started after its partition {what}")
        elif row.position > self._highest.get(assignment, -1):
            self._highest[assignment] = row.position

    def _judge(self, segment: Segment, row: Row, drain: _Closing) -> None:
        rules = segment.rules
        if rules.batch is None:
            self._findings.unsaid(segment, "batch, settles and hands_over")
            return
        if rules.batch and self._ended.get(segment) == row.mono:
            return
        what = "started while its partition was drained"
        if row.position < drain.highest or rules.batch or segment in self._gaps:
            closes = closes_prefix(rules)
            if closes is None:
                self._findings.unsaid(segment, "batch, settles and hands_over")
            if closes is not False and (rules.batch or not drain.over):
                return
            if closes:
                what = "started after the timeout of its drain had cancelled its handlers"
        self._findings.violation(segment, row, what)

    @on("ended")
    def _end(self, segment: Segment, row: Row) -> None:
        if not self._draining:
            return
        self._ended[segment] = row.mono
        drain = self._draining.get((segment, row.partition, row.assignment))
        if drain is not None and drain.since is not None and row.text == "cancelled":
            # A handler may also cancel itself.
            drain.over |= well_nigh(row.mono - drain.since, drain.timeout)

    @on("revoking")
    def _revoking(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        assignment = segment, row.partition, row.assignment
        self._draining[assignment] = _Closing(self._highest.pop(assignment, -1))
        self._hastened(segment, row)

    @on("hastened")
    def _hastened(self, segment: Segment, row: Row) -> None:
        drain, timeout = self._draining.get((segment, row.partition, row.assignment)), timeout_of(segment, row)
        if drain is not None and timeout is not None:
            drain.begin(row.mono, timeout)

    @on("revoked", "lost")
    def _over(self, segment: Segment, row: Row) -> None:
        self._highest.pop((segment, row.partition, row.assignment), None)
        self._draining.pop((segment, row.partition, row.assignment), None)
        self._given_up[segment][row.partition, row.assignment] = row.event

    @on("gap")
    def _gap(self, segment: Segment, row: Row) -> None:
        # The highest started position may be in the gap.
        self._gaps.add(segment)
        self._forget(segment, row)

    @on("over")
    def _end_of_segment(self, segment: Segment, row: Row) -> None:
        self._given_up.pop(segment, None)
        self._forget(segment, row)

    def _forget(self, segment: Segment, row: Row) -> None:
        for assignment in [one for one in self._highest if one[0] is segment]:
            del self._highest[assignment]
        for assignment in [one for one in self._draining if one[0] is segment]:
            del self._draining[assignment]


class _Prefix(Drain):
    """A drain with its held, blocked and parking lanes, and whether queued messages below ``highest`` waited.

    Attributes:
        highest: Highest started position.
        held: Time at which the head of each held, blocked or parking lane can start, by lane; infinity = unknown. A
            message without a lane counts by its position.
        publishing: Positions whose handlers have left unconfirmed outputs. They count as running.
        waits: Whether queued messages below ``highest`` waited until the end of the drain.
    """

    __slots__ = ("held", "highest", "publishing", "waits")

    def __init__(self) -> None:
        super().__init__()
        self.highest = -1
        self.held: dict[str | int, float] = {}
        self.publishing: set[int] = set()
        self.waits = False


class DrainWaitsForRunning(TimedChecker[_Prefix]):
    """A drain ends when its last running handler ends (36), and waits for no held, blocked or parking message.

    A source that commits positions without the completed set is an exception. Queued messages below the highest started
    message may wait until the timeout, because handlers of other partitions use the whole ``concurrency``.
    """

    _state_class = _Prefix

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: _Prefix) -> None:
        state.running += 1
        state.highest = max(state.highest, row.position)

    @with_state("ended")
    def _ended(self, segment: Segment, row: Row, state: _Prefix) -> None:
        if row.text == "outputs":
            # The drain also waits for the confirmation of the outputs.
            state.publishing.add(row.position)
            return
        state.running -= 1
        state.deadline = row.mono

    @with_state("published")
    def _published(self, segment: Segment, row: Row, state: _Prefix) -> None:
        if row.position in state.publishing:
            state.publishing.remove(row.position)
            state.running -= 1
            state.deadline = row.mono

    @with_state("retry")
    def _retry(self, segment: Segment, row: Row, state: _Prefix) -> None:
        state.held[_lane_or_position(segment, row)] = row.mono + row.number

    @with_state("blocked", "dlq_sent")
    def _stopped(self, segment: Segment, row: Row, state: _Prefix) -> None:
        if row.position in state.publishing:
            state.publishing.remove(row.position)
            state.running -= 1
        state.held[_lane_or_position(segment, row)] = inf

    @with_state("dlq_confirmed")
    def _parked(self, segment: Segment, row: Row, state: _Prefix) -> None:
        state.held.pop(_lane_or_position(segment, row), None)

    @on("unblocked")
    def _unblocked(self, segment: Segment, row: Row) -> None:
        for _, state in self._assignments.ending(segment, row):
            # The row does not name the lanes.
            state.held.clear()

    @with_state("revoking")
    def _revoking(self, segment: Segment, row: Row, state: _Prefix) -> None:
        state.since = state.deadline = row.mono

    @with_state("abandoned", find="known")
    def _abandoned(self, segment: Segment, row: Row, state: _Prefix) -> None:
        if state.since is not None and closes_prefix(segment.rules) and row.position < state.highest:
            # The drain gives up held lanes when it begins, and does not wait for messages queued in these lanes.
            state.waits |= state.held.get(_lane_or_position(segment, row), -inf) <= state.since

    @with_state("drained", find="end")
    def _drained(self, segment: Segment, row: Row, state: _Prefix) -> None:
        if state.since is not None and state.running <= 0 and not state.waits:
            self._findings.checked += 1
            self._deadlines.check(segment, row, state.deadline, "drained when its last handler had ended,")


def _lane_or_position(segment: Segment, row: Row) -> str | int:
    """Return the lane of a message, or the position of a message without a lane."""
    lane = lane_of(segment.rules, row)
    return row.position if lane is None else lane


class HandedOverAfterDrain(AssignmentChecker[Drain]):
    """A process hands a partition over only after the drain (36).

    A drain ends when no handler of the partition runs, or at its timeout.

    Args:
        timeline: History to judge.
    """

    _state_class = Drain

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._drained: set[Assignment] = set()

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: Drain) -> None:
        state.running += 1

    @with_state("ended")
    def _ended(self, segment: Segment, row: Row, state: Drain) -> None:
        state.running -= 1

    @on("revoking", "hastened")
    def _revoking(self, segment: Segment, row: Row) -> None:
        state, timeout = self._assignments.of(segment, row), timeout_of(segment, row)
        if timeout is None:
            self._findings.unsaid(segment, "drain_timeout")
        elif state is not None:
            state.begin(row.mono, timeout)

    @on("drained")
    def _drain(self, segment: Segment, row: Row) -> None:
        self._drained.add((segment, row.partition, row.assignment))
        state = self._assignments.known(segment, row)
        if state is None or state.running <= 0 or state.since is None:
            return
        took = row.mono - state.since
        if not well_nigh(took, state.timeout):
            what = f"drained {took:.3f} s after its drain began while {state.running} of its handlers ran"
            self._findings.violation(segment, row, f"{what}; its timeout is {state.timeout:g} s")

    @with_state("revoked")
    def _revoked(self, segment: Segment, row: Row, state: Drain) -> None:
        self._findings.checked += 1
        self._assignments.end(segment, row)
        if (segment, row.partition, row.assignment) not in self._drained:
            self._findings.violation(segment, row, "handed over before it was drained")
