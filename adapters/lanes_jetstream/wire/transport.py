"""What a durable consumer sends, on an inbox of our own: data messages carry the stream's subject, statuses the
inbox's."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lanes.errors import SourceError
from lanes_jetstream.wire.requests import Requests

__all__ = ["Pulls", "sequences"]


class Pulls(Requests):
    """The open requests of one consumer, each time on a fresh inbox. asyncio only; one caller."""

    def __init__(self, client: Client, next_subject: str, name: str) -> None:
        super().__init__(client, next_subject, name, wake=asyncio.Event())
        self._subscription: Subscription | None = None

    @property
    def inbox(self) -> str:
        """Where what is asked for comes; empty before the first ``renew``."""
        return self._inbox

    @property
    def reconnects(self) -> int:
        """How often the client had reconnected when this inbox was made."""
        return self._reconnects

    async def renew(self) -> None:
        """Drop everything that is open and start on a fresh inbox. Nothing is requested yet."""
        await self.close()
        inbox = self._client.new_inbox()
        # No pending limits: with one the client drops messages silently, and they come back out of order. The
        # room bounds what can arrive.
        self._subscription = await self._client.subscribe(
            f"{inbox}.*", cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self.begin(inbox)

    async def close(self) -> None:
        """End the subscription; the server drops the pull requests with it. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    async def wait(self, timeout: float) -> None:
        """Wait until something arrived or the pulls are broken, at most ``timeout`` seconds. Cancel-safe."""
        if self._arrived or self.check() is not None:
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            self.check()

    async def _receive(self, message: Msg) -> None:
        if message.subject.startswith(self._inbox):
            self.said(message)
        else:
            self.came(message)


def sequences(reply: str) -> tuple[int, int]:
    """Stream sequence and delivery number of the consumer, from either form of the reply subject.

    ``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>``, or with
    ``<domain>.<account hash>`` before the stream and possibly a token behind (NATS ADR-15). Raises ``SourceError``
    for any other.
    """
    dots = reply.count(".")
    if dots == 8:
        _, stream, consumer, _, _ = reply.rsplit(".", 4)
    else:
        stream, consumer = reply.split(".")[7:9] if dots in (10, 11) else ("", "")
    # Sequences have 64 bits; Python refuses to read numbers of thousands of digits.
    both = stream + consumer
    if not (stream and consumer and both.isascii() and both.isdigit() and len(stream) <= 20 >= len(consumer)):
        raise SourceError(
            f"a delivery has the reply subject {reply!r:.200}, which is not one of JetStream's: see that nobody else "
            "publishes to the inbox of this client"
        )
    return int(stream), int(consumer)
