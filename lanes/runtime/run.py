"""One run of a consumer: it receives messages, settles finished messages, keeps deadlines, and drains.

A run performs the decisions of the engine, and decides nothing about order, retries or bounds itself. All its tasks
belong to one task group of one event loop, asyncio or trio, and have ended when ``run`` returns.

This module passes every event of the source and every effect of the engine to the components of the run. No other
module decides the order of these calls.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import cast

import anyio
from anyio.abc import TaskGroup

from lanes.attempts import Attempts
from lanes.clock import Clock
from lanes.config import Settings
from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.ledgers import PositionFell
from lanes.core.ownership import AlreadyAssigned, SecondPartition
from lanes.core.types import NEVER, Partition, PartitionId, Room
from lanes.dead_letter import error_text
from lanes.errors import ConfigError, ContractError, LanesError
from lanes.handlers import BatchHandler, Decode, Handler, async_handler, handler_name, is_async, sync_handler
from lanes.loops import ThreadSafeCall, entry_of_loop
from lanes.observe.failures import FailedAttempts
from lanes.observe.health import Stalls, halted, report_blocked, report_stall
from lanes.observe.ownership import OwnershipLog
from lanes.observe.tap import Tap
from lanes.runtime.attempts import AttemptKeeper
from lanes.runtime.contract_checks import check_assigned, check_delivered
from lanes.runtime.dead_lettering import DeadLetterWriter
from lanes.runtime.handover import Handover
from lanes.runtime.settle import Settler
from lanes.source import (
    Assigned,
    DeadLetters,
    Delivered,
    Exhausted,
    Generation,
    Lost,
    Progressed,
    Revoking,
    Source,
    SourceEvent,
    SourceTraits,
)
from lanes.workers.batches import BatchWorkers
from lanes.workers.context import Workers
from lanes.workers.loop_watch import LoopWatch
from lanes.workers.tasks import TaskWorkers
from lanes.workers.threads import ThreadWorkers

log = logging.getLogger("lanes")


class Run:
    """The run of one consumer over an open source, and the ``RunContext`` of its components.

    Args:
        engine: The engine.
        source: The open source.
        traits: Properties of the source.
        handler: Handler that ``check_handler`` has accepted.
        decode: Function for ``Message.data``.
        dead_letters: Target of dead letters.
        attempts: Store of attempts.
        settings: Settings of the consumer.
        clock: Monotonic clock in seconds.
        tap: The observers of the run.

    Attributes:
        engine: The engine.
        clock: Monotonic clock in seconds.
        tap: The observers of the run.
        name: Name of the source in logs and errors.
        stopping: Whether the run drains, and receives no more messages.
        planned: Whether the group has a plan; True for a source without plans.
        fatal: The error that stops the run.
        redelivered: Number of redelivered positions by cause.
        loop_watch: The watch over the event loop.
        workers: The workers that call the handler.
        attempts: The keeper of the attempts in the store.
        settler: The settler of finished messages.
        dead_letter_writer: The writer of dead letters.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        traits: SourceTraits,
        handler: Handler,
        decode: Decode | None,
        dead_letters: DeadLetters | None,
        attempts: Attempts | None,
        settings: Settings,
        clock: Clock,
        tap: Tap,
    ) -> None:
        self.engine = engine
        self._effects, self._dirty, self._ready = engine.effects, engine.dirty, engine.chains.ready
        self._source = source
        self._extend_interval = traits.extend_interval
        self._commits = traits.settles == "cumulative"
        self._settings = settings
        self.clock = clock
        self.tap = tap
        self.name = traits.name
        self._active = False
        self.stopping = False
        self._exhausted = False
        self._starved = False
        self._given_back: set[PartitionId] = set()
        self.planned = not traits.plans
        self.fatal: BaseException | None = None
        self.redelivered: Counter[str] = Counter()
        self._stalls = Stalls(engine.committer)
        self._failures = FailedAttempts(self.name, handler_name(handler))
        self._ownership = OwnershipLog(self.name, plans=traits.plans)
        self._timer_wake = anyio.Event()
        self._receiving = anyio.CancelScope()
        self.loop_watch = LoopWatch(
            self.name,
            handler_name(handler),
            "make it a plain function, or await"
            if is_async(handler)
            else 'leave out sync_handlers="inline", so that it runs in threads',
            clock,
            tap.loop_held,
        )
        self._enter_loop = entry_of_loop()
        self._told_to_stop = ThreadSafeCall(self._stop, lambda: self._timer_wake.set())
        self._told_to_act = ThreadSafeCall(self.after, lambda: self._timer_wake.set())
        self._tasks: TaskGroup
        # The constructors of the components read these attributes, and call nothing of the run.
        self.workers = self._workers_for(handler, decode)
        self.attempts = AttemptKeeper(self, attempts)
        self.settler = Settler(self, source, self.attempts, commits=self._commits)
        close_prefix = self._commits and not traits.hands_over
        self._handover = Handover(
            self,
            source,
            self.workers,
            self.settler,
            self.attempts,
            self._ownership,
            settings.grace,
            close_prefix=close_prefix,
        )
        self.dead_letter_writer = DeadLetterWriter(self, dead_letters)

    def _workers_for(self, handler: Handler, decode: Decode | None) -> Workers:
        """Make the workers for a handler that ``check_handler`` has accepted. Starts nothing."""
        settings = self._settings
        inline, timeout, grace = settings.sync_handlers == "inline", settings.timeout, settings.grace
        if settings.batch is not None:
            return BatchWorkers(
                self,
                cast(BatchHandler, handler),
                size=settings.batch,
                linger=settings.linger,
                timeout=timeout,
                grace=grace,
                inline=inline,
                decode=decode,
            )
        if is_async(handler) or inline:
            return TaskWorkers(self, async_handler(handler, decode), timeout)
        return ThreadWorkers(self, sync_handler(handler, decode), timeout=timeout, grace=grace)

    async def run(self) -> None:
        """Consume until ``stop`` is called, a finite source has ended, or the error ``fatal`` stops the run.

        A cancellation stops at once.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                self._active = True
                policy = self.engine.policy
                self._ownership.opened(policy.order, policy.concurrency, policy.max_in_flight)
                self.loop_watch.start(self.workers.message_in)
                self.workers.start(self._tasks)
                self.start_soon(self._pump)
                self.start_soon(self.settler.run)
                self.start_soon(self._timer)
                if self._extend_interval is not None:
                    self.start_soon(self.settler.keep_alive, self._extend_interval)
                if self.stopping:
                    self._stop_partitions()
        finally:
            self._active = False
            self.loop_watch.stop()
            self.attempts.end()
            self._failures.end(self.clock())

    def stop(self) -> None:
        """Receive no more messages, and drain. Does not block. Idempotent. Other threads may call this method."""
        self._told_to_stop()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            if self._active:
                self._stop_partitions()

    # --- callbacks of the components

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake each component that has something to do.

        ``taking``: number of ready lanes that the caller takes itself, without being woken.
        """
        # This method is called after every message, so it reads the engine's own lists. They are never replaced.
        if self._effects:
            self._perform()
        if self._dirty and self.settler.idle:
            self.settler.wake()
        if len(self._ready) > taking:
            self.workers.wake(taking=taking)
        if self._exhausted:
            self._stop_when_exhausted()

    def after_command(self) -> None:
        """Call ``after``, in the next turn of the loop if a callback of the loop makes this call."""
        self._told_to_act()

    def floors_moved(self) -> None:
        """Check the partitions at ``max_ahead`` again, because a message has finished or a commit was confirmed."""
        if self._stalls.moved(self.clock()):
            self._timer_wake.set()

    def overdue(self, partition: Partition) -> bool:
        """Lose a partition if its lease has expired, and return whether the lease has expired. Idempotent."""
        if self.clock() < partition.deadline:
            return False
        self.lose(partition, "its lease has run out")
        return True

    def stop_because(self, error: BaseException) -> None:
        """Drain and stop the run; ``run`` raises the first ``error`` that was passed. Does not block."""
        if self.fatal is None:
            self.fatal = error
            # The caller sees an error of `lanes` with its full text. Any other error needs this log line.
            level = logging.INFO if isinstance(error, LanesError) else logging.ERROR
            log.log(level, "%s: stopping: %s: %s", self.name, type(error).__qualname__, error_text(error))
        self.stop()

    # --- tasks, and their end

    def start_soon(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Start a task. If the task raises an exception, the run drains, and ``run`` raises the exception."""
        self._tasks.start_soon(self._guarded, task, *arguments)

    def look_for_due(self) -> None:
        """Compute the next deadline again, because a hold may end sooner. Does not block."""
        self._timer_wake.set()

    async def _guarded(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task. If the task raises an exception, the run drains, and ``run`` raises the exception."""
        try:
            await task(*args)
        except Exception as error:
            self.stop_because(error)

    def _stop_partitions(self) -> None:
        for partition in list(self.engine.partitions.values()):
            self._start_drain(partition, self._settings.drain_timeout)
        self._tell_ownership()
        self._end_when_released()

    def _start_drain(self, partition: Partition, timeout: float) -> None:
        self.attempts.leave(partition)
        if self._handover.begin(partition, timeout):
            self.start_soon(self._drain, partition)
        elif timeout < NEVER:
            self._handover.hasten(partition, timeout)

    async def _drain(self, partition: Partition) -> None:
        await self._handover.drain(partition)
        self._end_when_released()

    def _end_when_released(self) -> None:
        if self.stopping and not self.engine.partitions:
            self._tasks.cancel_scope.cancel()

    # --- in

    async def _pump(self) -> None:
        while not self._exhausted:
            room = self.engine.room()
            if self.stopping:
                room = Room(0, 0, frozenset(self.engine.partitions.values()))
            room = self.attempts.room(room)
            self._starved = room.messages <= 0
            events: Sequence[SourceEvent] = ()
            with anyio.CancelScope() as self._receiving:
                events = await self._source.receive(room)
            for event in events:
                if not (self.attempts.active and self.attempts.put_aside(event)):
                    self.enter(event)
            self._tell_ownership()
            self.after()

    def _tell_ownership(self) -> None:
        if self._ownership.noted:
            self._ownership.tell(len(self.engine.partitions), stopping=self.stopping)

    def enter(self, event: SourceEvent) -> None:
        """Process an event of the source that has just arrived or was put aside."""
        engine, now = self.engine, self.clock()
        if isinstance(event, Delivered):
            check_delivered(self.name, event, stopping=self.stopping)
            if event.partition.live and not event.partition.draining:
                self.tap.delivered(event.partition, event.run, now)
            try:
                engine.receive(event.partition, event.run, event.size, now)
            except PositionFell as error:
                raise ContractError(f"{self.name}: {error}") from error
            # The effects are performed at once, because the rows of redelivered messages follow the row of their run.
            self._perform()
        elif isinstance(event, Assigned):
            self._assigned(event.partition)
        elif isinstance(event, Progressed):
            engine.progressed(event.partition, event.position, now)
            self.settler.wake()
        elif isinstance(event, Revoking):
            self._revoking(event.partition, event.timeout)
        elif isinstance(event, Lost):
            self.lose(event.partition, event.reason)
        elif isinstance(event, Generation):
            self.planned = True
            self._ownership.planned(event.number, standby=event.standby)
            self.tap.planned(event.number, standby=event.standby)
        elif isinstance(event, Exhausted):
            self._exhausted = True
            self._stop_when_exhausted()
        else:
            raise ContractError(
                f"{self.name} delivered a {type(event).__name__}, which is no event of lanes.source; please report "
                "this bug of the source"
            )

    def _assigned(self, partition: Partition) -> None:
        check_assigned(self.name, partition, commits=self._commits)
        if self.stopping:
            # A partition is given back once, or a source that assigns it again each time would never let the run end.
            if partition.id not in self._given_back:
                self._given_back.add(partition.id)
                self.start_soon(self._handover.release, partition)
            return
        try:
            self.engine.assign(partition)
        except AlreadyAssigned as error:
            raise ContractError(f"{self.name}: {error}") from error
        except SecondPartition:
            raise ConfigError(
                f'order="serial": {self.name} assigned {partition.id}, a second partition; use order="partition" or a '
                "topic with one partition"
            ) from None
        self.tap.assigned(partition)
        self._ownership.assigned(partition)
        self.attempts.begin(partition, self.clock())

    def _revoking(self, partition: Partition, timeout: float) -> None:
        if not self.engine.owns(partition):
            self.start_soon(self._handover.release, partition)
            return
        # An infinite timeout means that the next owner waits, so no handler is cancelled.
        if timeout < NEVER:
            timeout = min(timeout, self._settings.drain_timeout)
        self._start_drain(partition, timeout)

    def lose(self, partition: Partition, reason: str) -> None:
        """Give up a lost partition. From this call on, no result of the partition counts. Idempotent."""
        if not self.engine.owns(partition):
            return
        held = self.loop_watch.held_before(self.clock())
        if held is not None:
            reason = f"{reason}; {held}"
        zombies = self.engine.lose(partition)
        self._handover.lost(partition)
        log.warning(
            "%s: %s lost (%s); the results of its %d running handlers do not count, and its next owner runs their "
            "messages again",
            self.name,
            partition.id,
            reason,
            len(zombies),
        )
        self.tap.lost(partition, reason)
        self.workers.cancel(partition)
        self.settler.give_up(partition)
        self.settler.unsettled.settled(partition)
        self.attempts.forget(partition)
        self._end_when_released()

    def _stop_when_exhausted(self) -> None:
        if self._exhausted and not self.engine.flow.in_flight and not self.attempts.asked_since:
            self.stop()

    async def _timer(self) -> None:
        """The timer for the earliest deadline of held lanes, stalled partitions and counted failures."""
        while True:
            self._told_to_stop.serve()
            self._told_to_act.serve()
            at = min(self._stalls.next_at(), self._failures.next_at(), self.engine.next_due())
            self._timer_wake = anyio.Event()
            with anyio.move_on_after(max(0.0, at - self.clock())):
                await self._timer_wake.wait()
            now = self.clock()
            self.engine.due(now)
            self._failures.due(now)
            for stall in self._stalls.due(now):
                why = self.settler.unsettled.error(stall.partition)
                report_stall(stall, self.name, self._settings.max_ahead, now, why)
            # If all handlers hang, no other call pauses the clients.
            self.after()

    # --- effects

    def _perform(self) -> None:
        effects = self.engine.effects
        while effects:
            batch = effects[:]
            effects.clear()
            for effect in batch:
                self._perform_one(effect)

    def _perform_one(self, effect: fx.Effect) -> None:
        tap = self.tap
        if isinstance(effect, fx.Failed):
            self.attempts.failed(effect)
        if isinstance(effect, fx.Held | fx.Interrupted):
            self._failures.failed(effect, self.clock())
            self._timer_wake.set()
        if isinstance(effect, fx.Held):
            tap.held(effect.message, effect.delay, asked=effect.failure.delay is not None)
        elif isinstance(effect, fx.Saturated | fx.Resumed):
            self._crossed(saturated=isinstance(effect, fx.Saturated))
        elif isinstance(effect, fx.Redelivered):
            self.redelivered[effect.cause] += 1
            tap.redelivered(effect)
            # Positions that a former owner has completed are committed, even if no other message finishes.
            self.settler.wake()
        elif isinstance(effect, fx.DeadLetterDue):
            self.start_soon(self.dead_letter_writer.write, effect)
        elif isinstance(effect, fx.Halted):
            self.stop_because(halted(self.name, effect))
        elif isinstance(effect, fx.Blocked):
            tap.blocked(effect.message)
            report_blocked(self.name, effect)
        elif isinstance(effect, fx.Drained):
            self._handover.ended(effect.partition)
        elif isinstance(effect, fx.Abandoned):
            tap.abandoned(effect.messages)
        elif isinstance(effect, fx.Zombie):
            tap.zombie(effect.message)
            # A message of the same key in a new assignment may start now.
            self.workers.wake()
        elif isinstance(effect, fx.AheadReached):
            self._ahead_reached(effect)
        elif isinstance(effect, fx.AheadLeft):
            tap.ahead(effect.partition, reached=False, oldest=None)
            self.room_changed()
        elif isinstance(effect, fx.PauseDue):
            self.room_changed()

    def _crossed(self, *, saturated: bool) -> None:
        flow = self.engine.flow
        self.tap.crossed(saturated=saturated, in_flight=flow.in_flight, size=flow.bytes)
        if saturated:
            # The timer may now have to pause the clients.
            self._timer_wake.set()
        elif self._starved:
            self.room_changed()

    def room_changed(self) -> None:
        """Call ``Source.receive`` again with the new room. Does not block."""
        # receive() is cancel-safe, and ``_pump`` calls it again.
        self._receiving.cancel()

    def room_changed_elsewhere(self) -> None:
        """Call ``room_changed`` in the next turn of the loop. For other threads; does nothing after the loop's end."""
        with suppress(RuntimeError):
            self._enter_loop(lambda: self.room_changed())

    def _ahead_reached(self, effect: fx.AheadReached) -> None:
        self.tap.ahead(effect.partition, reached=True, oldest=effect.oldest)
        self.room_changed()
        # If only the confirmation of a commit is missing, the commit is sent now.
        self.settler.wake()
        self._stalls.reached(effect.partition, self.clock())
        self._timer_wake.set()
