"""The one clock that decides anything: monotonic, and counting the time a machine was suspended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["Clock", "monotonic"]

Clock = Callable[[], float]
"""Seconds from an arbitrary start; never goes back."""


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# Elsewhere (macOS) the monotonic clock stops during a suspend; there is no better one in the standard library.
monotonic: Final[Clock] = _boot_time if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds, those of a suspended machine included where the system counts them."""
