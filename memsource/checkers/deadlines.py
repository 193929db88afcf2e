"""Deadlines, by the clock of the process that had to keep them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

from memsource.checkers.assignments import AssignmentChecker, State
from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

MARGIN: Final = 5.0
"""Seconds that a process may be late by default: its loop, its disk and its machine are somebody else's, too."""

SILENT: Final = "deadlines passed while the process wrote nothing: it was suspended, or it was late"
"""The doubt about a process that missed a deadline in its sleep, or was never told of it."""

_WELL_NIGH: Final = 0.9
"""Two clocks measure a drain: the engine's, which writes the rows, and the loop's, which waits."""


class Deadlines:
    """Judges actions that come later than their deadline and ``margin`` seconds.

    A process that wrote nothing between its deadline and its action may have been suspended. That is a doubt, no
    violation. In virtual time only a mistake or a freeze makes a process late.
    """

    def __init__(self, findings: Findings, margin: float) -> None:
        self._findings = findings
        self._margin = margin
        self._times: dict[Segment, list[float]] = {}

    def check(self, segment: Segment, row: Row, deadline: float, what: str) -> None:
        """Judge an action that was due at ``deadline`` and comes with this row, or is still missing then."""
        if row.mono <= deadline + self._margin:
            return
        times = self._times.get(segment)
        if times is None:
            # Rows may carry a clock reading that is a little older than that of the row before.
            times = self._times[segment] = list(accumulate((row.mono for row in segment.rows), max))
        awake = times[min(bisect_left(times, deadline), len(times) - 1)]
        if row.mono - awake > self._margin:
            self._findings.violation(segment, row, f"{what} {row.mono - deadline:.3f} s late")
        else:
            self._findings.doubt(SILENT)


class TimedChecker(AssignmentChecker[State]):
    """A checker of deadlines. ``margin``: seconds by which something may be late, 0 or more."""

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        super().__init__(timeline)
        self._deadlines = Deadlines(self._findings, margin)


class Drain:
    """The drain of one assignment: its beginning (None before), timeout, deadline and running handlers."""

    __slots__ = ("deadline", "running", "since", "timeout")

    def __init__(self) -> None:
        self.running = 0
        self.since: float | None = None
        self.timeout = 0.0
        self.deadline = 0.0

    def begin(self, now: float, timeout: float) -> None:
        """Set the deadline ``timeout`` seconds after ``now``, unless an earlier one stands."""
        deadline = now + timeout
        if self.since is None:
            self.since, self.timeout, self.deadline = now, timeout, deadline
        elif deadline < self.deadline:
            self.timeout, self.deadline = deadline - self.since, deadline


def timeout_of(segment: Segment, row: Row) -> float | None:
    """The seconds that a ``revoking`` or ``hastened`` row gives a drain; None = the history does not say."""
    return row.number if row.number >= 0 else segment.rules.drain_timeout


def well_nigh(took: float, limit: float) -> bool:
    """Whether a wait that took so long, by the rows, may have ended at its ``limit``."""
    return took >= _WELL_NIGH * limit
