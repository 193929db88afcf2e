"""The workers: long-lived tasks that take a message, run the handler and report the outcome.

A worker makes plain calls into the engine: no task, event, scope or clock call per message. Idle workers sleep
on an event each and are woken only for work that is ready. A handler that never suspends is bounded by a *time
slice*: once it is used up, every worker yields to the event loop before its next message, so heartbeats and
settlements go on.

With a history, every worker yields once before each handler, and the first to come back writes the ``started``
rows of all of them by one ``write``: a group commit, so no handler is called whose row is not in the file.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition
from lanes.errors import HandlerHalted, Nak, Term
from lanes.history import History

Handler = Callable[[Message], Awaitable[object]]
"""An async function of one message. Returning acknowledges it; see ``Nak`` and ``Term`` for the rest."""

TIME_SLICE: Final = 0.005
"""Seconds of handlers that do not suspend before the workers yield to the event loop."""

_WAKING_LIMIT: Final = 8
"""Workers on their way out of their sleep, at most."""

_STRIDE_LIMIT: Final = 64
"""Messages between two looks at the clock, at most."""


class Shell(Protocol):
    """What the workers need of the consumer around them."""

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake whoever has something to do now."""

    def stop_because(self, error: BaseException) -> None:
        """Stop in order; ``error`` is raised when everything has been drained."""


class _Worker:
    __slots__ = ("cancelled", "message", "scope", "wake")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.cancelled = False
        self.scope: anyio.CancelScope
        self.wake: anyio.Event


class Workers:
    """The workers of one consumer."""

    def __init__(self, engine: Engine, handler: Handler, shell: Shell, clock: Clock, history: History | None) -> None:
        self._engine = engine
        self._handler = handler
        self._shell = shell
        self._clock = clock
        self._history = history
        self._workers = [_Worker() for _ in range(engine.concurrency)]
        self._idle: list[_Worker] = []
        self._waking = 0
        # With a history those that start together share one write, so they are woken together.
        self._waking_limit = _WAKING_LIMIT if history is None else engine.concurrency
        self._round = 0
        self._slice_start = clock()
        self._stride = 1
        self._countdown = 1

    def start(self, tasks: TaskGroup) -> None:
        """Start the worker tasks; they run until the task group is cancelled."""
        for worker in self._workers:
            tasks.start_soon(self._work, worker)

    def wake(self) -> None:
        """Wake idle workers for the lanes that are ready."""
        # Those woken before and not running yet will take their share, and wake the next ones: where handlers do
        # not suspend, the first few do all the work, and waking a worker costs more than a message.
        for _ in range(min(len(self._idle), self._engine.ready - self._waking, self._waking_limit - self._waking)):
            self._waking += 1
            self._idle.pop().wake.set()

    def cancel(self, partition: Partition) -> None:
        """Cancel the handlers that run for a partition; those of other partitions are not touched."""
        for worker in self._workers:
            if worker.message is not None and worker.message.partition is partition:
                worker.cancelled = True
                worker.scope.cancel()

    async def _work(self, worker: _Worker) -> None:
        again = True
        while again:
            worker.cancelled = False
            # One scope for many messages: it is replaced only after a cancellation, which it swallows here.
            with anyio.CancelScope() as worker.scope:
                again = await self._work_until_cancelled(worker)

    async def _work_until_cancelled(self, worker: _Worker) -> bool:
        """Handle messages; False when this worker must not await anything any more."""
        engine, handler, shell, history = self._engine, self._handler, self._shell, self._history
        while not worker.cancelled:
            message = engine.take()
            if message is None:
                worker.wake = anyio.Event()
                self._idle.append(worker)
                await worker.wake.wait()
                self._waking -= 1
                self.wake()
                continue
            worker.message = message
            try:
                if history is not None:
                    row = history.started(message, self._clock())
                    await anyio.lowlevel.checkpoint()
                    if history.written < row:
                        history.flush()
                await handler(message)
            except GeneratorExit as error:
                # Either the loop is gone and nothing may be awaited any more, or a handler plays with fire.
                worker.message = None
                self._finish(message, ABANDON, "error", error)
                shell.stop_because(error)
                return False
            except BaseException as error:
                worker.message = None
                cancellation = self._cancellation(worker, error)
                if cancellation is not None:
                    self._finish(message, ABANDON, "cancelled", error)
                    shell.after()
                    raise cancellation from None
                self._failed(message, error)
            else:
                worker.message = None
                if history is not None:
                    history.ended(message, "ok", self._clock())
                engine.finish(message, ACK, 0.0)
            # One ready lane is what this worker takes itself: waking another for it costs more than the message.
            shell.after(taking=1)
            self._countdown -= 1
            if self._countdown <= 0 and self._slice_used():
                before = self._round
                await anyio.lowlevel.checkpoint()
                if self._round == before:
                    # The first worker of the next round of the loop: a new slice for all of them.
                    self._round += 1
                    self._slice_start = self._clock()
        return True

    def _slice_used(self) -> bool:
        elapsed = self._clock() - self._slice_start
        if elapsed >= TIME_SLICE:
            self._stride = self._countdown = 1
            return True
        # Look again after as many messages as are sure to fit, as far as the last ones tell.
        self._stride = min(self._stride * 2, _STRIDE_LIMIT) if elapsed < TIME_SLICE / 4 else 1
        self._countdown = self._stride
        return False

    def _cancellation(self, worker: _Worker, error: BaseException) -> BaseException | None:
        """What has to go on of an exception because this worker, or all of them, were cancelled; else None."""
        if not worker.cancelled and anyio.current_effective_deadline() != float("-inf"):
            return None
        cancelled = anyio.get_cancelled_exc_class()
        if isinstance(error, BaseExceptionGroup):
            # trio hands the cancellations of a nursery on in a group, together with what else went wrong there.
            return error.split(cancelled)[0]
        return error if isinstance(error, cancelled) else None

    def _failed(self, message: Message, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, MemoryError):
            self._finish(message, _failure(error), "error", error)
            return
        # Not the handler's to decide: a cancellation that nobody asked for, KeyboardInterrupt, SystemExit, no
        # memory. Stop in order; the message is not settled and comes again.
        self._finish(message, ABANDON, "error", error)
        if isinstance(error, anyio.get_cancelled_exc_class()):
            # Raised as it is, it would pass for a cancellation of the caller's own.
            halted = HandlerHalted(
                f"the handler was cancelled at {message.partition.id} position {message.position}, and not by lanes "
                f"({type(error).__qualname__}): await what it starts, and catch the cancellation of its own tasks"
            )
            halted.__cause__ = error
            error = halted
        self._shell.stop_because(error)

    def _finish(self, message: Message, outcome: Outcome, result: str, error: BaseException) -> None:
        now = self._clock()
        if self._history is not None:
            self._history.ended(message, result, now, error)
        self._engine.finish(message, outcome, now)


def _failure(error: Exception) -> Failure:
    if isinstance(error, Nak):
        return Failure(error, random.random(), delay=error.delay)
    if isinstance(error, Term):
        return Failure(error, terminal=True)
    return Failure(error, random.random())
