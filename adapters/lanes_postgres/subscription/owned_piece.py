"""Represents one ownership of a piece of a partition: the messages of some slots, or the messages without a key."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from lanes.clock import monotonic
from lanes.core.ring import slot
from lanes.core.types import Room
from lanes.ownership import State
from lanes.source import Delivered, Progressed
from lanes_postgres.ring.slots import MovedSlots, Slots
from lanes_postgres.subscription.owned import Owned

_TELL_EVERY: Final = 1.0
"""Seconds between two events about skipped messages of other pieces. Each event causes one write to the database."""


@dataclass(eq=False, repr=False)
class OwnedPiece(Owned):
    """The ownership of a piece by this member. Only one event loop uses the object, and no call waits.

    Attributes:
        slots: The slots of the piece. ``None`` = the messages without a key.
        told: Position of the last event to the consumer. The piece has no undelivered message below this position.
        told_at: Time of the last event about skipped messages.
        moved: Lost parts that the member has not handed over yet.
        unstored: Error of the last attempt to store the position; "" = no error.
        kept: Error of the last attempt to hand over a part; "" = no error.
    """

    slots: Slots | None = None
    told: int = 0
    told_at: float = 0.0
    moved: list[MovedSlots] = field(default_factory=list)
    unstored: str = ""
    kept: str = ""

    def has(self, key: bytes | None) -> bool:
        """Return whether the piece contains the messages of a key."""
        if self.slots is None or key is None:
            return self.slots is None and key is None
        return slot(key) in self.slots

    def cut(self, slots: Slots, parts: Sequence[Slots]) -> list[MovedSlots]:
        """Reduce the piece to ``slots``, and return the parts that the piece loses.

        Args:
            slots: Slots that the piece keeps.
            parts: Slots of each known next owner. Each part waits only for the handlers of its own slots.

        Returns:
            Parts, which together contain all lost slots.
        """
        assert self.slots is not None, "the messages without a key stay together"
        gone = self.slots.minus(slots)
        self.slots = slots
        dropped = [stored for stored in self.waiting if not self.has(stored.key)]
        self.waiting = deque(stored for stored in self.waiting if self.has(stored.key))
        moved = []
        for part in [*parts, gone]:
            rest = gone.minus(part)
            if here := gone.minus(rest):
                below = (each.position for each in dropped if each.key is not None and slot(each.key) in here)
                moved.append(MovedSlots(here, min(below, default=self.read)))
            gone = rest
        self.moved += moved
        return moved

    def stored(self, state: State) -> None:
        """Record a stored position; see ``Owned.stored``."""
        super().stored(state)
        self.unstored = ""

    def finding(self) -> str:
        """Return a text about a fault of the piece's rows; empty without a fault."""
        piece, remedy = f"piece {self.unit} of partition {self.number}", "correct its row in lanes_ring_pieces"
        if self.unstored:
            return f"the position of {piece} is not stored: {self.unstored}; {remedy}"
        if self.kept:
            return f"a part of {piece} is not handed over: {self.kept}; {remedy}"
        return ""

    def take(self, room: Room) -> Delivered | None:
        """Remove and return waiting messages within ``room``; see ``Owned.take``."""
        delivered = super().take(room)
        if delivered is not None:
            self.told = delivered.run[-1].position + 1
        return delivered

    def passed(self) -> Progressed | None:
        """Return the event about skipped messages of other pieces; ``None`` = the event is not due."""
        if self.waiting or self.over or self.revoked or self.read <= self.told:
            return None
        now = monotonic()
        if now < self.told_at + _TELL_EVERY:
            return None
        self.told, self.told_at = self.read, now
        return Progressed(self.partition, self.read)


class Owners:
    """Finds the owner of each message of a read among the pieces of one partition. Immutable.

    Args:
        pieces: The pieces, whose slots do not overlap.
    """

    def __init__(self, pieces: Sequence[OwnedPiece]) -> None:
        self._keyless = next((piece for piece in pieces if piece.slots is None), None)
        self._runs = sorted(
            ((*run, piece) for piece in pieces if piece.slots is not None for run in piece.slots.runs),
            key=lambda run: run[0],
        )
        self._starts = [start for start, _, _ in self._runs]

    def of(self, key: bytes | None) -> OwnedPiece | None:
        """Return the piece that contains the messages of a key; None = no such piece."""
        if key is None:
            return self._keyless
        number = slot(key)
        index = bisect_right(self._starts, number) - 1
        if index < 0:
            return None
        _, after, piece = self._runs[index]
        return piece if number < after else None
