"""The shell around the engine: it pumps messages in, settles what is finished, keeps deadlines, and drains.

It performs what the engine decides, and decides nothing about order, retries or bounds itself. Everything runs
in one task group of one event loop, asyncio or trio, and is gone when ``run`` returns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Literal

import anyio
from anyio.abc import TaskGroup

from lanes.clock import Clock, monotonic
from lanes.config import Settings
from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.retry import RetryPolicy
from lanes.core.types import Partition, Room
from lanes.dead_letter import error_text
from lanes.errors import ConfigError, ContractError, HandlerHalted, LanesError
from lanes.handover import Handover
from lanes.history import History
from lanes.parking import Parking
from lanes.settling import Settler
from lanes.source import Assigned, DeadLetters, Delivered, Exhausted, Lost, Revoking, Source, SourceEvent
from lanes.status import Status, snapshot
from lanes.workers import Handler, Workers

log = logging.getLogger("lanes")

CLOSE_TIMEOUT: Final = 5.0
"""Seconds that each of the last settlement, closing the source and closing the dead letters may take."""


class Consumer:
    """One source, one handler, and the lanes between them.

    ``handler`` is an async function of one ``Message``. ``dead_letters`` is where messages go whose attempts are
    used up. ``history`` records what happens, row by row. ``clock`` (seconds, monotonic) is for simulation.

    Raises ``ConfigError`` for settings that contradict each other. An instance runs once and is not thread-safe:
    call everything from the event loop that runs it.
    """

    def __init__(
        self,
        source: Source,
        handler: Handler,
        *,
        settings: Settings | None = None,
        dead_letters: DeadLetters | None = None,
        history: History | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if not callable(handler):
            raise ConfigError(f"handler={handler!r} is not callable: pass an async function of one message")
        self._settings = settings or Settings()
        self._poison = self._settings.poison_policy(has_dead_letters=dead_letters is not None)
        self._source = source
        self._handler = handler
        self._dead_letters = dead_letters
        self._history = history
        self._clock = clock
        self._name = "source"
        self._state: Literal["new", "starting", "running", "stopped"] = "new"
        self._stopping = False
        self._exhausted = False
        self._fatal: BaseException | None = None
        self._starved = False
        self._redelivered: Counter[str] = Counter()
        self._engine: Engine
        self._workers: Workers
        self._tasks: TaskGroup
        self._receiving: anyio.CancelScope
        self._timer_wake: anyio.Event
        self._settler: Settler
        self._handover: Handover
        self._parking: Parking

    # --- what a user calls

    async def run(self) -> None:
        """Consume until ``stop`` is called or a finite source has been handled to its end.

        Blocks until everything is drained, settled and closed. Raises ``ConfigError`` or ``SourceError`` before
        the first message when a setting cannot be kept; ``HandlerHalted`` when a message was given up under the
        poison policy ``exit``; ``SourceError`` when the broker is gone for good; and whatever a handler raised
        that is not an ``Exception``. Cancelling it stops at once: handlers are cancelled, what had finished is
        settled, the rest is delivered again later.
        """
        if self._state != "new":
            raise LanesError(f"this consumer is {self._state} already: make a new one for another run")
        self._state = "starting"
        reason = "failed"
        try:
            extend_interval = await self._open()
            async with anyio.create_task_group() as self._tasks:
                self._state = "running"
                self._workers.start(self._tasks)
                self._tasks.start_soon(self._guarded, self._pump)
                self._tasks.start_soon(self._guarded, self._settler.run)
                self._tasks.start_soon(self._guarded, self._timer)
                if extend_interval is not None:
                    self._tasks.start_soon(self._guarded, self._settler.keep_alive, extend_interval)
                if self._stopping:
                    self._stop_partitions()
            reason = "stopped" if self._fatal is None and not self._stopping else "drained"
        finally:
            self._state = "stopped"
            with anyio.CancelScope(shield=True):
                await self._close("failed" if self._fatal is not None else reason)
        if self._fatal is not None:
            raise self._fatal

    def stop(self) -> None:
        """Stop in order: take nothing more, let running handlers end, settle, release; then ``run`` returns.

        Does not block. Idempotent.
        """
        if self._stopping:
            return
        self._stopping = True
        if self._state == "running":
            self._stop_partitions()

    def status(self) -> Status:
        """A snapshot of what is going on. Does not block; O(in flight). Raises ``LanesError`` before ``run``."""
        if not hasattr(self, "_engine"):
            raise LanesError("the consumer has not started: ask for its status after run() has opened the source")
        return snapshot(
            self._engine, self._clock(), dead_lettered=self._parking.confirmed, redelivered=self._redelivered
        )

    # --- what the workers call

    def after(self, *, taking: int = 0) -> None:
        """Perform the engine's effects and wake whoever has something to do now.

        ``taking``: how many ready lanes the caller will take itself, without being woken.
        """
        engine = self._engine
        if engine.effects:
            self._perform()
        if engine.dirty:
            self._settler.wake()
        if engine.ready > taking:
            self._workers.wake()
        if self._exhausted:
            self._stop_when_exhausted()

    def stop_because(self, error: BaseException) -> None:
        """Stop in order and raise ``error`` from ``run``; the first one wins. Does not block."""
        if self._fatal is None:
            self._fatal = error
            # An error of ours says it all where it is raised; whatever else comes up needs the context.
            level = logging.INFO if isinstance(error, LanesError) else logging.ERROR
            log.log(level, "%s: stopping: %s: %s", self._name, type(error).__qualname__, error_text(error))
        self.stop()

    # --- start and end

    async def _open(self) -> float | None:
        if self._dead_letters is not None:
            await self._dead_letters.open()
        traits = await self._source.open()
        self._name = traits.name
        settings = self._settings
        bound = settings.in_flight_bound(traits.max_in_flight)
        if settings.max_in_flight is None and traits.max_in_flight == bound:
            log.info("%s: max_in_flight is %d, what the broker's consumer allows", self._name, bound)
        retry = settings.retry
        self._engine = Engine(
            concurrency=settings.concurrency,
            max_in_flight=bound,
            max_bytes=settings.max_in_flight_bytes,
            retry=RetryPolicy(retry.attempts, retry.backoff, retry.max_backoff),
            dead_letters=self._poison == "skip",
        )
        self._workers = Workers(self._engine, self._handler, self, self._clock, self._history)
        self._timer_wake = anyio.Event()
        self._settler = Settler(self._engine, self._source, self, self._clock, self._history)
        self._handover = Handover(
            self._engine,
            self._source,
            self._workers,
            self._settler,
            self,
            self._clock,
            self._history,
            settings.grace,
            traits.name,
        )
        self._parking = Parking(self._engine, self._dead_letters, self, self._clock, self._history, traits.name)
        self._receiving = anyio.CancelScope()
        if self._history is not None:
            self._history.open(
                source=traits.name,
                concurrency=settings.concurrency,
                max_in_flight=bound,
                max_in_flight_bytes=settings.max_in_flight_bytes,
                now=self._clock(),
            )
        return traits.extend_interval

    async def _close(self, reason: str) -> None:
        """What must happen however ``run`` ends; bounded, because a caller waits for it."""
        with anyio.move_on_after(CLOSE_TIMEOUT):
            if hasattr(self, "_engine"):
                # After a drain there is nothing left to settle; after a cancellation there may be.
                await self._settler.settle()
        for closed in (self._source, self._dead_letters):
            with anyio.move_on_after(CLOSE_TIMEOUT):
                try:
                    if closed is not None:
                        await closed.aclose()
                except Exception as error:
                    # Not raised: it would hide why the run ended, and nothing can be done about it any more.
                    log.warning("%s: not closed in order: %s: %s", self._name, type(error).__qualname__, error)
        if self._history is not None:
            self._history.close(reason, self._clock())

    async def _guarded(self, task: Callable[..., Awaitable[None]], *args: object) -> None:
        """Run one of the consumer's own tasks: when it fails, everything stops in order with its error."""
        try:
            await task(*args)
        except Exception as error:
            self.stop_because(error)

    def _stop_partitions(self) -> None:
        for partition in list(self._engine.partitions.values()):
            self._start_drain(partition, self._settings.drain_timeout)
        self._end_when_released()

    def _start_drain(self, partition: Partition, timeout: float) -> None:
        if self._handover.begin(partition):
            self._tasks.start_soon(self._guarded, self._drain, partition, timeout)

    async def _drain(self, partition: Partition, timeout: float) -> None:
        await self._handover.drain(partition, timeout)
        self._end_when_released()

    def _end_when_released(self) -> None:
        if self._stopping and not self._engine.partitions:
            self._tasks.cancel_scope.cancel()

    # --- in

    async def _pump(self) -> None:
        while not self._exhausted:
            room = Room(0, 0) if self._stopping else self._engine.room()
            self._starved = room.messages <= 0
            events: Sequence[SourceEvent] = ()
            with anyio.CancelScope() as self._receiving:
                events = await self._source.receive(room)
            for event in events:
                self._on_event(event)
            self.after()

    def _on_event(self, event: SourceEvent) -> None:
        engine, history, now = self._engine, self._history, self._clock()
        if isinstance(event, Delivered):
            if history is not None and event.partition.live and not event.partition.draining:
                history.delivered(event.run, now)
            engine.receive(event.partition, event.run, event.size, now)
            # At once, so that the rows of redelivered messages follow those of their run.
            self._perform()
        elif isinstance(event, Assigned):
            engine.assign(event.partition)
            if history is not None:
                history.assigned(event.partition, now)
            if self._stopping:
                self._start_drain(event.partition, self._settings.drain_timeout)
        elif isinstance(event, Revoking):
            self._start_drain(event.partition, min(event.timeout, self._settings.drain_timeout))
        elif isinstance(event, Lost):
            self._lost(event)
        elif isinstance(event, Exhausted):
            self._exhausted = True
            self._stop_when_exhausted()
        else:
            raise ContractError(f"{self._name} delivered {event!r}, which is no event of lanes.source")

    def _lost(self, event: Lost) -> None:
        partition = event.partition
        zombies = self._engine.lose(partition)
        log.warning(
            "%s: %s lost (%s); %d handlers of it still run and will not count",
            self._name,
            partition.id,
            event.reason,
            len(zombies),
        )
        if self._history is not None:
            self._history.lost(partition, self._clock())
        self._workers.cancel(partition)
        # A drain of it has nothing more to wait for.
        self._handover.drained(partition)
        self._end_when_released()

    def _stop_when_exhausted(self) -> None:
        if self._exhausted and not self._engine.flow.in_flight:
            self.stop()

    async def _timer(self) -> None:
        """The one timer for the earliest deadline of all held lanes."""
        while True:
            due = self._engine.next_due()
            self._timer_wake = anyio.Event()
            with anyio.move_on_after(None if due is None else max(0.0, due - self._clock())):
                await self._timer_wake.wait()
            self._engine.due(self._clock())
            self._workers.wake()

    # --- effects

    def _perform(self) -> None:
        effects = self._engine.effects
        while effects:
            batch = effects[:]
            effects.clear()
            for effect in batch:
                self._perform_one(effect)

    def _perform_one(self, effect: fx.Effect) -> None:
        history = self._history
        if isinstance(effect, fx.Held):
            if history is not None:
                history.retry(effect.message, effect.delay, self._clock())
            self._timer_wake.set()
        elif isinstance(effect, fx.Saturated | fx.Resumed):
            self._crossed(saturated=isinstance(effect, fx.Saturated))
        elif isinstance(effect, fx.Redelivered):
            self._redelivered[effect.cause] += 1
            if history is not None:
                history.redelivered(effect.message, effect.cause, self._clock())
        elif isinstance(effect, fx.DeadLetterDue):
            self._tasks.start_soon(self._guarded, self._parking.park, effect.message, effect.failure)
        elif isinstance(effect, fx.Halted):
            self._halted(effect)
        elif isinstance(effect, fx.Drained):
            self._handover.drained(effect.partition)
        elif isinstance(effect, fx.Abandoned):
            if history is not None:
                history.abandoned(effect.messages, self._clock())
        elif isinstance(effect, fx.Zombie):
            if history is not None:
                history.zombie(effect.message, self._clock())
            # Its key may have a successor now, in a new assignment.
            self._workers.wake()

    def _crossed(self, *, saturated: bool) -> None:
        flow = self._engine.flow
        if self._history is not None:
            note = self._history.paused if saturated else self._history.resumed
            note(flow.in_flight, flow.bytes, self._clock())
        if not saturated and self._starved:
            # The pump waits without room; receive() is cancel-safe and is called again with what there is now.
            self._receiving.cancel()

    def _halted(self, effect: fx.Halted) -> None:
        message, error = effect.message, effect.failure.error
        halted = HandlerHalted(
            f"{self._name}: the handler failed {message.attempt} time(s) at {message.partition.id} position "
            f"{message.position} with {type(error).__qualname__}: {error_text(error)}. The poison policy is "
            '"exit": everything else was drained and this message comes again at the next start. Fix the handler, '
            'or pass dead_letters=… and poison="skip"'
        )
        halted.__cause__ = error
        self.stop_because(halted)
