"""What a test on several servers does as soon as there is somebody who decides it."""

from __future__ import annotations

from typing import Any, Final, Protocol

import anyio
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from tests.components import NatsServer
from tests.components.nats_cluster import NatsCluster

UNDECIDED: Final = (nats.errors.Error, nats.js.errors.Error, OSError)
"""What comes while there is nobody; an election takes seconds."""


class Creatable(Protocol):
    """A stream of a test that is not there yet."""

    async def create(self, **config: Any) -> None: ...


async def patiently(stream: Creatable) -> None:
    """Make it, with three copies, as soon as there is somebody to decide where."""
    with anyio.fail_after(30):
        while True:
            try:
                await stream.create(num_replicas=3)
                return
            except (*UNDECIDED, AssertionError):
                await anyio.sleep(0.2)


async def leader(cluster: NatsCluster, client: Client, stream: str, durable: str | None) -> NatsServer:
    """Who leads the consumer, or the stream; waits for one."""
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
    """Publish one message, and have it confirmed by most of the copies: what the servers may lose is not of these
    tests. ``number``: of the message; the server stores it once."""
    context = client.jetstream(timeout=2)
    with anyio.fail_after(30):
        while True:
            try:
                await context.publish(subject, body, headers={"Nats-Msg-Id": str(number)})
                return
            except UNDECIDED:
                await anyio.sleep(0.1)
