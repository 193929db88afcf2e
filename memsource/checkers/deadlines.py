"""Deadlines, by the clock of the process that had to keep them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Final

from memsource.checkers.verdict import Findings
from memsource.history.reader import Segment
from memsource.history.rows import Row

__all__ = ["MARGIN", "SILENT", "Deadlines", "Drain", "timeout_of", "well_nigh"]

MARGIN: Final = 5.0
"""Seconds that a process may be late by default: its loop, its disk and its machine are somebody else's, too."""

SILENT: Final = "deadlines passed while the process wrote nothing: it was suspended, or it was late"
"""The doubt about a process that missed a deadline in its sleep, or was never told of it."""

_WELL_NIGH: Final = 0.9
"""Two clocks measure a drain: the engine's, which writes the rows, and the loop's, which waits."""


class Deadlines:
    """Judges what came late by more than ``margin`` seconds.

    A process that wrote nothing from its deadline on until it acted may have been suspended: that is a doubt, and no
    violation. In virtual time, with a small margin, nothing is ever late for another reason than a mistake or a freeze.
    """

    def __init__(self, findings: Findings, margin: float) -> None:
        self._findings = findings
        self._margin = margin
        self._times: dict[Segment, list[float]] = {}

    def check(self, segment: Segment, row: Row, deadline: float, what: str) -> None:
        """What was due at ``deadline`` comes with this row, or has not come by then."""
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


class Drain:
    """Of one assignment: ``since`` when it is drained, None before; until when; and how many of its handlers run."""

    __slots__ = ("deadline", "running", "since", "timeout")

    def __init__(self) -> None:
        self.running = 0
        self.since: float | None = None
        self.timeout = 0.0
        self.deadline = 0.0

    def begin(self, now: float, timeout: float) -> None:
        """``timeout`` seconds from ``now``, unless an earlier deadline stands."""
        deadline = now + timeout
        if self.since is None:
            self.since, self.timeout, self.deadline = now, timeout, deadline
        elif deadline < self.deadline:
            self.timeout, self.deadline = deadline - self.since, deadline


def timeout_of(segment: Segment, row: Row) -> float | None:
    """The seconds that a ``revoking`` or ``hastened`` row gives a drain; None = the history does not say."""
    return row.number if row.number >= 0 else segment.rules.drain_timeout


def well_nigh(took: float, limit: float) -> bool:
    """Whether a wait of ``took`` seconds, by the rows, may have been one that ended at its ``limit``."""
    return took >= _WELL_NIGH * limit
