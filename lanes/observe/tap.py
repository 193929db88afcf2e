"""The one tap on what enters and leaves the engine: to the history, and to OpenTelemetry.

The runtime says each thing once, here. What happens for every message is not said here but by the workers, which ask
``history`` and ``telemetry`` themselves: where both are None nothing is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence

from lanes.clock import Clock
from lanes.core.effects import Redelivered
from lanes.core.types import Message, Partition, Settlement
from lanes.events import GroupEvent, OnEvent
from lanes.history.recorder import Recorder
from lanes.observe.otel import Telemetry


class Tap:
    """What one consumer tells; ``history`` and ``telemetry`` may both be None. Nothing blocks or raises.

    ``on_event`` gets what is told to the user; it may not raise either.
    """

    __slots__ = ("_clock", "_on_event", "history", "telemetry")

    def __init__(
        self, clock: Clock, history: Recorder | None, telemetry: Telemetry | None, on_event: OnEvent | None = None
    ) -> None:
        self._clock = clock
        self._on_event = on_event
        self.history = history
        self.telemetry = telemetry

    # --- messages

    def delivered(self, partition: Partition, run: Sequence[Message], now: float) -> None:
        """A run was received for a partition that takes it."""
        if self.history is not None:
            self.history.delivered(run, now)
        if self.telemetry is not None:
            self.telemetry.consumed(partition, len(run))

    def redelivered(self, effect: Redelivered) -> None:
        """A position of the run just delivered was not new."""
        # Of a run that came while its partition was drained there are no rows.
        if self.history is not None and not effect.message.partition.draining:
            self.history.redelivered(effect.message, effect.cause, self._clock())
        if self.telemetry is not None:
            self.telemetry.redelivered(effect.message, effect.cause)

    def held(self, message: Message, delay: float, *, asked: bool) -> None:
        """It failed and is tried again after ``delay`` seconds; ``asked``: because its handler said so."""
        if self.history is not None:
            self.history.retry(message, delay, self._clock(), asked=asked)
        if self.telemetry is not None:
            self.telemetry.retried(message)

    def parking(self, message: Message) -> None:
        """Its dead letter is about to be written."""
        if self.history is not None:
            self.history.dlq_sent(message, self._clock())

    def parked(self, message: Message, *, archived: bool) -> None:
        """Its dead letter is confirmed; ``archived``: it is not done with it, its lane stands still then."""
        if self.history is not None:
            note = self.history.archived if archived else self.history.dlq_confirmed
            note(message, self._clock())
        if self.telemetry is not None:
            self.telemetry.dead_lettered(message)

    def blocked(self, message: Message) -> None:
        """Its lane stands still from now on."""
        if self.history is not None:
            self.history.blocked(message, self._clock())

    def unblocked(self, key: bytes | None, count: int) -> None:
        """So many blocked lanes of a key go on."""
        if self.history is not None and count:
            self.history.unblocked(key, count, self._clock())

    def extended(self, messages: Sequence[Message]) -> None:
        """The broker was told that they are still being worked on."""
        if self.history is not None:
            self.history.extended(messages, self._clock())

    def abandoned(self, messages: Sequence[Message]) -> None:
        """They were given up without being settled."""
        if self.history is not None:
            self.history.abandoned(messages, self._clock())

    def zombie(self, message: Message) -> None:
        """Its result came after its assignment was fenced."""
        if self.history is not None:
            self.history.zombie(message, self._clock())
        if self.telemetry is not None:
            self.telemetry.zombie(message)

    # --- settling

    def settling(self, settlements: Sequence[Settlement], now: float) -> None:
        """These are about to leave for the broker: in the history's file before, so that it can be proven."""
        history = self.history
        if history is None:
            return
        for settlement in settlements:
            if settlement.floor is None:
                history.acks(settlement.messages, now)
            else:
                history.commit_sent(settlement.partition, settlement.floor, len(settlement.completed), now)
        history.flush()

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """The broker has them."""
        for settlement in settlements:
            if settlement.floor is not None:
                if self.history is not None:
                    self.history.commit_ok(settlement.partition, settlement.floor, self._clock())
            elif self.telemetry is not None:
                self.telemetry.settled(settlement.partition, len(settlement.messages))

    def completed(self, partition: Partition, count: int) -> None:
        """So many messages of a partition whose source commits are finished."""
        if self.telemetry is not None:
            self.telemetry.settled(partition, count)

    def unsettled(self, settlements: Sequence[Settlement]) -> None:
        """Nobody knows whether the broker has them."""
        if self.history is not None:
            for settlement in settlements:
                if settlement.floor is not None:
                    self.history.commit_failed(settlement.partition, settlement.floor, self._clock())

    # --- ownership and flow

    def assigned(self, partition: Partition) -> None:
        """This process owns the partition from now on."""
        if self.history is not None:
            self.history.assigned(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("assigned", partition))

    def revoking(self, partition: Partition, timeout: float) -> None:
        """Its drain begins, and may take ``timeout`` seconds."""
        if self.history is not None:
            self.history.revoking(partition, self._clock(), timeout)

    def hastened(self, partition: Partition, timeout: float) -> None:
        """Its drain may take ``timeout`` seconds more at most."""
        if self.history is not None:
            self.history.hastened(partition, self._clock(), timeout)

    def drained(self, partition: Partition) -> None:
        """Nothing of it runs any more."""
        if self.history is not None:
            self.history.drained(partition, self._clock())

    def revoked(self, partition: Partition) -> None:
        """It was handed over."""
        if self.history is not None:
            self.history.revoked(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("revoked", partition))

    def lost(self, partition: Partition, reason: str) -> None:
        """It is owned no more, without having been handed over."""
        if self.history is not None:
            self.history.lost(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("lost", partition, reason))

    def planned(self, generation: int, *, standby: bool) -> None:
        """The group has a plan, by which this process may have nothing."""
        if self._on_event is not None:
            self._on_event(GroupEvent(name="generation", generation=generation))
            if standby:
                self._on_event(GroupEvent(name="standby", generation=generation))

    def crossed(self, *, saturated: bool, in_flight: int, size: int) -> None:
        """Intake stopped or went on."""
        if self.history is not None:
            note = self.history.paused if saturated else self.history.resumed
            note(in_flight, size, self._clock())

    def ahead(self, partition: Partition, *, reached: bool, oldest: Message | None) -> None:
        """``max_ahead`` was reached, with ``oldest`` unfinished, or left."""
        if self.history is None:
            return
        if reached:
            self.history.ahead_reached(partition, oldest, self._clock())
        else:
            self.history.ahead_left(partition, self._clock())
