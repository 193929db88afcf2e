"""The failures of events: functions of case and step, so parent and worker compute the same failures."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

POISON: Final = 1 << 30
"""Number of failing attempts of an event that never succeeds."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The shares of the events that fail.

    Attributes:
        fail_every: Average number of events for each event that fails once or twice; 0 = no event fails.
        poison_every: Average number of events for each event that always fails; 0 = no event always fails.
    """

    fail_every: int = 100
    poison_every: int = 5_000

    def failures(self, case: str, step: int) -> int:
        """Return the number of failing attempts of this event: 0, 1, 2 or ``POISON``."""
        number = draw(f"{case}/{step}".encode())
        if self.poison_every and number % self.poison_every == 0:
            return POISON
        if self.fail_every and number % self.fail_every == 1 % self.fail_every:
            return 1 + (number >> 16) % 2
        return 0


def draw(name: bytes) -> int:
    """Return a pseudo-random 32-bit number that depends only on ``name``."""
    return zlib.crc32(name)
