"""Sends acknowledgements, repeats them after a reconnect, and waits for confirmations if the mode needs them.

A confirmation proves that the server has read the acknowledgement. The acknowledgement may still have no effect. After
the server has redelivered a message, it still confirms an acknowledgement of the earlier delivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes.clock import monotonic
from lanes.core.types import Settlement
from lanes.errors import SourceError
from lanes_jetstream.wire.connection import CLOSED
from lanes_jetstream.wire.messages import READER
from lanes_jetstream.wire.subscription import UnboundedSubscription

log = logging.getLogger("lanes.jetstream")

AckMode = Literal["fire-and-forget", "confirmed", "confirmed-at-drain"]
"""Mode of waiting for confirmations of acknowledgements; see ``JetStreamSource``."""

ACK: Final = b"+ACK"

IN_PROGRESS: Final = b"+WPI"

NAK: Final = b"-NAK"

CONFIRM_TIMEOUT: Final = 5.0
"""Seconds to wait for the confirmations of one settlement. The engine repeats a settlement without confirmations."""

SYNC_DELAY: Final = 0.25
"""Seconds until a server with the only copy has written an acknowledgement. The server writes every 0.1 s, and loses
unwritten acknowledgements when it is killed.
"""

_KEPT: Final = 10_000
"""Maximum number of acknowledgements that a reconnect repeats. A lost connection usually loses fewer."""


async def send_all(client: Client, subjects: Sequence[str], body: bytes) -> None:
    """Publish the same body to any number of reply subjects of the server. Raises the client's errors.

    If possible, the function passes all subjects to the client in one call. One call for each subject would cost more
    than the rest of a message's processing.
    """
    if not subjects:
        return
    send, flush = getattr(client, "_send_command", None), getattr(client, "_flush_pending", None)
    if send is None or flush is None or not client.is_connected or client.is_draining:
        # While the client reconnects, its own buffer bounds the unsent data.
        for subject in subjects:
            await client.publish(subject, body)
        return
    end = f"  {len(body)}\r\n{body.decode()}\r\n"
    # A subject from the server contains neither blanks nor line ends, because the client splits its input at both.
    await send(f"PUB {f'{end}PUB '.join(subjects)}{end}".encode())
    client.stats["out_msgs"] += len(subjects)
    client.stats["out_bytes"] += len(subjects) * len(body)
    await flush()


@contextmanager
def ack_errors(name: str) -> Iterator[None]:
    """Convert the client's errors of an acknowledgement into a ``SourceError`` whose text begins with ``name``."""
    try:
        yield
    except nats.errors.ConnectionClosedError:
        raise SourceError(f"{name}: {CLOSED}") from None
    except (nats.errors.Error, OSError) as error:
        raise SourceError(
            f"{name}: acknowledgement failed ({type(error).__name__}); check the server", retryable=True
        ) from error


async def keep_alive(client: Client, subjects: Sequence[str], name: str) -> None:
    """Tell the server that these deliveries to the source ``name`` are in progress. Best effort."""
    if not client.is_connected:
        return
    try:
        await send_all(client, subjects, IN_PROGRESS)
    except (nats.errors.Error, OSError) as error:
        log.debug("%s: in-progress not sent: %s", name, error)


async def give_back(client: Client, subjects: Sequence[str], name: str) -> None:
    """Make the server immediately redeliver these messages of the source ``name``, to any process. Best effort."""
    if not subjects or not client.is_connected:
        return
    try:
        await send_all(client, subjects, NAK)
    except (nats.errors.Error, OSError) as error:
        log.debug("%s: messages not given back: %s", name, error)


class OwnAcks:
    """Warns once if the handler of a source has settled a message itself.

    The check reads only one message of each settlement, so its cost does not depend on the number of messages. If a
    handler settles every message, the first settlement shows this.

    Args:
        name: Name of the source, for the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False

    def look(self, settlement: Settlement) -> None:
        """Check whether the handler has settled the first message of a settlement."""
        if not self._told and settlement.messages and READER.settled(settlement.messages[0].raw):
            self._told = True
            first = settlement.messages[0]
            log.warning(
                "%s: the handler has settled the message at %s position %d by message.raw. After an ack() or term(), "
                "the server does not redeliver the message, even if the handler fails later. Return from the handler "
                "instead",
                self._name,
                first.partition.id,
                first.position,
            )


class Acks:
    """Sends and repeats the acknowledgements of one source. The object requires asyncio and one ``send`` at a time.

    Args:
        client: The connected client.
        mode: Mode of waiting for confirmations; see ``JetStreamSource``.
        name: Name of the source, for errors and the log.
    """

    def __init__(self, client: Client, mode: AckMode, name: str) -> None:
        self._client = client
        self._mode = mode
        self._name = name
        self._kept: deque[str] = deque(maxlen=_KEPT)
        self._reconnects = client.stats["reconnects"]
        self._last_sent = 0.0
        self._inbox = ""
        self._subscription = UnboundedSubscription(client)
        self._number = 0
        self._unconfirmed: dict[str, str] = {}
        self._all_confirmed = asyncio.Event()

    async def send(self, tokens: Sequence[str]) -> None:
        """Acknowledge deliveries. In the mode ``"confirmed"``, wait until the server confirms the acknowledgements.

        Raises the client's errors, and a retryable ``SourceError`` for a missing confirmation. If a takeover redelivers
        a message before the end of this call, the source must acknowledge the message again.
        """
        # Store all tokens before sending the first one. The messages are finished, so a repeated acknowledgement is
        # always safe.
        self._kept.extend(tokens)
        if self._mode == "confirmed":
            await self._send_confirmed(tokens)
        else:
            await send_all(self._client, tokens, ACK)
        self._last_sent = monotonic()

    async def resend(self) -> None:
        """Repeat the last acknowledgements after a reconnect, because the old connection may have lost some of them.

        A repeat is idempotent, because an acknowledgement names one delivery of one message.
        """
        reconnects = self._client.stats["reconnects"]
        if reconnects != self._reconnects:
            await send_all(self._client, list(self._kept), ACK)
            self._reconnects = reconnects
            self._last_sent = monotonic()

    async def finish(self, *, loses_last_acks: bool, failed: bool) -> None:
        """Wait until the server has acted on every acknowledgement and cannot lose any of them.

        In the mode ``"fire-and-forget"`` the call returns at once. Raises the client's errors, and a retryable
        ``SourceError`` for a missing confirmation.

        Args:
            loses_last_acks: Whether the stream or consumer has only one copy, which the server writes to disk with a
                short delay.
            failed: Whether the source has failed permanently. If the stream or the durable is missing, the server
                confirms no acknowledgement, and the error of the run names this cause.
        """
        if self._mode == "fire-and-forget" or not self._kept:
            return
        # The server processes acknowledgements in order, so the last confirmation covers all of them.
        try:
            await self._client.request(self._kept[-1], ACK, timeout=CONFIRM_TIMEOUT)
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError) as error:
            if failed and isinstance(error, nats.errors.NoRespondersError):
                return
            raise SourceError(
                f"{self._name}: the last acknowledgement is not confirmed ({type(error).__name__}), so the server may "
                "redeliver its message; check the server",
                retryable=True,
            ) from None
        if loses_last_acks:
            await asyncio.sleep(max(0.0, self._last_sent + SYNC_DELAY - monotonic()))

    async def close(self) -> None:
        """End the subscription of the confirmations. Idempotent."""
        await self._subscription.close()

    async def _send_confirmed(self, tokens: Sequence[str]) -> None:
        self._inbox = self._inbox or self._client.new_inbox()
        await self._subscription.open_inbox(f"{self._inbox}.*", self._confirmed)
        self._all_confirmed.clear()
        self._unconfirmed = {f"{self._inbox}.{self._number + place}": token for place, token in enumerate(tokens)}
        self._number += len(tokens)
        for reply, token in list(self._unconfirmed.items()):
            await self._client.publish(token, ACK, reply=reply)
        try:
            async with asyncio.timeout(CONFIRM_TIMEOUT):
                await self._all_confirmed.wait()
        except TimeoutError:
            raise SourceError(
                f"{self._name}: {len(self._unconfirmed)} acknowledgements are not confirmed, so the server may "
                "redeliver their messages; check the server",
                retryable=True,
            ) from None

    def _confirmed(self, message: Msg) -> None:
        if (message.headers or {}).get("Status") == "503":
            # No server responds, because the consumer was deleted or has no leader at present.
            return
        self._unconfirmed.pop(message.subject, None)
        if not self._unconfirmed:
            self._all_confirmed.set()
