"""How long a run of the demo takes, and whether it still moves."""

from __future__ import annotations

from typing import Final

from lanes.clock import monotonic

_QUIET: Final = 2.0
"""Seconds without a change after which nothing more comes from workers that have nothing left."""


class Pace:
    """From ``begin`` on, by the process's own clock. All times are in seconds."""

    def __init__(self) -> None:
        self._seen: tuple[int, ...] = ()
        self._begun = 0.0
        self._changed = 0.0
        self._done_at = 0.0

    def begin(self) -> None:
        """The main part begins now."""
        self._begun = self._changed = self._done_at = monotonic()

    def moved(self) -> None:
        """Something that counts as a change has just happened."""
        self._changed = monotonic()

    def done(self) -> None:
        """An event was done just now."""
        self._done_at = monotonic()

    @property
    def elapsed(self) -> float:
        """From the beginning until now."""
        return monotonic() - self._begun

    @property
    def seconds(self) -> float:
        """From the beginning to the last event that was done."""
        return self._done_at - self._begun

    @property
    def quiet(self) -> float:
        """Since the last change."""
        return monotonic() - self._changed

    def look(self, seen: tuple[int, ...], *, answering: bool) -> None:
        """Compare the figures with the last ones; a server that does not answer counts as a change."""
        if seen != self._seen or not answering:
            self._seen = seen
            self.moved()

    def no_more(self, missing: int, in_flight: int) -> bool:
        """Whether none of the ``missing`` events can still come, when the server has none left.

        An event that is missing once nothing moves is lost, and the audit reports it.
        """
        return missing <= 0 or (self.quiet > _QUIET and not in_flight)
