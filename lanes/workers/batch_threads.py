"""Threads for a plain handler of batches: one call is one thread's, and a task of the event loop waits for its end.

A call that has begun keeps its lanes and its thread until it ends, whatever becomes of its partitions.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.types import Message, Outcome
from lanes.workers.pool import Pool, handler_context


class _Call:
    """One call: ``done`` is set when it has ended, or nobody waits for it any longer."""

    __slots__ = ("batch", "context", "done", "error", "outcomes")

    def __init__(self, batch: list[Message], context: contextvars.Context) -> None:
        self.batch = batch
        self.context = context
        self.outcomes: list[Outcome] | None = None
        self.error: BaseException | None = None
        self.done = anyio.Event()


class BatchThreads:
    """The threads of one consumer, as many as calls run at once, started as calls come up.

    ``handle`` runs in them: it calls the handler with a batch and returns one outcome for each message.
    ``timeout``: seconds after which a running call is reported, once, in the log; None = never. ``grace``: seconds
    that running calls get to end when the task group is cancelled.
    """

    def __init__(
        self,
        handle: Callable[[list[Message]], list[Outcome]],
        concurrency: int,
        clock: Clock,
        *,
        timeout: float | None,
        grace: float,
    ) -> None:
        self._handle = handle
        self._timeout = timeout
        self._grace = grace
        self._calls: dict[_Call, None] = {}
        self._pool: Pool[_Call, _Call] = Pool(self._run, lambda call: call.batch[0], concurrency, clock)

    def start(self, tasks: TaskGroup) -> None:
        """Wait for calls, until the task group is cancelled; then end the threads. Starts no thread yet."""
        self._pool.open()
        tasks.start_soon(self._serve)
        if self._timeout is not None:
            tasks.start_soon(self._pool.watch, self._timeout)

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """The first message of each call that has been running for ``timeout`` seconds or longer."""
        return self._pool.stuck(now, timeout)

    async def call(self, batch: list[Message]) -> list[Outcome]:
        """Have a batch handled in a thread; returns or raises what ``handle`` does.

        Its cancellation waits for the end of the handler; not longer than the grace when the whole run ends.
        """
        if self._pool.ending:
            # The run has been cancelled: this raises, and so does the one below.
            await anyio.lowlevel.checkpoint()
        call = _Call(batch, handler_context())
        self._calls[call] = None
        try:
            self._pool.need(len(self._calls))
            self._pool.put([call])
            with anyio.CancelScope(shield=True):
                await call.done.wait()
        finally:
            del self._calls[call]
        if call.error is not None:
            raise call.error
        if call.outcomes is None:
            # It was not begun, or is left behind.
            await anyio.lowlevel.checkpoint()
        return call.outcomes or []

    async def _serve(self) -> None:
        try:
            await self._pool.run(self._end_calls, self._grace, _counts)
        finally:
            for call in self._calls:
                call.done.set()

    def _end_calls(self) -> None:
        results = self._pool.results
        while results:
            results.popleft().done.set()

    # --- in the threads

    def _run(self, call: _Call, now: float) -> _Call:
        if not self._pool.ending:
            try:
                call.outcomes = call.context.run(self._handle, call.batch)
            except BaseException as error:
                call.error = error
        return call


def _counts(call: _Call) -> bool:
    """Whether whoever has its messages still waits for what comes of it."""
    return any(message.partition.live for message in call.batch)
