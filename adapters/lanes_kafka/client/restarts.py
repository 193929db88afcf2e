"""How often, and after which pause, a client that has failed for good is made anew.

Exponential backoff without jitter: only clients of one name meet here, and of two that take it from each other one
has to give up. A period of health gives back the attempts, as supervisors do.
"""

from __future__ import annotations

from typing import Final

from lanes.clock import Clock

FIRST_PAUSE: Final = 1.0
"""Seconds before the first attempt; before each further one twice as long."""

LONGEST_PAUSE: Final = 30.0
"""Seconds before an attempt at most."""

HEALTHY_AFTER: Final = 300.0
"""Seconds without a failure after which all begins anew. Much more than the longest pause: of two clients that fence
each other in turn each is well for as long as the other one pauses."""


class Restarts:
    """``attempts``: how many there are without a period of health between them; 0 or more."""

    def __init__(self, attempts: int, clock: Clock) -> None:
        self._attempts = self._left = attempts
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._well_since = clock()

    def made(self) -> None:
        """A client was made."""
        self._well_since = self._clock()

    def next(self) -> float | None:
        """It has failed: take an attempt; returns the seconds to pause before it, None when none is left."""
        now = self._clock()
        if now - self._well_since >= HEALTHY_AFTER:
            self._left, self._pause = self._attempts, FIRST_PAUSE
        self._well_since = now
        if not self._left:
            return None
        self._left -= 1
        pause, self._pause = self._pause, min(LONGEST_PAUSE, self._pause * 2)
        return pause
