"""The finished messages that wait for their settlement at the broker.

A partition is *dirty* while it has messages to settle. A possibly unsent settlement returns to the queue before later
finished messages, so settlements keep the order of completion.
"""

from __future__ import annotations

from lanes.core.lane import FINISHED, SETTLED
from lanes.core.types import Message, Partition, Settlement


class Outbox:
    """The dirty partitions of one engine.

    The engine also appends to the list ``dirty``, so no method assigns a new list.
    """

    __slots__ = ("dirty",)

    def __init__(self) -> None:
        self.dirty: list[Partition] = []

    def finished(self, message: Message) -> None:
        """Add a handled message, or a message with a confirmed dead letter."""
        self._mark(message.partition)
        message.partition.finished.append(message)

    def again(self, message: Message) -> None:
        """Add a redelivery of a settled message, whose acknowledgement may be lost."""
        self._mark(message.partition)
        message.partition.resettle.append(message)

    def collect(self) -> list[Settlement]:
        """Remove all messages to settle, and return one settlement for each dirty partition."""
        settlements = []
        for partition in self.dirty:
            settlements.append(Settlement(partition, partition.finished + partition.resettle))
            partition.finished = []
            partition.resettle = []
            partition.dirty = False
        self.dirty.clear()
        return settlements

    def give_back(self, settlement: Settlement) -> None:
        """Queue a possibly unsent settlement again, without messages that the engine has abandoned in the meantime."""
        partition = settlement.partition
        self._mark(partition)
        partition.finished = [m for m in settlement.messages if m.state == FINISHED] + partition.finished
        partition.resettle = [m for m in settlement.messages if m.state == SETTLED] + partition.resettle

    def forget(self, partition: Partition) -> None:
        """Stop settling messages of a partition. Idempotent."""
        partition.finished.clear()
        partition.resettle.clear()
        if partition.dirty:
            partition.dirty = False
            self.dirty.remove(partition)

    def _mark(self, partition: Partition) -> None:
        if not partition.dirty:
            partition.dirty = True
            self.dirty.append(partition)

    def __repr__(self) -> str:
        return f"<Outbox {len(self.dirty)} partitions with something to settle>"
