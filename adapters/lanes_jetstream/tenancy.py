"""One ownership of a cohort partition: what was delivered of it, what is done, and the pulls that bring more."""

from __future__ import annotations

import asyncio

from lanes.clock import monotonic
from lanes.core.cohort.ledger import DeliveryLedger, Done
from lanes.core.types import Message, Partition
from lanes.source import Delivered
from lanes_jetstream.backlog import Backlog
from lanes_jetstream.cohort_pulls import ConsumerPulls
from lanes_jetstream.keys import KeyFunction
from lanes_jetstream.partitioning import KeyWatch
from lanes_jetstream.reading import message_of
from lanes_jetstream.transport import sequences

__all__ = ["Tenancy"]


class Tenancy:
    """``number`` of the cohort partition, from the event that it is owned to the one that it is not.

    ``ledger``: everything delivered and what of it is done, that of earlier owners included. ``pulls``: None while the
    next consumer is being made, and once it drains. ``announced``: whoever handles it knows of it. ``revoked``: the
    plan gives it to another. ``releasing``: nothing of it runs any more. ``over``: it is handed over, or lost.
    ``again``: deliveries to acknowledge that are of finished messages. ``seen``: when something came last, be it one of
    those; ``confirm_at``: when an acknowledgement is to be confirmed next. ``backlog``: what its consumer has to
    deliver.
    """

    def __init__(self, number: int, partition: Partition, done: Done, pulls: ConsumerPulls) -> None:
        self.number = number
        self.partition = partition
        self.ledger = DeliveryLedger(done)
        self.pulls: ConsumerPulls | None = None
        self.again: list[str] = []
        self.announced = False
        self.revoked = False
        self.releasing = False
        self.over = asyncio.Event()
        self.seen = 0.0
        self.confirm_at = 0.0
        self.backlog = Backlog()
        self.follow(pulls)

    def __repr__(self) -> str:
        return f"<Tenancy of {self.partition.id}: {self.ledger!r}>"

    def follow(self, pulls: ConsumerPulls) -> None:
        """Go on with another consumer: it delivers again what is outstanding, and then what is new."""
        self.rest()
        # What they name was of the consumer before.
        self.again.clear()
        pulls.start()
        self.pulls = pulls
        self.backlog.begin()
        self._expected = 1

    def rest(self) -> None:
        """Take nothing more, until the next consumer. Idempotent."""
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
        expected, partition, ledger, number = self._expected, self.partition, self.ledger, self.number
        for raw in pulls.take():
            position, delivery = sequences(raw.reply)
            if delivery != expected:
                # The server counts as delivered what did not arrive, and would bring it behind newer ones. Everything
                # from here on is dropped: the next consumer brings it in order.
                pulls.breaks("gap", f"delivery {expected} missing, got {delivery}")
                break
            expected += 1
            last = raw.reply
            if not ledger.delivered(position):
                self.again.append(raw.reply)
                continue
            message = message_of(partition, raw, position, key)
            if watch is not None and message.key is not None:
                watch.see(message.key, number)
            run.append(message)
            size += message.size
        self._expected = expected
        if pulls.sent >= expected and pulls.caught_up and pulls.broken is None:
            # Its last delivery never came, and there may be none behind it to show that.
            pulls.breaks("gap", f"delivery {pulls.sent} missing")
        if last:
            self.seen = monotonic()
            self.backlog.delivered(expected - 1, _pending(last), ledger.highest)
        if not run:
            return None
        pulls.learn(len(run), size)
        return Delivered(partition, run, size)

    @property
    def taken(self) -> int:
        """How many messages have arrived, or may yet."""
        return 0 if self.pulls is None else self.pulls.taken

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
