"""What is delivered again, and what keeps the broker from doing so."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from lanes.core.ledgers import RUNS_LIMIT
from memsource.checkers.assignments import Assignments, LatestRun
from memsource.checkers.deadlines import MARGIN, Deadlines
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["KeptAlive", "RedeliveryNotRun"]


class _Run:
    __slots__ = ("finished", "running")

    def __init__(self) -> None:
        self.running: set[int] = set()
        self.finished: dict[int, None] = {}  # the latest ones, in order


class RedeliveryNotRun:
    """What is delivered again within an assignment is not run again: not beside the handler that runs (21), and not
    after one has finished it (22).

    What finished is remembered for the last 65,536 messages of an assignment; a consumer's memory ends somewhere, too.
    """

    name = "RedeliveryNotRun"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Run)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _redelivered(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if row.text == "settled":
            self._finished(segment, row)

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        if row.position in state.running:
            self._findings.violation(segment, row, "started while it was running in the same assignment")
        elif row.position in state.finished:
            self._findings.violation(segment, row, "started again after it had finished in the same assignment")
        state.running.add(row.position)

    def _ended(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.running.discard(row.position)
            if row.text == "ok":
                self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None:
            state.finished[row.position] = None
            if len(state.finished) > RUNS_LIMIT:
                del state.finished[next(iter(state.finished))]

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class _Alive:
    """position -> when the broker last heard of it; ``failed``: of those whose handler did not end well, and of which
    it is not known yet whether they are held on."""

    __slots__ = ("failed", "heard", "latest")

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}
        self.failed: dict[int, float] = {}
        self.latest = LatestRun()


class KeptAlive:
    """The broker hears of every message that is held, queued ones too, within ``extend_interval`` (20).

    It does by the delivery and by each ``extended`` row, until the message is acknowledged, given up, or its partition
    is drained or lost. Only where the broker has such a timer. ``margin``: seconds it may be late.
    """

    name = "KeptAlive"

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        self._findings = Findings(self.name, timeline)
        self._deadlines = Deadlines(self._findings, margin)
        self._assignments = Assignments(_Alive)
        self._timed = {segment: bool(segment.rules.extend_interval) for segment in timeline.segments}

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "extended": self._extended,
            "ack": self._left,
            "abandoned": self._left,
            # What was cancelled with the rest of its batch is queued again, and only its next start says so.
            "started": self._held,
            "ended": self._ended,
            "retry": self._held,
            "dlq_sent": self._held,
            "blocked": self._held,
            "drained": self._over,
            "revoked": self._over,
            "lost": self._lost,
            "gap": self._gap,
            "over": self._end,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _delivered(self, segment: Segment, row: Row) -> None:
        if not self._timed[segment]:
            if segment.rules.extend_interval is None:
                self._findings.unsaid(segment, "extend_interval")
            return
        state = self._assignments.of(segment, row)
        if state is not None:
            state.latest.delivered(row, new=row.position not in state.heard)
            state.heard[row.position] = row.mono

    def _redelivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is not None and state.latest.not_held(row):
            state.heard.pop(row.position, None)

    def _extended(self, segment: Segment, row: Row) -> None:
        state = self._assignments.of(segment, row)
        if state is None:
            return
        # Not all positions of a run: whoever wrote the row says how long it is.
        for position in [p for p in state.failed if any(first <= p <= last for first, last in row.runs)]:
            state.heard[position] = state.failed.pop(position)
        held = sorted(state.heard)
        for first, last in row.runs:
            for position in held[bisect_left(held, first) : bisect_right(held, last)]:
                self._findings.checked += 1
                self._judge(segment, row._replace(position=position), state.heard[position])
                state.heard[position] = row.mono

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok" or not self._timed[segment]:
            return
        state = self._assignments.of(segment, row)
        heard = None if state is None else state.heard.pop(row.position, None)
        if state is not None and heard is not None:
            # While its partition is drained nobody holds it any longer, and no row says so.
            self._judge(segment, row, heard)
            state.failed[row.position] = heard

    def _held(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        heard = None if state is None else state.failed.pop(row.position, None)
        if state is not None and heard is not None:
            state.heard[row.position] = heard

    def _left(self, segment: Segment, row: Row) -> None:
        if self._timed[segment]:
            state = self._assignments.of(segment, row)
            heard = None if state is None else state.heard.pop(row.position, None)
            if heard is not None:
                self._judge(segment, row, heard)

    def _over(self, segment: Segment, row: Row) -> None:
        state = self._assignments.end(segment, row)
        if state is not None:
            self._judge_all(segment, row, state)

    def _judge_all(self, segment: Segment, row: Row, state: _Alive) -> None:
        for position, heard in state.heard.items():
            self._judge(segment, row._replace(position=position), heard)

    def _judge(self, segment: Segment, row: Row, heard: float) -> None:
        self._deadlines.check(
            segment, row, heard + (segment.rules.extend_interval or 0), "held without the broker hearing of it,"
        )

    def _lost(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)

    def _end(self, segment: Segment, row: Row) -> None:
        if segment.crashed:
            for last, state in self._assignments.ending(segment, row):
                self._judge_all(segment, last, state)
        self._assignments.drop(segment)
