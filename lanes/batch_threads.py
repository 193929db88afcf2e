"""Threads for a plain handler of batches: one call is one thread's, and the event loop waits for its end.

A thread cannot be cancelled. A call that has begun keeps its lanes and its thread until it ends, whatever becomes of
its partitions; only the end of the whole run leaves it behind, after a grace.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.types import Message, Outcome
from lanes.errors import ConfigError
from lanes.loops import entry_of_loop
from lanes.threads import handler_context, report_left, report_stuck


class _Call:
    """One call: ``done`` is set when the handler has ended, ``wake`` then or when nobody waits for it any longer."""

    __slots__ = ("batch", "context", "done", "error", "outcomes", "started", "thread", "wake")

    def __init__(self, batch: list[Message], context: contextvars.Context, now: float) -> None:
        self.batch = batch
        self.context = context
        self.started = now
        self.thread: threading.Thread | None = None
        self.outcomes: list[Outcome] = []
        self.error: BaseException | None = None
        self.done = anyio.Event()
        self.wake = anyio.Event()

    def end(self) -> None:
        self.done.set()
        self.wake.set()


class BatchThreads:
    """The threads of one consumer, as many as calls run at once, started as calls come up.

    ``handle`` runs in them: it calls the handler with a batch and returns one outcome for each message.
    ``timeout``: seconds after which a running call is reported, once, in the log; None = never. ``grace``: seconds
    that running calls get to end when the task group is cancelled.
    """

    def __init__(
        self,
        handle: Callable[[list[Message]], list[Outcome]],
        clock: Clock,
        *,
        timeout: float | None,
        grace: float,
    ) -> None:
        self._handle = handle
        self._clock = clock
        self._timeout = timeout
        self._grace = grace
        self._calls: dict[_Call, None] = {}
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._ending = False
        self._call_on_loop: Callable[[Callable[[], None]], object]

    def start(self, tasks: TaskGroup) -> None:
        """Wait for calls, until the task group is cancelled; then end the threads. Starts no thread yet."""
        self._call_on_loop = entry_of_loop()
        tasks.start_soon(self._run)

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """The first message of each call that has been running for ``timeout`` seconds or longer."""
        return [call.batch[0] for call in self._calls if now - call.started >= timeout]

    async def call(self, batch: list[Message]) -> list[Outcome]:
        """Have a batch handled in a thread; returns or raises what ``handle`` does.

        Its cancellation waits for the end of the handler; not longer than the grace when the whole run ends.
        """
        if self._ending:
            # The run has been cancelled: this raises, and so does the one below.
            await anyio.lowlevel.checkpoint()
        call = _Call(batch, handler_context(), self._clock())
        self._calls[call] = None
        try:
            if len(self._threads) < len(self._calls):
                self._start_thread()
            self._queue.put(call)
            with anyio.CancelScope(shield=True):
                await self._end_of(call)
        finally:
            del self._calls[call]
        if not call.done.is_set():
            await anyio.lowlevel.checkpoint()
        if call.error is not None:
            raise call.error
        return call.outcomes

    async def _end_of(self, call: _Call) -> None:
        with anyio.move_on_after(self._timeout):
            await call.wake.wait()
        if not call.wake.is_set():
            assert self._timeout is not None, "only a timeout ends the wait"
            report_stuck(call.batch[0], self._clock() - call.started, self._timeout)
            await call.wake.wait()
        with anyio.move_on_after(self._grace):
            await call.done.wait()

    async def _run(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self._ending = True
            for call in self._calls:
                call.wake.set()
            for _ in self._threads:
                self._queue.put(None)
            with anyio.CancelScope(shield=True):
                await self._join()

    async def _join(self) -> None:
        # Those who wait for these calls leave them at the same moment.
        calls = list(self._calls)
        with anyio.move_on_after(self._grace):
            for call in calls:
                await call.done.wait()
        left = [call for call in calls if not call.done.is_set()]
        if left:
            report_left([call.batch[0] for call in left])
        for thread in self._threads:
            if thread not in [call.thread for call in left]:
                # It has no call any more: this waits for the system alone.
                thread.join()

    def _start_thread(self) -> None:
        # A daemon, so that a handler that never returns does not keep the process.
        thread = threading.Thread(target=self._work, name=f"lanes-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ConfigError(
                f"the system refused thread {len(self._threads) + 1} for concurrency ({error}): lower concurrency, or "
                "raise the limit of threads of this process"
            ) from error
        self._threads.append(thread)

    # --- in the threads

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.thread = threading.current_thread()
            try:
                call.outcomes = call.context.run(self._handle, call.batch)
            except BaseException as error:
                call.error = error
            try:
                self._call_on_loop(call.end)
            except RuntimeError:
                # The loop is closed: this thread was left behind, and nobody waits for it.
                return
            # An idle thread keeps no message alive.
            del call
