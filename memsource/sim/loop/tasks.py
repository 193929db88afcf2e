"""Tasks, futures and timers of a SimLoop, with an order that is the same in every run."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, TypeVar

_CANCELLED: Final = 100
"""Number of cancelled timers above which the loop removes them from the heap, if they are more than half of the heap.
"""

T = TypeVar("T")
Threads = Literal["refuse", "inline"]

GROUP: Final[ContextVar[str | None]] = ContextVar("memsource.sim.group", default=None)
"""Name of the group, such as a worker, of all tasks that this context creates. Child tasks inherit the group."""


@contextmanager
def in_group(group: str | None) -> Iterator[None]:
    """Assign the tasks that a ``with`` block creates to a group; None = to no group."""
    token = GROUP.set(group)
    try:
        yield
    finally:
        GROUP.reset(token)


TASK_METHODS: Final = frozenset(dir(asyncio.Task))
"""Methods of a task that a user may schedule (``call_later(1, task.cancel)``). The list contains no step of a task."""


class SimTask(asyncio.Task[Any]):
    """A task with a number, which is also its hash, and with the group of its creator."""

    __slots__ = ("group", "number")

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, group: str | None, **options: Any) -> None:
        # Set the number first, because asyncio hashes a task during its construction.
        self.number = number
        self.group = group
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        # anyio puts the repr into the message of each cancellation, so the repr is cheap and the same in every run.
        return f"<SimTask {self.title}>"

    @property
    def title(self) -> str:
        """The number, name and group of the task."""
        return f"{self.number} {self.get_name()!r}" + ("" if self.group is None else f" of {self.group!r}")


class SimFuture(asyncio.Future[Any]):
    """A future of a ``SimLoop``. The hash of the future is its number among the hashed futures of the run."""

    __slots__ = ("_number",)
    _number: int

    def __hash__(self) -> int:
        try:
            return self._number
        except AttributeError:
            loop: Any = self.get_loop()
            self._number = next(loop.hashed)
            return self._number


class OrderedWeakSet(weakref.WeakKeyDictionary[Any, None]):
    """A weak set in the order of insertion, with the methods that ``BaseEventLoop`` uses."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def owner_of(step: asyncio.Handle) -> asyncio.Task[Any] | None:
    """Return the task of a step; None for a callback."""
    callback = step._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task) and getattr(callback, "__name__", None) not in TASK_METHODS:
        return owner
    return None


def wrapped_by(task: asyncio.Task[Any]) -> list[Coroutine[Any, Any, Any]]:
    """Return the coroutines that the unstarted coroutine of a task would await. anyio wraps coroutines in this form."""
    coroutine: Any = task.get_coro()
    if not inspect.iscoroutine(coroutine) or inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED:
        return []
    known = list(coroutine.cr_frame.f_locals.values()) if coroutine.cr_frame is not None else []
    # A newer anyio keeps the coroutine in an object.
    known += [getattr(each, "_coro", None) for each in known]
    return [each for each in known if inspect.iscoroutine(each)]


async def inline(seconds: float, func: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call a thread's function on the event loop instead, after a delay in virtual seconds."""
    await asyncio.sleep(seconds)
    return func(*args)


class Timers:
    """A heap of timers, sorted by time and then by the order of their creation.

    The heap drops a cancelled timer at the time of the timer, or earlier if many timers are cancelled.
    """

    __slots__ = ("_heap", "_pushed", "cancelled")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any]] = []
        self._pushed = 0
        self.cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when: float, timer: asyncio.TimerHandle) -> None:
        """Add a timer. O(log n)."""
        # asyncio reports the cancellation of a handle only if the handle has this mark.
        timer._scheduled = True  # type: ignore[attr-defined]
        self._pushed += 1
        heapq.heappush(self._heap, (when, self._pushed, timer))

    def on_cancel(self, timer: Any) -> None:
        """Record that the caller is about to cancel a timer. O(1), amortized."""
        if timer._scheduled:
            self.cancelled += 1
            if self.cancelled > max(_CANCELLED, len(self._heap) // 2):
                self._heap = [one for one in self._heap if not one[2]._cancelled and one[2] is not timer]
                heapq.heapify(self._heap)
                self.cancelled = 0

    def next_at(self) -> float:
        """Return the time of the next timer; infinity = no timer."""
        heap = self._heap
        while heap and heap[0][2]._cancelled:
            self.cancelled -= 1
            heapq.heappop(heap)[2]._scheduled = False
        return heap[0][0] if heap else math.inf

    def due(self, now: float) -> list[asyncio.Handle]:
        """Remove the due timers, and return them in order."""
        heap = self._heap
        taken: list[asyncio.Handle] = []
        while heap and heap[0][0] <= now:
            timer = heapq.heappop(heap)[2]
            timer._scheduled = False
            if timer._cancelled:
                self.cancelled -= 1
            else:
                taken.append(timer)
        return taken

    def clear(self) -> None:
        """Drop all timers. Idempotent."""
        self._heap.clear()
        self.cancelled = 0
