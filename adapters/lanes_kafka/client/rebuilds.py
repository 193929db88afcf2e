"""Schedules the rebuilds of a client after permanent failures."""

from __future__ import annotations

from typing import Final

from lanes.clock import Clock

FIRST_PAUSE: Final = 1.0
"""Seconds before the first rebuild; each further pause is twice as long, up to ``LONGEST_PAUSE``."""

LONGEST_PAUSE: Final = 30.0
"""Maximum pause in seconds before a rebuild."""

HEALTHY_AFTER: Final = 300.0
"""Seconds without a failure after which the source may use all rebuilds again.

The interval is much longer than the longest pause before a rebuild. Two clients that fence each other in turn therefore
use up their rebuilds.
"""


class Rebuilds:
    """Decides whether and when the thread rebuilds a client after a permanent failure.

    The pauses grow exponentially and have no jitter. If two clients take the same ``group.instance.id`` from each
    other, one client must give up.

    Args:
        attempts: Maximum number of rebuilds, 0 or more, until the next ``HEALTHY_AFTER`` seconds without a failure.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, attempts: int, clock: Clock) -> None:
        self._attempts = self._left = attempts
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._healthy_since = clock()

    def built(self) -> None:
        """Record that the source has built a client."""
        self._healthy_since = self._clock()

    def next_pause(self) -> float | None:
        """Use up one rebuild. Returns the seconds before the rebuild; None = no rebuild is left."""
        now = self._clock()
        if now - self._healthy_since >= HEALTHY_AFTER:
            self._left, self._pause = self._attempts, FIRST_PAUSE
        self._healthy_since = now
        if not self._left:
            return None
        self._left -= 1
        pause, self._pause = self._pause, min(LONGEST_PAUSE, self._pause * 2)
        return pause
