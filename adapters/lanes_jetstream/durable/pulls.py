"""The pull requests of one durable consumer, on a separate inbox.

A message arrives with its subject in the stream, and a status arrives with a subject of the inbox.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes_jetstream.wire.pull_requests import PullRequests
from lanes_jetstream.wire.subscription import UnboundedSubscription


class DurablePulls(PullRequests):
    """The pull requests of one durable consumer.

    Each ``renew`` uses a fresh inbox. The object requires asyncio and a single caller.
    """

    def __init__(self, client: Client, next_subject: str, name: str, wake: asyncio.Event | None = None) -> None:
        super().__init__(client, next_subject, name, wake=wake or asyncio.Event())
        self._subscription = UnboundedSubscription(client)

    async def renew(self) -> None:
        """Drop all open requests, and subscribe to a fresh inbox. The call sends no request."""
        await self.close()
        inbox = self._client.new_inbox()
        await self._subscription.open_inbox(f"{inbox}.*", self._receive)
        self.restart(inbox)

    async def close(self) -> None:
        """End the subscription. The server then drops the pull requests. Idempotent."""
        await self._subscription.close()

    async def drain(self, flush: Callable[[], Awaitable[None]]) -> None:
        """Close like ``close``, after all messages that the server has sent for open requests have arrived. Idempotent.

        Args:
            flush: See ``UnboundedSubscription.drain``.
        """
        await self._subscription.drain(flush)

    async def wait(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a message or a status. Cancel-safe.

        The call returns at once after an arrived message or an interruption.
        """
        if self.arrived or self.check() is not None:
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            self.check()

    def _receive(self, message: Msg) -> None:
        if message.subject.startswith(self.inbox):
            self.on_status(message)
        else:
            self.on_message(message)
