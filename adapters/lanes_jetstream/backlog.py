"""What a durable has still to deliver, and whether some of that was dropped before it came."""

from __future__ import annotations

__all__ = ["Backlog"]


class Backlog:
    """The backlog of one durable, as it says with each delivery, and when it is asked.

    ``left``: how many messages it had still to deliver when it was heard of last; None = not yet. ``missed``: how many
    went without being delivered; ``reached``: the highest sequence that was read before the first of them.
    """

    __slots__ = ("_delivery", "_highest", "left", "missed", "reached")

    def __init__(self) -> None:
        self._delivery = 0
        self._highest = 0
        self.left: int | None = None
        self.missed = 0
        self.reached = 0

    def __repr__(self) -> str:
        return f"<Backlog: {self.left} left behind delivery {self._delivery}, {self.missed} missed>"

    def begin(self) -> None:
        """Another durable: what it delivers is not known, and its deliveries count from 1."""
        self._delivery = 0
        self.left = None

    @property
    def delivery(self) -> int:
        """The number of the delivery when it was heard of last."""
        return self._delivery

    def delivered(self, delivery: int, left: int, highest: int) -> None:
        """A delivery of this number came, and so many were left behind it. ``highest``: sequence read so far."""
        # Of an equal or a lower one the durable has said more since, when it was asked.
        if delivery > self._delivery:
            self._note(delivery, left, highest)

    def asked(self, delivery: int, left: int, highest: int) -> None:
        """It says that its last delivery has this number, and that so many are left. ``highest``: as above."""
        if delivery >= self._delivery:
            self._note(delivery, left, highest)

    def _note(self, delivery: int, left: int, highest: int) -> None:
        if self.left is not None:
            # New messages make it more, deliveries make it less, and nothing else does but their removal.
            lost = self.left - left - (delivery - self._delivery)
            if lost > 0:
                if not self.missed:
                    self.reached = self._highest
                self.missed += lost
        self._delivery, self.left, self._highest = delivery, left, highest
