"""The tap, which reports the events of a run to the history, OpenTelemetry and the user's function.

The runtime reports each event once, to a ``Tap``. The workers report each call of a handler directly to ``history`` and
``telemetry``, and make no such call if both are None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lanes.clock import Clock
from lanes.core.effects import Redelivered
from lanes.core.types import Message, Partition, Settlement
from lanes.events import GroupEvent, OnEvent
from lanes.history.recorder import Recorder
from lanes.observe.otel import Telemetry


class Tap:
    """The tap of one consumer.

    ``history`` or ``telemetry`` is None if the user has not configured it. No method blocks or raises an exception.
    ``on_event`` receives the events for the user, and must not raise an exception.
    """

    __slots__ = ("_clock", "_on_event", "history", "telemetry")

    def __init__(
        self, clock: Clock, history: Recorder | None, telemetry: Telemetry | None, on_event: OnEvent | None = None
    ) -> None:
        self._clock = clock
        self._on_event = on_event
        self.history = history
        self.telemetry = telemetry

    def loop_held(self, seconds: float) -> None:
        """Count the seconds for which a call blocked the event loop. Any thread may call the method."""
        if self.telemetry is not None:
            self.telemetry.loop_held(seconds)

    # --- messages

    def delivered(self, partition: Partition, run: Sequence[Message], now: float) -> None:
        """Record consecutive messages that a partition received."""
        if self.history is not None:
            self.history.delivered(run, now)
        if self.telemetry is not None:
            self.telemetry.consumed(partition, len(run))

    def redelivered(self, effect: Redelivered) -> None:
        """Record that a message of the last delivered run is in flight, settled or late."""
        # A run that arrived while its partition was draining has no rows.
        if self.history is not None and not effect.message.partition.draining:
            self.history.redelivered(effect.message, effect.cause, self._clock())
        if self.telemetry is not None:
            self.telemetry.redelivered(effect.message, effect.cause)

    def held(self, message: Message, delay: float, *, asked: bool) -> None:
        """Record that a retry follows after ``delay`` seconds; ``asked`` = the handler chose the delay."""
        if self.history is not None:
            self.history.retry(message, delay, self._clock(), asked=asked)
        if self.telemetry is not None:
            self.telemetry.retried(message)

    def parking(self, message: Message) -> None:
        """Record that the consumer is about to write a dead letter."""
        if self.history is not None:
            self.history.dlq_sent(message, self._clock())

    def parked(self, message: Message, *, archived: bool, again: bool) -> None:
        """Record that a message has a confirmed dead letter.

        Args:
            message: The message.
            archived: Whether the message stays unfinished, and its lane is blocked.
            again: Whether the tap has already recorded the dead letter.
        """
        if self.history is not None:
            note = self.history.archived if archived else self.history.dlq_confirmed
            note(message, self._clock())
        if self.telemetry is not None and not again:
            self.telemetry.dead_lettered(message)

    def publishing(self, message: Message, count: int) -> None:
        """Record that the consumer is about to send outputs of a message. ``count``: number of its outputs."""
        if self.history is not None:
            self.history.publishing(message, count, self._clock())

    def outputs(self, message: Message, count: int) -> None:
        """Record that the broker has confirmed ``count`` outputs of a message."""
        if self.telemetry is not None:
            self.telemetry.outputs(message.partition, count)

    def published(self, message: Message) -> None:
        """Record that the broker has confirmed all outputs of a message."""
        if self.history is not None:
            self.history.published(message, self._clock())

    def publish_failed(self, message: Message, error: BaseException) -> None:
        """Record that a send of outputs failed."""
        if self.history is not None:
            self.history.publish_failed(message, error, self._clock())
        if self.telemetry is not None:
            self.telemetry.publish_failed(message)

    def blocked(self, message: Message) -> None:
        """Record that a message blocks its lane."""
        if self.history is not None:
            self.history.blocked(message, self._clock())

    def unblocked(self, key: bytes | None, count: int) -> None:
        """Record that ``count`` blocked lanes of a key continue."""
        if self.history is not None and count:
            self.history.unblocked(key, count, self._clock())

    def extended(self, messages: Sequence[Message]) -> None:
        """Record that the source extended unsettled messages at the broker."""
        if self.history is not None:
            self.history.extended(messages, self._clock())

    def abandoned(self, messages: Sequence[Message]) -> None:
        """Record that this process gave up messages without a settlement."""
        if self.history is not None:
            self.history.abandoned(messages, self._clock())

    def zombie(self, message: Message) -> None:
        """Record a result that arrived after the fence of its assignment."""
        if self.history is not None:
            self.history.zombie(message, self._clock())
        if self.telemetry is not None:
            self.telemetry.zombie(message)

    # --- settling

    def settling(self, settlements: Sequence[Settlement], now: float) -> None:
        """Record settlements that the source is about to send.

        The call flushes the history rows before the runtime sends the settlements.
        """
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
        """Record sent settlements, and commits that the broker has confirmed."""
        for settlement in settlements:
            if settlement.floor is not None:
                if self.history is not None:
                    self.history.commit_ok(settlement.partition, settlement.floor, self._clock())
            elif self.telemetry is not None:
                self.telemetry.settled(settlement.partition, len(settlement.messages))

    def completed(self, partition: Partition, count: int) -> None:
        """Record ``count`` finished messages of a partition whose source commits."""
        if self.telemetry is not None:
            self.telemetry.settled(partition, count)

    def unsettled(self, settlements: Sequence[Settlement]) -> None:
        """Record settlements that failed or have an unknown result."""
        if self.history is not None:
            for settlement in settlements:
                if settlement.floor is not None:
                    self.history.commit_failed(settlement.partition, settlement.floor, self._clock())

    # --- ownership and flow

    def assigned(self, partition: Partition) -> None:
        """Record that this process has acquired the partition."""
        if self.history is not None:
            self.history.assigned(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("assigned", partition))

    def revoking(self, partition: Partition, timeout: float) -> None:
        """Record that the drain of a partition begins and may take ``timeout`` seconds."""
        if self.history is not None:
            self.history.revoking(partition, self._clock(), timeout)

    def hastened(self, partition: Partition, timeout: float) -> None:
        """Record that a drain may take at most ``timeout`` more seconds."""
        if self.history is not None:
            self.history.hastened(partition, self._clock(), timeout)

    def drained(self, partition: Partition) -> None:
        """Record that a drain has fenced the partition, after the end of its handlers or of their time."""
        if self.history is not None:
            self.history.drained(partition, self._clock())

    def revoked(self, partition: Partition) -> None:
        """Record the release of a partition."""
        if self.history is not None:
            self.history.revoked(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("revoked", partition))

    def lost(self, partition: Partition, reason: str) -> None:
        """Record the loss of a partition without a release."""
        if self.history is not None:
            self.history.lost(partition, self._clock())
        if self._on_event is not None:
            self._on_event(GroupEvent.of("lost", partition, reason))

    def planned(self, generation: int, *, standby: bool) -> None:
        """Record the newest plan of the group; ``standby`` = the plan gives this process no partition."""
        if self._on_event is not None:
            self._on_event(GroupEvent(name="generation", generation=generation))
            if standby:
                self._on_event(GroupEvent(name="standby", generation=generation))

    def provisioned(self, generation: int, *, under: bool) -> None:
        """Record that a process of the group owns more partitions than its target, or that no process does any more."""
        if self._on_event is not None:
            name: Literal["under_provisioned", "provisioned"] = "under_provisioned" if under else "provisioned"
            self._on_event(GroupEvent(name=name, generation=generation))

    def crossed(self, *, saturated: bool, in_flight: int, size: int) -> None:
        """Record that deliveries stopped or resumed."""
        if self.history is not None:
            note = self.history.paused if saturated else self.history.resumed
            note(in_flight, size, self._clock())

    def ahead(self, partition: Partition, *, reached: bool, oldest: Message | None) -> None:
        """Record that ``max_ahead`` stops a partition, or that the partition continues.

        Args:
            partition: The partition.
            reached: True = the partition stops; False = the partition continues.
            oldest: Oldest unfinished message of the partition; None = no message is unfinished.
        """
        if self.history is None:
            return
        if reached:
            self.history.ahead_reached(partition, oldest, self._clock())
        else:
            self.history.ahead_left(partition, self._clock())
