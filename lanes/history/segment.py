"""The file under a history: lines appended by single writes, on a disk that may be full."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["HEAD_END", "GivenUp", "SegmentFile"]

HEAD_END: Final = "0}\n"
"""How the head must end: its last value is the ``incomplete`` digit, which can be overwritten in place."""

_log = logging.getLogger("lanes.history")


class GivenUp(NamedTuple):
    """What one ``append`` gave up: how many of the rows, and whether the marker before them."""

    rows: int
    marker: bool


_NOTHING: Final = GivenUp(0, False)


class SegmentFile:
    """An append-only file that begins with ``head``; ASCII lines, each with its newline.

    A line of which a part is in the file is *torn*: its rest is kept and goes first the next time, so that a
    failed write never damages the lines around it. The head counts as torn from the beginning, and is never
    given up. While anything is torn or was given up unseen, the digit at the end of the head is 1.

    Raises ``OSError`` when the file cannot be created; it must not exist. No other method raises or waits for
    more than one ``write(2)``.
    """

    __slots__ = ("_failing", "_fd", "_flag_at", "_size", "_torn", "path")

    def __init__(self, path: Path, head: str) -> None:
        # Readable by its owner alone: hashes of guessable keys can be matched against guesses.
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self.path = path
        self._torn = head
        self._flag_at = len(head) - len(HEAD_END)
        self._size = 0
        self._failing = False

    @property
    def whole(self) -> bool:
        """Whether every line given so far is in the file from its first to its last byte, or was given up."""
        return not self._torn

    def append(self, rows: Sequence[str], marker: str = "") -> GivenUp:
        """Write the rest of a torn line, then ``marker`` unless empty, then ``rows``, by one ``write(2)``."""
        lines = [line for line in (self._torn, marker) if line]
        before_rows = len(lines)
        lines += rows
        data = "".join(lines).encode("ascii")
        error: OSError | None = None
        try:
            count = os.write(self._fd, data)
        except OSError as failure:
            count, error = 0, failure
        self._size += count
        if count == len(data):
            self._torn = ""
            if self._failing:
                self._failing = False
                self._flag("0")
                _log.warning("history %s: writing works again; a row says how many were dropped", self.path)
            return _NOTHING
        first_lost = self._tear(lines, count)
        if not self._failing:
            self._failing = True
            reason = "short write" if error is None else error.strerror
            _log.warning(
                "history %s: writing failed (%s); the run goes on, rows are dropped and counted until its disk takes "
                "them again",
                self.path,
                reason,
            )
        self._flag("1")
        return GivenUp(len(lines) - max(first_lost, before_rows), bool(marker) and first_lost < before_rows)

    def close(self) -> None:
        """Close the file. What is torn stays torn. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            os.close(fd)
        except OSError as error:
            _log.warning("history %s: closing failed (%s): its last rows may be missing", self.path, error.strerror)

    def _tear(self, lines: list[str], count: int) -> int:
        """Keep the rest of the line at byte ``count`` if it was begun; returns the first line lost."""
        cut, end = 0, len(lines[0])
        while end <= count:
            cut += 1
            end += len(lines[cut])
        taken = count - (end - len(lines[cut]))
        # A line torn before this write stays torn even when none of its rest was taken now.
        if taken or (cut == 0 and self._torn):
            self._torn = lines[cut][taken:]
            return cut + 1
        self._torn = ""
        return cut

    def _flag(self, digit: str) -> None:
        if self._size <= self._flag_at:
            # The digit is not in the file yet: it is in the rest of the head.
            self._torn = self._torn[: -len(HEAD_END)] + digit + HEAD_END[1:]
            return
        try:
            # Linux appends even a pwrite while O_APPEND is set; nobody else uses this descriptor meanwhile.
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_APPEND)
            try:
                os.pwrite(self._fd, digit.encode(), self._flag_at)
            finally:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        except OSError as error:
            _log.warning(
                "history %s: cannot be marked as incomplete (%s): `lanes check` may not know that rows are missing",
                self.path,
                error.strerror,
            )
