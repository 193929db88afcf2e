"""One ownership of a cohort partition: the pulls that bring its messages, and the backlog of its durable."""

from __future__ import annotations

from lanes.clock import monotonic
from lanes.cohort.owned import OwnedPartition
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Partition
from lanes.source import Delivered
from lanes_jetstream.cohort.partitioning import KeyWatch
from lanes_jetstream.cohort.pulls import ConsumerPulls
from lanes_jetstream.wire.keys import KeyFunction
from lanes_jetstream.wire.messages import message_of, pending, sequences

__all__ = ["Backlog", "PulledPartition"]


class PulledPartition(OwnedPartition):
    """See ``OwnedPartition``. asyncio only.

    ``pulls``: None while the next consumer is being made, and once it drains. ``again``: deliveries to acknowledge that
    are of finished messages. ``seen``: when something came last, be it one of those; ``confirm_at``: when an
    acknowledgement is to be confirmed next. ``backlog``: what its consumer has to deliver.
    """

    def __init__(self, number: int, partition: Partition, done: Done) -> None:
        super().__init__(number, partition, done)
        self.pulls: ConsumerPulls | None = None
        self.again: list[str] = []
        self.seen = 0.0
        self.confirm_at = 0.0
        self.backlog = Backlog()

    def follow(self, pulls: ConsumerPulls) -> None:
        """Take from the pulls of another consumer, which delivers again what is outstanding, and then what is new."""
        self.begin()
        # What they name was of the consumer before.
        self.again.clear()
        pulls.start()
        self.pulls = pulls
        self.backlog.begin()

    def rest(self) -> None:
        """See ``OwnedPartition.rest``."""
        if self.pulls is not None:
            self.pulls.end()
            self.pulls = None

    def take(self, key: KeyFunction | None, watch: KeyWatch | None) -> Delivered | None:
        """What has arrived. What came again although it is done is to be acknowledged ``again``.

        Ends at the first sign that a delivery was lost on the way: the pulls are broken then. Raises ``SourceError``
        when the consumer cannot be used any more, or a key is in two partitions.
        """
        pulls = self.pulls
        if pulls is None:
            return None
        run: list[Message] = []
        size = 0
        last = ""
        follows, partition, ledger, number = self.follows, self.partition, self.ledger, self.number
        for raw in pulls.take():
            position, delivery = sequences(raw.reply)
            if not follows(delivery):
                pulls.interrupt("gap", f"delivery {self.expected} missing, got {delivery}")
                break
            last = raw.reply
            if not ledger.delivered(position):
                self.again.append(raw.reply)
                continue
            message = message_of(partition, raw, position, key)
            if watch is not None and message.key is not None:
                watch.see(message.key, number)
            run.append(message)
            size += message.size
        if pulls.last_delivery >= self.expected and pulls.caught_up and pulls.interruption is None:
            # Its last delivery never came, and there may be none behind it to show that.
            pulls.interrupt("gap", f"delivery {pulls.last_delivery} missing")
        if last:
            self.seen = monotonic()
            self.backlog.delivered(self.expected - 1, pending(last), ledger.highest)
        if not run:
            return None
        pulls.learn_sizes(len(run), size)
        return Delivered(partition, run, size)

    @property
    def lag(self) -> int | None:
        """How many messages are not finished, delivered or not; None while that is not known."""
        if self.pulls is not None and self.pulls.caught_up:
            # What has come and is not taken, of a partition that is paused, is in no ledger yet.
            return len(self.ledger) + len(self.pulls.arrived)
        return None if self.backlog.left is None else len(self.ledger) + self.backlog.left


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
