"""Workers for an async handler: long-lived tasks that take a message, run the handler and report its outcome.

A worker makes plain calls into the engine, and needs no new task, event or scope for a message. Each idle
worker sleeps on an event and is woken only for a ready lane. The task of a worker starts when the worker is woken for
the first time. A *time slice* bounds handlers that never suspend. After the slice every worker yields to the event
loop before its next message, so heartbeats and settlements continue. A handler that has suspended has yielded
already. After a handler that has held the loop for longer, all workers rest for a moment, in which the answers of a
broker can arrive.

With a ``History``, every worker yields once before each handler. The first worker to resume writes the ``started`` rows
of all workers by one ``write``. So no handler is called before its row is in the file or was given up.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.core.types import ABANDON, ACK, NEVER, Message, Partition
from lanes.handlers import AsyncHandler
from lanes.observe.otel import Handling
from lanes.workers.context import RunContext
from lanes.workers.outcomes import RESULTS, OutcomeReporter, cancellation_of, failure

TIME_SLICE: Final = 0.005
"""Seconds that handlers may run without suspending before the workers yield to the event loop."""

_WAKING_LIMIT: Final = 8
"""Maximum number of woken workers that have not run yet."""

_STRIDE_LIMIT: Final = 64
"""Maximum number of messages between two reads of the clock."""


@dataclass(slots=True, eq=False)
class _Worker:
    message: Message | None = None
    started: float = 0.0
    cancelled: bool = False
    timed_out: bool = False
    scope: anyio.CancelScope = field(init=False)
    wake: anyio.Event = field(init=False)


class TaskWorkers:
    """The workers of one consumer.

    Args:
        context: The run.
        handler: Async function of one message.
        timeout: Seconds that a handler may take. ``None`` = no limit.
    """

    def __init__(self, context: RunContext, handler: AsyncHandler, timeout: float | None = None) -> None:
        engine, tap, clock = context.engine, context.tap, context.clock
        self._engine = engine
        self._handler = handler
        self._context = context
        self._clock = clock
        self._reporter = OutcomeReporter(context)
        self._history = tap.history
        self._telemetry = tap.telemetry
        self._loop_watch = context.loop_watch
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        # Number of workers that may still be started. No worker can be woken before ``start``.
        self._unstarted = 0
        self._tasks: TaskGroup
        self._handler_context: contextvars.Context
        self._latest: _Worker | None = None
        self._waking = 0
        # With a history, handlers that start together share one ``write``, so their workers are woken together.
        self._grouped = tap.history is not None and tap.history.group_commit
        self._waking_limit = engine.concurrency if self._grouped else _WAKING_LIMIT
        # Set when the slice is used up, until the loop has had its turn.
        self._yielding = False
        self._rest = 0.0
        self._round = 0
        self._slice_start = self._looked = clock()
        self._stride = 1
        self._countdown = 1

    def start(self, tasks: TaskGroup) -> None:
        """Start a worker task whenever one is needed; the tasks run until the task group is cancelled."""
        self._tasks = tasks
        self._handler_context = contextvars.copy_context()
        self._unstarted = self._engine.concurrency
        if self._timeout is not None:
            tasks.start_soon(self._watch, self._timeout)

    def wake(self, *, taking: int = 0) -> None:
        """Wake idle workers for the ready lanes. ``taking``: number of ready lanes that the caller takes."""
        # Woken workers take their share and wake further workers. If handlers do not suspend, the first few workers
        # handle all messages, and to wake a worker costs more than a message.
        waking, limit = self._waking, self._waking_limit
        if waking >= limit or not (self._idle or self._unstarted):
            return
        needed = self._engine.ready - taking - waking
        for _ in range(min(len(self._idle) + self._unstarted, needed, limit - waking)):
            self._waking += 1
            if self._idle:
                self._idle.pop().wake.set()
            else:
                self._begin()

    def cancel(self, partition: Partition) -> None:
        """Cancel the handlers that run for a partition, and no others."""
        for worker in self._workers:
            if worker.message is not None and worker.message.partition is partition:
                worker.cancelled = True
                worker.timed_out = False
                worker.scope.cancel()

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Always empty: a handler that runs too long is cancelled."""
        return []

    def message_in(self, frame: FrameType) -> Message | None:
        """Return the message whose handler a frame calls; None = the frame calls no handler of these workers."""
        if frame.f_code is not _CALLING:
            return None
        of_frame = frame.f_locals
        return of_frame.get("message") if of_frame.get("self") is self else None

    async def _watch(self, timeout: float) -> None:
        """Cancel every handler that takes too long, with one timer for all handlers."""
        while True:
            now = self._clock()
            running = [worker for worker in self._workers if worker.message is not None and not worker.cancelled]
            for worker in running:
                if now - worker.started >= timeout:
                    worker.cancelled = worker.timed_out = True
                    worker.scope.cancel()
            # A handler that starts later times out later than the first of these handlers.
            starts = [worker.started for worker in running if not worker.cancelled]
            # The sleep is never 0, although floats may round to 0: this task must not spin.
            await anyio.sleep(max(0.001, min(starts, default=now) + timeout - now))

    def _begin(self) -> None:
        """Start one more worker."""
        if self._tasks.cancel_scope.cancel_called:
            # The task group is ending, and the last settlement still wakes workers.
            return
        self._unstarted -= 1
        worker = _Worker()
        self._workers.append(worker)
        # The worker gets the context of the run, because a handler or a task of the user may wake it.
        self._handler_context.copy().run(self._tasks.start_soon, self._work, worker)

    def _woken(self) -> None:
        self._waking -= 1
        if len(self._idle) + self._waking + 1 == len(self._workers):
            # All workers slept, so their slice begins now.
            self._slice_start = self._looked = self._clock()
        self.wake(taking=1)

    async def _work(self, worker: _Worker) -> None:
        # A worker that is cancelled already calls no handler. Without this checkpoint, an eager task would call a
        # handler within ``wake``.
        await anyio.lowlevel.checkpoint()
        self._woken()
        again = True
        while again:
            worker.cancelled = worker.timed_out = False
            # One scope serves many messages, and is replaced only after it has absorbed a cancellation.
            with anyio.CancelScope() as worker.scope:
                again = await self._work_until_cancelled(worker)

    async def _work_until_cancelled(self, worker: _Worker) -> bool:
        """Handle messages. Return whether this worker may still await."""
        engine, handler, context, history = self._engine, self._handler, self._context, self._history
        telemetry, timed, reporter = self._telemetry, self._timeout is not None, self._reporter
        grouped = self._grouped
        handling: Handling | None = None
        now = 0.0
        while not worker.cancelled:
            yielding = self._yielding
            if yielding:
                await self._yield_to_loop()
                continue
            message = engine.take()
            if message is None:
                worker.wake = anyio.Event()
                self._idle.append(worker)
                await worker.wake.wait()
                self._woken()
                continue
            leased = message.partition.deadline != NEVER
            if leased:
                now = self._clock()
                if now >= message.partition.deadline:
                    reporter.give_back([message])
                    context.after()
                    continue
            worker.message = message
            self._latest = worker
            if timed:
                worker.started = self._clock()
            if telemetry is not None:
                handling = telemetry.handling(message)
            try:
                if history is not None and not given_up_before(message):
                    row = history.started(message, now if leased else self._clock())
                    if grouped:
                        await anyio.lowlevel.checkpoint()
                        while self._yielding:
                            await self._yield_to_loop()
                        if history.written < row:
                            history.flush()
                        if leased and self._clock() >= message.partition.deadline:
                            worker.message = None
                            reporter.give_up(message, handling)
                            context.after()
                            continue
                if message.broken is not None:
                    raise message.broken
                if handling is None:
                    await handler(message)
                else:
                    with handling:
                        await handler(message)
            except GeneratorExit as error:
                # The loop is closed, or the handler raised this exception, so no await is allowed any more.
                worker.message = None
                reporter.finish(message, ABANDON, "error", error, handling)
                context.stop_because(error)
                return False
            except BaseException as error:
                worker.message = None
                # Either this worker was cancelled, or the run.
                cancelled = worker.cancelled or anyio.current_effective_deadline() == float("-inf")
                cancellation = cancellation_of(error) if cancelled else None
                if cancellation is not None:
                    if worker.timed_out:
                        late = TimeoutError(f"the handler did not end within timeout={self._timeout:g} s")
                        reporter.finish(message, failure(late), "error", late, handling)
                    else:
                        reporter.finish(message, ABANDON, "cancelled", error, handling)
                    context.after()
                    raise cancellation from None
                reporter.failed(message, error, handling)
            else:
                worker.message = None
                if history is not None:
                    history.ended(message, "ok", self._clock())
                engine.finish(message, ACK, 0.0)
                if handling is not None:
                    handling.end(RESULTS[message.state])
            # This worker takes one ready lane itself, because to wake another worker costs more than the message.
            context.after(taking=1)
            if self._latest is not worker:
                continue  # Another worker ran, so the handler has suspended and the loop had its turn.
            self._countdown -= 1
            if self._countdown <= 0 and self._slice_used():
                # No worker starts a handler before the loop has had its turn.
                self._yielding = True
        return True

    async def _yield_to_loop(self) -> None:
        """Give the loop a turn, or a rest after a handler that has held the loop for long."""
        before = self._round
        if self._rest:
            await anyio.sleep(self._rest)
        else:
            await anyio.lowlevel.checkpoint()
        if self._round == before:
            # The first worker of the loop's next round starts a new slice for all of them.
            self._round += 1
            self._yielding = False
            self._slice_start = self._looked = self._clock()

    def _slice_used(self) -> bool:
        now = self._clock()
        left = self._slice_start + TIME_SLICE - now
        if left <= 0.0:
            self._stride = self._countdown = 1
            self._rest = self._loop_watch.rest(now)
            return True
        # The clock is read again after a number of messages that fits into the slice, judged by the last messages.
        took, self._looked = now - self._looked, now
        self._stride = min(self._stride * 2, _STRIDE_LIMIT) if took < left / 4 else 1
        self._countdown = self._stride
        return False


_CALLING: Final = TaskWorkers._work_until_cancelled.__code__
