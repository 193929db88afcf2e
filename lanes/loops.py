"""The event loop that something runs on, from wherever it is called: asyncio or trio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import anyio

__all__ = ["ThreadSafeCall", "entry_of_loop"]


def entry_of_loop() -> Callable[[Callable[[], None]], object]:
    """What calls a function on the running event loop, from any thread; ``RuntimeError`` when the loop is gone."""
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        return asyncio.get_running_loop().call_soon_threadsafe
    import trio

    return trio.lowlevel.current_trio_token().run_sync_soon


class ThreadSafeCall:
    """Calls ``function`` on the event loop that this is made on, whoever asks for it and where.

    In a task of that loop: at once. In a callback of the loop, such as a handler of a signal, where no task can be
    started, and in other threads: ``wake`` is called in the loop's next turn, for a task that then calls ``serve``.
    Where the loop is closed nothing is called. Does not block.
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
            # No task runs here, as far as the libraries can tell.
            here = False
        if here:
            self._function()
        else:
            with suppress(RuntimeError):
                self._enter(self._ask)

    def serve(self) -> None:
        """Call it for whoever asked and could not. To be called in a task of the loop."""
        if self._asked:
            self._asked = False
            self._function()

    def _ask(self) -> None:
        self._asked = True
        self._wake()
