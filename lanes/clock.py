"""The clock of every decision: monotonic, and it counts the time that the machine was suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Clock", "monotonic"]

Clock = Callable[[], float]
"""Returns seconds from an arbitrary start; never goes back."""


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Without CLOCK_BOOTTIME (macOS) the clock stops while suspended; the standard library has no better one.
monotonic: Final[Clock] = _boot_time if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds, including those of a suspended machine where the system counts them."""
