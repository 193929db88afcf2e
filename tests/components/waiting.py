"""Waits for a condition, without a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable

_POLL_SECONDS = 0.01


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = 60.0) -> None:
    """Block until `condition()` is true. Raises `TimeoutError`, with `what` in its text, after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(_POLL_SECONDS)
