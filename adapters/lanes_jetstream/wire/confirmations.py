"""Publishes many messages at once, and receives the confirmations of their streams by one subscription."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes_jetstream.wire.connection import API_TIMEOUT
from lanes_jetstream.wire.subscription import UnboundedSubscription

_MOST: Final = 4_000
"""Maximum number of unconfirmed messages. The wait for a confirmation begins when its message is sent."""

_SLICE: Final = 100
"""Number of messages to send in one turn of the loop."""

T = TypeVar("T")


class Confirmations(Generic[T]):
    """The unconfirmed messages of one client. Needs asyncio.

    A request for each message would take a task, a future and a timer. Here all messages of a call share one timer.

    Args:
        client: The connected client.

    Attributes:
        client: See ``Args``.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._inbox = client.new_inbox()
        self._subscription = UnboundedSubscription(client)
        self._number = 0
        self._calls: dict[str, _Call[T]] = {}
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Confirmations {len(self._calls)} unconfirmed messages>"

    async def publish(
        self, messages: Iterable[tuple[T, str, bytes, dict[str, str]]], ended: Callable[[T, bytes | Exception], None]
    ) -> None:
        """Publish messages, and wait for the answers of their streams, at most ``API_TIMEOUT`` seconds.

        A cancelled call may have published any of the messages.

        Args:
            messages: A name of the caller, the subject, the payload and the headers, for each message.
            ended: Called once for each message, within this call or in a callback of the loop, with the answer or the
                error of the client. ``NoRespondersError`` = no stream captures the subject.

        Raises:
            nats.errors.Error: The client cannot subscribe to the answers. The call has published nothing.
        """
        call = _Call(ended)
        try:
            # The calls send in turn, so that no call waits longer than ``API_TIMEOUT`` for the room of the others.
            async with self._turn:
                await self._subscription.open_inbox(f"{self._inbox}.*", self._answered)
                for number, (name, subject, payload, headers) in enumerate(messages, 1):
                    if number % _SLICE == 0:
                        await asyncio.sleep(0)
                    if len(self._calls) >= _MOST and not await self._has_room():
                        ended(name, TimeoutError())
                        continue
                    await self._send(call, name, subject, payload, headers)
            try:
                async with asyncio.timeout(API_TIMEOUT):
                    while call.names:
                        call.over.clear()
                        await call.over.wait()
            except TimeoutError:
                for name in call.names.values():
                    ended(name, TimeoutError())
        finally:
            for reply in call.names:
                self._calls.pop(reply, None)
            self._room.set()

    async def _has_room(self) -> bool:
        """Wait for room, and return whether there is room within ``API_TIMEOUT`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(API_TIMEOUT):
                while len(self._calls) >= _MOST:
                    self._room.clear()
                    await self._room.wait()
        return len(self._calls) < _MOST

    async def _send(self, call: _Call[T], name: T, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        self._number += 1
        reply = f"{self._inbox}.{self._number}"
        self._calls[reply] = call
        call.names[reply] = name
        try:
            await self.client.publish(subject, payload, reply=reply, headers=headers)
        except (nats.errors.Error, OSError) as error:
            if call.names.pop(reply, None) is not None:
                del self._calls[reply]
                call.ended(name, error)

    def _answered(self, message: Msg) -> None:
        call = self._calls.pop(message.subject, None)
        if call is None:
            # The call has ended without this answer.
            return
        if not self._room.is_set():
            self._room.set()
        name = call.names.pop(message.subject)
        none = (message.headers or {}).get("Status") == "503"
        call.ended(name, nats.errors.NoRespondersError() if none else message.data)
        if not call.names:
            call.over.set()

    async def close(self) -> None:
        """End the subscription. Idempotent."""
        await self._subscription.close()


class _Call(Generic[T]):
    """One call of ``Confirmations.publish``.

    Args:
        ended: See ``Confirmations.publish``.

    Attributes:
        names: The names of the unconfirmed messages by the subjects of their answers.
        ended: See ``Args``.
        over: Event that is set when all messages that were sent before have ended.
    """

    __slots__ = ("ended", "names", "over")

    def __init__(self, ended: Callable[[T, bytes | Exception], None]) -> None:
        self.names: dict[str, T] = {}
        self.ended = ended
        self.over = asyncio.Event()
