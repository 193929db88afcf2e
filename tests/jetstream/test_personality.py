"""The scenarios of the simulated JetStream broker have the same results on a real server."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from lanes_jetstream.wire.messages import sequences
from memsource.jetstream.pull_consumer import ConsumerSettings
from tests.components import NatsServer
from tests.jetstream.conftest import FreshStream
from tests.jetstream.workload import DURABLE, Stream
from tests.memsource.jetstream.scenarios import PATIENCE, SCENARIOS, Arrived, ModelCluster, Scenario


class RealCluster:
    """A stream on nats-server, pulled like a plain client."""

    def __init__(self, stream: Stream, server: NatsServer | None) -> None:
        self._stream = stream
        self._client: Client = stream.client
        self._server = server
        self._replies: defaultdict[int, list[str]] = defaultdict(list)

    async def create(self, settings: ConsumerSettings) -> None:
        wanted: dict[str, Any] = {
            "ack_wait": _nanoseconds(settings.ack_wait),
            "backoff": [_nanoseconds(seconds) for seconds in settings.backoff],
            "max_ack_pending": settings.max_ack_pending or -1,
            "max_deliver": settings.max_deliver or -1,
        }
        await self._stream.add_consumer(**wanted)

    async def publish(self, count: int) -> None:
        context = self._client.jetstream()
        for _ in range(count):
            await context.publish(f"{self._stream.name}.0", b"")

    async def pull(self, count: int) -> Arrived:
        arrived: Arrived = []
        ended = asyncio.Event()

        async def receive(message: Msg) -> None:
            if message.headers and "Status" in message.headers:
                ended.set()
                return
            sequence, _ = sequences(message.reply)
            self._replies[sequence].append(message.reply)
            arrived.append((sequence, int(message.reply.split(".")[4])))
            if len(arrived) == count:
                ended.set()

        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=receive)
        request = json.dumps({"batch": count, "expires": _nanoseconds(PATIENCE)}).encode()
        await self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream.name}.{DURABLE}", request, reply=inbox)
        await asyncio.wait_for(ended.wait(), timeout=10)
        await subscription.unsubscribe()
        return arrived

    async def ack(self, *sequences: int, old: bool = False) -> None:
        for sequence in sequences:
            await self._answer(sequence, b"+ACK", old=old)

    async def nak(self, *sequences: int, delay: float = 0.0) -> None:
        body = b"-NAK" + (json.dumps({"delay": _nanoseconds(delay)}).encode() if delay else b"")
        for sequence in sequences:
            await self._answer(sequence, body)

    async def extend(self, sequence: int) -> None:
        await self._answer(sequence, b"+WPI")

    async def wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def reset(self) -> None:
        await self._api("RESET", b"")

    async def set_ack_wait(self, seconds: float) -> None:
        info = await self._api("INFO", b"")
        config = {**info["config"], "ack_wait": _nanoseconds(seconds)}
        request = {"stream_name": self._stream.name, "config": config, "action": "update"}
        await self._api("CREATE", json.dumps(request).encode())

    async def kill_server(self) -> None:
        assert self._server is not None
        await self._client.flush()
        self._server.kill()
        self._server.start()
        while True:
            try:
                await self._api("INFO", b"")
                return
            except (nats.errors.Error, OSError):
                await asyncio.sleep(0.05)

    async def _answer(self, sequence: int, body: bytes, *, old: bool = False) -> None:
        # The server handles acknowledgements and pulls in separate tasks, so a later pull may overtake a plain publish.
        # The server answers a request after its effect. An ignored request has no answer, but the answer to a later "in
        # progress" shows that the server has read it. "In progress" has no effect on a settled message.
        reply = self._replies[sequence][0 if old else -1]
        if old:
            await self._client.publish(reply, body)
            body = b"+WPI"
        await self._client.request(reply, body, timeout=10.0)

    async def _api(self, verb: str, body: bytes) -> dict[str, Any]:
        answer = await self._client.request(f"$JS.API.CONSUMER.{verb}.{self._stream.name}.{DURABLE}", body, timeout=1.0)
        fields: dict[str, Any] = json.loads(answer.data)
        assert "error" not in fields, fields
        return fields


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


async def compare(scenario: Scenario, cluster: RealCluster) -> None:
    await cluster.create(scenario.settings)
    seen = await scenario.play(cluster)
    assert seen == await scenario.play(ModelCluster(scenario.settings))


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if not each.kills], ids=str)
async def test_the_server_and_the_simulated_broker_answer_alike(scenario: Scenario, stream: Stream) -> None:
    await compare(scenario, RealCluster(stream, None))


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", [each for each in SCENARIOS if each.kills], ids=str)
async def test_a_killed_server_and_the_simulated_broker_answer_alike(
    scenario: Scenario, fresh_stream: FreshStream
) -> None:
    server, stream = await fresh_stream()
    await compare(scenario, RealCluster(stream, server))
