"""The pause of a client's thread between two small reads.

The next read takes the messages that arrived during the pause, and the thread delivers them together. A delivery to the
event loop wakes several tasks, and therefore costs as much CPU as several messages.
"""

from __future__ import annotations

from typing import Final

REST: Final = 0.005
"""Seconds that the thread pauses after a small read that closely followed another read."""

SMALL: Final = 100
"""A read of fewer messages is small, if the read has emptied the client's queue."""


class ReadRest:
    """Decides how long the thread pauses before the next read.

    A single message never waits, because the pause begins with the second of two close reads.

    Attributes:
        until: Time at which the pause ends; 0 = no pause.
    """

    def __init__(self) -> None:
        self.until = self._read_at = 0.0

    def read(self, count: int, now: float, *, more: bool) -> None:
        """Record a read.

        Args:
            count: Number of the messages, 1 or more.
            now: Time of the clock, in seconds.
            more: Whether the client may have more messages.
        """
        is_close = now - self._read_at < 2 * REST
        self.until = now + REST if is_close and not more and count < SMALL else 0.0
        self._read_at = now
