"""Plain functions as handlers: threads of their own call them, the event loop hears of the results in batches.

The loop's task takes as many ready messages as may run and puts them into one queue, which the threads read. A
thread calls the handler and appends what came of it to the results; the first result of a batch wakes the task,
which finishes all of them and takes the next messages. No task, event or lock per message but the queue's own, and
every call into the engine is the loop's.

A thread cannot be cancelled. A message is taken back as long as it is in the queue, and by ``get`` alone: whoever
gets it out, a thread or the loop, has it, and nobody else. A handler that has begun keeps its lane and its thread
until it ends, however long that takes.

With a history, the ``started`` rows of everything that is put into the queue at once are written by one ``write``
before it.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Final

import anyio
from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, Message, Partition
from lanes.endings import Endings
from lanes.errors import ConfigError
from lanes.handlers import SyncHandler
from lanes.loops import entry_of_loop
from lanes.observe import Handling
from lanes.outcomes import RESULTS
from lanes.shell import Shell
from lanes.tap import Tap

log = logging.getLogger("lanes")

_NAMED_LIMIT: Final = 10
"""Messages that one log line names at most."""


class _NotRun(BaseException):
    """In place of a handler's error: its thread found that everything ends, and did not call it."""


class _Overdue(BaseException):
    """In place of a handler's error: its thread found that the lease had run out, and did not call it."""


class _Worker:
    """A thread; ``now`` is what it runs and since when (seconds of the clock), written by the thread alone."""

    __slots__ = ("ended", "now", "reported", "thread")

    def __init__(self, number: int, target: Callable[[_Worker], None]) -> None:
        self.now: tuple[Message, float] | None = None
        self.ended = False
        self.reported: tuple[Message, float] | None = None
        # A daemon, so that a handler that never returns does not keep the process.
        self.thread = threading.Thread(target=target, args=(self,), name=f"lanes-{number}", daemon=True)


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
        shell: Shell,
        clock: Clock,
        tap: Tap,
        *,
        timeout: float | None = None,
        grace: float,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._shell = shell
        self._clock = clock
        self._history = tap.history
        self._telemetry = tap.telemetry
        self._timeout = timeout
        self._grace = grace
        self._endings = Endings(engine, shell, clock, tap)
        self._workers: list[_Worker] = []
        self._queue: SimpleQueue[Message | None] = SimpleQueue()
        self._results: deque[tuple[Message, BaseException | None, Handling | None]] = deque()
        self._waking = False
        self._ending = False
        self._wake: anyio.Event
        self._context: contextvars.Context
        self._call_on_loop: Callable[[Callable[[], None]], object]

    # --- on the event loop

    def start(self, tasks: TaskGroup) -> None:
        """Start taking messages, until the task group is cancelled. Starts no thread yet."""
        self._wake = anyio.Event()
        self._context = handler_context()
        self._call_on_loop = entry_of_loop()
        tasks.start_soon(self._run)
        if self._timeout is not None:
            tasks.start_soon(self._watch, self._timeout)

    def wake(self, *, taking: int = 0) -> None:
        """Have the lanes taken that are ready; the caller takes ``taking`` of them. Does not block. Idempotent."""
        engine = self._engine
        # While all threads are busy it is their results that wake.
        if engine.ready > taking and engine.running < engine.concurrency:
            self._wake.set()

    def cancel(self, partition: Partition) -> None:
        """Take back what no thread has begun of a partition. What a thread runs goes on. Does not block.

        Idempotent.
        """
        if self._ending:
            return
        taken_back = self._take_back()
        for message in taken_back:
            if message.partition is not partition:
                self._queue.put(message)
        self._abandon([message for message in taken_back if message.partition is partition])
        self._shell.after()

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """The messages whose handlers have been running for ``timeout`` seconds or longer; O(threads)."""
        # Read once each: the threads go on.
        running = [worker.now for worker in self._workers]
        return [one[0] for one in running if one is not None and now - one[1] >= timeout]

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake = anyio.Event()
                self._finish_results()
                self._take()
                self._shell.after()
        except GeneratorExit:
            # The loop is gone: nothing may be awaited any more, and nobody hears of what still runs.
            self._end()
            raise
        except BaseException:
            self._end()
            with anyio.CancelScope(shield=True):
                await self._join()
            raise

    def _finish_results(self) -> None:
        # Before the first look: a thread that appends after the last one wakes again.
        self._waking = False
        engine, results, history = self._engine, self._results, self._history
        while results:
            message, error, handling = results.popleft()
            if error is None:
                if history is not None:
                    history.ended(message, "ok", self._clock())
                engine.finish(message, ACK, 0.0)
                if handling is not None:
                    handling.end(RESULTS[message.state])
            elif isinstance(error, _NotRun):
                self._endings.finish(message, ABANDON, "cancelled", None, None)
            elif isinstance(error, _Overdue):
                self._endings.give_up(message, handling)
            else:
                self._endings.failed(message, error, handling)

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
            self._endings.give_back(late)
        if history is not None:
            for message in taken:
                if not given_up_before(message):
                    history.started(message, now)
            history.flush()
        for message in taken:
            self._queue.put(message)
        self._start_threads()

    def _start_threads(self) -> None:
        """As many as there are messages that run or are to run; never more than ``concurrency``."""
        while len(self._workers) < self._engine.running:
            worker = _Worker(len(self._workers), self._work)
            try:
                worker.thread.start()
            except RuntimeError as error:
                refused = ConfigError(
                    f"the system refused thread {len(self._workers) + 1} of concurrency={self._engine.concurrency} "
                    f"({error}): lower concurrency, or raise the limit of threads of this process"
                )
                refused.__cause__ = error
                if not self._workers:
                    # Nobody would ever call their handlers.
                    self._abandon(self._take_back())
                self._shell.stop_because(refused)
                return
            self._workers.append(worker)

    def _take_back(self) -> list[Message]:
        """What no thread has got yet."""
        messages: list[Message] = []
        try:
            while True:
                message = self._queue.get_nowait()
                if message is not None:
                    messages.append(message)
        except Empty:
            return messages

    def _abandon(self, messages: list[Message]) -> None:
        for message in messages:
            self._endings.finish(message, ABANDON, "cancelled", None, None)

    async def _watch(self, timeout: float) -> None:
        """Report every handler that runs for ``timeout`` seconds, once; until cancelled."""
        while True:
            now = self._clock()
            due = now + timeout
            for worker in self._workers:
                running = worker.now
                if running is None or running is worker.reported:
                    continue
                if now - running[1] >= timeout:
                    worker.reported = running
                    report_stuck(running[0], now - running[1], timeout)
                else:
                    due = min(due, running[1] + timeout)
            # Not 0, whatever a subtraction of floats leaves: this task must not spin.
            await anyio.sleep(max(due - now, 0.001))

    # --- the end

    def _end(self) -> None:
        """Have every thread end that is idle, or as soon as its handler has ended. Does not block."""
        # From here on no handler is called: what is still queued comes back as a result.
        self._ending = True
        for _ in self._workers:
            self._queue.put(None)

    async def _join(self) -> None:
        """Wait for the threads, and leave those behind whose handlers do not end within the grace."""
        with anyio.move_on_after(self._grace):
            # Handlers of fenced partitions had their grace in the drain, and cannot count any more.
            while any(message.partition.live for message in self._running()):
                await self._wait_for_results()
        # A thread without a handler calls none any more, so that this takes no time to speak of.
        while any(worker.now is None and not worker.ended for worker in self._workers):
            await self._wait_for_results()
        self._finish_results()
        self._shell.after()
        for worker in self._workers:
            if worker.ended:
                # It has run its last line: this waits for the system alone.
                worker.thread.join()
        left = self._running()
        if left:
            report_left(left)

    def _running(self) -> list[Message]:
        running = [worker.now for worker in self._workers]
        return [one[0] for one in running if one is not None]

    async def _wait_for_results(self) -> None:
        await self._wake.wait()
        self._wake = anyio.Event()
        self._finish_results()
        self._shell.after()

    # --- in the threads

    def _work(self, worker: _Worker) -> None:
        get, append, clock = self._queue.get, self._results.append, self._clock
        while (message := get()) is not None:
            now = clock()
            worker.now = (message, now)
            handling = None if self._telemetry is None else self._telemetry.handling(message)
            # After ``now`` is set: the loop sets ``_ending`` first and looks at ``now`` then, so that one of the two
            # sees the other.
            if self._ending:
                error: BaseException | None = _NotRun()
            elif now >= message.partition.deadline:
                error = _Overdue()
            else:
                error = self._call(message, handling)
            worker.now = None
            append((message, error, handling))
            # An idle thread keeps none of them alive.
            del message, error, handling
            self._wake_loop()
        worker.ended = True
        self._wake_loop()

    def _call(self, message: Message, handling: Handling | None) -> BaseException | None:
        try:
            if message.broken is not None:
                raise message.broken
            self._context.copy().run(self._handle, message, handling)
        except BaseException as error:
            return error
        return None

    def _handle(self, message: Message, handling: Handling | None) -> None:
        if handling is None:
            self._handler(message)
        else:
            with handling:
                self._handler(message)

    def _wake_loop(self) -> None:
        # Two threads may both find it unset: the loop is woken twice, which does no harm.
        if not self._waking:
            self._waking = True
            try:
                self._call_on_loop(self._set_wake)
            except RuntimeError:
                # The loop is closed: this thread was left behind, and nobody waits for it.
                pass

    def _set_wake(self) -> None:
        self._wake.set()


def handler_context() -> contextvars.Context:
    """A copy of the current context, in which no event loop runs as far as the libraries for that can tell."""
    context = contextvars.copy_context()
    try:
        import sniffio
    except ImportError:
        pass
    else:
        # Else a handler that runs a loop of its own in its thread would be told that it is in one.
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


def report_stuck(message: Message, age: float, timeout: float) -> None:
    log.error(
        "%s position %d attempt %d: its handler has been running for %.1f s in a thread, handler timeout %g s. A "
        "thread cannot be cancelled: its lane and its thread stay taken until it returns",
        message.partition.id,
        message.position,
        message.attempt,
        age,
        timeout,
    )


def report_left(messages: list[Message]) -> None:
    named = ", ".join(f"{message.partition.id} position {message.position}" for message in messages[:_NAMED_LIMIT])
    log.warning(
        "%d threads left behind, whose handlers did not end: what they do does not count any more, and they end with "
        "the process. They run %s%s",
        len(messages),
        named,
        ", …" if len(messages) > _NAMED_LIMIT else "",
    )
