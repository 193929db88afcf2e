"""Workers for a batch handler. One call handles the heads of several lanes, each followed by its successors.

A worker takes a batch when enough messages for a full batch are ready, or ``linger`` seconds after the worker found a
ready message.

The history shows the messages of a lane in sequence. The first message of a lane has its ``started`` row before the
call. After the call, the workers write the rows of the other messages of the lane. The rows of each message follow the
last row of its predecessor. A message whose outcome is ignored, because a predecessor failed, has no rows of this call.

A plain handler runs in threads, unless ``inline`` is set. A thread makes one call at a time, and a task of the event
loop waits for the end of each call. A running call keeps its lanes and its thread until the call ends, even after the
consumer has given up the partitions.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.attempts import given_up_before
from lanes.core.lane import FINISHED, HANDLED, PUBLISHING, QUEUED
from lanes.core.publishing import Produced
from lanes.core.types import ABANDON, ACK, NEVER, RETURN, Failure, LaneId, Message, Outcome, Partition
from lanes.handlers import BatchHandler, Decode, is_async, refuse_awaitable
from lanes.observe.otel import Handling
from lanes.workers.context import RunContext
from lanes.workers.outcomes import (
    RESULTS,
    OwnershipInDoubt,
    batch_outcomes,
    cancellation_of,
    counts,
    explain,
    failure,
    readable,
    stopping,
)
from lanes.workers.overtime import AGAIN, PATIENCE, cancel_once, report_ignored
from lanes.workers.pool import Pool, handler_context
from lanes.workers.processes import Killed, ProcessCall, ProcessPool, run_threads

_FINE: Final = (FINISHED, PUBLISHING, HANDLED, QUEUED)

_LOOK_EVERY: Final = 1.0
"""Seconds between two searches for calls that the timeout has cancelled."""


@dataclass(slots=True, eq=False)
class _Worker:
    batch: list[Message] = field(default_factory=list)
    scope: anyio.CancelScope = field(init=False)


@dataclass(slots=True, eq=False)
class _TimedCall:
    """A call of an async handler with a timeout, in a scope ``gate`` whose shield bounds the rate of cancellations.

    ``since`` is the time of the first check that found the call cancelled; None = the call is not cancelled.
    """

    batch: list[Message]
    gate: anyio.CancelScope
    since: float | None = None
    reported: bool = False


class BatchWorkers:
    """The workers of one consumer whose handler takes up to ``size`` messages.

    The cancellation of a partition cancels every call with a message of the partition. Messages of other partitions in
    a cancelled call return to their lanes. A call in a thread continues after the cancellation.

    Args:
        context: The run.
        handler: Function of a list of messages.
        size: Maximum number of messages of a batch.
        linger: Maximum number of seconds that a batch waits for more messages.
        timeout: Seconds after which the workers cancel a call, or report a call in a thread. ``None`` = no limit.
        grace: Seconds for running calls in threads to end, at the end of the run.
        inline: Whether a plain function runs on the event loop instead of in threads.
        decode: Function for ``Message.data``.
        processes: The processes of a plain function. ``None`` = the function runs in this process.
    """

    def __init__(
        self,
        context: RunContext,
        handler: BatchHandler,
        *,
        size: int,
        linger: float,
        timeout: float | None,
        grace: float,
        inline: bool,
        decode: Decode | None,
        processes: ProcessPool | None = None,
    ) -> None:
        self._engine = context.engine
        self._handler = handler
        self._awaits = is_async(handler)
        self._context = context
        self._clock = context.clock
        self._tap = context.tap
        self._size = size
        self._linger = linger
        self._timeout = timeout
        self._decode = decode if processes is None else None
        self._processes = processes
        in_threads = not self._awaits and not inline
        self._threads = (
            _BatchThreads(self._outcomes_now, context, timeout=timeout, grace=grace, processes=processes)
            if in_threads
            else None
        )
        self._workers = [_Worker() for _ in range(context.engine.concurrency)]
        self._loop_watch = context.loop_watch
        self._freezes = context.freezes
        self._outputs = context.outputs
        # Seconds that the workers leave to the loop before the next call, and the number of turns left to the loop so
        # far.
        self._rest = 0.0
        self._round = 0
        self._wake = anyio.Event()
        # The calls of an async handler with a timeout, by their scopes.
        self._timed: dict[anyio.CancelScope, _TimedCall] = {}

    def start(self, tasks: TaskGroup) -> None:
        """Start the worker tasks; they run until the task group is cancelled."""
        if self._threads is not None:
            self._threads.start(tasks)
        elif self._awaits and self._timeout is not None:
            tasks.start_soon(self._watch, self._timeout)
        for worker in self._workers:
            tasks.start_soon(self._work, worker)

    def wake(self, *, taking: int = 0) -> None:
        """Wake the workers. ``taking`` has no effect, because a batch takes every ready message up to its size."""
        self._wake.set()

    def hold(self) -> None:
        """Do nothing, because each call checks for a freeze before it begins."""

    def cancel(self, partition: Partition) -> None:
        """Cancel the calls with messages of a partition."""
        for worker in self._workers:
            if any(message.partition is partition for message in worker.batch):
                worker.scope.cancel()
        if self._processes is not None:
            self._processes.cancel(partition)

    def stuck(self, now: float, timeout: float) -> list[Message]:
        """Return the first message of each call that has run in a thread for ``timeout`` seconds or longer."""
        return [] if self._threads is None or self._processes is not None else self._threads.pool.stuck(now, timeout)

    def on_the_loop(self) -> list[Message]:
        """Return the messages of the handler calls that run on the event loop. O(workers)."""
        return [] if self._threads is not None else [m for worker in self._workers for m in worker.batch]

    def message_in(self, frame: FrameType) -> Message | None:
        """Return the first message of the call that a frame makes; None = the frame makes no call of these workers."""
        if frame.f_code is not _CALLING:
            return None
        of_frame = frame.f_locals
        return of_frame["batch"][0] if of_frame.get("self") is self else None

    async def _work(self, worker: _Worker) -> None:
        while True:
            batch = await self._take()
            worker.batch = batch
            with anyio.CancelScope() as worker.scope:
                await self._handle(worker, batch)
            self._context.after()
            self._rest = self._loop_watch.rest(self._clock())
            await self._yield_to_loop()

    async def _yield_to_loop(self) -> None:
        """Give the loop one turn. After a call that blocked the loop for long, wait for a pause instead."""
        before = self._round
        await anyio.sleep(self._rest)
        if self._round == before:
            self._round += 1
            self._rest = 0.0

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
            while self._rest:
                # Another worker's call has held the loop, so no call starts before the loop has had its turn.
                await self._yield_to_loop()
            if self._freezes is not None and self._freezes.look(self._clock()):
                await self._freezes.wait()
                continue
            batch = engine.take_batch(self._size)
            if batch:
                return batch

    async def _handle(self, worker: _Worker, batch: list[Message]) -> None:
        tap, now = self._tap, self._clock()
        if _overdue(batch, now):
            worker.batch = []
            self._engine.finish_batch(batch, [RETURN] * len(batch), 0.0)
            self._lose_overdue(batch)
            return
        handling = None if tap.telemetry is None else tap.telemetry.handling_batch(batch)
        try:
            if tap.history is not None:
                heads = _heads(batch)
                for message in batch:
                    if message in heads and not given_up_before(message):
                        tap.history.started(message, now)
                # The rows are in the file before the handler is called.
                tap.history.flush()
            with handling or contextlib.nullcontext():
                outcomes = await self._outcomes(batch)
        except OwnershipInDoubt:
            # The call has ended. A worker without a batch is not cancelled by the loss of a partition.
            worker.batch = []
            self._lose_overdue(batch)
            worker.batch = batch
            self._finish(worker, [RETURN] * len(batch), "cancelled", None, handling)
        except BaseException as error:
            cancelled = anyio.current_effective_deadline() == float("-inf")
            cancellation = cancellation_of(error) if cancelled else None
            if cancellation is not None:
                # Messages of a partition that is not given up go back to their lanes.
                given_up = not all(m.partition.steady for m in batch)
                outcomes = [RETURN if m.partition.steady and given_up else ABANDON for m in batch]
                self._finish(worker, outcomes, "cancelled", error, handling)
                self._context.after()
                raise cancellation from None
            if isinstance(error, Exception) and counts(error):
                explain(error, batch=True)
                self._finish(worker, [failure(error)] * len(batch), "error", error, handling)
                return
            for message in batch:
                self._context.interrupting(message.partition)
            self._finish(worker, [ABANDON] * len(batch), "error", error, handling)
            self._context.stop_because(stopping(error, batch[0]), message=batch[0])
            if isinstance(error, GeneratorExit):
                raise
        else:
            # The loss precedes the rows, because in a lost partition only the first message of a lane gets rows.
            self._lose_overdue(batch)
            self._finish(worker, outcomes, "ok", None, handling)

    async def _outcomes(self, batch: list[Message]) -> list[Outcome]:
        """Call the handler with the readable messages."""
        if self._threads is not None:
            return await self._threads.call(batch)
        if not self._awaits:
            return self._outcomes_now(batch)
        sound, outcomes = self._read(batch)
        return self._of_all(batch, sound, await self._awaited(sound) if sound else None, outcomes)

    def _outcomes_now(self, batch: list[Message], process: ProcessCall | None = None) -> list[Outcome]:
        sound, outcomes = self._read(batch)
        if process is not None:
            if sound:
                outcomes.update(zip(sound, process.handle_batch(sound), strict=True))
            return [outcomes[message] for message in batch]
        return self._of_all(batch, sound, self._handler(sound) if sound else None, outcomes)

    def _lose_overdue(self, batch: list[Message]) -> None:
        for partition in {message.partition for message in batch}:
            if partition.deadline != NEVER:
                self._context.overdue(partition)

    def _read(self, batch: list[Message]) -> tuple[list[Message], dict[Message, Outcome]]:
        """Return the readable messages, and the outcomes of the unreadable messages.

        An unreadable message stops its lane.
        """
        sound, outcomes = readable(batch, self._decode)
        now = self._clock()
        if _overdue(batch, now) or (self._freezes is not None and self._freezes.look(now)):
            raise OwnershipInDoubt
        return sound, outcomes

    async def _watch(self, timeout: float) -> None:
        """Cancel again each call that continues after its cancellation by the timeout, and report the call once."""
        try:
            while True:
                now = self._clock()
                late = [call for scope, call in self._timed.items() if scope.cancel_called]
                for call in late:
                    self._look_at(call, now, timeout)
                await anyio.sleep(AGAIN if late else _LOOK_EVERY)
        finally:
            # A shield would keep the cancellation at the end of the run from the calls.
            for call in self._timed.values():
                call.gate.shield = False

    def _look_at(self, call: _TimedCall, now: float, timeout: float) -> None:
        if call.since is None:
            call.since = now
            return
        cancel_once(call.gate)
        age = now - call.since
        if age >= PATIENCE and not call.reported:
            call.reported = True
            report_ignored(self._handler, call.batch[0], age, timeout)

    async def _awaited(self, batch: list[Message]) -> object:
        with anyio.move_on_after(self._timeout) as scope, anyio.CancelScope() as gate:
            if self._timeout is not None:
                self._timed[scope] = _TimedCall(batch, gate)
            try:
                return await cast(Awaitable[object], self._handler(batch))
            finally:
                self._timed.pop(scope, None)
        raise TimeoutError(f"the handler did not end within timeout={self._timeout:g} s")

    def _of_all(
        self, batch: list[Message], sound: list[Message], returned: object, outcomes: dict[Message, Outcome]
    ) -> list[Outcome]:
        refuse_awaitable(self._handler, returned, batch[0])
        if sound:
            outcomes.update(zip(sound, batch_outcomes(sound, returned), strict=True))
        return [outcomes[message] for message in batch]

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
        if self._outputs is not None:
            outcomes = self._outputs.taken_of(batch, outcomes)
        self._note(batch, outcomes, result, error, now)
        self._engine.finish_batch(batch, outcomes, now)
        if handling is not None:
            bad = next((RESULTS[m.state] for m in batch if m.state not in _FINE), RESULTS[FINISHED])
            handling.end("cancelled" if result == "cancelled" else bad, error)

    def _note(
        self, batch: list[Message], outcomes: list[Outcome], result: str, error: BaseException | None, now: float
    ) -> None:
        """Write the history rows of a call that has ended, for each outcome that the engine does not ignore."""
        history = self._tap.history
        if history is None:
            return
        heads = _heads(batch)
        over: set[_Lane] = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            lane = (message.partition, message.lane)
            if given_up_before(message):
                over.add(lane)
                continue
            if message not in heads:
                if lane in over or not message.partition.live:
                    continue
                history.started(message, now)
            if outcome is ACK or isinstance(outcome, Produced):
                history.ended(message, "ok" if outcome is ACK else "outputs", now)
                continue
            over.add(lane)
            if isinstance(outcome, Failure):
                history.ended(message, "error", now, outcome.error)
            else:
                history.ended(message, result, now, error)


_CALLING: Final = BatchWorkers._handle.__code__


def _overdue(batch: list[Message], now: float) -> bool:
    """Return whether the lease of any message has expired."""
    return any(now >= message.partition.deadline for message in batch)


_Lane = tuple[Partition, LaneId]


def _heads(batch: list[Message]) -> set[Message]:
    """Return the first message of each lane, and every message without a lane."""
    lanes: dict[_Lane, Message] = {}
    for message in batch:
        lanes.setdefault((message.partition, message.lane), message)
    return {*lanes.values(), *(message for message in batch if message.lane is None)}


@dataclass(slots=True, eq=False)
class _Call:
    """One call in a thread.

    The event ``done`` is set when the call has ended, or when the workers have abandoned the call.
    """

    batch: list[Message]
    context: contextvars.Context
    outcomes: list[Outcome] | None = None
    error: BaseException | None = None
    done: anyio.Event = field(default_factory=anyio.Event)


class _BatchThreads:
    """The threads of one consumer, one for each concurrent call, started on demand.

    Args:
        handle: Function that threads call with a batch. The function calls the handler, and returns one outcome for
            each message.
        context: The run.
        timeout: Seconds after which the log reports a running call once. ``None`` = never.
        grace: Seconds for running calls to end when the task group is cancelled.
        processes: The processes in which ``handle`` calls the handler, each through its second argument.
    """

    def __init__(
        self,
        handle: Callable[[list[Message], ProcessCall | None], list[Outcome]],
        context: RunContext,
        *,
        timeout: float | None,
        grace: float,
        processes: ProcessPool | None,
    ) -> None:
        self._handle = handle
        self._processes = processes
        self._timeout = timeout if processes is None else None
        self._grace = grace
        self._calls: dict[_Call, None] = {}
        self.pool: Pool[_Call, _Call] = Pool(
            self._run,
            lambda call: call.batch[0],
            context.engine.concurrency,
            context.clock,
            None if processes is None else processes.end,
        )

    def start(self, tasks: TaskGroup) -> None:
        """Serve calls until the task group is cancelled, then end the threads. No thread starts before a call."""
        self.pool.open()
        if self._processes is not None:
            self._processes.start()
        tasks.start_soon(self._serve)
        if self._timeout is not None:
            tasks.start_soon(self.pool.watch, self._timeout)

    async def call(self, batch: list[Message]) -> list[Outcome]:
        """Handle a batch in a thread. Returns the result, or raises the exception, of ``handle``.

        A cancellation waits for the end of the handler. At the end of the run the call waits at most for the grace.
        """
        if self.pool.ending:
            # The run has been cancelled. This checkpoint raises, and the checkpoint below raises too.
            await anyio.lowlevel.checkpoint()
        call = _Call(batch, handler_context())
        self._calls[call] = None
        try:
            self.pool.need(len(self._calls))
            self.pool.put([call])
            with anyio.CancelScope(shield=True):
                await call.done.wait()
        finally:
            del self._calls[call]
        if call.error is not None:
            raise call.error
        if call.outcomes is None:
            # The call has not begun, or was abandoned.
            await anyio.lowlevel.checkpoint()
        return call.outcomes or []

    async def _serve(self) -> None:
        try:
            # A call counts while the outcome of one of its messages counts. With processes each call ends soon, because
            # its process is killed.
            await run_threads(
                self.pool,
                self._processes,
                self._end_calls,
                self._grace,
                lambda call: any(m.partition.live for m in call.batch),
            )
        finally:
            for call in self._calls:
                call.done.set()

    def _end_calls(self) -> None:
        results = self.pool.results
        while results:
            results.popleft().done.set()

    # --- in the threads

    def _run(self, call: _Call, now: float) -> _Call:
        if not self.pool.ending:
            try:
                if self._processes is None:
                    call.outcomes = call.context.run(self._handle, call.batch, None)
                else:
                    with self._processes.take(call.batch) as process:
                        call.outcomes = call.context.run(self._handle, call.batch, process)
            except Killed:
                # The process was killed because the task of this call is cancelled, so the call has no outcome.
                pass
            except BaseException as error:
                call.error = error
        return call
