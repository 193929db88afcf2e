"""Calls into an event loop of asyncio or trio, from tasks, callbacks and other threads."""

from __future__ import annotations

import asyncio
import math
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Final

import anyio
import anyio.lowlevel

BACKENDS: Final = ("asyncio", "auto", "trio", "uvloop")
"""The values of ``backend`` of ``lanes.main``."""


def has_uvloop() -> bool:
    """Return whether uvloop is installed, without an import."""
    return find_spec("uvloop") is not None


def has_trio() -> bool:
    """Return whether trio is installed, without an import."""
    return find_spec("trio") is not None


def backend_arguments(backend: str) -> dict[str, Any]:
    """Return the arguments by which ``anyio.run`` starts an event loop.

    Args:
        backend: One of ``BACKENDS``. ``uvloop`` and ``trio`` require an installation.

    Returns:
        The name of the library and its options. ``auto`` = uvloop if it is installed, else asyncio.
    """
    if backend == "uvloop" or (backend == "auto" and has_uvloop()):
        return {"backend": "asyncio", "backend_options": {"use_uvloop": True}}
    return {"backend": "asyncio" if backend == "auto" else backend}


def entry_of_loop() -> Callable[[Callable[[], None]], object]:
    """Return a function that schedules calls on the running event loop, from any thread.

    The returned function raises ``RuntimeError`` when the loop is closed.
    """
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        return asyncio.get_running_loop().call_soon_threadsafe
    import trio

    return trio.lowlevel.current_trio_token().run_sync_soon


@types.coroutine
def _turn() -> Generator[None, None, None]:
    yield


def turn_of_loop() -> Callable[[], Awaitable[None]]:
    """Return a function that gives the running loop one turn, when a task of the loop awaits its result.

    A caller can cancel the await, as with ``anyio.lowlevel.checkpoint``. On asyncio, the checkpoint of anyio takes
    several times as long.
    """
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        return _turn
    return anyio.lowlevel.checkpoint


def loop_check() -> Callable[[], bool]:
    """Return a function that returns whether a task of the running event loop makes the call.

    The result is False in another thread, and in a callback of the loop that cannot start tasks.
    """
    entry = entry_of_loop()

    def is_here() -> bool:
        try:
            return entry_of_loop() == entry
        except Exception:
            # No task runs here. anyio and trio raise different errors.
            return False

    return is_here


def runs_a_loop() -> bool:
    """Return whether a task or a callback of an event loop makes this call."""
    try:
        entry_of_loop()
    except Exception:
        # anyio and trio raise different errors where no loop runs.
        return False
    return True


class ThreadSafeCall:
    """A callable that calls a function on one event loop, on which the program created the object.

    The call does not block.

    In a task of that loop, the object calls the function at once. After a call from another thread, or from a callback
    of the loop such as a signal handler, the loop calls ``wake`` in its next turn. The task that ``wake`` wakes then
    calls ``serve``. After the loop is closed, the object calls no function.

    Args:
        function: Function to call.
        wake: Function that wakes the task that calls ``serve``.
        before: Function that a callback or another thread calls at once, before it requests the call of ``function``;
            None = no function.
    """

    def __init__(
        self, function: Callable[[], None], wake: Callable[[], None], before: Callable[[], None] | None = None
    ) -> None:
        self._function = function
        self._wake = wake
        self._before = before
        self._asked = False
        self._enter = entry_of_loop()
        self._is_here = loop_check()

    def __call__(self) -> None:
        if self._is_here():
            self._function()
        else:
            if self._before is not None:
                self._before()
            with suppress(RuntimeError):
                self._enter(self._ask)

    def serve(self) -> None:
        """Call the function if a callback or a thread has requested it.

        The caller must call this method in a task of the loop.
        """
        if self._asked:
            self._asked = False
            self._function()

    def _ask(self) -> None:
        self._asked = True
        self._wake()


class Doorbell:
    """Wakes the one task that waits.

    The object belongs to one event loop, asyncio or trio. A ring while no task waits has no effect. With asyncio a wait
    takes about a third of the time of ``anyio.Event`` within ``anyio.move_on_after``, because later waits use the same
    timer. A timer that ends too early starts again for the rest of the time.
    """

    __slots__ = ("_event", "_loop", "_timer", "_timer_at", "_until", "_waiter")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = self._until = math.inf
        self._event: anyio.Event | None = None

    def __repr__(self) -> str:
        return "<Doorbell, waiting>" if self._waiter is not None or self._event is not None else "<Doorbell>"

    def ring(self) -> None:
        """Wake the waiting task.

        The call does not block. Idempotent. The caller must call this method on the event loop.
        """
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self._event is not None:
            self._event.set()

    async def wait(self, seconds: float = math.inf) -> None:
        """Wait for a ring, at most for a time. Cancel-safe. Only one task may wait at a time.

        Args:
            seconds: Maximum time in seconds. 0 or less = one turn of the loop; infinity = no bound.
        """
        loop = self._loop
        if loop is None:
            with suppress(RuntimeError):
                loop = self._loop = asyncio.get_running_loop()
            if loop is None:
                await self._wait_in_trio(seconds)
                return
        waiter = self._waiter = loop.create_future()
        self._until = loop.time() + seconds
        if self._until < self._timer_at:
            self._cancel_timer()
            self._set_timer(loop)
        try:
            await waiter
        except BaseException:
            # A timer that stays would keep this object, and what is rung, alive after the end of the run.
            self._cancel_timer()
            raise
        finally:
            self._waiter = None

    async def _wait_in_trio(self, seconds: float) -> None:
        event = self._event = anyio.Event()
        try:
            if seconds == math.inf:
                await event.wait()
            else:
                with anyio.move_on_after(max(0.0, seconds)):
                    await event.wait()
        finally:
            self._event = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_at = self._until
        self._timer = loop.call_at(self._until, self._time_is_up)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, math.inf

    def _time_is_up(self) -> None:
        at, self._timer, self._timer_at = self._timer_at, None, math.inf
        loop, waiter = self._loop, self._waiter
        if waiter is None or loop is None:
            return
        if self._until <= at:
            self.ring()
        elif self._until < math.inf:
            # The time of the present wait is not over.
            self._set_timer(loop)
