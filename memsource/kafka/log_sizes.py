"""The bytes of one partition's log, for retention by size."""

from __future__ import annotations

from bisect import bisect_right


class LogSizes:
    """The number of bytes below each end of a log, without the deleted part.

    Attributes:
        total: Number of bytes that were ever written.
    """

    def __init__(self) -> None:
        self.total = 0
        # Rising ends of the log after each write, and the bytes below each end.
        self._ends: list[int] = []
        self._below: list[int] = []

    def append(self, end: int, size: int) -> None:
        """Record a write of ``size`` bytes, after which the log ends at ``end``."""
        self.total += size
        self._ends.append(end)
        self._below.append(self.total)

    def above(self, position: int) -> int:
        """Return the number of bytes above an undeleted position."""
        at = bisect_right(self._ends, position)
        return self.total - self._below[at] if at < len(self._ends) else 0

    def begin(self, limit: int, stable: int) -> int:
        """Return the position at which a log that keeps ``limit`` bytes begins.

        Args:
            limit: Minimum number of newest bytes that the log keeps.
            stable: End of the part that retention may delete.

        Returns:
            The position; 0 = no deletion.
        """
        at = min(bisect_right(self._below, self.total - limit), bisect_right(self._ends, stable))
        return self._ends[at - 1] if at else 0

    def trim(self, before: int) -> None:
        """Forget the writes below a position. Idempotent."""
        at = bisect_right(self._ends, before)
        del self._ends[:at]
        del self._below[:at]
