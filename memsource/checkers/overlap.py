"""The checker of the mutual exclusion of handlers with one key."""

from __future__ import annotations

from math import inf

from memsource.checkers.assignments import Assignments
from memsource.checkers.checker import PromiseChecker, on
from memsource.checkers.deadlines import Drain, timeout_of
from memsource.checkers.verdict import at
from memsource.history.reader import Segment
from memsource.history.rows import Row, whole
from memsource.history.timeline import Assignment, Timeline

_Start = tuple[Segment, Row]


class NoOverlap(PromiseChecker):
    """At most one handler of a key runs at any time.

    A handler runs from ``started`` to ``ended``, or to the last row of a crashed process. Handlers of a key never
    overlap within a member, also across its assignments. Handlers of two members may overlap in these cases only:

    - The assignment of the first handler was lost after the handler had started. The handler runs until its
      cancellation.
    - The broker had revoked one of the two assignments, and its process started the handler before it noticed the loss.
    - The first assignment had a lease whose deadline has passed. If the broker takes a lease, the row of the loss
      records the end of the lease.

    In an assignment under a lease, no handler starts after the deadline, and the process acknowledges no message after
    the deadline or the loss. A message without a key, and each message with ``order="none"``, must not overlap with
    itself. If keys share a lane, the checker judges each key separately.

    Args:
        timeline: History to judge.
        late: Whether a suspended process may have missed the grace of a drain in this run. A cancelled handler that
            started before the deadline of the drain may then overlap with a handler of the next owner.
    """

    _needs_order = True

    def __init__(self, timeline: Timeline, *, late: bool = False) -> None:
        super().__init__(timeline)
        self._running: dict[tuple[str, str | int], list[_Start]] = {}
        self._deadlines = timeline.deadlines
        # The deadlines of the leases, as far as the process knows them at the current row.
        self._leases: dict[Assignment, float] = {}
        self._drains = Assignments(Drain) if late else None
        self._outlived: set[tuple[Segment, str, int, int]] = set()

    @on("started")
    def _started(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if row.mono >= self._leases.get((segment, row.partition, row.assignment), inf):
            self._findings.violation(segment, row, "started when its own lease had run out")
        name = _name(segment, row)
        running = self._running.setdefault(name, [])
        unaware = self._unaware(segment, row)
        for other, start in running:
            # A lane waits until a handler of a lost assignment ends, but a message without a lane does not wait.
            same = other is segment and (isinstance(name[1], str) or row.assignment == start.assignment)
            apart = other is not segment and self._leased_at(other, start, row)
            if same or (not unaware and (apart or self._exclusive(other, start))):
                what = f"started while position {start.position} of its key was running"
                self._findings.violation(segment, row, f"{what} ({at(other, start)})")
                break
        running.append((segment, row))

    @on("leased")
    def _leased(self, segment: Segment, row: Row) -> None:
        self._leases[segment, row.partition, row.assignment] = row.number

    def _leased_at(self, other: Segment, start: Row, row: Row) -> bool:
        """Return whether a lease certainly was valid when a message started in a different assignment."""
        deadline = self._deadlines.get((other, start.partition, start.assignment), 0.0)
        return row.mono < deadline and start.partition not in self._incomparable and not self._unaware(other, start)

    @on("ack")
    def _ack(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        deadline = self._deadlines.get(assignment)
        if deadline is not None and (row.mono >= deadline or row.n > self._losses.get(assignment, inf)):
            self._findings.violation(segment, row, "acknowledged when its lease had run out or was lost")

    def _exclusive(self, other: Segment, start: Row) -> bool:
        """Return whether two handlers of different members or assignments must not overlap."""
        if (other, start.partition, start.assignment) in self._deadlines or start.partition in self._incomparable:
            return False
        if other.gaps:
            # A gap, even a later gap, may hide that the partition was lost.
            return False
        if (other, start.partition, start.assignment, start.position) in self._outlived:
            return False
        lost = self._losses.get((other, start.partition, start.assignment), 0)
        return lost < start.n and not self._unaware(other, start)

    @on("revoking", "hastened")
    def _revoking(self, segment: Segment, row: Row) -> None:
        drain = None if self._drains is None else self._drains.of(segment, row)
        timeout = timeout_of(segment, row)
        if drain is not None and timeout is not None:
            drain.begin(row.mono, timeout)

    @on("drained")
    def _drained(self, segment: Segment, row: Row) -> None:
        drain = None if self._drains is None else self._drains.known(segment, row)
        if drain is None:
            return
        assignment = segment, row.partition, row.assignment
        for running in self._running.values():
            for other, start in running:
                if (other, start.partition, start.assignment) == assignment and start.mono <= drain.deadline:
                    self._outlived.add((*assignment, start.position))

    @on("ended", "zombie")
    def _ended(self, segment: Segment, row: Row) -> None:
        name = _name(segment, row)
        running = self._running.get(name)
        if running is None:
            return
        for index, (other, start) in enumerate(running):
            if other is segment and start.position == row.position and start.assignment == row.assignment:
                del running[index]
                break
        if not running:
            del self._running[name]

    @on("gap", "over")
    def _over(self, segment: Segment, row: Row) -> None:
        """Forget the running handlers of a segment, after the end of its process or in a gap."""
        for name in list(self._running):
            running = [(other, start) for other, start in self._running[name] if other is not segment]
            if running:
                self._running[name] = running
            else:
                del self._running[name]


def _name(segment: Segment, row: Row) -> tuple[str, str | int]:
    """Return partition and unit of exclusion: the key, or the position for a message without a key or an order."""
    unit = row.position if row.key is None or segment.rules.order == "none" else row.key
    return whole(row.partition), unit
