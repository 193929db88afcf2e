"""One handler of a key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from memsource.checkers.verdict import Findings, Handler, Verdict, at
from memsource.history import Segment
from memsource.rows import Row
from memsource.timeline import Timeline

_Start = tuple[Segment, Row]


class NoOverlap:
    """At most one handler of a key runs at any time.

    A handler runs from ``started`` to ``ended``, or to its process's last row when the process crashed. Within a
    member handlers of a key never overlap, across its assignments neither. Across members they may only where
    the assignment of the one that started first was *lost*: its handlers run on until they are cancelled; or where
    the broker had taken that of either, and its process had not heard of that when it started. A
    message without a key is only kept from running beside itself, and not after its assignment was lost.
    """

    name = "NoOverlap"

    def __init__(self, timeline: Timeline) -> None:
        self._findings = Findings(self.name, timeline)
        self._incomparable = timeline.incomparable
        self._running: dict[tuple[str, str | int], list[_Start]] = {}
        # (segment, partition, epoch) -> number of the ``lost`` row
        self._lost = {
            (segment, row.partition, row.epoch): row.n
            for segment in timeline.segments
            for row in segment.rows
            if row.event == "lost"
        }
        self._taken = timeline.taken

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "started": self._started,
            "ended": self._ended,
            "zombie": self._ended,
            "gap": self._over,
            "over": self._over,
        }

    def verdict(self) -> Verdict:
        return self._findings.verdict(across=True)

    def _started(self, segment: Segment, row: Row) -> None:
        self._findings.checked += 1
        name = (row.partition, row.position if row.key is None else row.key)
        running = self._running.setdefault(name, [])
        unaware = self._unaware(segment, row)
        for other, start in running:
            # A lane waits for a handler of a lost assignment, but a keyless message has none.
            same = other is segment and (row.key is not None or row.epoch == start.epoch)
            if same or (not unaware and self._exclusive(other, start)):
                what = f"started while position {start.position} of its key was running"
                self._findings.violation(segment, row, f"{what} ({at(other, start)})")
                break
        running.append((segment, row))

    def _exclusive(self, other: Segment, start: Row) -> bool:
        """Whether a handler of another member or assignment may certainly not run beside this one."""
        if start.partition in self._incomparable or other.gaps:
            # A gap may hide that the partition was lost, even one that comes later.
            return False
        lost = self._lost.get((other, start.partition, start.epoch), 0)
        return lost < start.n and not self._unaware(other, start)

    def _unaware(self, segment: Segment, row: Row) -> bool:
        """Whether the broker has taken its partition, and its process had not heard of that when it started."""
        assignment = segment, row.partition, row.epoch
        return assignment in self._taken and row.n < self._lost.get(assignment, inf)

    def _ended(self, segment: Segment, row: Row) -> None:
        name = (row.partition, row.position if row.key is None else row.key)
        running = self._running.get(name)
        if running is None:
            return
        for index, (other, start) in enumerate(running):
            if other is segment and start.position == row.position and start.epoch == row.epoch:
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
