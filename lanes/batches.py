"""Workers for a handler of batches: one call of it is one execution of every lane in the batch.

A batch is taken when it can be full, or when its first message has waited for ``linger`` seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from lanes.clock import Clock
from lanes.core.engine import Engine
from lanes.core.lane import FINISHED, QUEUED
from lanes.core.types import ABANDON, ACK, Failure, LaneId, Message, Outcome, Partition, PartitionId
from lanes.errors import MessageError
from lanes.handlers import BatchHandler, Decode, decoded, is_async, refuse_awaitable
from lanes.observe import Handling
from lanes.outcomes import RESULTS, batch_outcomes, cancellation_of, counts, failure, stopping
from lanes.settling import Shell
from lanes.tap import Tap


class _Worker:
    __slots__ = ("batch", "cancelled", "scope")

    def __init__(self) -> None:
        self.batch: list[Message] = []
        self.cancelled = False
        self.scope: anyio.CancelScope


class BatchWorkers:
    """The workers of one consumer whose handler takes up to ``size`` messages.

    A plain function runs in a thread, or on the event loop with ``inline``. Cancelling a partition cancels the calls
    that any of its messages is in: what of them belongs to other partitions was interrupted, and drains these.
    """

    def __init__(
        self,
        engine: Engine,
        handler: BatchHandler,
        shell: Shell,
        clock: Clock,
        tap: Tap,
        *,
        size: int,
        linger: float,
        timeout: float | None,
        inline: bool,
        decode: Decode | None,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._awaits = is_async(handler)
        self._shell = shell
        self._clock = clock
        self._tap = tap
        self._size = size
        self._linger = linger
        self._timeout = timeout
        self._inline = inline
        self._decode = decode
        self._threads = anyio.CapacityLimiter(engine.concurrency)
        self._workers = [_Worker() for _ in range(engine.concurrency)]
        self._wake = anyio.Event()

    def start(self, tasks: TaskGroup) -> None:
        """Start the worker tasks; they run until the task group is cancelled."""
        for worker in self._workers:
            tasks.start_soon(self._work, worker)

    def wake(self) -> None:
        """Something is ready."""
        self._wake.set()

    def cancel(self, partition: Partition) -> None:
        """Cancel the calls that messages of a partition are in."""
        for worker in self._workers:
            if any(message.partition is partition for message in worker.batch):
                worker.cancelled = True
                worker.scope.cancel()

    async def _work(self, worker: _Worker) -> None:
        while True:
            batch = await self._take()
            worker.batch = batch
            worker.cancelled = False
            with anyio.CancelScope() as worker.scope:
                await self._handle(worker, batch)
            self._shell.after()
            await anyio.lowlevel.checkpoint()

    async def _take(self) -> list[Message]:
        engine = self._engine
        while True:
            if not engine.available(1):
                self._wake = anyio.Event() if self._wake.is_set() else self._wake
                await self._wake.wait()
                continue
            if self._linger:
                deadline = self._clock() + self._linger
                while engine.available(self._size) < self._size and (left := deadline - self._clock()) > 0:
                    self._wake = anyio.Event() if self._wake.is_set() else self._wake
                    with anyio.move_on_after(left):
                        await self._wake.wait()
            batch = engine.take_batch(self._size)
            if batch:
                return batch

    async def _handle(self, worker: _Worker, batch: list[Message]) -> None:
        tap = self._tap
        handling: Handling | None = None
        if tap.telemetry is not None:
            handling = tap.telemetry.handling_batch(batch)
        try:
            if tap.history is not None:
                for message in batch:
                    tap.history.started(message, self._clock())
                # In the file before the handler is called, as a whole.
                tap.history.flush()
            if handling is None:
                outcomes = await self._outcomes(batch)
            else:
                with handling:
                    outcomes = await self._outcomes(batch)
        except BaseException as error:
            cancelled = worker.cancelled or anyio.current_effective_deadline() == float("-inf")
            cancellation = cancellation_of(error) if cancelled else None
            if cancellation is not None:
                self._finish(worker, [ABANDON] * len(batch), "cancelled", error, handling)
                raise cancellation from None
            if isinstance(error, Exception) and counts(error):
                self._finish(worker, [failure(error)] * len(batch), "error", error, handling)
                return
            self._finish(worker, [ABANDON] * len(batch), "error", error, handling)
            self._shell.stop_because(stopping(error, batch[0]))
            if isinstance(error, GeneratorExit):
                raise
        else:
            self._finish(worker, outcomes, "ok", None, handling)

    async def _outcomes(self, batch: list[Message]) -> list[Outcome]:
        """Call the handler with what can be read. Behind a message of a lane that cannot, that lane waits."""
        unreadable: dict[tuple[PartitionId, LaneId], None] = {}
        outcomes: dict[Message, Outcome] = {}
        sound = []
        for message in batch:
            lane = (message.partition.id, message.lane)
            if message.lane is not None and lane in unreadable:
                outcomes[message] = ABANDON  # Behind one that is no ack: the engine gives it back to its lane.
                continue
            try:
                if message.broken is not None:
                    raise message.broken
                if self._decode is not None:
                    decoded(message, self._decode)
            except MessageError as error:
                outcomes[message] = failure(error)
                unreadable[lane] = None
            else:
                sound.append(message)
        if sound:
            returned = await self._call(sound)
            outcomes.update(zip(sound, batch_outcomes(sound, returned), strict=True))
        return [outcomes[message] for message in batch]

    async def _call(self, batch: list[Message]) -> object:
        with anyio.move_on_after(self._timeout):
            if self._awaits:
                return await cast(Awaitable[object], self._handler(batch))
            if self._inline:
                returned = self._handler(batch)
            else:
                returned = await anyio.to_thread.run_sync(self._handler, batch, limiter=self._threads)
            refuse_awaitable(self._handler, returned, batch[0])
            return returned
        raise TimeoutError(f"the handler did not end within timeout={self._timeout} s")

    def _finish(
        self,
        worker: _Worker,
        outcomes: list[Outcome],
        result: str,
        error: BaseException | None,
        handling: Handling | None,
    ) -> None:
        batch, worker.batch = worker.batch, []
        now = self._clock()
        self._engine.finish_batch(batch, outcomes, now)
        if self._tap.history is not None:
            for message, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, Failure):
                    self._tap.history.ended(message, "error", now, outcome.error)
                elif outcome is ACK and message.state != QUEUED:
                    self._tap.history.ended(message, "ok", now)
                else:
                    # Behind one that was no ack: whatever came of it does not count, and it runs again.
                    self._tap.history.ended(message, "cancelled" if result == "ok" else result, now, error)
        if handling is not None:
            bad = next((RESULTS[m.state] for m in batch if m.state not in (FINISHED, QUEUED)), RESULTS[FINISHED])
            handling.end("cancelled" if result == "cancelled" else bad, error)
