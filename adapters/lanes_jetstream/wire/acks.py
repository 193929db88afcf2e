"""Acknowledgements on their way: sent, repeated after a reconnect, confirmed where that was asked for.

A confirmation says that the server has read the acknowledgement, not that it counted; one of a delivery that was
repeated meanwhile counts too.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lanes.clock import monotonic
from lanes.errors import SourceError

log = logging.getLogger("lanes.jetstream")

AckMode = Literal["fire-and-forget", "confirmed", "confirmed-at-drain"]

ACK: Final = b"+ACK"

IN_PROGRESS: Final = b"+WPI"

CONFIRM_TIMEOUT: Final = 5.0
"""Seconds for the confirmations of one settlement; those that do not come are asked for again."""

SYNC_DELAY: Final = 0.25
"""Seconds until a server with one copy has written down what it was told: it does so every 0.1 s, and what it was told
since is lost when it is killed."""

_KEPT: Final = 10_000
"""Acknowledgements that are repeated after a reconnect: more than a connection can lose."""


async def send_all(client: Client, subjects: Sequence[str], body: bytes) -> None:
    """Publish the same to many subjects, which were reply subjects of the server's. Raises what the client raises.

    In one piece where the client can: the calls for each of them cost more than handling a message does.
    """
    send, flush = getattr(client, "_send_command", None), getattr(client, "_flush_pending", None)
    if send is None or flush is None or not client.is_connected or client.is_draining:
        # What is sent while it reconnects is bounded by the client, and by nothing else.
        for subject in subjects:
            await client.publish(subject, body)
        return
    end = f"  {len(body)}\r\n{body.decode()}\r\n"
    # A subject that came from the server has neither blanks nor line ends: the line it came in was split at them.
    await send("".join([f"PUB {subject}{end}" for subject in subjects]).encode())
    client.stats["out_msgs"] += len(subjects)
    client.stats["out_bytes"] += len(subjects) * len(body)
    await flush()


@contextmanager
def ack_errors(name: str) -> Iterator[None]:
    """Raise what the client raises while acknowledgements of ``name`` are sent as ``SourceError``."""
    try:
        yield
    except nats.errors.ConnectionClosedError:
        raise SourceError(f"{name}: the connection is closed and does not come back: start again") from None
    except (nats.errors.Error, OSError) as error:
        raise SourceError(f"{name}: not acknowledged: {type(error).__name__}", retryable=True) from error


async def keep_alive(client: Client, subjects: Sequence[str], name: str) -> None:
    """Tell the server that these deliveries to ``name`` are in progress. Best effort: what is lost comes again."""
    if not client.is_connected:
        return
    try:
        await send_all(client, subjects, IN_PROGRESS)
    except (nats.errors.Error, OSError) as error:
        log.debug("%s: in-progress not sent: %s", name, error)


class Acks:
    """The acknowledgements of one source. ``takeovers``: how many have begun. asyncio only; one ``send`` at a time."""

    def __init__(self, client: Client, mode: AckMode, name: str, takeovers: Callable[[], int]) -> None:
        self._client = client
        self._mode = mode
        self._name = name
        self._takeovers = takeovers
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._reconnects = client.stats["reconnects"]
        self._last_sent = 0.0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._number = 0
        self._unconfirmed: dict[str, str] = {}
        self._all_confirmed = asyncio.Event()

    async def send(self, tokens: Sequence[str]) -> None:
        """Acknowledge these deliveries; ``"confirmed"``: and wait for the server to say so.

        Raises a retryable ``SourceError`` when that does not come in time, unless a takeover has begun since: what the
        server does not know is then delivered again, and acknowledged again. Raises what the client raises.
        """
        # Before the first of them leaves: all are of finished messages, so none may be repeated too early.
        self._kept.extend(tokens)
        if self._mode == "confirmed":
            await self._send_confirmed(tokens)
        else:
            await send_all(self._client, tokens, ACK)
        self._last_sent = monotonic()

    async def resend(self) -> None:
        """Repeat the last acknowledgements after a reconnect: some may have been lost with the connection.

        An acknowledgement names one delivery of one message, so a repeated one changes nothing.
        """
        reconnects = self._client.stats["reconnects"]
        if reconnects != self._reconnects:
            await send_all(self._client, list(self._kept), ACK)
            self._reconnects = reconnects
            self._last_sent = monotonic()

    async def finish(self, *, loses_last_acks: bool) -> None:
        """Return when the server has acted on every acknowledgement that was sent, and will not forget one.

        ``forgets``: it has one copy, and writes what it is told a moment later. Nothing to do in the mode
        ``"fire-and-forget"``. Raises a retryable ``SourceError`` without a confirmation, and what the client raises.
        """
        if self._mode == "fire-and-forget" or not self._kept:
            return
        # It acts on them in the order in which they came: when it has on the last one, it has on all.
        try:
            await self._client.request(self._kept[-1], ACK, timeout=CONFIRM_TIMEOUT)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as error:
            raise SourceError(
                f"{self._name}: the last acknowledgement is not confirmed ({type(error).__name__}): what the server "
                "has not read is delivered again",
                retryable=True,
            ) from None
        if loses_last_acks:
            await asyncio.sleep(max(0.0, self._last_sent + SYNC_DELAY - monotonic()))

    async def close(self) -> None:
        """End the subscription of the confirmations. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    async def _send_confirmed(self, tokens: Sequence[str]) -> None:
        if self._subscription is None:
            self._inbox = self._client.new_inbox()
            # Without limits, like the inbox of the messages: a confirmation that is dropped would be waited for.
            self._subscription = await self._client.subscribe(
                f"{self._inbox}.*", cb=self._confirmed, pending_msgs_limit=0, pending_bytes_limit=0
            )
        takeovers = self._takeovers()
        self._all_confirmed.clear()
        self._unconfirmed.clear()
        for token in tokens:
            self._number += 1
            reply = f"{self._inbox}.{self._number}"
            self._unconfirmed[reply] = token
        for reply, token in list(self._unconfirmed.items()):
            await self._client.publish(token, ACK, reply=reply)
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                await self._all_confirmed.wait()
        except TimeoutError:
            if takeovers == self._takeovers():
                raise SourceError(
                    f"{self._name}: {len(self._unconfirmed)} acknowledgements are not confirmed: what the server has "
                    "not read is delivered again",
                    retryable=True,
                ) from None
            log.info("%s: %d acknowledgements were overtaken by a takeover", self._name, len(self._unconfirmed))

    async def _confirmed(self, message: Msg) -> None:
        if (message.headers or {}).get("Status") == "503":
            # Nobody has read it: the consumer is gone, or has no leader now.
            return
        self._unconfirmed.pop(message.subject, None)
        if not self._unconfirmed:
            self._all_confirmed.set()
