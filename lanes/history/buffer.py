"""The rows between the event loop, which makes them, and the thread that writes them: so many, and so many bytes.

The loop never waits. A row that does not fit is given up, and in its place there is a ``dropped`` row: it has the
number of the last row that is missing there, and ``count`` says how many are, that one included.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

__all__ = ["DROPPED", "END", "RowBuffer", "dropped_row", "number_of"]

DROPPED: Final = ',"event":"dropped",'
END: Final = ',"event":"end",'
"""In a row, these name its event."""

WAKE_ROWS: Final = 4_096
"""Rows for which the thread is woken; fewer wait until it looks by itself."""

TAKE_ROWS: Final = 4_096
TAKE_BYTES: Final = 2 << 20
"""What the thread takes at once, at most, give or take one row."""

_ROW: Final = re.compile(r'\{"n":(\d+),"event":"[^"]*"(,"member":"[^"]*","mono":[\d.]+,"wall":[\d.]+)')


class RowBuffer:
    """Rows as lines. ``append`` to ``rows`` and tell by ``added``, or ``put``; another thread takes them.

    Two threads may use it: one that adds, and one that takes. ``dropped`` counts the rows given up.
    """

    __slots__ = (
        "_added",
        "_bytes",
        "_count",
        "_lock",
        "_marker",
        "_taken",
        "_wake_at",
        "dropped",
        "limit",
        "rows",
        "wake",
    )

    def __init__(self, limit: int, size: int) -> None:
        self.rows: deque[str] = deque()
        self.limit = limit
        self.dropped = 0
        self.wake = threading.Event()
        self._bytes = size
        self._wake_at = min(WAKE_ROWS, limit)
        # Each is written by one thread alone, so neither needs the lock.
        self._added = self._taken = 0
        # Adding needs none, nor does taking by itself; giving up looks at the end and changes it.
        self._lock = threading.Lock()
        self._marker = ""
        self._count = 0

    def __repr__(self) -> str:
        return f"<RowBuffer: {len(self.rows)} rows, {self._added - self._taken} bytes, {self.dropped} dropped>"

    def added(self, size: int, *, whole: bool = False) -> bool:
        """Rows of ``size`` bytes were appended; False when there is no room: then the last of them was given up.

        ``whole``: nothing is given up, whatever is there already.
        """
        self._added += size
        rows = self.rows
        if len(rows) >= self._wake_at and not self.wake.is_set():
            self.wake.set()
        if whole or not self._full():
            return True
        if not size:
            return False
        with self._lock:
            if not self._full():
                return True
            row = rows.pop()
            self._added -= len(row)
            self._mark(row, 1)
        return False

    def put(self, lines: Sequence[str], *, whole: bool = False) -> bool:
        """Add all of these lines; or none of them where there is no room, but for ``whole``: then False."""
        if whole or not self._full():
            self.rows.extend(lines)
            self._added += sum(map(len, lines))
            if len(self.rows) >= self._wake_at and not self.wake.is_set():
                self.wake.set()
            return True
        with self._lock:
            self._mark(lines[-1], len(lines))
        return False

    def take(self) -> list[str]:
        """The oldest rows, as many as are taken at once; empty when there is none."""
        taken: list[str] = []
        size = 0
        with self._lock:
            rows = self.rows
            while rows and len(taken) < TAKE_ROWS and size < TAKE_BYTES:
                row = rows.popleft()
                taken.append(row)
                size += len(row)
            self._taken += size
        return taken

    @property
    def half_full(self) -> bool:
        """Whether more than half of what it may hold is there."""
        return 2 * len(self.rows) > self.limit or 2 * (self._added - self._taken) > self._bytes

    def _full(self) -> bool:
        return len(self.rows) > self.limit or self._added - self._taken > self._bytes

    def _mark(self, last: str, count: int) -> None:
        """These rows are given up, ``last`` of which was the last one: a row says so, one for all that follow."""
        rows = self.rows
        self.dropped += count
        if rows and rows[-1] is self._marker:
            self._added -= len(rows.pop())
            count += self._count
        self._count = count
        self._marker = dropped_row(last, count)
        rows.append(self._marker)
        self._added += len(self._marker)


def dropped_row(last: str, count: int) -> str:
    """The row that stands for ``count`` rows that are missing up to the row ``last``, with its number and time."""
    found = _found(last)
    return f'{{"n":{found[1]},"event":"dropped"{found[2]},"count":{count}}}\n'


def number_of(row: str) -> int:
    """The number of a row as ``lanes.history.recorder`` writes it."""
    return int(_found(row)[1])


def _found(row: str) -> re.Match[str]:
    found = _ROW.match(row)
    assert found is not None, "rows come from lanes.history.recorder"
    return found
