"""What a durable has still to deliver, and whether some of that was dropped before it came."""

from __future__ import annotations

__all__ = ["Backlog"]


class Backlog:
    """The backlog of one durable, as it says with each delivery, and when it is asked.

    ``left``: how many messages it had still to deliver when it was heard of last; None = not yet. ``missed``: how many
    went without being delivered; ``reached``: the highest sequence that was read before the first of them.
    """

    __slots__ = ("_delivery", "_doubted", "_highest", "left", "missed", "reached")

    def __init__(self) -> None:
        self._delivery = 0
        self._highest = 0
        self._doubted: int | None = None
        self.left: int | None = None
        self.missed = 0
        self.reached = 0

    def __repr__(self) -> str:
        return f"<Backlog: {self.left} left behind delivery {self._delivery}, {self.missed} missed>"

    def begin(self) -> None:
        """Another durable: what it delivers is not known, and its deliveries count from 1."""
        self._delivery = 0
        self._doubted = None
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
        """It says that its last delivery has this number, and that so many are left. ``highest``: as above.

        One with several copies says so before all of them know what it has just delivered: the number may be too low
        then. So what seems to be missed counts once a later answer has the same number.
        """
        if delivery < self._delivery:
            return
        if self._lost(delivery, left) > 0 and self._doubted != delivery:
            self._doubted = delivery
            return
        self._note(delivery, left, highest)

    def _lost(self, delivery: int, left: int) -> int:
        # New messages make it more, deliveries make it less, and nothing else does but their removal.
        return 0 if self.left is None else self.left - left - (delivery - self._delivery)

    def _note(self, delivery: int, left: int, highest: int) -> None:
        lost = self._lost(delivery, left)
        if lost > 0:
            if not self.missed:
                self.reached = self._highest
            self.missed += lost
        self._doubted = None
        self._delivery, self.left, self._highest = delivery, left, highest
