"""The pull requests and the backlog of one owned cohort partition."""

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


class PulledPartition(OwnedPartition):
    """An owned partition whose messages a member pulls; see ``OwnedPartition``. Needs asyncio.

    Args:
        number: Number of the cohort partition.
        partition: The assignment.
        done: Messages that former owners finished.

    Attributes:
        pulls: Pull requests of the consumer; None = the member does not pull, for example during a drain or before the
            next consumer exists.
        again: Reply subjects of finished messages that the server redelivered, and that the member must acknowledge
            again.
        seen: Clock reading in seconds at the last ``take`` of an arrived message.
        confirm_at: Clock reading in seconds after which an acknowledgement requests a confirmation.
        backlog: The undelivered messages of the consumer.
        missing: Number of missing deliveries since the last arrival of a message.
    """

    def __init__(self, number: int, partition: Partition, done: Done) -> None:
        super().__init__(number, partition, done)
        self.pulls: ConsumerPulls | None = None
        self.again: list[str] = []
        self.seen = 0.0
        self.confirm_at = 0.0
        self.backlog = Backlog()
        self.missing = 0

    def follow(self, pulls: ConsumerPulls) -> None:
        """Pull from a new consumer, which redelivers unacknowledged messages before it delivers new messages."""
        self.begin()
        # These acknowledgements name deliveries of the previous consumer.
        self.again.clear()
        pulls.start()
        self.pulls = pulls
        self.backlog.begin()

    def rest(self) -> None:
        """Stop pulling; see ``OwnedPartition.rest``."""
        if self.pulls is not None:
            self.pulls.end()
            self.pulls = None

    def take(self, key: KeyFunction | None, watch: KeyWatch | None, limit: int | None = None) -> Delivered | None:
        """Return the arrived messages as one event. The call adds redeliveries of finished messages to ``again``.

        The event ends before the first gap in the delivery numbers. A gap interrupts the pull requests.

        Args:
            key: The key function; None = no keys.
            watch: Check of the keys; None = no check.
            limit: Maximum number of messages to take; None = all arrived messages.

        Returns:
            The event; None = no unfinished message arrived.

        Raises:
            SourceError: The consumer is permanently unusable, or a key occurs in two partitions.
        """
        pulls = self.pulls
        if pulls is None:
            return None
        run: list[Message] = []
        size = 0
        last = ""
        follows, partition, ledger, number = self.follows, self.partition, self.ledger, self.number
        for raw in pulls.take(limit):
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
        caught_up = pulls.caught_up and not pulls.arrived
        if pulls.last_delivery >= self.expected and caught_up and pulls.interruption is None:
            # The last delivery has not arrived, and no later delivery may show the loss.
            self.missing = pulls.last_delivery - self.expected + 1
            pulls.interrupt("gap", f"delivery {pulls.last_delivery} missing")
        if last:
            self.seen = monotonic()
            self.missing = 0
            self.backlog.delivered(self.expected - 1, pending(last), ledger.highest)
        if not run:
            return None
        pulls.learn_sizes(len(run), size)
        return Delivered(partition, run, size)

    @property
    def lag(self) -> int | None:
        """Number of unfinished messages, including undelivered messages; None = unknown."""
        if self.pulls is not None and self.pulls.caught_up:
            # The ledger does not contain arrived messages of a paused partition yet.
            return len(self.ledger) + len(self.pulls.arrived)
        return None if self.backlog.left is None else len(self.ledger) + self.backlog.left

    @property
    def waiting(self) -> int | None:
        """Sum of undelivered messages and missing deliveries; None = unknown."""
        left = 0 if self.pulls is not None and self.pulls.caught_up else self.backlog.left
        if self.missing:
            return self.missing + (left or 0)
        return None if left is None else left + max(0, self.backlog.delivery - (self.expected - 1))


class Backlog:
    """The undelivered messages of one durable, as deliveries and the server's answers report them.

    Attributes:
        left: Number of undelivered messages at the last report; None = no report yet.
        delivery: Delivery number of the last report.
        missed: Number of messages that the stream removed without a delivery.
        reached: Highest sequence that the member had read before the first missed message.
        doubted: Whether the last answer reports too few messages, so that a second answer must confirm the number.
    """

    __slots__ = ("_answer", "_base", "_highest", "delivery", "doubted", "left", "missed", "reached")

    def __init__(self) -> None:
        self._base: tuple[int, int] | None = None
        self._answer: tuple[int, int, int] | None = None
        self._highest = 0
        self.delivery = 0
        self.left: int | None = None
        self.missed = 0
        self.reached = 0
        self.doubted = False

    def __repr__(self) -> str:
        return f"<Backlog: {self.left} left after delivery {self.delivery}, {self.missed} missed>"

    def begin(self) -> None:
        """Begin with a new durable, whose backlog is unknown and whose deliveries count from 1."""
        self._base = self._answer = None
        self.doubted = False
        self.delivery = 0
        self.left = None

    def delivered(self, delivery: int, left: int, highest: int) -> None:
        """Record a delivery and the backlog after the delivery.

        Args:
            delivery: Delivery number.
            left: Number of undelivered messages after the delivery.
            highest: Highest sequence that the source has read.
        """
        # With an equal or lower number, the last answer about the durable is newer than this delivery.
        if self.left is None or delivery > self.delivery:
            self.delivery, self.left = delivery, left
        if self._base is None or delivery > self._base[0]:
            self._note(delivery, left, highest)
            self.doubted = False

    def asked(self, delivery: int, left: int, highest: int) -> None:
        """Record the server's answer about the durable.

        A durable with several copies may report too few messages until all copies know the last delivery. A removal is
        therefore certain only after two answers with the same delivery number.

        Args:
            delivery: Delivery number of the last delivery.
            left: Number of undelivered messages.
            highest: Highest sequence that the member had read before the request.
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
        # New messages increase the backlog, and deliveries reduce the backlog. Any further reduction is a removal.
        return before - left - (delivery - known)

    def _note(self, delivery: int, left: int, highest: int) -> None:
        lost = self._lost(delivery, left)
        if lost > 0:
            if not self.missed:
                self.reached = self._highest
            self.missed += lost
        self._base, self._highest = (delivery, left), highest
