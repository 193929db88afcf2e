"""A task of a source in memory that runs beside its calls, on asyncio and on trio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

__all__ = ["Background"]


class Background:
    """``run`` as a task of its own, started at once. ``ended`` is set when it is over, ``failure`` is what it raised
    then; ``changed`` is called."""

    def __init__(self, run: Callable[[], Awaitable[None]], changed: Callable[[], None]) -> None:
        self.ended = anyio.Event()
        self.failure: Exception | None = None
        self._run = run
        self._changed = changed
        self._scope = anyio.CancelScope()
        # Held, or it could be collected while it runs.
        self._task: Any
        if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
            self._task = asyncio.get_running_loop().create_task(self._guarded())
        else:
            import trio

            self._task = trio.lowlevel.spawn_system_task(self._guarded)

    def __repr__(self) -> str:
        state = "ended" if self.ended.is_set() else "running"
        return f"<Background {state}>"

    def cancel(self) -> None:
        """Have it end at once. Idempotent."""
        self._scope.cancel()

    async def _guarded(self) -> None:
        try:
            with self._scope:
                await self._run()
        except Exception as error:
            self.failure = error
        finally:
            self.ended.set()
            self._changed()
