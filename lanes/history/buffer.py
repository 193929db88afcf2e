"""The bounded buffer between the event loop, which creates rows, and the thread, which writes rows.

The event loop never waits for the thread. The buffer drops a row that does not fit, and stores a ``dropped`` row
instead. The ``dropped`` row has the number of the last missing row. The field ``count`` of the ``dropped`` row is the
number of missing rows, including the last one.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

DROPPED: Final = ',"event":"dropped",'
END: Final = ',"event":"end",'
"""The part of a row that names the event."""

WAKE_ROWS: Final = 4_096
"""Number of rows that wakes the thread; fewer rows wait until the thread reads the buffer at its next interval."""

TAKE_ROWS: Final = 4_096
TAKE_BYTES: Final = 2 << 20
"""Maximum number of bytes, plus one row, that the thread takes in one step."""

_ROW: Final = re.compile(r'\{"n":(\d+),"event":"[^"]*"(,"member":"[^"]*","mono":[\d.]+,"wall":[\d.]+)')


class RowBuffer:
    """Rows as lines, added by one thread and taken by another thread.

    The adding thread calls ``put``, or appends to ``rows`` and then calls ``added``. ``dropped`` is the number of
    dropped rows.
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
        # Only one thread writes each counter, so the counters need no lock.
        self._added = self._taken = 0
        # The lock protects the last row, because giving up a row replaces the last row.
        self._lock = threading.Lock()
        self._marker = ""
        self._count = 0

    def __repr__(self) -> str:
        return f"<RowBuffer: {len(self.rows)} rows, {self._added - self._taken} bytes, {self.dropped} dropped>"

    def added(self, size: int, *, whole: bool = False) -> bool:
        """Count the ``size`` of appended rows, in bytes.

        If the buffer is full, drop the last row and return False. With ``whole`` the buffer keeps every row, even when
        it is full.
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
        """Add all lines. If the buffer is full and ``whole`` is False, add no line and return False."""
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
        """Remove and return the oldest rows. An empty buffer returns an empty result."""
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
        """Whether the buffer is more than half full."""
        return 2 * len(self.rows) > self.limit or 2 * (self._added - self._taken) > self._bytes

    def _full(self) -> bool:
        return len(self.rows) > self.limit or self._added - self._taken > self._bytes

    def _mark(self, last: str, count: int) -> None:
        """Drop ``count`` rows up to ``last``. One ``dropped`` row counts all consecutive missing rows."""
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
    """Make the row for ``count`` missing rows up to the row ``last``, with the number and time of ``last``."""
    found = _found(last)
    return f'{{"n":{found[1]},"event":"dropped"{found[2]},"count":{count}}}\n'


def number_of(row: str) -> int:
    """Return the number of a row that ``lanes.history.recorder`` made."""
    return int(_found(row)[1])


def _found(row: str) -> re.Match[str]:
    found = _ROW.match(row)
    assert found is not None, "rows come from lanes.history.recorder"
    return found
