"""Threads that make calls: one queue in front of them, and what came of each call behind them, for the event loop.

A call is whatever one thread does in one go. The first result of several wakes the loop, which looks at all of them: no
task, event or lock a call but the queue's own.

A thread cannot be cancelled. A call is taken back as long as it is in the queue, and by ``get`` alone: whoever gets it
out, a thread or the loop, has it, and nobody else. One that has begun keeps its thread until it ends, however long that
takes; only the end of the whole run leaves it behind, after a grace.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

import anyio

from lanes.clock import Clock
from lanes.core.types import Message
from lanes.errors import ConfigError
from lanes.loops import entry_of_loop

log = logging.getLogger("lanes")

_NAMED_LIMIT: Final = 10
"""Messages that one log line names at most."""

Call = TypeVar("Call")
Result = TypeVar("Result")


class _Thread(Generic[Call]):
    """``now`` is what it runs and since when (seconds of the clock), written by the thread alone."""

    __slots__ = ("ended", "now", "reported", "thread")

    def __init__(self, number: int, target: Callable[[_Thread[Call]], None]) -> None:
        self.now: tuple[Call, float] | None = None
        self.ended = False
        self.reported: tuple[Call, float] | None = None
        # A daemon, so that a handler that never returns does not keep the process.
        self.thread = threading.Thread(target=target, args=(self,), name=f"lanes-{number}", daemon=True)


class Pool(Generic[Call, Result]):
    """The threads of one consumer, started as calls come up.

    ``call`` runs in them, with a call and the time of its start; it does not raise, and what it returns is put into
    ``results``. ``message_of``: what names a call in the log. ``concurrency``: as many threads as there may be.
    ``clock`` is called from the threads too. Everything else here is called from the event loop that runs it.

    ``ending``: no call that has not begun may begin any more; ``call`` looks at it first.
    """

    def __init__(
        self,
        call: Callable[[Call, float], Result],
        message_of: Callable[[Call], Message],
        concurrency: int,
        clock: Clock,
    ) -> None:
        self.results: deque[Result] = deque()
        self.ending = False
        self._call = call
        self._message_of = message_of
        self._concurrency = concurrency
        self._clock = clock
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._threads: list[_Thread[Call]] = []
        self._waking = False
        self._wake: anyio.Event
        self._call_on_loop: Callable[[Callable[[], None]], object]

    def __repr__(self) -> str:
        return f"<Pool {len(self._threads)} threads, {len(self._running())} calls running>"

    # --- on the event loop

    def open(self) -> None:
        """Belong to the running event loop from now on. Starts no thread yet."""
        self._wake = anyio.Event()
        self._call_on_loop = entry_of_loop()

    def wake(self) -> None:
        """Have ``run`` call its ``turn``. Does not block. Idempotent."""
        self._wake.set()

    def put(self, calls: Iterable[Call]) -> None:
        """Have calls made, in this order. Does not block."""
        for call in calls:
            self._queue.put(call)

    def need(self, threads: int) -> None:
        """Have at least so many threads. Raises ``ConfigError`` when the system refuses one; those there are go on."""
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
        """Whether there is no thread."""
        return not self._threads

    def take_back(self) -> list[Call]:
        """What no thread has got yet."""
        calls: list[Call] = []
        try:
            while True:
                call = self._queue.get_nowait()
                if call is not None:
                    calls.append(call)
        except Empty:
            return calls

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """What has been running for ``timeout`` seconds or longer; O(threads)."""
        # Read once each: the threads go on.
        running = [thread.now for thread in self._threads]
        return [self._message_of(one[0]) for one in running if one is not None and now - one[1] >= timeout]

    async def watch(self, timeout: float) -> None:
        """Report every call that runs for ``timeout`` seconds, once; until cancelled."""
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
            # Not 0, whatever a subtraction of floats leaves: this task must not spin.
            await anyio.sleep(max(due - now, 0.001))

    async def run(self, turn: Callable[[], None], grace: float, counts: Callable[[Call], bool]) -> None:
        """Call ``turn`` whenever a call has ended, and after each ``wake``; until cancelled.

        Then nothing more begins, calls that still count get ``grace`` seconds to end, and what runs even then is left
        behind. ``turn`` is called for what ends meanwhile, and once at the end.
        """
        try:
            while True:
                await self._woken()
                turn()
        except GeneratorExit:
            # The loop is gone: nothing may be awaited any more, and nobody hears of what still runs.
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
        # Before the first look at the results: a thread that appends after the last one wakes again.
        self._waking = False

    def _end(self) -> None:
        """Have every thread end that is idle, or as soon as its call has ended. Does not block."""
        self.ending = True
        for _ in self._threads:
            self._queue.put(None)

    async def _join(self, turn: Callable[[], None], grace: float, counts: Callable[[Call], bool]) -> None:
        with anyio.move_on_after(grace):
            while any(counts(call) for call in self._running()):
                await self._woken()
                turn()
        # A thread without a call makes none any more, so that this takes no time to speak of.
        while any(thread.now is None and not thread.ended for thread in self._threads):
            await self._woken()
            turn()
        turn()
        for thread in self._threads:
            if thread.ended:
                # It has run its last line: this waits for the system alone.
                thread.thread.join()
        left = self._running()
        if left:
            _report_left([self._message_of(call) for call in left])

    def _running(self) -> list[Call]:
        running = [thread.now for thread in self._threads]
        return [one[0] for one in running if one is not None]

    # --- in the threads

    def _work(self, thread: _Thread[Call]) -> None:
        get, append, clock, run = self._queue.get, self.results.append, self._clock, self._call
        while (call := get()) is not None:
            now = clock()
            # Before ``ending`` is looked at: the loop sets that first and looks at ``now`` then, so that one of the two
            # sees the other.
            thread.now = (call, now)
            result = run(call, now)
            thread.now = None
            append(result)
            # An idle thread keeps none of them alive.
            del call, result
            self._wake_loop()
        thread.ended = True
        self._wake_loop()

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


def _report_stuck(message: Message, age: float, timeout: float) -> None:
    log.error(
        "%s position %d attempt %d: its handler has been running for %.1f s in a thread, handler timeout %g s. A "
        "thread cannot be cancelled: its lane and its thread stay taken until it returns",
        message.partition.id,
        message.position,
        message.attempt,
        age,
        timeout,
    )


def _report_left(messages: list[Message]) -> None:
    named = ", ".join(f"{message.partition.id} position {message.position}" for message in messages[:_NAMED_LIMIT])
    log.warning(
        "%d threads left behind, whose handlers did not end: what they do does not count any more, and they end with "
        "the process. They run %s%s",
        len(messages),
        named,
        ", …" if len(messages) > _NAMED_LIMIT else "",
    )
