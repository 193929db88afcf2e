"""Helpers for tests on several servers: create streams, find leaders, publish with confirmation."""

from __future__ import annotations

from typing import Any, Final, Protocol

import anyio
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from tests.components import NatsServer
from tests.components.nats_cluster import NatsCluster

UNDECIDED: Final = (nats.errors.Error, nats.js.errors.Error, OSError)
"""Errors while there is no leader; an election takes seconds."""


class Creatable(Protocol):
    """A stream of a test that does not exist yet."""

    async def create(self, **config: Any) -> None: ...


async def patiently(stream: Creatable) -> None:
    """Create a stream with three copies as soon as a leader can place it."""
    with anyio.fail_after(30):
        while True:
            try:
                await stream.create(num_replicas=3)
                return
            except (*UNDECIDED, AssertionError):
                await anyio.sleep(0.2)


async def leader(cluster: NatsCluster, client: Client, stream: str, durable: str | None) -> NatsServer:
    """Wait for the leader of the consumer or the stream."""
    context = client.jetstream(timeout=1)
    with anyio.fail_after(30):
        while True:
            try:
                info = await (context.consumer_info(stream, durable) if durable else context.stream_info(stream))
                if info.cluster is not None and info.cluster.leader:
                    return cluster.server(info.cluster.leader)
            except UNDECIDED:
                pass
            await anyio.sleep(0.2)


async def confirmed(client: Client, subject: str, body: bytes, number: int) -> None:
    """Publish one message and wait until most copies have it.

    These tests are not about messages that servers lose before that. The server stores each ``number`` once.
    """
    context = client.jetstream(timeout=2)
    with anyio.fail_after(30):
        while True:
            try:
                await context.publish(subject, body, headers={"Nats-Msg-Id": str(number)})
                return
            except UNDECIDED:
                await anyio.sleep(0.1)
