"""A subscription that drops no message, and that can pass messages on without a separate task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

log = logging.getLogger("lanes.jetstream")


class UnboundedSubscription:
    """One subscription without pending limits. With limits, the client would silently drop messages."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._subscription: Subscription | None = None

    async def open(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> None:
        """Subscribe; the client subscribes again after a reconnect. Idempotent.

        Args:
            subject: Subject or pattern of the messages.
            receive: Function for each message, called by a task of the client.
        """
        if self._subscription is None:
            self._subscription = await self._client.subscribe(
                subject, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
            )

    async def open_inbox(self, subject: str, receive: Callable[[Msg], None]) -> None:
        """Subscribe to an inbox that no other program has published to yet. Idempotent.

        The client calls ``receive`` while it reads the socket. The queue and the task of ``open`` would use as much CPU
        as the delivery of a message.

        Args:
            subject: Subject or pattern of the inbox.
            receive: Function for each message. The function must return at once.
        """

        async def from_task(message: Msg) -> None:
            receive(message)

        first = self._subscription is None
        await self.open(subject, from_task)
        if first and isinstance(getattr(self._subscription, "_pending_queue", None), asyncio.Queue):
            # No message can wait in the former queue, because no program knows the inbox yet.
            self._subscription._pending_queue = _PassingQueue(receive)  # type: ignore[union-attr]

    async def close(self) -> None:
        """Unsubscribe. Idempotent."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None and not self._client.is_closed:
            await subscription.unsubscribe()

    async def drain(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Unsubscribe after the client has received every message that the server has sent. Idempotent.

        The call requires a subscription by ``open_inbox``. Cancel-safe. A cancelled call drops the later messages.

        Args:
            flush: Function that waits until the server has read all requests and the client has received all earlier
                messages, like ``Connection.flush``. The client's own drain ends its flush after 10 s. A later answer to
                this flush ends the client's read loop.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is None or self._client.is_closed:
            return
        try:
            unsubscribe = getattr(self._client, "_send_unsubscribe", None)
            if unsubscribe is not None and not self._client.is_draining:
                await unsubscribe(subscription._id)
                await flush()
                await subscription._pending_queue.join()
        finally:
            # If its caller drains or has closed the client, the client discards the subscription itself.
            if not (self._client.is_closed or self._client.is_draining):
                # The server ignores a repeated unsubscribe. The call only makes the client discard the subscription.
                await subscription.unsubscribe()


class _PassingQueue(asyncio.Queue[Msg]):
    """A queue that passes each message to a function and stores none."""

    def __init__(self, receive: Callable[[Msg], None]) -> None:
        super().__init__()
        self._receive = receive

    def put_nowait(self, item: Msg) -> None:
        try:
            self._receive(item)
        except Exception:
            # An exception would end the task that reads the socket for the whole client.
            log.exception("a message of %s was not received; please report this as a bug", item.subject)
