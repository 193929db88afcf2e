"""Lanes that could go on do."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from memsource.checkers.assignments import Assignments, lane_of
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["LaneProgress"]


class _Ready:
    """Of one assignment: the unfinished messages of each lane, and at which start of the process a head was ready."""

    __slots__ = ("ahead", "lanes", "measured", "since")

    def __init__(self) -> None:
        self.lanes: dict[str, deque[int]] = {}
        self.since: dict[int, int] = {}
        self.ahead = False
        self.measured = True


class LaneProgress:
    """A lane whose head could start does start, before ``max_in_flight`` others have (30): whatever another lane or
    another partition does, it waits for its turn alone (29, 35).

    With batches so many calls, of ``batch`` messages each. A head behind a handler of an earlier assignment can start
    when that one has ended. Not measured: heads that were held or blocked, what waits for ``max_ahead``, what comes
    late, partitions that are drained, and folded lanes, because a history does not say which keys share one.
    """

    name = "LaneProgress"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Ready)
        self._starts: dict[Segment, int] = defaultdict(int)
        # (segment, partition, lane) -> its handlers that run: (assignment, position); of several ones when the
        # former ones were fenced.
        self._running: dict[tuple[Segment, str, str], set[tuple[int, int]]] = {}
        self._bounds = {segment: self._bound(segment) for segment in timeline.segments}

    @staticmethod
    def _bound(segment: Segment) -> int | None:
        """Starts of others in between at most; None = not to be measured."""
        rules = segment.rules
        unsaid = None in (rules.order, rules.keyless, rules.lanes, rules.batch)
        if segment.max_in_flight is None or unsaid or rules.lanes:
            return None
        return segment.max_in_flight * max(1, rules.batch or 1)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "zombie": self._zombie,
            "dlq_confirmed": self._finished,
            "ahead_reached": self._ahead,
            "ahead_left": self._not_ahead,
            "abandoned": self._stop,
            "revoking": self._over,
            "lost": self._over,
            "gap": self._gap,
            "over": self._end,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _state(self, segment: Segment, row: Row) -> _Ready | None:
        if self._bounds[segment] is None:
            return None
        state = self._assignments.of(segment, row)
        return state if state is not None and state.measured else None

    def _delivered(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is None:
            if segment.rules.lanes is None:
                self._findings.unsaid(segment, "order, keyless, lanes and batch")
            return
        lane = lane_of(segment.rules, row)
        if lane is not None:
            waiting = state.lanes.get(lane)
            if waiting is not None:
                waiting.append(row.position)
                return
            state.lanes[lane] = deque([row.position])
        if not state.ahead and not self._behind(segment, row, lane):
            state.since.setdefault(row.position, self._starts[segment])

    def _behind(self, segment: Segment, row: Row, lane: str | None) -> bool:
        """Whether a handler of an earlier assignment still runs in its lane."""
        running = self._running.get((segment, row.partition, lane), ()) if lane is not None else ()
        return any(assignment != row.assignment for assignment, _ in running)

    def _redelivered(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is None:
            return
        if segment.rules.settles == "cumulative":
            self._leave(segment, row, state)
        else:
            # Where it stands in its lane is the consumer's to know.
            state.measured = False
            state.since.clear()
            state.lanes.clear()

    def _started(self, segment: Segment, row: Row) -> None:
        bound = self._bounds[segment]
        if bound is None:
            return
        self._starts[segment] += 1
        lane = lane_of(segment.rules, row)
        if lane is not None:
            self._running.setdefault((segment, row.partition, lane), set()).add((row.assignment, row.position))
        state = self._state(segment, row)
        since = None if state is None else state.since.pop(row.position, None)
        if since is not None:
            self._findings.checked += 1
            between = self._starts[segment] - since - 1
            if between > bound:
                self._findings.violation(segment, row, f"{between} others started while it could, the bound is {bound}")

    def _ended(self, segment: Segment, row: Row) -> None:
        self._runs_no_more(segment, row)
        if row.text == "ok":
            self._finished(segment, row)

    def _zombie(self, segment: Segment, row: Row) -> None:
        lane = self._runs_no_more(segment, row)
        if lane is None or self._running.get((segment, row.partition, lane)):
            return
        for (one, partition, _), state in self._assignments.states.items():
            waiting = state.lanes.get(lane)
            if one is segment and partition == row.partition and waiting and state.measured and not state.ahead:
                state.since.setdefault(waiting[0], self._starts[segment])

    def _runs_no_more(self, segment: Segment, row: Row) -> str | None:
        """A handler has ended; returns its lane, None when it has none or was not known to run."""
        lane = lane_of(segment.rules, row)
        running = None if lane is None else self._running.get((segment, row.partition, lane))
        if lane is None or running is None or (row.assignment, row.position) not in running:
            return None
        running.remove((row.assignment, row.position))
        if not running:
            del self._running[segment, row.partition, lane]
        return lane

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            self._leave(segment, row, state)

    def _leave(self, segment: Segment, row: Row, state: _Ready) -> None:
        """The next one of its lane is the head."""
        state.since.pop(row.position, None)
        lane = lane_of(segment.rules, row)
        waiting = None if lane is None else state.lanes.get(lane)
        if lane is None or not waiting:
            return
        if waiting[0] != row.position:
            if row.position in waiting:
                waiting.remove(row.position)
            return
        waiting.popleft()
        if not waiting:
            del state.lanes[lane]
        elif not state.ahead and not self._behind(segment, row, lane):
            state.since[waiting[0]] = self._starts[segment]

    def _ahead(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            # Which of them wait for it is not said.
            state.ahead = True
            state.since.clear()

    def _not_ahead(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            state.ahead = False

    def _stop(self, segment: Segment, row: Row) -> None:
        state = self._state(segment, row)
        if state is not None:
            state.measured = False

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
        self._forget(segment)

    def _forget(self, segment: Segment) -> None:
        for one in [one for one in self._running if one[0] is segment]:
            del self._running[one]

    def _end(self, segment: Segment, row: Row) -> None:
        bound = self._bounds[segment]
        for last, state in self._assignments.ending(segment, row):
            if bound is None or not state.measured:
                continue
            for position, since in state.since.items():
                if self._starts[segment] - since > bound:
                    head = last._replace(position=position)
                    what = f"{self._starts[segment] - since} others started and it never did, the bound is {bound}"
                    self._findings.violation(segment, head, what)
        self._assignments.drop(segment)
        self._forget(segment)
