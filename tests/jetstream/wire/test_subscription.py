"""A subscription to an inbox receives each message while the client reads the socket, and an error ends no reading."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import nats.aio.subscription
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes_jetstream.wire.subscription import UnboundedSubscription

pytestmark = pytest.mark.anyio


async def publish(client: Client, subject: str, *bodies: bytes) -> None:
    for body in bodies:
        await client.publish(subject, body)
    # The ping of a flush may overtake messages that the client has not written yet. The second ping does not.
    await client.flush()
    await client.flush()


async def test_messages_of_an_inbox_are_received_in_order_before_the_next_answer(client: Client) -> None:
    received: list[bytes] = []
    subscription = UnboundedSubscription(client)
    inbox = client.new_inbox()
    await subscription.open_inbox(f"{inbox}.*", lambda message: received.append(message.data))
    await publish(client, f"{inbox}.1", b"a", b"b", b"c")
    assert received == [b"a", b"b", b"c"]
    await subscription.drain(client.flush)
    await publish(client, f"{inbox}.1", b"late")
    assert received == [b"a", b"b", b"c"]


async def test_a_failing_receiver_ends_neither_the_subscription_nor_the_client(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[bytes] = []

    def receive(message: Msg) -> None:
        received.append(message.data)
        if message.data == b"bad":
            raise RuntimeError("bad")

    subscription = UnboundedSubscription(client)
    inbox = client.new_inbox()
    await subscription.open_inbox(inbox, receive)
    with caplog.at_level(logging.ERROR, "lanes.jetstream"):
        await publish(client, inbox, b"bad", b"good")
    assert received == [b"bad", b"good"]
    assert f"a message of {inbox} was not received" in caplog.text
    await subscription.close()
    await subscription.close()


async def test_a_client_with_another_queue_calls_the_receiver_from_its_task(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[bytes] = []
    changed = nats.aio.subscription.Subscription.__init__

    class OwnQueue:
        def __init__(self) -> None:
            self._queue: asyncio.Queue[Msg] = asyncio.Queue()

        def __getattr__(self, name: str) -> object:
            return getattr(self._queue, name)

    def with_own_queue(self: nats.aio.subscription.Subscription, *args: object, **named: object) -> None:
        changed(self, *args, **named)  # type: ignore[arg-type]
        self._pending_queue = OwnQueue()  # type: ignore[assignment]

    subscription = UnboundedSubscription(client)
    inbox = client.new_inbox()
    with monkeypatch.context() as patched:
        patched.setattr(nats.aio.subscription.Subscription, "__init__", with_own_queue)
        await subscription.open_inbox(inbox, lambda message: received.append(message.data))
    await publish(client, inbox, b"a", b"b")
    await subscription.drain(client.flush)
    assert received == [b"a", b"b"]


async def test_messages_after_a_reconnect_reach_the_same_receiver(client: Client) -> None:
    received: list[bytes] = []
    subscription = UnboundedSubscription(client)
    inbox = client.new_inbox()
    await subscription.open_inbox(inbox, lambda message: received.append(message.data))
    await publish(client, inbox, b"before")
    reconnects = client.stats["reconnects"]
    transport: Any = client._transport
    transport._io_writer.transport.abort()
    async with asyncio.timeout(15):
        while client.stats["reconnects"] == reconnects or not client.is_connected:
            await asyncio.sleep(0.05)
    await publish(client, inbox, b"after")
    assert received == [b"before", b"after"]
    await subscription.close()
