"""What a durable has still to deliver, and whether some of that was dropped before it came."""

from __future__ import annotations

__all__ = ["Backlog"]


class Backlog:
    """The backlog of one durable, as it says with each delivery, and when it is asked.

    ``left``: how many messages it had still to deliver when it was heard of last; None = not yet. ``missed``: how many
    went without being delivered; ``reached``: the highest sequence that was read before the first of them. ``doubted``:
    its last answer has fewer left than there should be, and has to be heard once more to count.
    """

    __slots__ = ("_answer", "_base", "_highest", "delivery", "doubted", "left", "missed", "reached")

    def __init__(self) -> None:
        self._base: tuple[int, int] | None = None
        self._answer: tuple[int, int, int] | None = None
        self._highest = 0
        self.delivery = 0
        """The number of the delivery when it was heard of last."""
        self.left: int | None = None
        self.missed = 0
        self.reached = 0
        self.doubted = False

    def __repr__(self) -> str:
        return f"<Backlog: {self.left} left behind delivery {self.delivery}, {self.missed} missed>"

    def begin(self) -> None:
        """Another durable: what it delivers is not known, and its deliveries count from 1."""
        self._base = self._answer = None
        self.doubted = False
        self.delivery = 0
        self.left = None

    def delivered(self, delivery: int, left: int, highest: int) -> None:
        """A delivery of this number came, and so many were left behind it. ``highest``: sequence read so far."""
        # Of an equal or a lower one the durable has said more since, when it was asked.
        if self.left is None or delivery > self.delivery:
            self.delivery, self.left = delivery, left
        if self._base is None or delivery > self._base[0]:
            self._note(delivery, left, highest)
            self.doubted = False

    def asked(self, delivery: int, left: int, highest: int) -> None:
        """It says that its last delivery has this number, and that so many are left. ``highest``: as above.

        One with several copies says so before all of them know what it has just delivered: the number may be too low
        then. A later answer with the same number shows that the one before had the right one: only that counts.
        """
        if self.left is None or delivery >= self.delivery:
            self.delivery, self.left = delivery, left
        before, self._answer = self._answer, (delivery, left, highest)
        if before is not None and before[0] == delivery and (self._base is None or delivery >= self._base[0]):
            self._note(*before)
        self.doubted = self._lost(delivery, left) > 0

    def _lost(self, delivery: int, left: int) -> int:
        if self._base is None:
            return 0
        known, before = self._base
        # New messages make it more, deliveries make it less, and nothing else does but their removal.
        return before - left - (delivery - known)

    def _note(self, delivery: int, left: int, highest: int) -> None:
        lost = self._lost(delivery, left)
        if lost > 0:
            if not self.missed:
                self.reached = self._highest
            self.missed += lost
        self._base, self._highest = (delivery, left), highest
