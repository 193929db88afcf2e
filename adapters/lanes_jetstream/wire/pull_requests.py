"""The pull requests that are open for one consumer: what they may still bring, what they brought, why they end.

Several stay open at once, so the server never waits for the client; what they may still bring is counted and never
exceeds the room given. The count is only as good as the connection: whatever shakes it (a reconnect, missed
heartbeats, a change of leader) makes the requests ``broken``, and whoever has them begins anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Room
from lanes.errors import SourceError

__all__ = ["PULL_EXPIRES", "Interruption", "PullRequests"]

PULL_EXPIRES: Final = 30.0
"""Seconds after which the server ends a pull request that was not filled."""

HEARTBEAT: Final = 2.0
"""Seconds after which the server shows that an idle pull request is still there."""

HEARTBEATS_MISSED: Final = 3.0
"""Heartbeats without a sign of life after which the requests count as broken."""

_DELETED: Final = "Consumer Deleted"

_FATAL: Final = {
    _DELETED: "the consumer was deleted: stop whoever does that, or start again: a new one begins at start=…",
    "Consumer is push based": "the consumer is push-based now: use a durable of its own for lanes",
    "Exceeded MaxRequestBatch": "the consumer's max_batch is too small: raise or remove it",
    "Exceeded MaxRequestExpires": f"the consumer's max_expires is below {PULL_EXPIRES:g} s: raise or remove it",
    "Exceeded MaxRequestMaxBytes": "the consumer's max_bytes is too small: raise or remove it",
}


class Interruption(NamedTuple):
    """Why requests are to begin anew. ``kind`` is what to go by, ``text`` what to say.

    ``"new"``: there were none yet. ``"connection"``: it is lost, or another one. ``"unsent"``. ``"silence"``: no
    heartbeat. ``"gap"``: a delivery did not arrive, over a connection that held. ``"unanswered"``: nobody reads what is
    sent to the consumer. ``"crowded"``: as many wait as the consumer allows. ``"ended"``: by the server, for now.
    """

    kind: Literal["new", "connection", "unsent", "silence", "gap", "unanswered", "crowded", "ended"]
    text: str

    def __str__(self) -> str:
        return self.text


class PullRequests:
    """Of one consumer, by requests to ``next_subject``. asyncio only; one caller.

    ``wake`` is set whenever something has arrived; several may share one. ``expires``: seconds after which the server
    ends a request that was not filled, of those that follow. ``failure``: why the consumer cannot be used any more;
    ``deleted``: because it is not there. ``caught_up``: the server had nothing more to send when it last said
    something.
    """

    def __init__(
        self, client: Client, next_subject: str, name: str, *, wake: asyncio.Event, expires: float = PULL_EXPIRES
    ) -> None:
        self._client = client
        self._next_subject = next_subject
        self._name = name
        self._wake = wake
        self._inbox = ""
        self._open = 0
        self._request = 0
        self._arrived: list[Msg] = []
        self._outstanding = 0
        self._average_size = 256.0
        self._oversized = False
        self._heard = False
        self._last_sign = 0.0
        self._last_look = 0.0
        self._reconnects = 0
        self.expires = expires
        self.caught_up = False
        self.deleted = False
        self.interruption: Interruption | None = Interruption("new", "not started")
        self.failure: SourceError | None = None

    def restart(self, inbox: str) -> None:
        """Forget what was requested before. What comes belongs to ``inbox`` from now on; nothing is requested yet."""
        self._arrived = []
        self._outstanding = 0
        self._open = 0
        self._oversized = False
        self.caught_up = False
        self._reconnects = self._client.stats["reconnects"]
        self._inbox = inbox
        self.interruption = None

    # --- what is asked for

    @property
    def outstanding(self) -> int:
        """How many messages may still come from what is asked for."""
        return self._outstanding

    @property
    def reserved(self) -> int:
        """How many messages have arrived, or may yet."""
        return self._outstanding + len(self._arrived)

    @property
    def open_requests(self) -> int:
        """How many requests may be open, at most."""
        return self._open if self._outstanding else 0

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

    async def request_exactly(self, count: int) -> None:
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

    # --- what has come

    def on_message(self, message: Msg) -> None:
        """A message of the consumer. Called for every one: what can be done once for many is done elsewhere."""
        # Also behind others that wait: while nothing of a paused partition is taken, it is the only sign of life.
        self._heard = True
        if not self._arrived:
            self._wake.set()
            self.caught_up = False
        self._arrived.append(message)
        self._outstanding -= 1

    def on_status(self, message: Msg) -> None:
        """A status of the requests."""
        self._heard = True
        self._wake.set()
        headers = message.headers or {}
        status, text = headers.get("Status", ""), headers.get("Description", "")
        # The server shows that it is there only while it has nothing to send.
        self.caught_up = status == "100"
        if self.caught_up:
            return
        if status == "503":
            self.interrupt("unanswered", "no responders")
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
            self.deleted = text.startswith(_DELETED)
        elif status == "409" and not text.startswith("Batch Completed"):
            # Server Shutdown, Leadership Change and the like: the request is gone, the consumer is not.
            self.interrupt("crowded" if "MaxWaiting" in text else "ended", f"{status} {text}")

    @property
    def arrived(self) -> Sequence[Msg]:
        """What has arrived and was not taken."""
        return self._arrived

    def take(self) -> list[Msg]:
        """What has arrived since the last call. Raises ``SourceError`` when the consumer cannot be used any more."""
        if self.failure is not None:
            raise self.failure
        arrived, self._arrived = self._arrived, []
        return arrived

    def learn_sizes(self, count: int, size: int) -> None:
        """So many messages, one or more, had so many bytes together: what is asked for is bounded by their average."""
        # As if each one had moved it by a twentieth towards its size.
        self._average_size += (size / count - self._average_size) * (1.0 - 0.95**count)

    # --- whether they still count

    def interrupt(self, kind: Literal["unsent", "gap", "unanswered", "crowded", "ended"], text: str) -> None:
        """They are to begin anew: the count of what may come is worth nothing. The last reason counts."""
        self.interruption = Interruption(kind, text)

    def check(self) -> Interruption | None:
        """Why they have to begin anew, or None."""
        if self.interruption is None:
            if not self._client.is_connected:
                self.interruption = Interruption("connection", "disconnected")
            elif self._client.stats["reconnects"] != self._reconnects:
                self.interruption = Interruption("connection", "reconnected")
            else:
                self._check_heartbeat(monotonic())
        return self.interruption

    def _check_heartbeat(self, now: float) -> None:
        if self._heard or now - self._last_look > HEARTBEAT / 2:
            # Or nobody looked for so long: this loop was blocked, and what the server sent waits to be read.
            self._heard = False
            self._last_sign = now
        elif self._outstanding and now - self._last_sign > HEARTBEAT * HEARTBEATS_MISSED:
            self.interruption = Interruption("silence", "no heartbeat from the server")
        self._last_look = now


def _count(header: str | None) -> int:
    return int(header) if header is not None and header.isascii() and header.isdigit() else 0
