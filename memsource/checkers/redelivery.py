"""The checkers of redelivered messages, and of the extensions that prevent a redelivery."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from lanes.core.ledgers import RUNS_LIMIT
from memsource.checkers.assignments import AssignmentChecker, LatestRun, with_state
from memsource.checkers.checker import on
from memsource.checkers.deadlines import MARGIN, TimedChecker
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline


class _Run:
    __slots__ = ("finished", "running")

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.finished: dict[int, None] = {}  # the latest finished positions, in order


class RedeliveryNotRun(AssignmentChecker[_Run]):
    """A message that the broker redelivers within an assignment does not run again.

    No handler starts for a message whose handler still runs (21) or has returned (22). The checker remembers the last
    65,536 finished messages of an assignment.
    """

    _state_class = _Run
    _ends_at = ("revoked",)

    @on("redelivered")
    def _redelivered(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if row.text == "settled":
            self._finished(segment, row)

    @with_state("started")
    def _started(self, segment: Segment, row: Row, state: _Run) -> None:
        if row.position in state.running:
            self._findings.violation(segment, row, "started while it was running in the same assignment")
        elif row.position in state.finished:
            self._findings.violation(segment, row, "started again after it had finished in the same assignment")
        state.running.add(row.position)

    @with_state("ended")
    def _ended(self, segment: Segment, row: Row, state: _Run) -> None:
        state.running.discard(row.position)
        if row.text == "ok":
            self._finished(segment, row)

    @with_state("dlq_confirmed", "published")
    def _finished(self, segment: Segment, row: Row, state: _Run) -> None:
        state.finished[row.position] = None
        if len(state.finished) > RUNS_LIMIT:
            del state.finished[next(iter(state.finished))]


class _Alive:
    """The time at which one assignment last received or extended each message.

    Attributes:
        heard: Time of the last delivery or extension of each held position.
        failed: Time of the last delivery or extension of each position whose handler failed. The engine may have
            abandoned these messages.
        latest: The latest unbroken series of deliveries.
    """

    __slots__ = ("failed", "heard", "latest")

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}
        self.failed: dict[int, float] = {}
        self.latest = LatestRun()


class KeptAlive(TimedChecker[_Alive]):
    """A source extends each delivered and unsettled message every ``extend_interval`` seconds (20).

    The interval begins with the delivery and with each ``extended`` row of the message. The duty ends when the process
    acknowledges the message or gives it up, or when its partition is drained or lost. The checker judges only brokers
    that redeliver a message after a time without an extension.

    Args:
        timeline: History to judge.
        margin: Seconds by which an extension may be late.
    """

    _state_class = _Alive

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        super().__init__(timeline, margin=margin)
        self._timed = {segment: bool(segment.rules.extend_interval) for segment in timeline.segments}

    @on("delivered")
    def _delivered(self, segment: Segment, row: Row) -> None:
        if not self._timed[segment]:
            if segment.rules.extend_interval is None:
                self._findings.unsaid(segment, "extend_interval")
            return
        state = self._assignments.of(segment, row)
        if state is not None:
            state.latest.delivered(row, new=row.position not in state.heard)
            state.heard[row.position] = row.mono

    @with_state("redelivered")
    def _redelivered(self, segment: Segment, row: Row, state: _Alive) -> None:
        if state.latest.not_held(row):
            state.heard.pop(row.position, None)

    @with_state("extended")
    def _extended(self, segment: Segment, row: Row, state: _Alive) -> None:
        # Compare with first and last position of a range. A damaged row may claim a range of any length.
        for position in [p for p in state.failed if any(first <= p <= last for first, last in row.runs)]:
            state.heard[position] = state.failed.pop(position)
        held = sorted(state.heard)
        for first, last in row.runs:
            for position in held[bisect_left(held, first) : bisect_right(held, last)]:
                self._findings.checked += 1
                self._judge(segment, row._replace(position=position), state.heard[position])
                state.heard[position] = row.mono

    @on("ended")
    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok" or not self._timed[segment]:
            return
        state = self._assignments.of(segment, row)
        heard = None if state is None else state.heard.pop(row.position, None)
        if state is not None and heard is not None:
            # A drained partition no longer holds the message, although no row says so.
            self._judge(segment, row, heard)
            state.failed[row.position] = heard

    @on("started", "retry", "dlq_sent", "blocked", "publishing")
    def _held(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        heard = None if state is None else state.failed.pop(row.position, None)
        if state is not None and heard is not None:
            state.heard[row.position] = heard

    @on("ack", "abandoned")
    def _left(self, segment: Segment, row: Row) -> None:
        if self._timed[segment]:
            state = self._assignments.of(segment, row)
            heard = None if state is None else state.heard.pop(row.position, None)
            if heard is not None:
                self._judge(segment, row, heard)

    @with_state("drained", "revoked", find="end")
    def _over(self, segment: Segment, row: Row, state: _Alive) -> None:
        self._judge_all(segment, row, state)

    def _judge_all(self, segment: Segment, row: Row, state: _Alive) -> None:
        for position, heard in state.heard.items():
            self._judge(segment, row._replace(position=position), heard)

    def _judge(self, segment: Segment, row: Row, heard: float) -> None:
        self._deadlines.check(segment, row, heard + (segment.rules.extend_interval or 0), "held without an extension,")

    @on("over")
    def _end(self, segment: Segment, row: Row) -> None:
        if segment.crashed:
            for last, state in self._assignments.ending(segment, row):
                self._judge_all(segment, last, state)
        self._assignments.drop(segment)
