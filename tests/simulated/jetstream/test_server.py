"""The simulated nats-server answers scripts of requests of a real client. A real server gives the same answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random

import nats
import pytest
from nats.aio.client import Client

from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.virtual import run
from tests.components import NatsServer as RealServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import USERS, unique
from tests.simulated.jetstream.network import HOST, Network
from tests.simulated.jetstream.scripts import (
    DENIED,
    SCRIPTS,
    Script,
    Seen,
    a_denied_message_has_no_effect_and_is_an_error_of_the_client,
)
from tests.simulated.jetstream.seams import seams
from tests.simulated.jetstream.server.server import NatsServer


def simulated(script: Script, *denied: str) -> Seen:
    """Play a script on a simulated server, in virtual time. Its user may not publish to the subjects ``denied``."""

    async def main() -> Seen:
        network = Network(NatsServer(), Random(0), (0.001,))
        network.server.denied += denied
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


def test_the_simulated_and_the_real_server_refuse_alike(fresh_nats: Callable[..., RealServer]) -> None:
    script = a_denied_message_has_no_effect_and_is_an_error_of_the_client
    server = fresh_nats(config=USERS.format(denied=json.dumps(DENIED)[1:-1]))
    url = server.url.replace("nats://", "nats://app:app@")
    assert simulated(script, *DENIED) == asyncio.run(real(script, url))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_simulated_and_the_real_server_answer_alike(script: Script, nats_server: RealServer) -> None:
    assert simulated(script) == asyncio.run(real(script, nats_server.url))
