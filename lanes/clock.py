"""The default clock, which is monotonic. On Linux the clock also advances while the machine is suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Clock", "monotonic"]

Clock = Callable[[], float]
"""A function whose result is the number of seconds since an arbitrary start, and never falls."""


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Without CLOCK_BOOTTIME, as on macOS, the clock stops while the machine is suspended.
monotonic: Final[Clock] = _boot_time if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""The monotonic clock in seconds. On systems with ``CLOCK_BOOTTIME`` the clock also counts the time in which the
machine is suspended.
"""
