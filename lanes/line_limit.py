"""The limit on repeated log lines: the log shows the first line of a kind, and later the number of further lines.

``LineLimit`` decides which lines the log shows, such as lines about failed attempts. ``FoldedLog`` writes the lines of
a broker's client to a logger. ``OutageLog`` writes the lines about an outage of any source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from lanes.dead_letter import printable
from lanes.source import Outage

FOLDED_FOR: Final = 10.0
"""Seconds after a line in which the object counts further lines of the same kind."""

_KINDS_LIMIT: Final = 50
"""Maximum number of kinds with separate counts."""

_OUTAGE_AFTER: Final = 3.0
"""Seconds without an answer before the first line about an outage."""

_OUTAGE_EVERY: Final = 60.0
"""Seconds between two lines about one outage."""

T = TypeVar("T")


@dataclass(slots=True)
class _Window(Generic[T]):
    """The lines of one kind since the last logged line.

    Attributes:
        since: Time of the last logged line, in seconds.
        count: Number of counted lines after the last logged line.
        latest: A list with the newest counted line; empty = no counted line.
    """

    since: float
    count: int
    latest: list[T]


@dataclass(frozen=True, slots=True)
class Counted(Generic[T]):
    """Lines of one kind that the log did not show.

    Attributes:
        kind: Kind of the lines.
        count: Number of lines, 1 or more.
        seconds: Length in seconds of the interval of the count.
        latest: The newest line.
    """

    kind: str
    count: int
    seconds: float
    latest: T


class LineLimit(Generic[T]):
    """Counts the repeated lines of each kind. Times are seconds of one clock. No method blocks.

    Args:
        others: Name of a common kind, which receives the lines of new kinds when too many kinds have counted lines.
    """

    def __init__(self, others: str) -> None:
        self._others = others
        self._windows: dict[str, _Window[T]] = {}

    def __len__(self) -> int:
        return len(self._windows)

    def logs(self, kind: str, line: T, now: float) -> bool:
        """Return whether the caller must log a line now. The object counts every other line."""
        window = self._windows.get(kind)
        if window is None and len(self._windows) >= _KINDS_LIMIT:
            self._forget(now)
            if len(self._windows) >= _KINDS_LIMIT:
                return self._count(self._windows.setdefault(self._others, _Window(now, 0, [])), line)
        if window is None or (not window.count and now >= window.since + FOLDED_FOR):
            self._windows[kind] = _Window(now, 0, [])
            return True
        return self._count(window, line)

    def next_at(self) -> float:
        """Return the time at which ``due`` returns counted lines; infinity = no counted line."""
        return min(
            (window.since + FOLDED_FOR for window in self._windows.values() if window.count), default=float("inf")
        )

    def due(self, now: float) -> list[Counted[T]]:
        """Remove and return the counted lines of each kind whose count has lasted ``FOLDED_FOR`` seconds or longer."""
        return self._take(now, FOLDED_FOR) if self.next_at() <= now else []

    def end(self, now: float) -> list[Counted[T]]:
        """Remove and return all counted lines."""
        return self._take(now, 0.0)

    def _count(self, window: _Window[T], line: T) -> Literal[False]:
        window.count += 1
        window.latest[:] = [line]
        return False

    def _forget(self, now: float) -> None:
        for kind, window in list(self._windows.items()):
            if not window.count and now >= window.since + FOLDED_FOR:
                del self._windows[kind]

    def _take(self, now: float, least: float) -> list[Counted[T]]:
        taken = []
        for kind, window in self._windows.items():
            seconds = now - window.since
            if window.count and seconds >= least:
                taken.append(Counted(kind, window.count, seconds, window.latest[0]))
                window.since, window.count = now, 0
                window.latest.clear()
        return taken


class FoldedLog:
    """Writes the lines of a broker's client to a logger, and counts repeated lines.

    Only one thread at a time may call the methods.

    Args:
        log: The logger.
        name: Name of the client's owner, which begins each line.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, log: logging.Logger, name: str, clock: Callable[[], float]) -> None:
        self._log = log
        self._name = name
        self._clock = clock
        self._limit: LineLimit[tuple[int, str]] = LineLimit("other lines")

    def write(self, level: int, kind: str, text: str) -> None:
        """Log or count a line. The object always logs a line at DEBUG.

        Args:
            level: Level of the line.
            kind: Text that is the same for all lines about one fact.
            text: The line.
        """
        if not self._log.isEnabledFor(level):
            return
        self.due()
        if level <= logging.DEBUG or self._limit.logs(kind, (level, text), self._clock()):
            self._log.log(level, "%s: %s", self._name, text)

    def due(self) -> None:
        """Log the counted lines that are due."""
        self._tell(self._limit.due(self._clock()))

    def end(self) -> None:
        """Log all counted lines. The caller makes this call when the client ends or works again."""
        self._tell(self._limit.end(self._clock()))

    def _tell(self, counted: list[Counted[tuple[int, str]]]) -> None:
        log = self._log
        for each in counted:
            level, text = each.latest
            log.log(level, "%s: %d more line(s) in %.1f s, the last: %s", self._name, each.count, each.seconds, text)


class OutageLog:
    """Writes a warning at the start of an outage and once a minute, and a line when a server answers again.

    Only one thread at a time may call the method.

    Args:
        log: The logger.
        name: Name of the source, which begins each line.
        server: Name for a server, such as ``broker``.
        waits: Clause about other work that waits, such as ``no commit is confirmed``.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, log: logging.Logger, name: str, server: str, waits: str, clock: Callable[[], float]) -> None:
        self._log = log
        self._name = name
        self._server = server
        self._waits = waits
        self._clock = clock
        self._since: float | None = None
        self._due = 0.0

    def look(self, outage: Outage | None) -> None:
        """Log a warning or the end of the outage, if a line is due.

        Args:
            outage: The current outage; None = a server answers.
        """
        now = self._clock()
        if outage is None:
            if self._since is not None:
                self._log.info("%s: a %s answers again after %.0f s", self._name, self._server, now - self._since)
            self._since = None
            return
        if outage.seconds < _OUTAGE_AFTER or (self._since is not None and now < self._due):
            return
        if self._since is None:
            self._since = now - outage.seconds
        self._due = now + _OUTAGE_EVERY
        # An error of lanes ends with its own remedy.
        remedy = (
            "" if "; " in outage.error else f". Start the {self._server}, or correct the network and the credentials"
        )
        self._log.warning(
            "%s: no %s has answered for %.0f s (%s). Until one answers, no message arrives and %s%s",
            self._name,
            self._server,
            outage.seconds,
            printable(outage.error) or "the client reports no error",
            self._waits,
            remedy,
        )
