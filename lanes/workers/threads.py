"""Workers for a plain handler. Threads call the handler, and the event loop reads the results in batches.

A task of the loop takes all ready messages that may run, and queues them in the pool. The task later reports all
results and takes the next messages. Only the loop calls the engine. A handler that has begun occupies its lane and its
thread until the handler ends. If the run cancels the handlers of a partition, the workers take back its queued
messages.

With a history, one ``write`` stores the ``started`` rows of all messages that a task queues together, before the task
queues the messages.
"""

from __future__ import annotations

import contextvars
from types import FrameType

from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.core.types import ABANDON, ACK, Message, Partition
from lanes.errors import ConfigError
from lanes.handlers import SyncHandler
from lanes.observe.otel import Handling
from lanes.workers.context import RunContext
from lanes.workers.outcomes import RESULTS, OutcomeReporter, OwnershipInDoubt
from lanes.workers.pool import Pool, handler_context
from lanes.workers.processes import Killed, ProcessPool, run_threads


class _NotRun(BaseException):
    """The result for a handler that was not called because the run was ending."""


_Result = tuple[Message, BaseException | None, Handling | None]


class ThreadWorkers:
    """The threads of one consumer, ``Engine.concurrency`` at most, started on demand.

    Threads call ``handler`` concurrently, each time in a copy of the context of ``start``. Only ``handler`` and
    ``clock`` run in the threads; every method belongs to the event loop.

    Args:
        context: The run.
        handler: Plain function of one message.
        timeout: Seconds after which the log reports a running handler once. ``None`` = never.
        grace: Seconds for running handlers to end when the task group is cancelled.
        processes: The processes that call the handler, for ``handler=None``. ``None`` = the threads call the handler.
    """

    def __init__(
        self,
        context: RunContext,
        handler: SyncHandler | None,
        *,
        timeout: float | None = None,
        grace: float,
        processes: ProcessPool | None = None,
    ) -> None:
        self._engine = context.engine
        self._handler = handler
        self._context = context
        self._clock = context.clock
        self._history = context.tap.history
        self._telemetry = context.tap.telemetry
        self._freezes = context.freezes
        self._processes = processes
        # ``ProcessPool`` kills a process after the timeout, so the threads need no watch.
        self._timeout = timeout if processes is None else None
        self._grace = grace
        self._reporter = OutcomeReporter(context)
        self._pool: Pool[Message, _Result] = Pool(
            self._run,
            lambda message: message,
            context.engine.concurrency,
            context.clock,
            None if processes is None else processes.end,
        )
        self._handler_context: contextvars.Context

    # --- on the event loop

    def start(self, tasks: TaskGroup) -> None:
        """Take messages until the task group is cancelled. No thread starts before the first message."""
        self._pool.open()
        self._handler_context = handler_context()
        # Handlers of fenced partitions had their grace in the drain, and their results do not count.
        if self._processes is not None:
            self._processes.start()
        tasks.start_soon(
            run_threads, self._pool, self._processes, self._turn, self._grace, lambda message: message.partition.live
        )
        if self._timeout is not None:
            tasks.start_soon(self._pool.watch, self._timeout)

    def wake(self, *, taking: int = 0) -> None:
        """Take the ready lanes. ``taking``: number of ready lanes that the caller takes."""
        engine = self._engine
        # While all threads are busy, their results wake the task.
        if engine.ready > taking and engine.running_handlers < engine.concurrency:
            self._pool.wake()

    def hold(self) -> None:
        """Do nothing, because each thread checks for a freeze before it calls the handler."""

    def cancel(self, partition: Partition) -> None:
        """Take back the queued messages of a partition.

        Handlers in threads continue. The call kills the handler processes of the partition.
        """
        if self._pool.ending:
            return
        taken_back = self._pool.take_back()
        self._pool.put(message for message in taken_back if message.partition is not partition)
        self._abandon([message for message in taken_back if message.partition is partition])
        if self._processes is not None:
            self._processes.cancel(partition)
        self._context.after()

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Return the messages whose handlers have run for ``timeout`` seconds or longer. O(threads)."""
        return [] if self._processes is not None else self._pool.stuck(now, timeout)

    def on_the_loop(self) -> list[Message]:
        """Return no message, because the run does not wait for a handler in a thread after its grace."""
        return []

    def message_in(self, frame: FrameType) -> Message | None:
        """Return None, because no handler runs on the event loop."""
        return None

    def _turn(self) -> None:
        self._finish_results()
        if not self._pool.ending:
            self._take()
        self._context.after()

    def _finish_results(self) -> None:
        engine, results, history = self._engine, self._pool.results, self._history
        while results:
            message, error, handling = results.popleft()
            if error is None:
                outcome = self._reporter.succeeded(message)
                if history is not None:
                    history.ended(message, "ok" if outcome is ACK else "outputs", self._clock())
                engine.finish(message, outcome, 0.0)
                if handling is not None:
                    handling.end(RESULTS[message.state])
            elif isinstance(error, _NotRun | Killed):
                self._reporter.finish(message, ABANDON, "cancelled", None, handling)
            elif isinstance(error, OwnershipInDoubt):
                self._reporter.give_up(message, handling)
            else:
                self._reporter.failed(message, error, handling)

    def _take(self) -> None:
        """Queue every ready message that may run."""
        if self._freezes is not None and self._freezes.held:
            return
        engine, history = self._engine, self._history
        taken: list[Message] = []
        while (message := engine.take()) is not None:
            taken.append(message)
        if not taken:
            return
        now = self._clock()
        late = [message for message in taken if now >= message.partition.deadline]
        if late:
            taken = [message for message in taken if message not in late]
            self._reporter.give_back(late)
        if history is not None:
            for message in taken:
                if not given_up_before(message):
                    history.started(message, now)
            history.flush()
        self._pool.put(taken)
        try:
            # One thread for each message that runs or is queued, and never more than ``concurrency``.
            self._pool.need(engine.running_handlers)
        except ConfigError as refused:
            if self._pool.empty:
                # Without a thread no handler would ever be called.
                self._abandon(self._pool.take_back())
            self._context.stop_because(refused)

    def _abandon(self, messages: list[Message]) -> None:
        for message in messages:
            self._reporter.finish(message, ABANDON, "cancelled", None, None)

    # --- in the threads

    def _run(self, message: Message, now: float) -> _Result:
        handling = None if self._telemetry is None else self._telemetry.handling(message)
        if self._pool.ending:
            return message, _NotRun(), handling
        if self._processes is None:
            assert self._handler is not None, "without processes, the threads call the handler"
            return self._call(message, now, handling, self._handler)
        try:
            with self._processes.take((message,)) as process:
                # The wait for a process may have taken long, so the call begins now.
                return self._call(message, self._clock(), handling, process.handle)
        except BaseException as error:
            # The call was cancelled before it began, or no process can start.
            return message, error, handling

    def _call(self, message: Message, now: float, handling: Handling | None, handler: SyncHandler) -> _Result:
        if now >= message.partition.deadline or (self._freezes is not None and self._freezes.look(now)):
            return message, OwnershipInDoubt(), handling
        try:
            if message.broken is not None:
                raise message.broken
            self._handler_context.copy().run(_handle, message, handling, handler)
        except BaseException as error:
            return message, error, handling
        return message, None, handling


def _handle(message: Message, handling: Handling | None, handler: SyncHandler) -> None:
    if handling is None:
        handler(message)
    else:
        with handling:
            handler(message)
