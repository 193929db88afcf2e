"""Waiting in virtual time for what nobody announces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import anyio

__all__ = ["until"]

POLL: Final = (0.2, 5.0)


async def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait for a condition, at most so long; whether it came true."""
    with anyio.move_on_after(timeout):
        pause = POLL[0]
        while not condition():
            await anyio.sleep(pause)
            pause = min(pause * 1.5, POLL[1])
    return condition()
