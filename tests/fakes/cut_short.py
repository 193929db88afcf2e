"""Cancels a call while it waits, on any event loop and at any load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, ParamSpec

import anyio
import anyio.lowlevel
import pytest

__all__ = ["cut_short"]

P = ParamSpec("P")

_TURNS: Final = 50


async def cut_short(call: Callable[P, Awaitable[object]], /, *arguments: P.args, **options: P.kwargs) -> None:
    """Begin a call, let every task run, and cancel the call. Fails if the call has already returned."""
    returned: list[object] = []

    async def run() -> None:
        returned.append(await call(*arguments, **options))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        for _ in range(_TURNS):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    if returned:
        pytest.fail(f"the call did not wait, and returned {returned[0]}")
