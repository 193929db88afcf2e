"""Redelivered messages, and the extensions that prevent a redelivery."""

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
        self.finished: dict[int, None] = {}  # the latest ones, in order


class RedeliveryNotRun(AssignmentChecker[_Run]):
    """A message that is redelivered within an assignment does not run again.

    It runs neither beside the handler that runs (21) nor after one has finished it (22). The checker remembers the last
    65,536 finished messages of an assignment, as a consumer does.
    """

    _state_class = _Run

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

    @with_state("dlq_confirmed")
    def _finished(self, segment: Segment, row: Row, state: _Run) -> None:
        state.finished[row.position] = None
        if len(state.finished) > RUNS_LIMIT:
            del state.finished[next(iter(state.finished))]

    @on("revoked")
    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)


class _Alive:
    """When the broker last heard of each position.

    ``failed`` has those whose handler did not end well: they may be held no longer.
    """

    __slots__ = ("failed", "heard", "latest")

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}
        self.failed: dict[int, float] = {}
        self.latest = LatestRun()


class KeptAlive(TimedChecker[_Alive]):
    """The broker hears of each held message, queued ones included, within ``extend_interval`` (20).

    It hears of a message by the delivery and by each ``extended`` row. This lasts until the message is acknowledged or
    given up, or its partition is drained or lost. Only brokers with such a timer are judged.

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
        # Compare with the ends of a run and do not walk it: its length is the writer's claim.
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
            # A drained partition holds it no longer, and no row says so.
            self._judge(segment, row, heard)
            state.failed[row.position] = heard

    @on("started", "retry", "dlq_sent", "blocked")
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
        self._deadlines.check(
            segment, row, heard + (segment.rules.extend_interval or 0), "held without the broker hearing of it,"
        )

    @on("over")
    def _end(self, segment: Segment, row: Row) -> None:
        if segment.crashed:
            for last, state in self._assignments.ending(segment, row):
                self._judge_all(segment, last, state)
        self._assignments.drop(segment)
