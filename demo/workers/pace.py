"""The duration of a run of the demo, and the time since its last progress."""

from __future__ import annotations

from math import inf
from typing import Final

from lanes.clock import monotonic

_QUIET: Final = 2.0
"""Seconds without progress after which the demo expects no further event from idle workers."""

_SLOW: Final = 1.0
"""Seconds without an answer after which a request that a worker sent in the meantime may have failed."""


class Pace:
    """Times since ``begin``, in seconds of the process's clock."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._begun = 0.0
        self._changed = 0.0
        self._done_at = 0.0
        self._asked_at = inf

    def begin(self) -> None:
        """Record the start of the main part."""
        self._begun = self._changed = self._done_at = monotonic()

    def moved(self) -> None:
        """Record progress of the run at the current time."""
        self._changed = monotonic()

    def done(self) -> None:
        """Record the end of an event at the current time."""
        self._done_at = monotonic()

    def ask(self) -> None:
        """Record the begin of a question to the broker at the current time."""
        self._asked_at = monotonic()

    def answered(self) -> None:
        """Record the end of the question."""
        self._asked_at = inf

    @property
    def slow(self) -> bool:
        """Whether the broker has left a question unanswered for so long that requests of workers may have failed."""
        return monotonic() - self._asked_at > _SLOW

    @property
    def elapsed(self) -> float:
        """Seconds since ``begin``."""
        return monotonic() - self._begun

    @property
    def seconds(self) -> float:
        """Seconds from ``begin`` to the last finished event."""
        return self._done_at - self._begun

    @property
    def quiet(self) -> float:
        """Seconds since the last progress."""
        return monotonic() - self._changed

    def look(self, seen: tuple[int, ...], *, answering: bool) -> None:
        """Record progress if the figures differ from the last figures, or if the server does not answer."""
        if seen != self._seen or not answering:
            self._seen = seen
            self.moved()

    def no_more(self, missing: int, in_flight: int) -> bool:
        """Return whether all events are finished, or idle workers have made no progress for ``_QUIET`` seconds.

        The audit then reports the ``missing`` events as lost.
        """
        return missing <= 0 or (self.quiet > _QUIET and not in_flight)
