"""A thread of an adapter as a task of the simulator: its steps alternate with the other tasks, in virtual time.

The adapter's code runs in a thread of the system, but only while the loop waits for it. At each pause the thread yields
to the loop. The chooser of the loop decides when the thread continues. A run therefore has one order of steps, as with
tasks. A freeze or crash of the member stops the member's threads too.

``SteppedThread``, ``SteppedQueue``, ``monotonic``, ``sleep`` and ``wait`` replace ``threading.Thread``,
``queue.SimpleQueue``, functions of ``time`` and ``concurrent.futures.wait`` in an adapter's modules. A simulated client
calls ``pause`` where a real client would block.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import inspect
import math
import threading
from asyncio.events import _set_running_loop
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from queue import Empty
from typing import Any, Final, Generic, TypeVar

from memsource.sim.loop.event_loop import SimLoop, current

T = TypeVar("T")

_running: Final[dict[int, SteppedThread]] = {}


class Ended(BaseException):
    """Ends a thread at its pause, because its run is over.

    Adapters catch ``Exception``, so this class does not extend it.
    """


class SteppedThread:
    """A thread whose steps are the steps of one task, with the arguments of ``threading.Thread``.

    Args:
        target: Function of the thread.
        name: Name of the thread.
        daemon: Ignored.
    """

    def __init__(self, *, target: Callable[[], object], name: str = "thread", daemon: bool = True) -> None:
        self.name = name
        self._target = target
        self._ended = False
        self._over = False
        self._until = 0.0
        self._woken = False
        self._waiting: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._mine = _thread.allocate_lock()
        self._loops = _thread.allocate_lock()
        self._mine.acquire()
        self._loops.acquire()

    # --- on the loop

    def start(self) -> None:
        """Start the thread, as a task of the caller's group."""
        self._loop: SimLoop = current()
        context = copy_context()
        thread = threading.Thread(target=lambda: context.run(self._run), name=self.name, daemon=True)
        # The guards of the simulation refuse threads; this one runs only while the loop waits.
        inspect.unwrap(threading.Thread.start)(thread)
        self._task = self._loop.create_task(self._drive(), name=self.name)

    async def ended(self) -> None:
        """Wait for the end of the thread, and raise its error."""
        await self._task

    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return not self._over

    def join(self) -> None:
        """Return at once. The thread must have ended: an adapter joins a thread only after the thread's last step."""
        assert self._over, f"{self.name} is joined before its last step"

    def wake(self) -> None:
        """End the present pause of a thread, or else its next pause."""
        if self._waiting is None:
            self._woken = True
        elif not self._waiting.done():
            self._waiting.set_result(None)

    def end(self) -> None:
        """End the thread: its present pause and every later pause raise ``Ended``. Idempotent. Blocks until its end."""
        if not self._over:
            self._ended = True
            self._step()

    async def _drive(self) -> None:
        try:
            while not self._over:
                self._step()
                if self._error is not None:
                    raise self._error
                if not self._over:
                    await self._wait()
        finally:
            self.end()

    async def _wait(self) -> None:
        if self._woken or self._until <= self._loop.time():
            self._woken = False
            await asyncio.sleep(0)
            return
        self._waiting = self._loop.create_future()
        timer = None
        if self._until < math.inf:
            timer = self._loop.call_at(self._until, self.wake)
        try:
            await self._waiting
        finally:
            self._waiting = None
            if timer is not None:
                timer.cancel()

    def _step(self) -> None:
        """Let the thread run until its next pause or its end."""
        self._mine.release()
        self._loops.acquire()

    # --- in the thread

    def _run(self) -> None:
        self._mine.acquire()
        ident = threading.get_ident()
        _running[ident] = self
        self._loop.guests.add(ident)
        # Calls for the running loop, such as the start of a task, find the loop that waits for this thread.
        _set_running_loop(self._loop)
        try:
            # Also if the run is over: a task may wait for the answer of a thread that has made no step yet.
            self._target()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            del _running[ident]
            self._loop.guests.discard(ident)
            _set_running_loop(None)
            self._over = True
            self._loops.release()

    def pause(self, until: float = 0.0) -> None:
        """Yield to the loop until ``wake`` or the time ``until``. May return earlier.

        Args:
            until: Time of the loop. If the time has passed, every other ready task may take a step first.

        Raises:
            Ended: The run is over.
        """
        if not self._ended:
            self._until = until
            self._loops.release()
            self._mine.acquire()
        if self._ended:
            raise Ended

    def time(self) -> float:
        """The time of the loop, in seconds."""
        return self._loop.time()


def stepped() -> SteppedThread | None:
    """Return the stepped thread that makes this call; None = another thread."""
    return _running.get(threading.get_ident())


def pause(until: float = 0.0) -> None:
    """Let the calling stepped thread pause; see ``SteppedThread.pause``. In any other thread, do nothing."""
    thread = stepped()
    if thread is not None:
        thread.pause(until)


class SteppedQueue(Generic[T]):
    """A ``queue.SimpleQueue`` that one stepped thread reads."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._getter: SteppedThread | None = None

    def put(self, item: T) -> None:
        """Add an item, and end the present pause of the receiving thread, regardless of the cause of the pause."""
        self._items.append(item)
        if self._getter is not None:
            self._getter.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove and return the first item; see ``queue.SimpleQueue.get``."""
        thread = self._getter = stepped() or self._getter
        if block and not self._items:
            assert thread is not None, "only a stepped thread waits"
            until = math.inf if timeout is None else thread.time() + timeout
            while not self._items and thread.time() < until:
                thread.pause(until)
        if not self._items:
            raise Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        """Remove and return the first item; raises ``queue.Empty`` if the queue has no item."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether the queue has no item."""
        return not self._items


def monotonic() -> float:
    """The virtual time in seconds; replaces ``time.monotonic``."""
    thread = stepped()
    return current().time() if thread is None else thread.time()


def sleep(seconds: float) -> None:
    """Let the calling stepped thread sleep; replaces ``time.sleep``."""
    until = monotonic() + seconds
    while monotonic() < until:
        pause(until)


def wait(futures: Collection[Future[Any]], timeout: float | None = None) -> None:
    """Wait until all futures are done; replaces ``concurrent.futures.wait`` for a stepped thread.

    Args:
        futures: The futures.
        timeout: Maximum virtual seconds; None = no limit.
    """
    thread = stepped()
    assert thread is not None, "only a stepped thread waits"
    until = math.inf if timeout is None else thread.time() + timeout
    for future in futures:
        future.add_done_callback(lambda _: thread.wake())
    while thread.time() < until and not all(future.done() for future in futures):
        thread.pause(until)


@contextlib.contextmanager
def replaced(*places: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes of modules while a ``with`` block runs.

    Args:
        *places: The module, the name of its attribute, and the replacement.

    Yields:
        Nothing.
    """
    with contextlib.ExitStack() as undo:
        for owner, name, by in places:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, by)
        yield
