"""One ownership of a cohort partition: the pulls that bring its messages, and what they say of those to come."""

from __future__ import annotations

from lanes.clock import monotonic
from lanes.cohort.owned import Tenancy
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Partition
from lanes.source import Delivered
from lanes_jetstream.cohort.backlog import Backlog
from lanes_jetstream.cohort.partitioning import KeyWatch
from lanes_jetstream.cohort.pulls import ConsumerPulls
from lanes_jetstream.wire.keys import KeyFunction
from lanes_jetstream.wire.messages import message_of
from lanes_jetstream.wire.transport import sequences

__all__ = ["PulledTenancy"]


class PulledTenancy(Tenancy):
    """See ``Tenancy``. asyncio only.

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
        """See ``Tenancy.rest``."""
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
                pulls.breaks("gap", f"delivery {self.expected} missing, got {delivery}")
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
        if pulls.sent >= self.expected and pulls.caught_up and pulls.broken is None:
            # Its last delivery never came, and there may be none behind it to show that.
            pulls.breaks("gap", f"delivery {pulls.sent} missing")
        if last:
            self.seen = monotonic()
            self.backlog.delivered(self.expected - 1, _pending(last), ledger.highest)
        if not run:
            return None
        pulls.learn(len(run), size)
        return Delivered(partition, run, size)

    @property
    def lag(self) -> int | None:
        """How many messages are not finished, delivered or not; None while that is not known."""
        if self.pulls is not None and self.pulls.caught_up:
            # What has come and is not taken, of a partition that is paused, is in no ledger yet.
            return len(self.ledger) + len(self.pulls.waiting)
        return None if self.backlog.left is None else len(self.ledger) + self.backlog.left


def _pending(reply: str) -> int:
    """How many messages the consumer had still to deliver behind one, as that one's reply subject says."""
    tokens = reply.split(".")
    number = tokens[8] if len(tokens) == 9 else tokens[10]
    # Of one that does not say it nothing can be missed.
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 20 else 0
