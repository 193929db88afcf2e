"""Which events fail, and how often: a function of case and step, so that parent and worker agree without a word."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final

POISON: Final = 1 << 30
"""The number of failing attempts of an event that never succeeds."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """About one event in ``fail_every`` fails once or twice, about one in ``poison_every`` always; 0 = none."""

    fail_every: int = 100
    poison_every: int = 5_000

    def failures(self, case: str, step: int) -> int:
        """How many attempts of this event fail: 0, 1, 2 or ``POISON``."""
        number = draw(f"{case}/{step}".encode())
        if self.poison_every and number % self.poison_every == 0:
            return POISON
        if self.fail_every and number % self.fail_every == 1 % self.fail_every:
            return 1 + (number >> 16) % 2
        return 0


def draw(name: bytes) -> int:
    """A 32-bit number that looks random and is a function of ``name``."""
    return zlib.crc32(name)
