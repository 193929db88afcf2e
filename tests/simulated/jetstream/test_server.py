"""The simulated nats-server answers scripts of requests of a real client. A real server answers them alike."""

from __future__ import annotations

import asyncio
from random import Random

import nats
import pytest
from nats.aio.client import Client

from memsource.jetstream.server.server import NatsServer
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run
from tests.components import NatsServer as RealServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import unique
from tests.simulated.jetstream.network import HOST, Network
from tests.simulated.jetstream.scripts import SCRIPTS, Script, Seen
from tests.simulated.jetstream.seams import seams


def simulated(script: Script) -> Seen:
    """Play a script on a simulated server, in virtual time."""

    async def main() -> Seen:
        network = Network(NatsServer(), Random(0), (0.001,))
        client: Client = await nats.connect(f"nats://{HOST}:4222")
        try:
            return await script(client, "S")
        finally:
            await client.close()
            network.end()

    with seams():
        return run(main, chooser=Fifo()).result


async def real(script: Script, url: str) -> Seen:
    """Play a script on a real server."""
    client = await connect(url)
    name = unique("T")
    try:
        return await script(client, name)
    finally:
        for stream in (name, f"KV_{name}"):
            await client.request(f"$JS.API.STREAM.DELETE.{stream}", timeout=10)
        await client.close()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_both_servers_answer_alike(script: Script, nats_server: RealServer) -> None:
    assert simulated(script) == asyncio.run(real(script, nats_server.url))
