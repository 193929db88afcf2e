"""One ownership of a piece of a partition: the messages of some slots, or those without a key."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from lanes.clock import monotonic
from lanes.core.ring import slot
from lanes.core.types import Room
from lanes.source import Delivered, Progressed
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.subscription.owned import Owned

_TELL_EVERY: Final = 1.0
"""Seconds after which the consumer is told that messages of other pieces were passed. Each time costs a write."""


@dataclass(eq=False, repr=False)
class OwnedPiece(Owned):
    """One ownership of a piece. Belongs to one event loop; no call waits.

    Attributes:
        slots: The slots to read. ``None`` = the messages without a key.
        told: Position below which the consumer knows that no message is left to deliver.
        told_at: Time of the last such event.
        moved: The parts that were given up and not handed over yet.
    """

    slots: Slots | None = None
    told: int = 0
    told_at: float = 0.0
    moved: list[MovedSlots] = field(default_factory=list)

    def has(self, key: bytes | None) -> bool:
        """Return whether messages of a key belong to the piece."""
        if self.slots is None or key is None:
            return self.slots is None and key is None
        return slot(key) in self.slots

    def cut(self, slots: Slots) -> MovedSlots | None:
        """Read no more messages than those of ``slots``, and return the part that has gone; ``None`` = nothing."""
        assert self.slots is not None, "the messages without a key stay together"
        gone = self.slots.minus(slots)
        if not gone:
            return None
        self.slots = slots
        dropped = [stored.position for stored in self.waiting if not self.has(stored.key)]
        self.waiting = deque(stored for stored in self.waiting if self.has(stored.key))
        moved = MovedSlots(gone, min(dropped, default=self.read))
        self.moved.append(moved)
        return moved

    def take(self, room: Room) -> Delivered | None:
        """Take waiting messages within the room; see ``Owned.take``."""
        delivered = super().take(room)
        if delivered is not None:
            self.told = delivered.run[-1].position + 1
        return delivered

    def passed(self) -> Progressed | None:
        """Return the event that messages of other pieces were passed, if it is time; ``None`` = not now."""
        now = monotonic()
        if self.waiting or self.over or self.revoked or self.read <= self.told or now < self.told_at + _TELL_EVERY:
            return None
        self.told, self.told_at = self.read, now
        return Progressed(self.partition, self.read)
