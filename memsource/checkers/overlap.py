"""One handler of a key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from memsource.checkers.assignments import Assignments
from memsource.checkers.deadlines import Drain, timeout_of
from memsource.checkers.verdict import Findings, Handler, Verdict, at
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Assignment, Timeline

__all__ = ["NoOverlap"]

_Start = tuple[Segment, Row]


class NoOverlap:
    """At most one handler of a key runs at any time.

    A handler runs from ``started`` to ``ended``, or to its process's last row when the process crashed. Within a
    member handlers of a key never overlap, across its assignments neither. Across members they may only where
    the assignment of the one that started first was *lost*: its handlers run on until they are cancelled; or where
    the broker had taken that of either, and its process had not heard of that when it started. Where the assignment
    that started first had a lease, they may only from its deadline on, whatever its process knew, and nothing starts
    or is acknowledged in an assignment behind its own deadline or its loss. A
    message without a key, and every message under the order ``none``, is only kept from running beside itself, and not
    after its assignment was lost. Where keys share a lane, their own promises are judged, not the lane's.

    ``late``: processes stood still in this run, so that the grace of a drain may have passed before they could take a
    step. What had started before the drain's deadline and was cancelled may then run on beside the next owner's.
    """

    name = "NoOverlap"

    def __init__(self, timeline: Timeline, *, late: bool = False) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._running: dict[tuple[str, str | int], list[_Start]] = {}
        # (segment, partition, assignment) -> number of the ``lost`` row
        self._lost = {
            (segment, row.partition, row.assignment): row.n
            for segment in timeline.segments
            for row in segment.rows
            if row.event == "lost"
        }
        self._taken = timeline.taken
        self._deadlines = timeline.deadlines
        # What the process knew of its leases so far.
        self._leases: dict[Assignment, float] = {}
        self._drains = Assignments(Drain) if late else None
        self._outlived: set[tuple[Segment, str, int, int]] = set()

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "leased": self._leased,
            "started": self._started,
            "ack": self._ack,
            "ended": self._ended,
            "zombie": self._ended,
            "revoking": self._revoking,
            "hastened": self._revoking,
            "drained": self._drained,
            "gap": self._over,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict(across=True)

    def _started(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        if row.mono >= self._leases.get((segment, row.partition, row.assignment), inf):
            self._findings.violation(segment, row, "started when its own lease had run out")
        name = _name(segment, row)
        running = self._running.setdefault(name, [])
        unaware = self._unaware(segment, row)
        for other, start in running:
            # A lane waits for a handler of a lost assignment, but a message without a lane has none.
            same = other is segment and (isinstance(name[1], str) or row.assignment == start.assignment)
            leased = other is not segment and self._leased_at(other, start, row)
            if same or leased or (not unaware and self._exclusive(other, start)):
                what = f"started while position {start.position} of its key was running"
                self._findings.violation(segment, row, f"{what} ({at(other, start)})")
                break
        running.append((segment, row))

    def _leased(self, segment: Segment, row: Row) -> None:
        self._leases[segment, row.partition, row.assignment] = row.number

    def _leased_at(self, other: Segment, start: Row, row: Row) -> bool:
        """Whether the lease of an assignment certainly held when a message was started elsewhere."""
        deadline = self._deadlines.get((other, start.partition, start.assignment), 0.0)
        return row.mono < deadline and start.partition not in self._incomparable

    def _ack(self, segment: Segment, row: Row) -> None:
        assignment = segment, row.partition, row.assignment
        deadline = self._deadlines.get(assignment)
        if deadline is not None and (row.mono >= deadline or row.n > self._lost.get(assignment, inf)):
            self._findings.violation(segment, row, "acknowledged when its lease had run out or was lost")

    def _exclusive(self, other: Segment, start: Row) -> bool:
        """Whether a handler of another member or assignment may certainly not run beside this one."""
        if (other, start.partition, start.assignment) in self._deadlines or start.partition in self._incomparable:
            return False
        if other.gaps:
            # A gap may hide that the partition was lost, even one that comes later.
            return False
        if (other, start.partition, start.assignment, start.position) in self._outlived:
            return False
        lost = self._lost.get((other, start.partition, start.assignment), 0)
        return lost < start.n and not self._unaware(other, start)

    def _unaware(self, segment: Segment, row: Row) -> bool:
        """Whether the broker has taken its partition, and its process had not heard of that when it started."""
        assignment = segment, row.partition, row.assignment
        return assignment in self._taken and row.n < self._lost.get(assignment, inf)

    def _revoking(self, segment: Segment, row: Row) -> None:
        drain = None if self._drains is None else self._drains.of(segment, row)
        timeout = timeout_of(segment, row)
        if drain is not None and timeout is not None:
            drain.begin(row.mono, timeout)

    def _drained(self, segment: Segment, row: Row) -> None:
        drain = None if self._drains is None else self._drains.known(segment, row)
        if drain is None:
            return
        assignment = segment, row.partition, row.assignment
        for running in self._running.values():
            for other, start in running:
                if (other, start.partition, start.assignment) == assignment and start.mono <= drain.deadline:
                    self._outlived.add((*assignment, start.position))

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

    def _over(self, segment: Segment, row: Row) -> None:
        """Nothing is known to run any more: the process is gone, or handlers may have ended in a gap."""
        for name in list(self._running):
            running = [(other, start) for other, start in self._running[name] if other is not segment]
            if running:
                self._running[name] = running
            else:
                del self._running[name]


def _name(segment: Segment, row: Row) -> tuple[str, str | int]:
    """What names the messages of which one runs at a time: their key, or where they have no order, the position."""
    return row.partition, row.position if row.key is None or segment.rules.order == "none" else row.key
