"""Counts the messages that the open pull requests of a consumer may still deliver, and detects interruptions.

Several requests may be open at once, so the server rarely waits for the client. Apart from one oversized message,
``pull`` requests at most the free part of the room. The count is correct only while the connection holds. A reconnect,
missed heartbeats or a change of leader is an ``interruption``, after which the owner of the object starts new requests.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Final, Literal, NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError
from lanes_jetstream.wire.answers import number

PULL_EXPIRES: Final = 30.0
"""Seconds after which the server ends an unfilled pull request."""

HEARTBEAT: Final = 2.0
"""Seconds between two heartbeats of the server on an idle pull request."""

HEARTBEATS_MISSED: Final = 3.0
"""Number of missed heartbeats after which the object treats the requests as interrupted."""

_DELETED: Final = "Consumer Deleted"

_FATAL: Final = {
    _DELETED: (
        "the consumer was deleted; prevent the deletion, or start again with a new consumer, which begins at start=…"
    ),
    "Consumer is push based": "use a separate pull consumer for lanes",
    "Exceeded MaxRequestBatch": "raise or remove the consumer's max_batch",
    "Exceeded MaxRequestExpires": f"raise the consumer's max_expires to {PULL_EXPIRES:g} s or more, or remove it",
    "Exceeded MaxRequestMaxBytes": "raise or remove the consumer's max_bytes",
}


class Interruption(NamedTuple):
    """The reason why the owner must start new requests. The owner reacts to ``kind`` and logs ``text``.

    - ``new``: the source has sent no request yet
    - ``connection``: the connection was lost or replaced
    - ``unsent``: the client could not send a request
    - ``silence``: the heartbeat is missing
    - ``gap``: a delivery did not arrive on an unbroken connection
    - ``unanswered``: no server answers requests to the consumer
    - ``crowded``: the consumer allows no more waiting requests
    - ``ended``: the server ended the request, and the consumer still exists
    - ``unsorted``: unacknowledged messages do not arrive in the order of their sequences
    - ``shrunk``: ack_wait is shrunk outside a takeover of the source
    """

    kind: Literal[
        "new", "connection", "unsent", "silence", "gap", "unanswered", "crowded", "ended", "unsorted", "shrunk"
    ]
    text: str

    def __str__(self) -> str:
        return self.text


class PullRequests:
    """The pull requests of one consumer. The object requires asyncio and a single caller.

    Args:
        client: The connected client.
        next_subject: Subject of the requests.
        name: Name of the source, for errors.
        wake: Event that the object sets when a status arrives, and when the first message after a ``take`` arrives.
            Several instances may share the event.
        expires: Seconds after which the server ends an unfilled request.

    Attributes:
        inbox: Subject of the answers; empty before the first ``restart``.
        arrived: Arrived messages that ``take`` has not returned yet.
        outstanding: Number of messages that open requests may still deliver.
        reconnects: Number of reconnects of the client at the last ``restart``.
        caught_up: Whether the last status was a heartbeat, which the server sends only while no message waits. The
            first message after a ``take`` sets the value to False.
        interruption: The reason to start new requests; None = no reason is known.
        heard_at: Time of the last ``check`` that found a new answer of the server; minus infinity before the first
            answer.
        failure: The error that makes the consumer permanently unusable; None = the consumer is usable.
        deleted: Whether the consumer no longer exists.
        asked_at: Clock reading in seconds at the last request of ``Turns``; minus infinity = no request yet.
    """

    def __init__(
        self, client: Client, next_subject: str, name: str, *, wake: asyncio.Event, expires: float = PULL_EXPIRES
    ) -> None:
        self._client = client
        self._next_subject = next_subject
        self._name = name
        self._wake = wake
        self._request = 0
        self._average_size = 256.0
        self._heard = False
        self._last_sign = 0.0
        self._last_look = 0.0
        self.heard_at = -math.inf
        self.expires = expires
        self.deleted = False
        self.asked_at = -math.inf
        self.failure: SourceError | None = None
        self.restart("")
        self.interruption: Interruption | None = Interruption("new", "not started")

    def restart(self, inbox: str) -> None:
        """Discard all earlier requests, and expect answers at ``inbox``. The call sends no request."""
        self.arrived: list[Msg] = []
        self.outstanding = 0
        self._open = 0
        self._oversized = False
        self.caught_up = False
        self.reconnects = self._client.stats["reconnects"]
        self.inbox = inbox
        self.interruption = None

    # --- requests

    @property
    def reserved(self) -> int:
        """Number of messages that wait for ``take`` or may still arrive."""
        return self.outstanding + len(self.arrived)

    @property
    def open_requests(self) -> int:
        """Largest number of requests that may be open."""
        return self._open if self.outstanding else 0

    async def pull(self, room: Room) -> None:
        """Request the free part of the room when half of the room is free."""
        # The server does not announce sizes. The average size of earlier messages bounds the number of requested
        # messages. ``max_bytes`` bounds each request if messages are suddenly larger.
        fits = min(room.messages, max(1, int(room.bytes / self._average_size)))
        free = fits - self.outstanding - len(self.arrived)
        if self._oversized and not self.outstanding and room.messages > 0 and room.bytes > 0:
            # The next message exceeds the room for bytes, so request the message alone.
            self._oversized = False
            await self._ask(1, None)
        elif free > 0 and free >= fits // 2 and not self._oversized:
            # Messages of other open requests also need some of the bytes.
            await self._ask(free, max(1, room.bytes - int(self.outstanding * self._average_size)))

    async def request_exactly(self, count: int) -> None:
        """Request ``count`` messages of any size."""
        await self._ask(count, None)

    async def _ask(self, batch: int, max_bytes: int | None) -> None:
        self._request += 1
        if not self.outstanding:
            self._last_sign = monotonic()
            self._open = 0
        self._open += 1
        self.outstanding += batch
        request: dict[str, int] = {
            "batch": batch,
            "expires": int(self.expires * 1e9),
        }
        if self.expires > 2 * HEARTBEAT:
            # The server refuses heartbeats for a request that expires within two heartbeats.
            request["idle_heartbeat"] = int(HEARTBEAT * 1e9)
        if max_bytes is not None:
            request["max_bytes"] = max_bytes
        await self._client.publish(
            self._next_subject, json.dumps(request).encode(), reply=f"{self.inbox}.{self._request}"
        )

    # --- arrivals

    def on_message(self, message: Msg) -> None:
        """Record a message of the consumer. The client calls the method for each message."""
        # Each message sets the flag, because only arrivals show that a paused partition still has a connection.
        self._heard = True
        if not self.arrived:
            self._wake.set()
            self.caught_up = False
        self.arrived.append(message)
        self.outstanding -= 1

    def on_status(self, message: Msg) -> None:
        """Record a status of the requests."""
        self._heard = True
        self._wake.set()
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        # The server sends heartbeats only while it has nothing to send.
        self.caught_up = status == "100"
        if self.caught_up:
            return
        if status == "503":
            self.interrupt("unanswered", "no responders")
            return
        # The request has ended, so its undelivered messages are no longer outstanding.
        self._open = max(0, self._open - 1)
        self.outstanding = max(0, self.outstanding - (number(headers.get("Nats-Pending-Messages")) or 0))
        if text.startswith("Message Size Exceeds MaxBytes"):
            self._oversized = True
            return
        if status == "400" or any(text.startswith(known) for known in _FATAL):
            remedy = next((r for known, r in _FATAL.items() if text.startswith(known)), "check the server's log")
            self.failure = SourceError(f"{self._name}: pull refused ({status} {text}): {remedy}")
            self.deleted = text.startswith(_DELETED)
        elif status == "409" and not text.startswith("Batch Completed"):
            # Statuses such as Server Shutdown and Leadership Change end the request, not the consumer.
            self.interrupt("crowded" if "MaxWaiting" in text else "ended", f"{status} {text}")

    def take(self, limit: int | None = None) -> list[Msg]:
        """Remove and return at most ``limit`` arrived messages, in order; None = all arrived messages.

        Raises ``SourceError`` when the consumer is permanently unusable.
        """
        if self.failure is not None:
            raise self.failure
        if limit is not None and limit < len(self.arrived):
            arrived, self.arrived = self.arrived[:limit], self.arrived[limit:]
            return arrived
        arrived, self.arrived = self.arrived, []
        return arrived

    def learn_sizes(self, count: int, size: int) -> None:
        """Record that ``count`` messages have ``size`` bytes in total. The average size bounds the next requests."""
        # Each message moves the exponential average by a twentieth towards the mean size of these messages.
        self._average_size += (size / count - self._average_size) * (1.0 - 0.95**count)

    # --- interruptions

    def interrupt(
        self, kind: Literal["unsent", "gap", "unanswered", "crowded", "ended", "unsorted", "shrunk"], text: str
    ) -> None:
        """Record an interruption, after which the count of outstanding messages is wrong.

        A later reason replaces an earlier reason.
        """
        self.interruption = Interruption(kind, text)

    def check(self) -> Interruption | None:
        """Return the reason to start new requests; None = no reason."""
        if self.interruption is None:
            if not self._client.is_connected:
                self.interruption = Interruption("connection", "disconnected")
            elif self._client.stats["reconnects"] != self.reconnects:
                self.interruption = Interruption("connection", "reconnected")
            else:
                self._check_heartbeat(monotonic())
        return self.interruption

    def _check_heartbeat(self, now: float) -> None:
        if self._heard:
            self.heard_at = now
        if self._heard or now - self._last_look > HEARTBEAT / 2:
            # A long pause between two checks shows that the loop was blocked, so heartbeats may be unread.
            self._heard = False
            self._last_sign = now
        elif self.outstanding and now - self._last_sign > HEARTBEAT * HEARTBEATS_MISSED:
            self.interruption = Interruption("silence", "no heartbeat from the server")
        self._last_look = now
