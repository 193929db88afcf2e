"""Passes only one cancellation to a call. Needs asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in a separate task, and return its result. A cancellation of the caller reaches the task once.

    A cancelled scope cancels its tasks again in each iteration of the event loop. psycopg asks the server to cancel a
    running statement. A second cancellation would interrupt this request and log a warning.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        raise
