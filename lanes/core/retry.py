"""What follows a failed attempt: hold the head of the lane for a while, or give the message up.

Exponential backoff with full jitter (Brooker, "Exponential Backoff And Jitter", 2015): before attempt n + 1 the
lane waits a random time between 0 and min(``max_backoff``, ``backoff`` · 2ⁿ⁻¹).
"""

from __future__ import annotations

from typing import Final

from lanes.core.types import Failure

EXHAUSTED: Final = -1.0
"""The answer of ``delay`` for "no further attempt"; every real delay is 0 or more."""

_DOUBLINGS_LIMIT: Final = 60
"""Beyond this many doublings any backoff is above any ``max_backoff``; keeps 2ⁿ a small number."""


class RetryPolicy:
    """``attempts`` in all, the first one included; ``backoff`` and ``max_backoff`` in seconds."""

    __slots__ = ("attempts", "backoff", "max_backoff")

    def __init__(self, attempts: int, backoff: float, max_backoff: float) -> None:
        self.attempts = attempts
        self.backoff = backoff
        self.max_backoff = max_backoff

    def delay(self, attempt: int, failure: Failure) -> float:
        """Seconds to hold after the failed ``attempt`` (1, 2, …), or ``EXHAUSTED``."""
        if failure.terminal or attempt >= self.attempts:
            return EXHAUSTED
        if failure.delay is not None:
            return failure.delay
        ceiling = min(self.max_backoff, self.backoff * 2.0 ** min(attempt - 1, _DOUBLINGS_LIMIT))
        return failure.chance * ceiling
