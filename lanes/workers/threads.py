"""Plain functions as handlers: threads of their own call them, the event loop hears of the results in batches.

The loop's task takes as many ready messages as may run and hands them to the pool. A thread calls the handler; the task
finishes all that have ended and takes the next messages. Every call into the engine is the loop's.

A handler that has begun keeps its lane and its thread until it ends. What no thread has begun is taken back when its
partition is given up.

With a history, the ``started`` rows of everything that is handed over at once are written by one ``write`` before it.
"""

from __future__ import annotations

import contextvars

from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, Message, Partition
from lanes.errors import ConfigError
from lanes.handlers import SyncHandler
from lanes.observe.otel import Handling
from lanes.observe.tap import Tap
from lanes.workers.context import RunContext
from lanes.workers.outcomes import RESULTS, LeaseExpired, OutcomeReporter
from lanes.workers.pool import Pool, handler_context


class _NotRun(BaseException):
    """In place of a handler's error: its thread found that everything ends, and did not call it."""


_Result = tuple[Message, BaseException | None, Handling | None]


class ThreadWorkers:
    """The threads of one consumer, ``Engine.concurrency`` at most, started as work comes up.

    ``handler`` is called from several threads at once, each time in a copy of the context that ``start`` was
    called in. ``timeout``: seconds after which a running handler is reported, once, in the log; None = never.
    ``grace``: seconds that running handlers get to end when the task group is cancelled.

    ``clock`` is called from the threads too. Everything else here is called from the event loop that runs it.
    """

    def __init__(
        self,
        engine: Engine,
        handler: SyncHandler,
        context: RunContext,
        clock: Clock,
        tap: Tap,
        *,
        timeout: float | None = None,
        grace: float,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._context = context
        self._clock = clock
        self._history = tap.history
        self._telemetry = tap.telemetry
        self._timeout = timeout
        self._grace = grace
        self._reporter = OutcomeReporter(engine, context, clock, tap)
        self._pool: Pool[Message, _Result] = Pool(self._run, _itself, engine.concurrency, clock)
        self._handler_context: contextvars.Context

    # --- on the event loop

    def start(self, tasks: TaskGroup) -> None:
        """Start taking messages, until the task group is cancelled. Starts no thread yet."""
        self._pool.open()
        self._handler_context = handler_context()
        # Handlers of fenced partitions had their grace in the drain, and cannot count any more.
        tasks.start_soon(self._pool.run, self._turn, self._grace, lambda message: message.partition.live)
        if self._timeout is not None:
            tasks.start_soon(self._pool.watch, self._timeout)

    def wake(self, *, taking: int = 0) -> None:
        """Have the lanes taken that are ready; the caller takes ``taking`` of them. Does not block. Idempotent."""
        engine = self._engine
        # While all threads are busy it is their results that wake.
        if engine.ready > taking and engine.running_handlers < engine.concurrency:
            self._pool.wake()

    def cancel(self, partition: Partition) -> None:
        """Take back what no thread has begun of a partition. What a thread runs goes on. Does not block.

        Idempotent.
        """
        if self._pool.ending:
            return
        taken_back = self._pool.take_back()
        self._pool.put(message for message in taken_back if message.partition is not partition)
        self._abandon([message for message in taken_back if message.partition is partition])
        self._context.after()

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """The messages whose handlers have been running for ``timeout`` seconds or longer; O(threads)."""
        return self._pool.stuck(now, timeout)

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
                if history is not None:
                    history.ended(message, "ok", self._clock())
                engine.finish(message, ACK, 0.0)
                if handling is not None:
                    handling.end(RESULTS[message.state])
            elif isinstance(error, _NotRun):
                self._reporter.finish(message, ABANDON, "cancelled", None, None)
            elif isinstance(error, LeaseExpired):
                self._reporter.give_up(message, handling)
            else:
                self._reporter.failed(message, error, handling)

    def _take(self) -> None:
        """Hand the threads everything that is ready and may run."""
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
            # As many as there are messages that run or are to run; never more than ``concurrency``.
            self._pool.need(engine.running_handlers)
        except ConfigError as refused:
            if self._pool.empty:
                # Nobody would ever call their handlers.
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
        if now >= message.partition.deadline:
            return message, LeaseExpired(), handling
        try:
            if message.broken is not None:
                raise message.broken
            self._handler_context.copy().run(self._handle, message, handling)
        except BaseException as error:
            return message, error, handling
        return message, None, handling

    def _handle(self, message: Message, handling: Handling | None) -> None:
        if handling is None:
            self._handler(message)
        else:
            with handling:
                self._handler(message)


def _itself(message: Message) -> Message:
    return message
