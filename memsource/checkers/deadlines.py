"""Deadlines, by the clock of the process that must meet them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from operator import attrgetter
from typing import Final

from memsource.checkers.assignments import AssignmentChecker, State
from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row
from memsource.history.timeline import Timeline

MARGIN: Final = 5.0
"""Seconds that a process may be late by default, because other work shares its loop, disk and machine."""

SILENT: Final = "deadlines passed while the process wrote nothing: it was suspended, or it was late"
"""The doubt about a process that missed a deadline while it wrote no row."""

FREEZE: Final = 1.0
"""Seconds without a row that may be a freeze."""

_WELL_NIGH: Final = 0.9
"""Share of a limit after which a wait may have timed out. The clocks of the rows and of the loop differ."""


class Deadlines:
    """The judge of actions that happen later than ``margin`` seconds after their deadline.

    A delay is a violation if the process wrote a row after the deadline and more than ``margin`` seconds before the
    action. If the process wrote no row in the meantime, a suspend may have caused the delay, which then counts as a
    doubt. In virtual time, only a fault of the process or a freeze causes a delay.
    """

    def __init__(self, findings: Findings, margin: float) -> None:
        self._findings = findings
        self._margin = margin
        self._times: dict[Segment, list[float]] = {}

    def check(self, segment: Segment, row: Row, deadline: float, what: str) -> None:
        """Judge an action that was due at ``deadline``. At ``row`` the action happens, or is still missing."""
        if row.mono <= deadline + self._margin:
            return
        times = self._times.get(segment)
        if times is None:
            # The clock reading of a row may be slightly older than the reading of the previous row.
            times = self._times[segment] = list(accumulate((row.mono for row in segment.rows), max))
        awake = times[min(bisect_left(times, deadline), len(times) - 1)]
        if row.mono - awake > self._margin:
            self._findings.violation(segment, row, f"{what} {row.mono - deadline:.3f} s late")
        else:
            self._findings.doubt(SILENT)


class TimedChecker(AssignmentChecker[State]):
    """A checker of deadlines. An action may be ``margin`` seconds late; ``margin`` is 0 or more."""

    def __init__(self, timeline: Timeline, *, margin: float = MARGIN) -> None:
        super().__init__(timeline)
        self._deadlines = Deadlines(self._findings, margin)


class Drain:
    """The drain of one assignment: beginning (None before the drain), timeout, deadline and running handlers."""

    __slots__ = ("deadline", "running", "since", "timeout")

    def __init__(self) -> None:
        self.running = 0
        self.since: float | None = None
        self.timeout = 0.0
        self.deadline = 0.0

    def begin(self, now: float, timeout: float) -> None:
        """Set the deadline to ``timeout`` seconds after ``now``, unless an earlier deadline is set."""
        deadline = now + timeout
        if self.since is None:
            self.since, self.timeout, self.deadline = now, timeout, deadline
        elif deadline < self.deadline:
            self.timeout, self.deadline = deadline - self.since, deadline


def timeout_of(segment: Segment, row: Row) -> float | None:
    """Return the timeout of a drain in seconds, from a ``revoking`` or ``hastened`` row; None = unknown."""
    return row.number if row.number >= 0 else segment.rules.drain_timeout


def well_nigh(took: float, limit: float) -> bool:
    """Return whether a wait of ``took`` seconds, measured between rows, may have ended at its ``limit``."""
    return took >= _WELL_NIGH * limit


def froze_before(segment: Segment, row: Row) -> bool:
    """Return whether a freeze may precede ``row``, and the process has started no message since."""
    rows = segment.rows
    later = row.mono
    for index in range(bisect_left(rows, row.n, key=attrgetter("n")) - 1, -1, -1):
        each = rows[index]
        if later - each.mono >= FREEZE:
            return True
        if each.event == "started":
            return False
        later = each.mono
    return False
