"""What a durable consumer sends, on an inbox of our own: data messages carry the stream's subject, statuses the
inbox's."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lanes_jetstream.wire.pull_requests import PullRequests

__all__ = ["Pulls"]


class Pulls(PullRequests):
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
        self.restart(inbox)

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
            self.on_status(message)
        else:
            self.on_message(message)
