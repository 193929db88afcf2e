"""A pool of threads for plain handlers: the event loop queues calls, and the threads return results.

The first of several results wakes the loop, which then reads all results. The pool therefore needs no task, event or
lock for a call.

A thread cannot be cancelled. Only ``get`` removes a call from the queue, so only one thread has a call, or the loop
that takes the call back. A call that has begun uses its thread until the call ends. At the end of the run, the pool
abandons each call that still runs after the grace.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

import anyio

from lanes.clock import Clock
from lanes.core.types import Message
from lanes.errors import ConfigError
from lanes.loops import entry_of_loop

log = logging.getLogger("lanes")

_NAMED_LIMIT: Final = 10
"""Maximum number of messages in one log line."""

Call = TypeVar("Call")
Result = TypeVar("Result")


class _Thread(Generic[Call]):
    """One thread.

    ``now`` is the current call with its start in seconds; None = the thread is idle. Only the thread writes ``now``.
    ``reported`` is the call that the log has reported, with its start.
    """

    __slots__ = ("ended", "now", "reported", "thread")

    def __init__(self, number: int, target: Callable[[_Thread[Call]], None]) -> None:
        self.now: tuple[Call, float] | None = None
        self.ended = False
        self.reported: tuple[Call, float] | None = None
        # A daemon thread does not keep the process alive, even if its handler never returns.
        self.thread = threading.Thread(target=target, args=(self,), name=f"lanes-{number}", daemon=True)


class Pool(Generic[Call, Result]):
    """The threads of one consumer, started on demand.

    Only ``call`` and ``clock`` run in the threads; every method belongs to the event loop.

    Args:
        call: Function that performs a call, with the call and its start in seconds as arguments. The function never
            raises an exception. The pool appends the result of the function to ``results``.
        message_of: Function that returns the message that the log names for a call.
        concurrency: Maximum number of threads.
        clock: Monotonic clock in seconds.
        on_end: Function that the pool calls at the end of the run, after it has set ``ending``; None = no function.

    Attributes:
        results: Results that the loop has not read yet.
        ending: Whether no further call may begin. The function ``call`` checks this attribute first.
    """

    def __init__(
        self,
        call: Callable[[Call, float], Result],
        message_of: Callable[[Call], Message],
        concurrency: int,
        clock: Clock,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self.results: deque[Result] = deque()
        self.ending = False
        self._call = call
        self._message_of = message_of
        self._concurrency = concurrency
        self._clock = clock
        self._on_end = on_end
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._threads: list[_Thread[Call]] = []
        self._waking = False
        self._wake: anyio.Event
        self._call_on_loop: Callable[[Callable[[], None]], object]

    def __repr__(self) -> str:
        return f"<Pool {len(self._threads)} threads, {len(self._running())} calls running>"

    # --- on the event loop

    def open(self) -> None:
        """Bind the pool to the running event loop. The call starts no thread."""
        self._wake = anyio.Event()
        self._call_on_loop = entry_of_loop()

    def wake(self) -> None:
        """Make ``run`` call the function ``turn`` once more. Idempotent."""
        self._wake.set()

    def put(self, calls: Iterable[Call]) -> None:
        """Queue calls, in this order."""
        for call in calls:
            self._queue.put(call)

    def need(self, threads: int) -> None:
        """Start threads up to a number.

        Raises ``ConfigError`` if the system refuses a thread; the existing threads continue.
        """
        while len(self._threads) < threads:
            thread = _Thread(len(self._threads), self._work)
            try:
                thread.thread.start()
            except RuntimeError as error:
                raise ConfigError(
                    f"the system refused thread {len(self._threads) + 1} of concurrency={self._concurrency} "
                    f"({error}): lower concurrency, or raise the limit of threads of this process"
                ) from error
            self._threads.append(thread)

    @property
    def empty(self) -> bool:
        """Whether the pool has not started a thread yet."""
        return not self._threads

    def take_back(self) -> list[Call]:
        """Take back the calls that no thread has taken yet."""
        calls: list[Call] = []
        with suppress(Empty):
            while True:
                call = self._queue.get_nowait()
                if call is not None:
                    calls.append(call)
        return calls

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Return the messages of the calls that have run for ``timeout`` seconds or longer. O(threads)."""
        # Each ``now`` is read once, because its thread changes it.
        running = [thread.now for thread in self._threads]
        return [self._message_of(one[0]) for one in running if one is not None and now - one[1] >= timeout]

    async def watch(self, timeout: float) -> None:
        """Until cancelled, report each call that runs for ``timeout`` seconds once."""
        while True:
            now = self._clock()
            due = now + timeout
            for thread in self._threads:
                running = thread.now
                if running is None or running is thread.reported:
                    continue
                if now - running[1] >= timeout:
                    thread.reported = running
                    _report_stuck(self._message_of(running[0]), now - running[1], timeout)
                else:
                    due = min(due, running[1] + timeout)
            # The sleep is never 0, although floats may round to 0: this task must not spin.
            await anyio.sleep(max(due - now, 0.001))

    async def run(self, turn: Callable[[], None], grace: float, counts: Callable[[Call], bool]) -> None:
        """Call ``turn`` after calls have ended, and after ``wake``, until cancelled.

        After the cancellation no call begins. The method then waits ``grace`` seconds for running calls whose results
        the engine still accepts. After this time, the method abandons the remaining calls.

        Args:
            turn: Function that reads the results.
            grace: Seconds for running calls to end.
            counts: Function that returns whether the engine still accepts the result of a call.
        """
        try:
            while True:
                await self._woken()
                turn()
        except GeneratorExit:
            # The loop is closed, so no await is allowed, and the result of a running call is lost.
            self._end()
            raise
        except BaseException:
            self._end()
            with anyio.CancelScope(shield=True):
                await self._join(turn, grace, counts)
            raise

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake = anyio.Event()
        # Cleared before the results are read, so that a thread with a later result wakes the loop again.
        self._waking = False

    def _end(self) -> None:
        """Make each thread end when it has no call."""
        self.ending = True
        for _ in self._threads:
            self._queue.put(None)
        if self._on_end is not None:
            self._on_end()

    async def _join(self, turn: Callable[[], None], grace: float, counts: Callable[[Call], bool]) -> None:
        with anyio.move_on_after(grace):
            while any(counts(call) for call in self._running()):
                await self._woken()
                turn()
        # A thread without a call begins none any more, so this wait is short.
        while any(thread.now is None and not thread.ended for thread in self._threads):
            await self._woken()
            turn()
        turn()
        for thread in self._threads:
            if thread.ended:
                # The thread has run its last line, so this waits only for the system.
                thread.thread.join()
        left = [call for call in self._running() if counts(call)]
        if left:
            # The drain or the loss of the partition has reported the calls whose results no longer count.
            _report_abandoned([self._message_of(call) for call in left])

    def _running(self) -> list[Call]:
        running = [thread.now for thread in self._threads]
        return [one[0] for one in running if one is not None]

    # --- in the threads

    def _work(self, thread: _Thread[Call]) -> None:
        get, append, clock, run = self._queue.get, self.results.append, self._clock, self._call
        while (call := get()) is not None:
            now = clock()
            # The thread sets ``now`` before the call reads ``ending``, and the loop sets ``ending`` before it reads
            # ``now``. So at least the thread or the loop sees the change of the other.
            thread.now = (call, now)
            result = run(call, now)
            thread.now = None
            append(result)
            # An idle thread must not keep call and result alive.
            del call, result
            self._wake_loop()
        thread.ended = True
        self._wake_loop()

    def _wake_loop(self) -> None:
        # Two threads may both find ``_waking`` unset and wake the loop twice, which is harmless.
        if not self._waking:
            self._waking = True
            # The loop is closed if this thread was abandoned.
            with suppress(RuntimeError):
                self._call_on_loop(self.wake)


def handler_context() -> contextvars.Context:
    """Copy the current context so that sniffio detects no event loop in the copy."""
    context = contextvars.copy_context()
    try:
        import sniffio
    except ImportError:
        pass
    else:
        # A handler may run an event loop of its own in its thread.
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


def _report_stuck(message: Message, age: float, timeout: float) -> None:
    log.error(
        "%s position %d attempt %d: the handler has been running for %.1f s in a thread, longer than timeout=%g s. A "
        "thread cannot be cancelled, so the handler keeps its lane and its thread until it returns; raise timeout=, "
        "or let the handler end sooner",
        message.partition.id,
        message.position,
        message.attempt,
        age,
        timeout,
    )


def _report_abandoned(messages: list[Message]) -> None:
    named = ", ".join(f"{message.partition.id} position {message.position}" for message in messages[:_NAMED_LIMIT])
    log.warning(
        "abandoned %d threads whose handlers did not end within the grace; the results do not count, and the threads "
        "end with the process. Raise grace=, or let the handlers end sooner. Their messages: %s%s",
        len(messages),
        named,
        ", …" if len(messages) > _NAMED_LIMIT else "",
    )
