"""How far a partition may run ahead of what the broker has confirmed, and who is told when it does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from heapq import heappop, heappush

from memsource.checkers.assignments import Assignments, begin_committing
from memsource.checkers.verdict import Findings, Handler, Verdict
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

__all__ = ["MaxAhead", "StallNamed"]


class _Above:
    """Of one assignment: what was delivered at or above the confirmed floor, in order; what of it is unfinished."""

    __slots__ = ("_heap", "ahead", "crossed", "delivered", "unfinished")

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.unfinished: set[int] = set()
        self._heap: list[int] = []
        self.ahead = False
        self.crossed: Row | None = None

    def confirm(self, floor: int) -> None:
        del self.delivered[: bisect_left(self.delivered, floor)]

    def deliver(self, position: int) -> None:
        self.delivered.append(position)
        self.unfinished.add(position)
        heappush(self._heap, position)

    def oldest(self) -> int:
        """The lowest unfinished position, -1 = none."""
        heap = self._heap
        while heap and heap[0] not in self.unfinished:
            heappop(heap)
        return heap[0] if heap else -1


class MaxAhead:
    """No handler starts at a message that is more than ``max_ahead`` deliveries above the floor that the broker has
    confirmed (27). Only where a position is committed."""

    name = "MaxAhead"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Above)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "commit_ok": self._confirmed,
            "delivered": self._delivered,
            "started": self._started,
            "revoked": self._over,
            "lost": self._over,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        begin_committing(self._assignments, self._findings, segment, row, "max_ahead", segment.rules.max_ahead)

    def _confirmed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            state.confirm(row.floor)

    def _delivered(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            state.delivered.append(row.position)

    def _started(self, segment: Segment, row: Row) -> None:
        state, bound = self._assignments.known(segment, row), segment.rules.max_ahead
        if state is None or bound is None:
            return
        self._findings.checked += 1
        if len(state.delivered) <= bound:
            return
        ahead = bisect_left(state.delivered, row.position + 1)
        if ahead > bound:
            what = f"started {ahead} deliveries above the confirmed floor, max_ahead is {bound}"
            self._findings.violation(segment, row, what)

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)


class StallNamed:
    """Reaching ``max_ahead`` is told at once, with the message that holds the floor (29).

    That is the lowest one delivered that has not finished; none where everything has and only a confirmation is
    missing. That other keys go on until then is for ``LaneProgress`` to say.
    """

    name = "StallNamed"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._assignments = Assignments(_Above)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "assigned": self._assigned,
            "commit_ok": self._confirmed,
            "delivered": self._delivered,
            "redelivered": self._redelivered,
            "started": self._started,
            "ended": self._ended,
            "dlq_confirmed": self._finished,
            "ahead_reached": self._reached,
            "ahead_left": self._left,
            "revoking": self._over,
            "lost": self._over,
            "gap": self._gap,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict()

    def _assigned(self, segment: Segment, row: Row) -> None:
        begin_committing(self._assignments, self._findings, segment, row, "max_ahead", segment.rules.max_ahead)

    def _confirmed(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            self._told(segment, state)
            state.confirm(row.floor)

    def _delivered(self, segment: Segment, row: Row) -> None:
        state, bound = self._assignments.known(segment, row), segment.rules.max_ahead
        if state is None or bound is None:
            return
        state.deliver(row.position)
        if len(state.delivered) >= bound and not state.ahead and state.crossed is None:
            state.crossed = row

    def _redelivered(self, segment: Segment, row: Row) -> None:
        if row.text == "settled":
            # In the run that was just delivered: it may be what is told next.
            state = self._assignments.known(segment, row)
            if state is not None:
                state.unfinished.discard(row.position)

    def _started(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None and state.crossed is not None:
            self._told(segment, state)

    def _ended(self, segment: Segment, row: Row) -> None:
        if row.text == "ok":
            self._finished(segment, row)

    def _finished(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            self._told(segment, state)
            state.unfinished.discard(row.position)

    def _told(self, segment: Segment, state: _Above) -> None:
        if state.crossed is not None:
            self._findings.violation(segment, state.crossed, "reached max_ahead, and nobody was told")
            state.crossed = None

    def _reached(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is None:
            return
        self._findings.checked += 1
        state.ahead, state.crossed = True, None
        oldest, admitted = state.oldest(), state.delivered[: segment.rules.max_ahead]
        if oldest not in admitted:
            # What waits for max_ahead holds nothing up.
            oldest = -1
        if row.position != oldest:
            named = "nobody" if row.position < 0 else f"position {row.position}"
            holds = "nobody does" if oldest < 0 else f"position {oldest} does"
            self._findings.violation(segment, row, f"named {named} as holding the floor, {holds}")

    def _left(self, segment: Segment, row: Row) -> None:
        state = self._assignments.known(segment, row)
        if state is not None:
            state.ahead = False

    def _over(self, segment: Segment, row: Row) -> None:
        self._assignments.end(segment, row)

    def _gap(self, segment: Segment, row: Row) -> None:
        self._assignments.gap(segment)
