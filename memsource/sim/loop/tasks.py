"""Tasks and futures whose hash is their number: a set of them has the same order in every run."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final, TypeVar

__all__ = ["GROUP", "TASK_METHODS", "OrderedWeakSet", "SimFuture", "SimTask", "inline", "owner_of", "wrapped_by"]

T = TypeVar("T")

GROUP: Final[ContextVar[str | None]] = ContextVar("memsource.sim.group", default=None)
"""The group, such as a worker, that the tasks made in this context belong to. Children inherit it."""

TASK_METHODS: Final = frozenset(dir(asyncio.Task))
"""Methods that somebody else may schedule (``call_later(1, task.cancel)``); a task's steps are not among them."""


class SimTask(asyncio.Task[Any]):
    """A task with a number, which is its hash too, and the group it was made in."""

    __slots__ = ("group", "number")

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, group: str | None, **options: Any) -> None:
        # First, because a task is put into a set while it is made.
        self.number = number
        self.group = group
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        # anyio puts it into the message of every cancellation: it must be the same in every run, and cheap.
        group = "" if self.group is None else f" of {self.group!r}"
        return f"<SimTask {self.number} {self.get_name()!r}{group}>"


class SimFuture(asyncio.Future[Any]):
    """A future of a ``SimLoop`` whose hash is its place in the order of those that were hashed."""

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
    """What ``BaseEventLoop`` needs of a weak set, in the order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


def owner_of(step: asyncio.Handle) -> asyncio.Task[Any] | None:
    """The task whose step this is; None where it is a callback."""
    callback = step._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task) and getattr(callback, "__name__", None) not in TASK_METHODS:
        return owner
    return None


def wrapped_by(task: asyncio.Task[Any]) -> list[Coroutine[Any, Any, Any]]:
    """The coroutines that one which has not begun was given to await, as anyio's tasks are: they never will be."""
    coroutine: Any = task.get_coro()
    if not inspect.iscoroutine(coroutine) or inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED:
        return []
    known = list(coroutine.cr_frame.f_locals.values()) if coroutine.cr_frame is not None else []
    # A newer anyio keeps it in an object.
    known += [getattr(each, "_coro", None) for each in known]
    return [each for each in known if inspect.iscoroutine(each)]


async def inline(seconds: float, func: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call what was meant for a thread, after so many virtual seconds."""
    await asyncio.sleep(seconds)
    return func(*args)
