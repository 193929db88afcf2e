"""Workers for an async handler: long-lived tasks that take a message, run the handler and report its outcome.

A worker calls the engine without await, and needs no new task, event or scope for a message. Each idle worker waits on
a doorbell, which wakes the worker only for a ready lane. ``WakeLimit`` decides the number of workers to wake in one
turn of the loop. The task of a worker starts at the first wake-up of the worker.

A *time slice* bounds handlers that never suspend. After the slice every worker yields to the event loop before its next
message, so heartbeats and settlements continue. A handler that suspends also yields to the event loop. If a handler has
held the loop for 0.1 s or longer, all workers pause briefly, so that the loop can process answers of the broker.

With a ``History``, every worker yields at least once before each handler. The first worker to resume writes the
``started`` rows of all workers by one ``write``. A worker therefore calls a handler only after the history has written
or dropped the ``started`` row.
"""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.core.types import ABANDON, ACK, NEVER, Message, Partition
from lanes.handlers import AsyncHandler, check_returned
from lanes.loops import Doorbell, loop_check, turn_of_loop
from lanes.observe.otel import Handling
from lanes.workers.context import RunContext
from lanes.workers.freezes import StartLooks
from lanes.workers.outcomes import RESULTS, OutcomeReporter, cancellation_of, failure
from lanes.workers.overtime import AGAIN, BURST, PATIENCE, cancel_once, report_ignored
from lanes.workers.wake_limit import ALONE, SURE, TIME_SLICE, WakeLimit

_STRIDE_LIMIT: Final = 64
"""Maximum number of messages between two reads of the clock."""


@dataclass(slots=True, eq=False)
class _Worker:
    message: Message | None = None
    started: float = 0.0
    cancelled: bool = False
    timed_out: bool = False
    # Time of the cancellation of a handler that has timed out; NEVER = the log has reported the handler.
    cancelled_at: float = NEVER
    # Time of the next single cancellation of a handler that has timed out; NEVER = no handler has timed out.
    again_at: float = NEVER
    scope: anyio.CancelScope = field(init=False)
    # The scope within ``scope``, whose shield bounds the rate of cancellations.
    gate: anyio.CancelScope = field(init=False)
    bell: Doorbell = field(default_factory=Doorbell)


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
        self._freezes = context.freezes
        self._outputs = {} if context.outputs is None else context.outputs.attempts
        self._looks = None if context.freezes is None else StartLooks(context.freezes, clock)
        self._timeout = timeout
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        # Number of workers that may still be started. No worker can be woken before ``start``.
        self._unstarted = 0
        self._tasks: TaskGroup
        self._is_here: Callable[[], bool]
        self._turn: Callable[[], Awaitable[None]]
        self._handler_context: contextvars.Context
        self._latest: _Worker | None = None
        # Number of woken workers that have not run yet. Such workers are woken together, and run in one turn of the
        # loop.
        self._waking = 0
        # Number of woken workers that have run, out of those woken last.
        self._ran = 0
        # Number of workers without a message that yield to the loop.
        self._waiting = 0
        # With a history, handlers that start together share one ``write``, so their workers are woken together.
        self._grouped = tap.history is not None and tap.history.group_commit
        self._wake_limit = WakeLimit(engine.concurrency, grouped=self._grouped)
        # Set when the slice is used up, until the loop has had its turn.
        self._yielding = False
        self._rest = 0.0
        self._round = 0
        self._slice_start = self._looked = self._batch_start = clock()
        self._stride = 1
        self._countdown = 1

    def start(self, tasks: TaskGroup) -> None:
        """Start worker tasks on demand; the tasks run until the task group is cancelled."""
        self._tasks = tasks
        self._is_here = loop_check()
        self._turn = turn_of_loop()
        self._handler_context = contextvars.copy_context()
        self._unstarted = self._engine.concurrency
        if self._timeout is not None:
            tasks.start_soon(self._watch, self._timeout)

    def wake(self, *, taking: int = 0) -> None:
        """Wake idle workers for the ready lanes. ``taking``: number of ready lanes that the caller takes."""
        # The last of several woken workers wakes further workers, and so does a worker that has yielded. If handlers do
        # not suspend, the first worker handles all messages, and to wake a worker costs more than a message.
        waiting, limit = self._waiting, self._wake_limit
        if self._waking or (waiting >= ALONE and not limit.share) or not (self._idle or self._unstarted):
            return
        ready = self._engine.ready - taking
        if ready <= waiting:
            return
        self._ran = 0
        for _ in range(min(len(self._idle) + self._unstarted, ready - waiting, limit(ready) - waiting)):
            self._waking += 1
            if self._idle:
                self._idle.pop().bell.ring()
            elif not self._begin():
                self._waking -= 1
                return

    def hold(self) -> None:
        """Start no handler while the check for freezes forbids new handlers. Any thread may call this method."""
        self._yielding = True

    def cancel(self, partition: Partition) -> None:
        """Cancel only the handlers that run for a partition."""
        for worker in self._workers:
            if worker.message is not None and worker.message.partition is partition:
                worker.cancelled = True
                worker.timed_out = False
                worker.scope.cancel()

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Return no message, because the workers cancel a handler that runs too long."""
        return []

    def on_the_loop(self) -> list[Message]:
        """Return the messages whose handlers run. O(workers)."""
        return [worker.message for worker in self._workers if worker.message is not None]

    def message_in(self, frame: FrameType) -> Message | None:
        """Return the message whose handler a frame calls; None = the frame calls no handler of these workers."""
        if frame.f_code is not _CALLING:
            return None
        of_frame = frame.f_locals
        return of_frame.get("message") if of_frame.get("self") is self else None

    async def _watch(self, timeout: float) -> None:
        """Cancel every handler that takes too long, with one timer for all handlers."""
        try:
            await self._cancel_late(timeout)
        finally:
            # A shield would keep the cancellation at the end of the run from the handlers.
            for worker in self._workers:
                if worker.again_at != NEVER:
                    worker.gate.shield = False

    async def _cancel_late(self, timeout: float) -> None:
        while True:
            now = self._clock()
            running = [worker for worker in self._workers if worker.message is not None and not worker.cancelled]
            for worker in running:
                if now - worker.started >= timeout:
                    worker.cancelled = worker.timed_out = True
                    worker.cancelled_at, worker.again_at = now, now + BURST
                    worker.scope.cancel()
            # A handler that starts later times out later than the first of these handlers.
            starts = [min(worker.started, now) for worker in running if not worker.cancelled]
            due = min(min(starts, default=now) + timeout, self._cancel_again(now), self._report_ignored(now, timeout))
            # The sleep is never 0, although floats may round to 0: this task must not spin.
            await anyio.sleep(max(0.001, due - now))

    def _cancel_again(self, now: float) -> float:
        """Cancel each handler that continues after its cancellation once more. Return the time of the next call."""
        due = NEVER
        for worker in self._workers:
            if worker.again_at == NEVER or worker.message is None:
                continue
            if now >= worker.again_at:
                worker.again_at = now + AGAIN
                cancel_once(worker.gate)
            due = min(due, worker.again_at)
        return due

    def _report_ignored(self, now: float, timeout: float) -> float:
        """Report each handler that continues after its cancellation once. Return the time of the next report."""
        due = NEVER
        for worker in self._workers:
            if not worker.timed_out or worker.message is None:
                continue
            age = now - worker.cancelled_at
            if age >= PATIENCE:
                worker.cancelled_at = NEVER
                report_ignored(self._handler, worker.message, age, timeout)
            else:
                due = min(due, worker.cancelled_at + PATIENCE)
        return due

    def _begin(self) -> bool:
        """Start one more worker, and return whether it will run."""
        if self._tasks.cancel_scope.cancel_called:
            # The task group is ending, and the last settlement still wakes workers.
            return False
        if not self._is_here():
            # Only a task of this loop can start a task, and a callback has no task. The loop calls ``wake`` again.
            self._context.after_command()
            return False
        self._unstarted -= 1
        worker = _Worker()
        self._workers.append(worker)
        # The worker gets the context of the run, because a handler or a task of the user may wake it.
        self._handler_context.copy().run(self._tasks.start_soon, self._work, worker)
        return True

    def _woken(self) -> None:
        self._waking -= 1
        self._ran += 1
        now = self._clock()
        if self._ran == 1:
            # The loop had its turn after these workers were woken, so the slice begins now.
            self._slice_start = self._looked = now
            self._loop_watch.turned(now)
            self._batch_start = now
        elif not self._waking:
            self._wake_limit.started(self._ran, now - self._batch_start)
        if self._looks is not None and self._looks.woken(now):
            self._yielding = True
        self.wake(taking=1)

    async def _work(self, worker: _Worker) -> None:
        # A worker that is cancelled already calls no handler. Without this checkpoint, an eager task would call a
        # handler within ``wake``.
        await anyio.lowlevel.checkpoint()
        self._woken()
        again = True
        while again:
            worker.cancelled, worker.timed_out, worker.again_at = False, False, NEVER
            # Two scopes serve many messages, and are replaced only after they have absorbed a cancellation.
            with anyio.CancelScope() as worker.scope, anyio.CancelScope() as worker.gate:
                again = await self._work_until_cancelled(worker)

    async def _work_until_cancelled(self, worker: _Worker) -> bool:
        """Handle messages. Return whether this worker may still use ``await``."""
        engine, handler, context, history = self._engine, self._handler, self._context, self._history
        telemetry, timed, reporter = self._telemetry, self._timeout is not None, self._reporter
        grouped, looks, wake_limit, turn = self._grouped, self._looks, self._wake_limit, self._turn
        outputs, succeeded = self._outputs, reporter.succeeded
        handling: Handling | None = None
        now = 0.0
        while not worker.cancelled:
            yielding = self._yielding
            if yielding:
                self._waiting += 1
                try:
                    await self._yield_to_loop()
                finally:
                    self._waiting -= 1
                if not self._yielding:
                    # While this worker yielded, no other worker was woken for the ready lanes.
                    self.wake(taking=1)
                continue
            if looks is not None:
                looks.until -= 1
                if looks.until <= 0 and engine.ready and looks.look():
                    self._yielding = True
                    continue
            message = engine.take()
            if message is None:
                self._idle.append(worker)
                await worker.bell.wait()
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
            latest = self._latest
            if latest is not worker:
                if latest is not None and latest.message is not None and wake_limit.share < SURE:
                    # This worker runs while the handler of the other worker has not ended.
                    wake_limit.suspended()
                self._latest = worker
            if timed:
                # The handler is not called before its row is in the file, so its time has not begun.
                worker.started = NEVER
            if telemetry is not None:
                handling = telemetry.handling(message)
            try:
                if history is not None and not given_up_before(message):
                    row = history.started(message, now if leased else self._clock())
                    if grouped:
                        await turn()
                        while self._yielding:
                            await self._yield_to_loop()
                        if history.written < row:
                            history.flush()
                        if (leased and self._clock() >= message.partition.deadline) or (
                            looks is not None and looks.look()
                        ):
                            worker.message = None
                            reporter.give_up(message, handling)
                            context.after()
                            continue
                if message.broken is not None:
                    raise message.broken
                if timed:
                    worker.started = self._clock()
                if handling is None:
                    returned = await handler(message)
                else:
                    with handling:
                        returned = await handler(message)
                if returned is not None:
                    check_returned(handler, returned, message)
            except GeneratorExit as error:
                # The loop is closed, or the handler raised this exception, so no await is allowed any more.
                worker.message = None
                reporter.finish(message, ABANDON, "error", error, handling)
                context.stop_because(error, message=message)
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
                # A consumer without a publisher has an empty mapping here, which costs next to nothing.
                outcome = succeeded(message) if outputs else ACK
                if history is not None:
                    history.ended(message, "ok" if outcome is ACK else "outputs", self._clock())
                engine.finish(message, outcome, 0.0)
                if handling is not None:
                    handling.end(RESULTS[message.state])
            # This worker takes one ready lane itself, because to wake another worker costs more than the message.
            context.after(taking=1)
            if self._latest is not worker:
                continue  # Another worker ran, so the handler has suspended and the loop had its turn.
            self._countdown -= 1
            if self._countdown <= 0:
                self._look_at_slice()
        return True

    async def _yield_to_loop(self) -> None:
        """Give the loop one turn. After a handler that held the loop for long, wait for a pause instead."""
        before, freezes = self._round, self._freezes
        if freezes is not None and freezes.held:
            await freezes.wait()
        elif self._rest:
            await anyio.sleep(self._rest)
        else:
            await anyio.lowlevel.checkpoint()
        if self._round == before:
            # The first worker of the loop's next round starts a new slice for all of them.
            self._round += 1
            self._yielding = False
            if self._looks is not None:
                # The process may have been frozen in the loop's turn, after the look of a woken worker.
                self._looks.until = 1
            if freezes is not None and freezes.held:
                # A thread may have called ``hold`` just before.
                self._yielding = True
            self._slice_start = self._looked = self._clock()

    def _look_at_slice(self) -> None:
        """Check for the end of the slice, after ``_stride`` messages whose handlers have not suspended."""
        now = self._clock()
        self._wake_limit.returned(self._stride)
        left = self._slice_start + TIME_SLICE - now
        if left <= 0.0:
            self._stride = self._countdown = 1
            self._rest = self._loop_watch.rest(now)
            # No worker starts a handler before the loop has had its turn.
            self._yielding = True
            return
        # The clock is read again after a number of messages that fits into the slice, judged by the last messages.
        took, self._looked = now - self._looked, now
        self._stride = min(self._stride * 2, _STRIDE_LIMIT) if took < left / 4 else 1
        self._countdown = self._stride


_CALLING: Final = TaskWorkers._work_until_cancelled.__code__
