"""An asyncio event loop in virtual time. In each turn one task, selected by a chooser, takes one step.

A turn has three parts. Timers that are due become callbacks. The callbacks of futures and timers run, first in, first
out. One of the ready tasks takes one step. Virtual time jumps to the next timer when no callback and no task is ready,
or when the chooser decides to jump. With the same chooser, a program takes the same steps in every run, with the
exceptions below.

Three rules make runs repeatable. First, the loop numbers tasks in the order of their creation. The loop sorts tasks
that become ready in the same turn by number, because anyio iterates over a set to deliver a cancellation. Second,
tasks, futures and cancel scopes hash by number, so each iteration over a set of them has the same order. The sets that
``asyncio.wait`` returns to the user have this order too. Third, the garbage collector runs only between runs. A program
that reads a clock or depends on the order of another set may differ between runs. For sets of strings, start Python
with ``PYTHONHASHSEED=0``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import sys
import threading
import weakref
from asyncio.events import _get_running_loop
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextvars import Context
from operator import itemgetter
from types import FrameType
from typing import Any, Final, TypeVar, TypeVarTuple

from memsource.sim.errors import Deadlock, Livelock, NeverYields, Refused, SimulationError
from memsource.sim.loop.choosers import Chooser
from memsource.sim.loop.guards import LOOP_CALLS, REAL_CONSUMER, THREADS, refusing
from memsource.sim.loop.places import handlers, place_of_frame, place_of_task, runs_a_real_consumer, title, waits
from memsource.sim.loop.tasks import (
    GROUP,
    TASK_METHODS,
    OrderedWeakSet,
    SimFuture,
    SimTask,
    Threads,
    Timers,
    inline,
    owner_of,
    wrapped_by,
)

__all__ = ["GROUP", "SimLoop", "SimTask", "Threads", "current"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
E = TypeVar("E", bound=BaseException)

_CALLBACK_TURNS: Final = 100
"""The most turns in which only callbacks run. Time passes after these turns, because anyio retries the cancellation of
a frozen task in every turn."""
_CANCELLATION: Final = (
    "_deliver_cancellation"  # anyio's method that cancels the tasks of a scope, repeatedly until they end
)
_JUMP_LIMIT: Final = 1.0
"""The longest jump of time that a chooser may make while tasks are ready, in virtual seconds."""


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one run. The loop has no file descriptor and starts no thread.

    ``memsource.sim.loop.virtual.run`` makes the loop, and ``current`` finds the loop.

    Args:
        chooser: Decides which ready task takes the next step.
        thread_time: Returns the virtual seconds that a function in a thread takes; None = the loop refuses threads.
        turns_limit: Maximum number of turns while no time passes, and of turns that cancel the remaining tasks.

    Attributes:
        guests: Idents of threads that call the loop only while the thread of the loop waits for them.
        jumps: Times before and after each jump that the chooser made while tasks were ready, in order.
    """

    _closed: bool
    _stopping: bool
    _thread_id: int | None

    def __init__(self, chooser: Chooser, *, thread_time: Callable[[], float] | None, turns_limit: int) -> None:
        super().__init__()
        self.turns = 0
        self.steps = 0
        self.digest = 0
        self.failure: BaseException | None = None
        self.guests: set[int] = set()
        self.jumps: list[tuple[float, float]] = []
        self._ending = False
        self.scopes: Iterator[int] = itertools.count()
        self.hashed: Iterator[int] = itertools.count()
        self._chooser: Final = chooser
        self._thread_time: Final = thread_time
        self._turns_limit: Final = turns_limit
        self._counted_from: Final = turns_limit // 2
        self._failed = False
        self._now = 0.0
        self._still = 0
        self._callback_turns = 0
        self._counts: Counter[int] = Counter()
        self._numbered = 0
        self._foreign: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._callbacks: deque[asyncio.Handle] = deque()
        self._timers: Final = Timers()
        # The queue of ready tasks: their numbers, and their steps. Tasks from index ``_mark`` on are not sorted yet.
        self._tasks: list[int] = []
        self._steps: list[asyncio.Handle] = []
        self._mark = 0
        self._stepping: asyncio.Handle | None = None
        self._frozen: dict[str, float] = {}
        self._frozen_handles: list[tuple[str | None, int | None, asyncio.Handle]] = []
        self._wrapped: list[Coroutine[Any, Any, Any]] = []
        # Retries of anyio's cancellation, each with the number of steps to take before it. Retries are therefore as
        # frequent as on a loop on which every ready task takes a step in each turn.
        self._retries: deque[tuple[int, asyncio.Handle]] = deque()
        # BaseEventLoop keeps asynchronous generators in a weak set, and closes them in the order of that set.
        self._asyncgens: Any = OrderedWeakSet()

    # --- methods that asyncio calls

    def time(self) -> float:
        """Virtual seconds since the run began."""
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        owner, name = getattr(callback, "__self__", None), getattr(callback, "__name__", None)
        number = None
        if isinstance(owner, asyncio.Task) and name not in TASK_METHODS:
            number = owner.number if type(owner) is SimTask else self._number_of(owner)
        if self._frozen and (group := self._group_of(handle)) in self._frozen:
            self._frozen_handles.append((group, number, handle))
        elif number is not None:
            self._tasks.append(number)
            self._steps.append(handle)
        elif name == _CANCELLATION:
            self._retries.append((self.steps + len(self._tasks), handle))
        else:
            self._callbacks.append(handle)
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        ident = threading.get_ident()
        if self._thread_id not in (None, ident) and ident not in self.guests:
            raise self.refuse("loop.call_soon_threadsafe from another thread", THREADS)
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if math.isnan(when):
            raise ValueError(f"loop.call_at({when}): the time must be a number of seconds")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers.push(when, timer)
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        self._timers.on_cancel(timer)

    def create_future(self) -> asyncio.Future[Any]:
        return SimFuture(loop=self)

    def create_task(
        self, coro: Any, *, name: object = None, context: Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if self.get_task_factory() is not None:
            return super().create_task(coro, name=name, context=context, **options)
        self._numbered += 1
        group = GROUP.get() if context is None else context.get(GROUP, None)
        number = self._numbered
        # asyncio's own task names depend on the number of tasks in the whole process.
        title = f"Task-{number}" if name is None else str(name)
        return SimTask(coro, number, group, loop=self, name=title, context=context, **options)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        seconds = self.thread_seconds("loop.run_in_executor")
        return self.create_task(inline(seconds, func, args), name=f"inline {getattr(func, '__name__', func)}")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Handle a report of asyncio about a task.

        After a failure the loop drops all reports, because most reports are about abandoned tasks.
        """
        if self.failure is None:
            super().call_exception_handler(context)

    def close(self) -> None:
        super().close()
        for queue in (self._callbacks, self._tasks, self._steps, self._frozen_handles, self._retries):
            queue.clear()
        self._timers.clear()

    def _run_once(self) -> None:
        self.turns = turn = self.turns + 1
        if self.failure is not None and not self._failed:
            raise self._end(self.failure)
        callbacks, tasks, retries = self._callbacks, self._tasks, self._retries
        while retries and (retries[0][0] <= self.steps or not tasks):
            callbacks.append(retries.popleft()[1])
        if not self._pass_time(turn):
            return
        for _ in range(len(callbacks)):
            handle = callbacks.popleft()
            if not handle._cancelled:
                self._stepping = handle
                handle._run()
        ready = len(tasks)
        self._still += 1
        if self._still > self._turns_limit:
            raise self._standing_still()
        if not ready:
            self._callback_turns += 1
            return
        self._callback_turns = 0
        if ready - self._mark > 1:
            self._rank()
        index = 0
        # The chooser itself may have failed.
        if ready > 1 and not self._failed:
            index = self._chooser.choose(turn, tasks)
            if not 0 <= index < ready:
                what = f"{self._chooser!r} chose task {index} of {ready} in turn {turn}"
                raise self._end(SimulationError(f"{what}: must be 0 to {ready - 1}"))
        number = tasks.pop(index)
        self._stepping = step = self._steps.pop(index)
        self._mark = ready - 1
        self.steps += 1
        if self._still > self._counted_from:
            self._counts[number] += 1
        # A hash of integers is the same in every process.
        self.digest = hash((self.digest, turn, number))
        step._run()
        self._stepping = None

    # --- time

    def _pass_time(self, turn: int) -> bool:
        """Let time pass if nothing is ready, if the chooser jumps, or after many turns that ran only callbacks.

        Return False if the loop stops.
        """
        when = self._timers.next_at()
        if when > self._now:
            if self._tasks:
                # A slow processor delays tasks for a moment, not until a far deadline.
                moves = when - self._now <= _JUMP_LIMIT and not self._failed and self._chooser.jump(turn)
            elif self._callbacks:
                moves = when < math.inf and self._callback_turns >= _CALLBACK_TURNS
            elif when < math.inf:
                moves = True
            elif self._stopping:
                return False
            else:
                raise self._end(Deadlock(self._deadlock()))
            if not moves:
                return True
            if self._tasks:
                self.jumps.append((self._now, when))
            self._now = when
            self._callback_turns = 0
            if not self._ending:
                self._still = 0
                self._counts.clear()
        if when <= self._now:
            self._callbacks.extend(self._timers.due(self._now))
        return True

    def slow_since(self, since: float) -> float:
        """Seconds after a given time in which ready tasks took no step, because the chooser let time jump."""
        return sum(after - max(before, since) for before, after in self.jumps if after > since)

    # --- groups

    def freeze(self, group: str, until: float) -> None:
        """Stop the tasks of a group for some time, as under SIGSTOP. Does not block.

        Timers of the group that become due during the freeze run when the group wakes. A later call replaces an earlier
        call.

        Args:
            group: Name of the group.
            until: Time of the next step, in seconds of ``time``; a time in the past wakes the group at once.
        """
        self._frozen[group] = until
        if until <= self._now or self._ending:
            self._frozen[group] = self._now
            self._thaw(group)
            return
        queue = list(zip(self._tasks, self._steps, strict=True))
        ranked = self._mark
        self._tasks.clear()
        self._steps.clear()
        for index, (number, step) in enumerate(queue):
            if self._group_of(step) == group:
                self._frozen_handles.append((group, number, step))
                self._mark -= index < ranked
            else:
                self._tasks.append(number)
                self._steps.append(step)
        if until < math.inf:
            self.call_at(until, self._thaw, group, context=Context())

    def _thaw(self, group: str) -> None:
        if self._frozen.get(group, math.inf) > self._now:
            return
        del self._frozen[group]
        waiting, self._frozen_handles = self._frozen_handles, []
        for of, number, handle in waiting:
            if of != group:
                self._frozen_handles.append((of, number, handle))
            elif number is None:
                self._callbacks.append(handle)
            else:
                self._tasks.append(number)
                self._steps.append(handle)

    # --- tasks

    def _number_of(self, task: asyncio.Task[Any]) -> int:
        if isinstance(task, SimTask):
            return task.number
        # A task of another task factory is unknown to the loop until its first step is scheduled.
        number = self._foreign.get(task)
        if number is None:
            self._numbered += 1
            number = self._foreign[task] = self._numbered
        return number

    @staticmethod
    def _group_of(handle: Any) -> str | None:
        """Return the group of a task's step or of a callback."""
        task = owner_of(handle)
        if isinstance(task, SimTask):
            return task.group
        context: Context = handle._context
        return context.get(GROUP, None)

    def _rank(self) -> None:
        mark = self._mark
        fresh = sorted(zip(self._tasks[mark:], self._steps[mark:], strict=True), key=itemgetter(0))
        self._tasks[mark:] = [number for number, _ in fresh]
        self._steps[mark:] = [step for _, step in fresh]

    # --- the end of a run

    def fail(self, error: E) -> E:
        """End the run with an error, and return the error. An earlier error of the run stays the run's error."""
        if self.failure is None:
            self.failure = error
        return error

    def end(self) -> None:
        """Wake all frozen groups, so that the caller can cancel the remaining tasks. Idempotent."""
        self._ending = True
        self._still = 0
        for group in list(self._frozen):
            self.freeze(group, self._now)

    def _end(self, error: E) -> E:
        self.fail(error)
        self._failed = True
        self._wrapped = [coroutine for task in asyncio.all_tasks(self) for coroutine in wrapped_by(task)]
        self.end()
        return error

    def abandon(self) -> None:
        """Close the coroutines of unfinished tasks, and drop their errors.

        Without this call, the garbage collector would close the coroutines later, while other code runs.
        """
        for inner in self._wrapped:
            inner.close()
        for task in sorted(asyncio.all_tasks(self), key=self._number_of):
            coroutine: Any = task.get_coro()
            with contextlib.suppress(BaseException):
                coroutine.close()

    def refuse(self, what: str, remedy: str) -> Refused:
        """Return the error for a call that virtual time cannot control.

        The run ends with this error in the next turn.
        """
        frame = sys._getframe(1)
        if runs_a_real_consumer(frame, asyncio.all_tasks(self)):
            remedy = REAL_CONSUMER
        return self.fail(Refused(f"{what}, called at {place_of_frame(frame)}, has no virtual time; {remedy}"))

    def thread_seconds(self, what: str) -> float:
        """Return the virtual seconds of a thread's function; see ``memsource.sim.loop.guards.Refuser``."""
        if self._thread_time is None:
            raise self.refuse(what, THREADS)
        return self._thread_time()

    def overdue(self, frame: FrameType | None) -> None:
        """Record that a step does not end, and the ``frame`` that it executes. Callable from any thread."""
        step = self._stepping
        task = None if step is None else owner_of(step)
        who = "a callback" if task is None else title(task)
        self.fail(
            NeverYields(
                f"{who} does not yield: turn {self.turns}, at {place_of_frame(frame)}, does not end; "
                "await something in the task, such as anyio.sleep(0)"
            )
        )

    def waiting(self, groups: Collection[str]) -> list[str]:
        """Return a line for each of the first ten tasks of these groups that run the user's code.

        Args:
            groups: Names of the groups.

        Returns:
            Lines with the title of a task and the place where the task waits.
        """
        return waits(
            task for task in handlers(asyncio.all_tasks(self)) if isinstance(task, SimTask) and task.group in groups
        )

    def _deadlock(self) -> str:
        frozen = f"; frozen for ever: {', '.join(sorted(self._frozen))}" if self._frozen else ""
        what = f"every task waits for another task, and no task waits for a time{frozen}"
        return "\n".join([f"turn {self.turns}, time {self._now:g}: {what}", *waits(asyncio.all_tasks(self))])

    def _standing_still(self) -> Livelock:
        tasks = {self._number_of(task): task for task in asyncio.all_tasks(self)}
        most = ", ".join(
            f"{title(tasks[number])} ({steps} steps, now at {place_of_task(tasks[number])})"
            if number in tasks
            else f"task {number}, which has ended ({steps} steps)"
            for number, steps in self._counts.most_common(3)
        )
        what = "the cancelled tasks have not ended" if self._ending else "no time has passed"
        return self._end(
            Livelock(
                f"turn {self.turns}, time {self._now:g}: {what} in {self._turns_limit} turns; most steps: "
                f"{most or 'none, callbacks call one another'}. Wait for an event or a time"
            )
        )


for _name, _remedy in LOOP_CALLS.items():
    setattr(SimLoop, _name, refusing(f"loop.{_name}", _remedy))


def current() -> SimLoop:
    """Return the loop of the running simulation.

    Returns:
        The loop.

    Raises:
        SimulationError: This thread runs no simulation.
    """
    loop = _get_running_loop()
    if not isinstance(loop, SimLoop):
        raise SimulationError(
            "no simulation is running in this thread; call current() inside memsource.sim.loop.virtual.run"
        )
    return loop
