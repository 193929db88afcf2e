"""Decides how many idle workers to wake at once. The module is pure: it does no I/O and reads no clock.

A handler that suspends keeps its worker busy, so each ready lane needs a separate worker. Handlers that never suspend
run in sequence in the first woken worker, and every other woken worker finds no work. The limit therefore depends on
the share of handlers that suspend. The share is an average with more weight for later handlers.

All woken workers start their handlers in one turn of the event loop, which runs no other task during that turn. The
limit therefore also depends on the number of starts that take at most ``WAKE_SLICE``.
"""

from __future__ import annotations

import math
from typing import Final

TIME_SLICE: Final = 0.002
"""Seconds of one turn of the event loop in which handlers run that do not suspend, or in which the engine takes
delivered messages."""

WAKE_SLICE: Final = 0.00025
"""Seconds of one turn of the event loop in which woken workers start handlers. Handlers that start in one turn tend to
end in one turn, so a longer slice delays a timer twice."""

ALONE: Final = 1
"""Number of workers to wake together while no handler suspends. The first worker handles all messages. The first worker
wakes a second worker, which takes further messages if the first handler suspends.
"""

FEW: Final = 8
"""Number of workers to wake together as soon as a handler suspends."""

SURE: Final = 0.99
"""Share above which further suspensions do not count, because their effect on the share is small."""

_WEIGHT: Final = 1 / 16
"""Weight of one handler in the share."""

_NOTHING: Final = 1 / 64
"""Share below which all handlers count as handlers that never suspend."""


class WakeLimit:
    """The limit of one consumer.

    Args:
        concurrency: Maximum number of running handlers.
        grouped: Whether handlers that start together share one write of the history. If so, the limit initially allows
            all of them to start together.

    Attributes:
        share: Share of the last handlers that have suspended, 0 to 1.
        fits: Number of woken workers whose starts fit into ``WAKE_SLICE``.
    """

    __slots__ = ("_concurrency", "fits", "share")

    def __init__(self, concurrency: int, *, grouped: bool = False) -> None:
        self._concurrency = concurrency
        self.share = 1.0 if grouped else 0.0
        self.fits = concurrency if grouped else min(FEW, concurrency)

    def __call__(self, ready: int) -> int:
        """Return the number of workers to wake together for a number of ready lanes."""
        if not self.share:
            return ALONE
        return max(FEW, min(math.ceil(self.share * ready), self.fits))

    def suspended(self) -> None:
        """Count a handler that has suspended."""
        self.share += (1.0 - self.share) * _WEIGHT

    def returned(self, count: int) -> None:
        """Count handlers that have returned without suspending."""
        share: float = self.share * (1.0 - _WEIGHT) ** count
        self.share = share if share >= _NOTHING else 0.0

    def started(self, count: int, took: float) -> None:
        """Record that ``count`` woken workers have started handlers in one turn of the loop, in ``took`` seconds."""
        if took >= WAKE_SLICE:
            self.fits = max(FEW, min(int(count * WAKE_SLICE / took), self.fits))
        elif count >= self.fits and took < WAKE_SLICE / 2:
            self.fits = min(2 * self.fits, self._concurrency)
