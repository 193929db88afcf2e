"""One run of a consumer, which receives messages, settles finished messages, observes deadlines, and drains.

This file is longer than most, because it passes every event of the source and every effect of the engine to the right
component.

A run performs the decisions of the engine. The engine alone decides order, retries and bounds. On asyncio and on trio,
all tasks of a run have ended when ``Run.run`` returns.

This module processes the events of the source and the effects of the engine, and calls the components of the run.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from lanes.attempts import Attempts
from lanes.clock import Clock
from lanes.config import Settings
from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.ledgers import PositionFell
from lanes.core.ownership import AlreadyAssigned, SecondPartition
from lanes.core.types import NEVER, Message, Partition, PartitionId, Room
from lanes.dead_letter import described
from lanes.errors import ConfigError, ContractError, LanesError
from lanes.handlers import BatchHandler, Decode, Handler, async_handler, handler_name, is_async, sync_handler
from lanes.loops import ThreadSafeCall, entry_of_loop
from lanes.observe.cut_off import CutOffLog
from lanes.observe.failures import FailedAttempts, user_traceback
from lanes.observe.health import Stalls, halted, report_blocked, report_stall
from lanes.observe.intake import IntakeWatch
from lanes.observe.keyless import KeylessWatch
from lanes.observe.ownership import OwnershipLog
from lanes.observe.retention import PERIOD, RetentionWatch
from lanes.observe.status import Provision
from lanes.observe.tap import Tap
from lanes.outputs.publisher import Publisher
from lanes.runtime.attempts import AttemptKeeper
from lanes.runtime.confirmation import Confirmation
from lanes.runtime.contract_checks import check_assigned, check_delivered
from lanes.runtime.dead_lettering import DeadLetterWriter
from lanes.runtime.deliveries import pieces
from lanes.runtime.handover import Handover
from lanes.runtime.publishing import OutputSender
from lanes.runtime.settle import Settler
from lanes.runtime.survivors import DRAINED_WITHIN, survivors
from lanes.source import (
    Assigned,
    Backlogged,
    Confirming,
    DeadLetters,
    Delivered,
    Exhausted,
    Generation,
    Lost,
    Progressed,
    Retaining,
    Revoking,
    RevokingPart,
    Source,
    SourceEvent,
    SourceTraits,
)
from lanes.workers.batches import BatchWorkers
from lanes.workers.context import Workers
from lanes.workers.loop_watch import LoopWatch
from lanes.workers.outputs import OutputBuffer
from lanes.workers.processes import ProcessPool
from lanes.workers.tasks import TaskWorkers
from lanes.workers.threads import ThreadWorkers
from lanes.workers.wake_limit import TIME_SLICE

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
        publisher: Publisher of outputs; None = handlers publish nothing.
        attempts: Store of attempts.
        settings: Settings of the consumer.
        clock: Monotonic clock in seconds.
        tap: The observers of the run.
        outlived: Function that the run calls at its end, with the messages whose handlers continue after their
            cancellation.

    Attributes:
        engine: The engine.
        clock: Monotonic clock in seconds.
        tap: The observers of the run.
        name: Name of the source in logs and errors.
        stopping: Whether the run drains, and receives no more messages.
        at_once: Whether the run stops without a drain.
        has_plan: Event that is set when ``planned`` becomes True, or the run has ended.
        planned: Whether the group has a plan; True for a source without plans.
        fatal: The error that stops the run; None = no error.
        redelivered: Number of redelivered positions by cause.
        loop_watch: The check for calls that block the event loop.
        intake: The check for missing deliveries; None = the source does not report a backlog.
        retention: The check of the broker's retention; None = the source does not report retentions.
        freezes: The check for freezes; None = the broker does not reassign the partitions of a silent process.
        workers: The workers that call the handler.
        attempts: The keeper of the attempts in the store.
        settler: The settler of finished messages.
        dead_letter_writer: The writer of dead letters.
        outputs: The buffer of the outputs of handlers; None = the consumer has no publisher.
        output_sender: The sender of outputs; None = the consumer has no publisher.
    """

    def __init__(
        self,
        engine: Engine,
        source: Source,
        traits: SourceTraits,
        handler: Handler,
        decode: Decode | None,
        dead_letters: DeadLetters | None,
        publisher: Publisher | None,
        attempts: Attempts | None,
        settings: Settings,
        clock: Clock,
        tap: Tap,
        outlived: Callable[[list[Message]], Awaitable[None]],
    ) -> None:
        self.engine = engine
        self._effects, self._dirty, self._ready = engine.effects, engine.dirty, engine.chains.ready
        self._source = source
        self._extend_interval = traits.extend_interval
        self._commits = traits.settles == "cumulative"
        self._settings = settings
        self.clock = clock
        self.tap = tap
        self._outlived = outlived
        self.name = traits.name
        self._active = False
        self.stopping = False
        self.at_once = False
        self._exhausted = False
        # A loss cancels handlers for the first time, without the grace that a drain has given the others.
        self._lost_running = False
        self._starved = False
        self._entering = False
        self._given_back: set[PartitionId] = set()
        self.planned = not traits.plans
        self._target = traits.consumer_target
        self._plan: Generation | None = None
        self.has_plan = anyio.Event()
        if self.planned:
            self.has_plan.set()
        self.fatal: BaseException | None = None
        self.redelivered: Counter[str] = Counter()
        self._stalls = Stalls(engine.committer)
        self._handler_name = handler_name(handler)
        self._failures = FailedAttempts(self.name, self._handler_name)
        self._ownership = OwnershipLog(self.name, plans=traits.plans, handler=self._handler_name)
        # A handler in a thread cannot be cancelled, and a plain handler on the event loop ends before the limit.
        cancels = is_async(handler) or settings.processes is not None
        self._cut_off = CutOffLog(
            self.name, self._handler_name, settings.drain_timeout, "was cancelled" if cancels else "failed"
        )
        unordered_without_key = settings.order == "key" and settings.keyless == "any"
        self._keyless = KeylessWatch(self.name) if unordered_without_key else None
        self._timer_wake = anyio.Event()
        self._receiving = anyio.CancelScope()
        self._confirmation: Confirmation | None = None
        if isinstance(source, Confirming) and source.freeze_limit() < NEVER:
            self._confirmation = Confirmation(self, source, lambda: self.workers)
        self.freezes = self._confirmation.watch if self._confirmation is not None else None
        self.loop_watch = LoopWatch(
            self.name,
            handler_name(handler),
            "make it a plain function, or await"
            if is_async(handler)
            else 'leave out sync_handlers="inline", so that it runs in threads',
            clock,
            tap.loop_held,
            None if self.freezes is None else self.freezes.look,
        )
        reporting: object = source
        self.intake = (
            IntakeWatch(self.name, reporting, settings.unhealthy_after) if isinstance(reporting, Backlogged) else None
        )
        self.retention = RetentionWatch(self.name, reporting) if isinstance(reporting, Retaining) else None
        self._enter_loop = entry_of_loop()
        # No handler starts between the request to stop and the turn of the loop that serves the request.
        hold = engine.hold_starts
        self._told_to_stop = ThreadSafeCall(self._stop, lambda: self._timer_wake.set(), hold)
        self._told_to_stop_at_once = ThreadSafeCall(self._stop_at_once, lambda: self._timer_wake.set(), hold)
        self._told_to_act = ThreadSafeCall(self.after, lambda: self._timer_wake.set())
        self._tasks: TaskGroup
        traced = tap.telemetry is not None
        self.outputs = (
            None if publisher is None else OutputBuffer(settings.max_outputs, settings.max_output_bytes, traced=traced)
        )
        # The constructors of the components read these attributes, and call nothing of the run.
        self.workers: Workers = self._workers_for(handler, decode)
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
            self._cut_off,
            settings.grace,
            close_prefix=close_prefix,
        )
        self.dead_letter_writer = DeadLetterWriter(self, dead_letters, self._failures, traits)
        self.output_sender = None if publisher is None else OutputSender(self, publisher)

    def _workers_for(self, handler: Handler, decode: Decode | None) -> Workers:
        """Make the workers for a handler that ``check_handler`` has accepted, without starting them."""
        settings = self._settings
        inline, timeout, grace = settings.sync_handlers == "inline", settings.timeout, settings.grace
        processes = self._processes_for(handler, decode)
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
                processes=processes,
            )
        if processes is not None:
            return ThreadWorkers(self, None, grace=grace, processes=processes)
        if is_async(handler) or inline:
            return TaskWorkers(self, async_handler(handler, decode), timeout)
        return ThreadWorkers(self, sync_handler(handler, decode), timeout=timeout, grace=grace)

    def _processes_for(self, handler: Handler, decode: Decode | None) -> ProcessPool | None:
        settings = self._settings
        if settings.processes is None:
            return None
        return ProcessPool(
            handler,
            decode,
            settings.process_setup,
            batch=settings.batch is not None,
            count=settings.processes,
            timeout=settings.timeout,
            grace=settings.grace,
            traced=self.tap.telemetry is not None,
            refuse=self.stop_because,
        )

    async def run(self) -> None:
        """Consume until ``stop`` is called, a finite source has ended, or the error ``fatal`` stops the run.

        A cancellation stops the run without a drain.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                self._active = True
                policy = self.engine.policy
                self._ownership.opened(policy.order, policy.concurrency, policy.max_in_flight)
                watched = self.loop_watch.start(self.workers.message_in)
                self.workers.start(self._tasks)
                self.start_soon(self._pump)
                self.start_soon(self.settler.run)
                if self.output_sender is not None:
                    self.start_soon(self.output_sender.run)
                self.start_soon(self._timer)
                if self._confirmation is not None and not watched:
                    self.start_soon(self._confirmation.look)
                if self._extend_interval is not None:
                    self.start_soon(self.settler.keep_alive, self._extend_interval)
                if self.intake is not None:
                    self.start_soon(self._watch_intake, self.intake)
                if self.retention is not None:
                    self.start_soon(self._watch_retention, self.retention)
                if self.at_once:
                    self._tasks.cancel_scope.cancel()
                elif self.stopping:
                    self._stop_partitions()
        finally:
            self._active = False
            self.has_plan.set()
            self.loop_watch.stop()
            self.attempts.end()
            self._failures.end(self.clock())
            self._cut_off.tell()

    @property
    def ending(self) -> str:
        """The way in which the run ended, for the history: ``"drained"``, ``"stopped"`` or ``"failed"``."""
        if self.fatal is not None:
            return "failed"
        # A cancellation may end a drain. After a drain the run owns no partition.
        drained = self.stopping and not self.at_once and not self.engine.partitions
        return "drained" if drained else "stopped"

    def stop(self) -> None:
        """Stop receiving messages, and drain.

        The call does not block. Idempotent. Other threads may call this method.
        """
        self._told_to_stop()

    def stop_at_once(self) -> None:
        """Cancel the handlers and end the run.

        The call does not block. Idempotent. Other threads may call this method.
        """
        self.at_once = True
        self._told_to_stop_at_once()

    def _stop_at_once(self) -> None:
        self.stopping = True
        if self._active:
            self._tasks.cancel_scope.cancel()

    def _stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            if self._active:
                self._stop_partitions()
        if not self.at_once:
            # The drain may have to close the prefix, so messages may start again. The timer has just woken the workers.
            self.engine.resume_starts()

    # --- callbacks of the components

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake each component that has work.

        ``taking``: number of ready lanes that the caller itself takes.
        """
        # This method is called after every message, so it reads the engine's own lists. The engine never replaces these
        # lists.
        if self._effects:
            self._perform()
        if self._dirty and self.settler.idle:
            self.settler.wake()
        if len(self._ready) > taking:
            self.workers.wake(taking=taking)
        if self._exhausted:
            self._stop_when_exhausted()

    def after_command(self) -> None:
        """Call ``after``, in the next turn of the loop if no task of the loop makes this call."""
        self._told_to_act()

    def floors_moved(self) -> None:
        """Check the partitions at ``max_ahead`` again, because a message has finished or a commit was confirmed."""
        if self._stalls.moved(self.clock()):
            self._timer_wake.set()

    def overdue(self, partition: Partition) -> bool:
        """If the lease of a partition has expired, report the partition as lost.

        Return whether the lease has expired. Idempotent.
        """
        if self.clock() < partition.deadline:
            return False
        self.lose(partition, "its lease has run out")
        return True

    def interrupting(self, partition: Partition) -> None:
        """Count the unfinished messages of a partition for its next drain.

        The caller then abandons one of these messages.
        """
        self._handover.interrupting(partition)

    def stop_because(self, error: BaseException, *, message: Message | None = None, function: str = "") -> None:
        """Drain and stop the run. The consumer raises the ``error`` of the first such call. The call does not block.

        Args:
            error: The error.
            message: Message whose handler raised the error; None = another function raised the error.
            function: The consumer's argument whose function raised the error; "" = other code raised the error.
        """
        if self.fatal is None:
            self.fatal = error
            # The caller sees an error of `lanes` with its full text. Any other error needs this log line.
            known = isinstance(error, LanesError)
            if message is not None:
                place = f"{message.partition.id} position {message.position}"
                function = f"{self._handler_name} at {place}"
            log.log(
                logging.INFO if known else logging.ERROR,
                "%s: stopping: %s%s",
                self.name,
                described(error),
                f"; raised by {function}" if function else "",
                # Python shows no traceback of a SystemExit.
                exc_info=user_traceback(error) if function and not known else None,
            )
        self.stop()

    # --- tasks, and their end

    def start_soon(self, task: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Start a task. If the task raises an exception, call ``stop_because`` with the exception."""
        self._tasks.start_soon(self._guarded, task, *arguments)

    def look_for_due(self) -> None:
        """Compute the next deadline again, because a hold may end earlier than the current deadline.

        The call does not block.
        """
        self._timer_wake.set()

    async def _guarded(self, task: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run a task. If the task raises an exception, call ``stop_because`` with the exception."""
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
        left: deque[SourceEvent] = deque()
        while not self._exhausted:
            # One scope serves many calls, because a scope costs more than a short run of messages. A scope that was
            # cancelled meanwhile would cancel the next call, whose room is new already.
            with anyio.CancelScope() as self._receiving:
                while not (left or self._exhausted or self._receiving.cancel_called):
                    left = pieces(await self._source.receive(self._room()))
                    self._enter_slice(left)
            while left:
                await anyio.lowlevel.checkpoint()
                self._enter_slice(left)

    def _room(self) -> Room:
        room = self.engine.room()
        if self.stopping:
            room = Room(0, 0, frozenset(self.engine.partitions.values()))
        room = self.attempts.room(room)
        self._starved = room.messages <= 0
        return room

    def _enter_slice(self, events: deque[SourceEvent]) -> None:
        """Remove and process events until the end of a time slice, so that many messages do not delay a timer."""
        begin = self.clock()
        # Partitions that are lost together share a log line.
        self._entering = True
        try:
            while events:
                event = events.popleft()
                if not (self.attempts.active and self.attempts.put_aside(event)):
                    self.enter(event)
                if isinstance(event, Delivered) and self.clock() - begin >= TIME_SLICE:
                    break
        finally:
            self._entering = False
            self._ownership.tell_lost()
        self._tell_ownership()
        self.after()

    def _tell_ownership(self) -> None:
        if self._ownership.noted:
            self._ownership.tell(len(self.engine.partitions), stopping=self.stopping)

    def enter(self, event: SourceEvent) -> None:
        """Process a new or deferred event of the source."""
        engine, now = self.engine, self.clock()
        if isinstance(event, Delivered):
            check_delivered(self.name, event, stopping=self.stopping)
            if event.partition.live and not event.partition.draining:
                self.tap.delivered(event.partition, event.run, now)
            if self.intake is not None:
                self.intake.delivered(event.partition)
            if self._keyless is not None and self._keyless.delivered(event):
                self._keyless = None
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
            if self.intake is not None:
                self.intake.delivered(event.partition)
            self.settler.wake()
        elif isinstance(event, Revoking):
            self._revoking(event.partition, event.timeout)
        elif isinstance(event, RevokingPart):
            self.tap.abandoned(engine.part(event.partition, event.part))
        elif isinstance(event, Lost):
            self.lose(event.partition, event.reason)
        elif isinstance(event, Generation):
            self._plan_changed(event)
        elif isinstance(event, Exhausted):
            self._exhausted = True
            self._stop_when_exhausted()
        else:
            raise ContractError(
                f"{self.name} delivered a {type(event).__name__}, which is no event of lanes.source; please report "
                "this bug of the source"
            )

    def _plan_changed(self, plan: Generation) -> None:
        former, self._plan, self.planned = self._plan, plan, True
        self.has_plan.set()
        if former is None or (plan.number, plan.standby) != (former.number, former.standby):
            self._ownership.planned(plan.number, standby=plan.standby)
            self.tap.planned(plan.number, standby=plan.standby)
        if plan.under_provisioned != (former is not None and former.under_provisioned):
            self._ownership.provisioned(plan.number, under=plan.under_provisioned)
            self.tap.provisioned(plan.number, under=plan.under_provisioned)

    def provision(self) -> Provision:
        """Return the target of this process, and whether the group exceeds its targets.

        Any thread may call this method.
        """
        target, plan = self._target, self._plan
        if plan is not None:
            honoured = None if target is None else plan.target_honoured
            return Provision(target, honoured, plan.under_provisioned)
        if target is None:
            return Provision()
        # Without a plan of the group, this process knows only its own partitions.
        return Provision(target, target_honoured=False, under_provisioned=len(self.engine.partitions) > target)

    def _assigned(self, partition: Partition) -> None:
        check_assigned(self.name, partition, commits=self._commits)
        if self.stopping:
            # A partition is released once. A source that assigns the partition again after each release would otherwise
            # keep the run from ending.
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
        partition.outputs = self.outputs
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
        """Give up a lost partition. After this call, the engine ignores results of the partition. Idempotent."""
        if not self.engine.owns(partition):
            return
        held = self.loop_watch.held_before(self.clock())
        if held is not None:
            reason = f"{reason}; {held}"
        zombies = self.engine.lose(partition)
        self._lost_running = self._lost_running or bool(zombies)
        self._handover.lost(partition)
        self._ownership.lost(partition, reason, zombies)
        if not self._entering:
            self._ownership.tell_lost()
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
        """Act at each deadline until the end of the run, and then check handlers that ignore their cancellation."""
        try:
            await self._serve_deadlines()
        except anyio.get_cancelled_exc_class():
            # The tasks of this run have been cancelled, and the run waits for all of them. A worker whose handler
            # ignored that cancellation would otherwise take its next message, although the source is closed.
            self.engine.hold_starts()
            with anyio.CancelScope(shield=True):
                drained = self.ending == "drained" and not self._lost_running
                within = DRAINED_WITHIN if drained else self._settings.grace
                if left := await survivors(self.workers, within):
                    await self._outlived(left)
            raise

    async def _serve_deadlines(self) -> None:
        """The timer for the earliest deadline of held lanes, bounds, stalled partitions and counted failures."""
        while True:
            self._told_to_stop.serve()
            self._told_to_stop_at_once.serve()
            self._told_to_act.serve()
            if self._confirmation is not None:
                self._confirmation.serve()
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

    async def _watch_intake(self, intake: IntakeWatch) -> None:
        while not self.stopping:
            intake.look(self.engine.partitions.values(), self.attempts.room(self.engine.room()), self.clock())
            await anyio.sleep(intake.period)
        intake.look((), self.engine.room(), self.clock())

    async def _watch_retention(self, retention: RetentionWatch) -> None:
        while True:
            retention.look(self.engine.partitions.values(), self.clock())
            await anyio.sleep(PERIOD)

    # --- effects

    def _perform(self) -> None:
        effects = self.engine.effects
        while effects:
            batch = effects[:]
            effects.clear()
            for effect in batch:
                if isinstance(effect, fx.PublishDue):
                    # The first comparison, because this effect follows every message with outputs.
                    assert self.output_sender is not None, "only the buffer of a publisher has outputs"
                    self.output_sender.due(effect)
                else:
                    self._perform_one(effect)

    def _perform_one(self, effect: fx.Effect) -> None:
        tap = self.tap
        if isinstance(effect, fx.Failed):
            self.attempts.failed(effect)
            # The timer must look again: a hold may end before its next deadline, or the failure leaves a handler idle
            # at a bound.
            self._timer_wake.set()
        if isinstance(effect, fx.Held | fx.Interrupted):
            self._failures.failed(effect, self.clock())
        if isinstance(effect, fx.Held):
            tap.held(effect.message, effect.delay, asked=effect.failure.delay is not None)
        elif isinstance(effect, fx.Saturated | fx.Resumed):
            self._crossed(saturated=isinstance(effect, fx.Saturated))
        elif isinstance(effect, fx.Redelivered):
            self.redelivered[effect.cause] += 1
            tap.redelivered(effect)
            # Positions that a former owner has completed are committed, even if no other message finishes.
            self.settler.wake()
        elif isinstance(effect, fx.PublishHeld):
            assert self.output_sender is not None, "only the buffer of a publisher has outputs"
            self.output_sender.held(effect)
            # The timer must look again: the next send may be due before its next deadline.
            self._timer_wake.set()
        elif isinstance(effect, fx.DeadLetterDue):
            self.start_soon(self.dead_letter_writer.write, effect)
        elif isinstance(effect, fx.Halted):
            self.stop_because(halted(self.name, effect))
        elif isinstance(effect, fx.Blocked):
            tap.blocked(effect.message)
            report_blocked(self.name, effect)
        elif isinstance(effect, fx.Drained):
            self._handover.ended(effect.partition)
        elif isinstance(effect, fx.Parted):
            self.start_soon(self._handover.hand_over, effect.partition, effect.parting)
        elif isinstance(effect, fx.Abandoned):
            self._handover.abandoned(effect.messages)
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
        elif isinstance(effect, fx.PauseDue | fx.PartitionResumed):
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
        """Call ``Source.receive`` again with the new bounds of messages and bytes. The call does not block."""
        # receive() is cancel-safe, and ``_pump`` calls it again.
        self._receiving.cancel()

    def room_changed_elsewhere(self) -> None:
        """Call ``room_changed`` in the next turn of the loop.

        Other threads call this method. After the loop's end the call has no effect.
        """
        with suppress(RuntimeError):
            self._enter_loop(lambda: self.room_changed())

    def _ahead_reached(self, effect: fx.AheadReached) -> None:
        self.tap.ahead(effect.partition, reached=True, oldest=effect.oldest)
        self.room_changed()
        # If only the confirmation of a commit is missing, the commit is sent now.
        self.settler.wake()
        self._stalls.reached(effect.partition, self.clock())
        self._timer_wake.set()
