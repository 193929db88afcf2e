"""Overlapped raw pulls on an inbox of our own.

Several pull requests stay open at once, so the server never waits for the client; what they may still bring is
counted and never exceeds the room given. Data messages carry the stream's subject, statuses the inbox's.

The count is only as good as the connection: whatever shakes it (a reconnect, missed heartbeats, a change of
leader) makes the pulls ``broken``, and the caller starts again on a fresh inbox.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError

log = logging.getLogger("lanes.jetstream")

PULL_EXPIRES: Final = 30.0
"""Seconds after which the server ends a pull request that was not filled."""

HEARTBEAT: Final = 2.0
"""Seconds after which the server shows that an idle pull request is still there."""

HEARTBEATS_MISSED: Final = 3.0
"""Heartbeats without a sign of life after which the pulls count as broken."""

_FATAL: Final = {
    "Consumer Deleted": "the consumer was deleted: stop whoever does that, or start again: a new one begins at start=…",
    "Consumer is push based": "the consumer is push-based now: use a durable of its own for lanes",
    "Exceeded MaxRequestBatch": "the consumer's max_batch is too small: raise or remove it",
    "Exceeded MaxRequestExpires": f"the consumer's max_expires is below {PULL_EXPIRES:g} s: raise or remove it",
    "Exceeded MaxRequestMaxBytes": "the consumer's max_bytes is too small: raise or remove it",
}


class Pulls:
    """The open pull requests of one consumer, and what they brought. asyncio only; one caller.

    ``wake`` is set whenever something has arrived; several may share one. ``expires``: seconds after which the server
    ends a request that was not filled, of those that follow.
    """

    def __init__(
        self,
        client: Client,
        next_subject: str,
        name: str,
        *,
        wake: asyncio.Event | None = None,
        expires: float = PULL_EXPIRES,
    ) -> None:
        self._client = client
        self._open = 0
        self._next_subject = next_subject
        self._name = name
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._request = 0
        self._arrived: list[Msg] = []
        self._wake = wake or asyncio.Event()
        self.expires = expires
        self._outstanding = 0
        self._average_size = 256.0
        self._oversized = False
        self._heard = False
        self._last_sign = 0.0
        self._last_look = 0.0
        self._reconnects = 0
        self.broken: str | None = "not started"
        self.failure: SourceError | None = None

    @property
    def inbox(self) -> str:
        """Where what is asked for comes; empty before the first ``renew``."""
        return self._inbox

    @property
    def outstanding(self) -> int:
        """How many messages may still come from what is asked for."""
        return self._outstanding

    @property
    def open_requests(self) -> int:
        """How many requests may be open, at most."""
        return self._open if self._outstanding else 0

    @property
    def reconnects(self) -> int:
        """How often the client had reconnected when this inbox was made."""
        return self._reconnects

    async def renew(self) -> None:
        """Drop everything that is open and start on a fresh inbox. Nothing is requested yet."""
        await self.close()
        self._begin(self._client.new_inbox())
        # No pending limits: with one the client drops messages silently, and they come back out of order. The
        # room bounds what can arrive.
        self._subscription = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        self.broken = None

    def _begin(self, inbox: str) -> None:
        self._arrived = []
        self._outstanding = 0
        self._open = 0
        self._oversized = False
        self._reconnects = self._client.stats["reconnects"]
        self._inbox = inbox

    async def close(self) -> None:
        """End the subscription; the server drops the pull requests with it. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    async def pull(self, room: Room) -> None:
        """Request what fits into the room and is not requested yet, once half of it is free."""
        # The server tells no sizes beforehand: the average of what came bounds how many are asked for, and
        # max_bytes bounds each request should they grow suddenly.
        fits = min(room.messages, max(1, int(room.bytes / self._average_size)))
        free = fits - self._outstanding - len(self._arrived)
        if self._oversized and not self._outstanding and room.messages > 0 and room.bytes > 0:
            # The next message is larger than the room for bytes: it comes alone.
            self._oversized = False
            await self._ask(1, None)
        elif free > 0 and free >= fits // 2 and not self._oversized:
            # What is still to come from other requests takes its share of the bytes too.
            await self._ask(free, max(1, room.bytes - int(self._outstanding * self._average_size)))

    async def ask_exactly(self, count: int) -> None:
        """Request ``count`` messages whatever their size."""
        await self._ask(count, None)

    async def _ask(self, batch: int, max_bytes: int | None) -> None:
        self._request += 1
        if not self._outstanding:
            self._last_sign = monotonic()
            self._open = 0
        self._open += 1
        self._outstanding += batch
        request: dict[str, int] = {
            "batch": batch,
            "expires": int(self.expires * 1e9),
        }
        if self.expires > 2 * HEARTBEAT:
            # The server refuses heartbeats of a request that ends before it would miss them.
            request["idle_heartbeat"] = int(HEARTBEAT * 1e9)
        if max_bytes is not None:
            request["max_bytes"] = max_bytes
        await self._client.publish(
            self._next_subject, json.dumps(request).encode(), reply=f"{self._inbox}.{self._request}"
        )

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

    def take(self) -> list[Msg]:
        """What has arrived since the last call. Raises ``SourceError`` when the consumer cannot be used any more."""
        if self.failure is not None:
            raise self.failure
        arrived, self._arrived = self._arrived, []
        return arrived

    def learn(self, count: int, size: int) -> None:
        """So many messages, one or more, had so many bytes together: what is asked for is bounded by their average."""
        # As if each one had moved it by a twentieth towards its size.
        self._average_size += (size / count - self._average_size) * (1.0 - 0.95**count)

    def check(self) -> str | None:
        """Why the pulls have to be renewed, or None."""
        if self.broken is None:
            if not self._client.is_connected:
                self.broken = "disconnected"
            elif self._client.stats["reconnects"] != self._reconnects:
                self.broken = "reconnected"
            else:
                self._check_heartbeat(monotonic())
        return self.broken

    def _check_heartbeat(self, now: float) -> None:
        if self._heard or now - self._last_look > HEARTBEAT / 2:
            # Or nobody looked for so long: this loop was blocked, and what the server sent waits to be read.
            self._heard = False
            self._last_sign = now
        elif self._outstanding and now - self._last_sign > HEARTBEAT * HEARTBEATS_MISSED:
            self.broken = "no heartbeat from the server"
        self._last_look = now

    async def _receive(self, message: Msg) -> None:
        # For every message: whatever can be done once for many is done by ``check`` and ``learn``.
        self._heard = True
        if message.subject.startswith(self._inbox):
            self._status(message)
            self._wake.set()
            return
        if not self._arrived:
            self._wake.set()
        self._arrived.append(message)
        self._outstanding -= 1

    def _status(self, message: Msg) -> None:
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        if status == "100":
            return
        if status == "503":
            self.broken = "no responders"
            return
        # The request is over: give back what it did not bring.
        self._open = max(0, self._open - 1)
        self._outstanding = max(0, self._outstanding - _count(headers.get("Nats-Pending-Messages")))
        if text.startswith("Message Size Exceeds MaxBytes"):
            self._oversized = True
            return
        if status == "400" or any(text.startswith(known) for known in _FATAL):
            remedy = next((r for known, r in _FATAL.items() if text.startswith(known)), "see the server's log")
            self.failure = SourceError(f"{self._name}: pull refused: {status} {text}: {remedy}")
        elif status == "409" and not text.startswith("Batch Completed"):
            # Server Shutdown, Leadership Change and the like: the request is gone, the consumer is not.
            self.broken = f"{status} {text}"


def size_of(message: Msg) -> int:
    """The bytes a message counts for: payload, subject and headers."""
    size = len(message.data) + len(message.subject)
    if message.headers:
        size += sum(len(name) + len(value) for name, value in message.headers.items())
    return size


def _count(header: str | None) -> int:
    return int(header) if header is not None and header.isascii() and header.isdigit() else 0


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
            f"a delivery with the reply subject {reply!r:.200}: not one of JetStream's; is it the server?"
        )
    return int(stream), int(consumer)
