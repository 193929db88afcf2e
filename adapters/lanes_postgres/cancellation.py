"""A call that a cancellation reaches once. Needs asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


async def cancelled_once(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine in a separate task, and return its result. A cancellation of the caller reaches the task once.

    A cancelled scope cancels its tasks in each turn of the loop. psycopg cancels a running statement at the server, and
    a second cancellation would interrupt this request and log a warning.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        raise
