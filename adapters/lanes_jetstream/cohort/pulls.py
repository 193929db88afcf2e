"""The pull requests of many consumers over one inbox, with one subscription for all cohort partitions.

A status arrives at the reply subject of its pull request. A message arrives with the stream's subject, and the reply
subject of the message names the consumer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Sequence
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.core.types import Room
from lanes_jetstream.wire.connection import Connection, UnboundedSubscription, number
from lanes_jetstream.wire.pull_requests import PullRequests

log = logging.getLogger("lanes.jetstream")

EXPIRES: Final = 5.0
"""Seconds until an unfilled request ends, so that a busy partition can use its room."""

BRIEF: Final = 0.02
"""Seconds until an unfilled request ends if the room has fewer messages than the member has partitions."""

AGAIN: Final = 1.0
"""Seconds between two requests of an idle partition if the room has fewer messages than the member has partitions."""

_IDLE_SHARE: Final = 4
"""An idle partition requests a quarter of an even share, so that busy partitions have room."""

_CONFIRMATION: Final = "ack"


class Inbox:
    """One subscription that the pull requests of many consumers share.

    Args:
        client: The connected client.

    Attributes:
        wake: Event that is set when a status arrives, or the first message of a consumer after its ``take``.
        subject: Prefix of the subjects of all statuses.
    """

    def __init__(self, client: Client) -> None:
        self.wake = asyncio.Event()
        self.client = client
        self.subject = client.new_inbox()
        self._subscription = UnboundedSubscription(client)
        self._numbers = 0
        self._by_subject: dict[str, ConsumerPulls] = {}
        self._by_consumer: dict[str, ConsumerPulls] = {}

    async def open(self) -> None:
        """Subscribe; the client subscribes again after a reconnect. Idempotent."""
        await self._subscription.open(f"{self.subject}.>", self._receive)

    async def close(self) -> None:
        """Unsubscribe. The server then drops the pull requests. Idempotent."""
        await self._subscription.close()

    def add(self, pulls: ConsumerPulls) -> str:
        """Register the pull requests of a consumer. Returns the subject of the statuses, without its last token."""
        self._numbers += 1
        subject = f"{self.subject}.{self._numbers}"
        self._by_subject[subject] = pulls
        self._by_consumer[pulls.consumer] = pulls
        return subject

    def remove(self, pulls: ConsumerPulls, subject: str) -> None:
        """Ignore further arrivals for the pull requests of a consumer. Idempotent."""
        self._by_subject.pop(subject, None)
        if self._by_consumer.get(pulls.consumer) is pulls:
            del self._by_consumer[pulls.consumer]

    async def _receive(self, message: Msg) -> None:
        # Runs for every message. `PulledPartition.take` does the work for many messages at once.
        if message.subject.startswith(self.subject):
            pulls = self._by_subject.get(message.subject.rpartition(".")[0])
            if pulls is not None:
                pulls.on_status(message)
            return
        tokens = message.reply.split(".")
        # The long form has a domain and an account in front, see `sequences`. Other subjects match no consumer.
        place = 3 if len(tokens) == 9 else 5
        pulls = self._by_consumer.get(tokens[place]) if len(tokens) > place else None
        if pulls is not None:
            pulls.on_message(message)


class ConsumerPulls(PullRequests):
    """The pull requests of one consumer over a shared inbox. Needs asyncio; one caller.

    Args:
        inbox: The shared inbox.
        connection: Connection to the server.
        stream: Name of the stream.
        consumer: Name of the consumer.
        name: Name of the source, for errors.

    Attributes:
        last_delivery: Delivery number in the server's last report about the idle consumer; 0 = no report yet.
        confirmation: Subject for the confirmations of acknowledgements. Reports that no server reads acknowledgements
            arrive at the same subject.
        asked_at: Clock reading in seconds at the last request; minus infinity = no request yet.
    """

    def __init__(self, inbox: Inbox, connection: Connection, stream: str, consumer: str, name: str) -> None:
        super().__init__(
            inbox.client,
            connection.next_subject(stream, consumer),
            name,
            wake=inbox.wake,
            expires=EXPIRES,
        )
        self.consumer = consumer
        self.last_delivery = 0
        self.confirmation = ""
        self.asked_at = -math.inf
        self._shared = inbox

    def start(self) -> None:
        """Register at the inbox. Called once; sends no request."""
        inbox = self._shared.add(self)
        self.confirmation = f"{inbox}.{_CONFIRMATION}"
        self.restart(inbox)

    def end(self) -> None:
        """Ignore further messages and statuses. Idempotent."""
        self._shared.remove(self, self.inbox)

    def delivered_by(self, token: str) -> bool:
        """Return whether a reply subject names this consumer, and not an earlier consumer of the partition."""
        return f".{self.consumer}." in token

    def on_status(self, message: Msg) -> None:
        """Handle a status, or the confirmation of an acknowledgement."""
        headers = message.headers or {}
        if message.subject != self.confirmation:
            super().on_status(message)
            last = number(headers.get("Nats-Last-Consumer"))
            if self.caught_up and last is not None:
                self.last_delivery = last
        elif headers.get("Status") == "503":
            if self.interruption is None:
                self.interrupt("unanswered", "no responders")
            self._shared.wake.set()


class Turns:
    """Distributes the room among the consumers of a member.

    Args:
        name: Name of the source, for the log.
        partitions: Number of partitions of the whole cohort.
    """

    def __init__(self, name: str, partitions: int) -> None:
        self._name = name
        self._partitions = partitions
        self._most = 0
        self._warned = False

    async def pull(
        self, pulls: Sequence[ConsumerPulls], busy: Collection[ConsumerPulls], room: Room, now: float
    ) -> None:
        """Request messages, so that all open requests together stay within ``room``.

        In a cohort of several partitions, about a quarter of the room is reserved for all partitions, in equal shares
        of at least one message. Partitions of other members have a share too, because they may move to this member. The
        remaining room is divided evenly among the ``busy`` partitions.

        If the room is too small for all partitions, a request expires after ``BRIEF`` seconds. The partitions then take
        turns, and an idle partition gets a request every ``AGAIN`` seconds. So a message of an idle partition may wait
        for ``AGAIN`` seconds, and ``BRIEF`` seconds longer each time that idle partitions fill the room.

        Warns once if no ``room`` so far had one message for each consumer.

        Args:
            pulls: Pull requests of the consumers that may deliver now.
            busy: The part of ``pulls`` whose consumers have delivered a message within the last second.
            room: Maximum number and bytes of the requested messages.
            now: Time in seconds of the monotonic clock.
        """
        self._most = max(self._most, room.messages)
        if self._most < len(pulls) and not self._warned:
            self._warned = True
            log.warning(
                "%s: max_in_flight=%d is less than the %d partitions of this member, so messages of an idle partition "
                "wait for a second or more; raise max_in_flight",
                self._name,
                self._most,
                len(pulls),
            )
        left = room.messages - sum(each.reserved for each in pulls)
        without = sum(not each.reserved for each in pulls)
        size = max(1, room.bytes // max(1, len(pulls)))
        turns = sorted(pulls, key=lambda each: (each.reserved > 0, each.asked_at))
        if left < without:
            share = max(1, left // (2 * max(1, len(busy))))
            for each in turns:
                if left > 0 and (each in busy or (not each.reserved and now - each.asked_at >= AGAIN)):
                    part = min(share, each.reserved + left) if each in busy else 1
                    left -= await _pull(each, room._replace(messages=part, bytes=size), BRIEF, now)
            return
        small = room.messages
        if self._partitions > 1:
            small = max(1, min(room.messages // (_IDLE_SHARE * self._partitions), left // max(1, without)))
        elsewhere = min(small * (self._partitions - len(pulls)), room.messages // 4)
        large = max(small, (room.messages - elsewhere - small * (len(pulls) - len(busy))) // max(1, len(busy)))
        aside = elsewhere + sum(max(0, small - each.reserved) for each in pulls)
        for each in turns:
            taken = each.reserved
            own = max(0, small - taken)
            share = (
                min(large, taken + max(min(own, left), left - aside + own))
                if each in busy
                else min(small, taken + left)
            )
            if share > 0:
                asked = await _pull(each, room._replace(messages=share, bytes=size), EXPIRES, now)
                left -= asked
                aside -= min(own, asked)


async def _pull(pulls: ConsumerPulls, room: Room, expires: float, now: float) -> int:
    """Request the free part of the room. Returns the number of requested messages."""
    taken = pulls.reserved
    pulls.expires = expires
    await pulls.pull(room)
    asked = pulls.reserved - taken
    if asked:
        pulls.asked_at = now
    return asked
