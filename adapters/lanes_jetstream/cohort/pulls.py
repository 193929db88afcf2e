"""Shares one inbox among the pull requests of all cohort partitions, with one subscription.

A status has the reply subject of its pull request. A message has its subject in the stream, and the reply subject of
the message names the consumer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes_jetstream.wire.answers import number
from lanes_jetstream.wire.connection import Connection
from lanes_jetstream.wire.pull_requests import PullRequests
from lanes_jetstream.wire.subscription import UnboundedSubscription
from lanes_jetstream.wire.turns import EXPIRES

_CONFIRMATION: Final = "ack"


class Inbox:
    """One subscription that the pull requests of many consumers share.

    Args:
        client: The connected client.

    Attributes:
        wake: Event that the inbox sets when a status arrives, and when the first message of a consumer after a ``take``
            arrives.
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
        await self._subscription.open_inbox(f"{self.subject}.>", self._receive)

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

    def _receive(self, message: Msg) -> None:
        # This code runs for every message. `PulledPartition.take` does the other work for many messages at once.
        if message.subject.startswith(self.subject):
            pulls = self._by_subject.get(message.subject.rpartition(".")[0])
            if pulls is not None:
                pulls.on_status(message)
            return
        tokens = message.reply.split(".")
        # The long form begins with a domain and an account; see `sequences`. Other subjects match no consumer.
        place = 3 if len(tokens) == 9 else 5
        pulls = self._by_consumer.get(tokens[place]) if len(tokens) > place else None
        if pulls is not None:
            pulls.on_message(message)


class ConsumerPulls(PullRequests):
    """The pull requests of one consumer over a shared inbox. The object requires asyncio and a single caller.

    Args:
        inbox: The shared inbox.
        connection: Connection to the server.
        stream: Name of the stream.
        consumer: Name of the consumer.
        name: Name of the source, for errors.

    Attributes:
        last_delivery: Delivery number in the last heartbeat of the server; 0 = no heartbeat yet.
        confirmation: Subject for the confirmations of acknowledgements. The server also reports here that no server
            reads the acknowledgements.
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
        self._shared = inbox

    def start(self) -> None:
        """Register at the inbox. Call this method only once. The call sends no request."""
        inbox = self._shared.add(self)
        self.confirmation = f"{inbox}.{_CONFIRMATION}"
        self.restart(inbox)

    def end(self) -> None:
        """Ignore further messages and statuses. Idempotent."""
        self._shared.remove(self, self.inbox)

    def delivered_by(self, token: str) -> bool:
        """Return whether a reply subject names this consumer instead of an earlier consumer of the partition."""
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
