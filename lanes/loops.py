"""Calls into an event loop, asyncio or trio, from tasks, callbacks and other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import anyio


def entry_of_loop() -> Callable[[Callable[[], None]], object]:
    """Return a function that schedules calls on the running event loop, from any thread.

    The returned function raises ``RuntimeError`` when the loop is closed.
    """
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        return asyncio.get_running_loop().call_soon_threadsafe
    import trio

    return trio.lowlevel.current_trio_token().run_sync_soon


class ThreadSafeCall:
    """A callable that calls a function on the event loop on which the object was made. Does not block.

    In a task of that loop, the function is called at once. From a callback of the loop, such as a signal handler, or
    from another thread, ``wake`` is called in the next turn of the loop. The task that ``wake`` wakes then calls
    ``serve``. After the loop is closed, no function is called.

    Args:
        function: Function to call.
        wake: Function that wakes the task that calls ``serve``.
    """

    def __init__(self, function: Callable[[], None], wake: Callable[[], None]) -> None:
        self._function = function
        self._wake = wake
        self._asked = False
        self._enter = entry_of_loop()

    def __call__(self) -> None:
        try:
            here = entry_of_loop() == self._enter
        except RuntimeError:
            # No task runs here.
            here = False
        if here:
            self._function()
        else:
            with suppress(RuntimeError):
                self._enter(self._ask)

    def serve(self) -> None:
        """Call the function if a callback or a thread has requested it. Must be called in a task of the loop."""
        if self._asked:
            self._asked = False
            self._function()

    def _ask(self) -> None:
        self._asked = True
        self._wake()
