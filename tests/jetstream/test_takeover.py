"""A start that finds messages of an earlier run: what it changes of the consumer, it restores, whatever ends it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream.durable.consumer import ORIGINAL_ACK_WAIT
from tests.components import NatsServer
from tests.jetstream.workload import DURABLE, Recorder, Stream, all_done, crashing, inner, running

pytestmark = pytest.mark.anyio

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

FAST = lanes.Settings(concurrency=50, drain_timeout=10)


async def test_killed_between_shrink_and_restore(stream: Stream) -> None:
    """A process that dies with ack_wait shrunk leaves the original in the metadata; the next start restores it."""
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    config = json.loads(
        (await stream.client.request(f"$JS.API.CONSUMER.INFO.{stream.name}.{DURABLE}", b"", timeout=5)).data
    )["config"]
    config["metadata"][ORIGINAL_ACK_WAIT] = str(config["ack_wait"])
    config["ack_wait"] = 1_000_000
    request = {"stream_name": stream.name, "config": config, "action": "update"}
    await stream.client.request(
        f"$JS.API.CONSUMER.CREATE.{stream.name}.{DURABLE}", json.dumps(request).encode(), timeout=5
    )
    assert (await stream.consumer_info()).config.ack_wait == 0.001
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    restored = (await stream.consumer_info()).config
    assert restored.ack_wait == 30.0
    assert ORIGINAL_ACK_WAIT not in (restored.metadata or {})


async def test_cancelled_in_the_middle_of_a_takeover(stream: Stream) -> None:
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(20):
            while (await stream.consumer_info()).config.ack_wait != 0.001:
                await anyio.sleep(0.002)
    assert (await stream.consumer_info()).config.ack_wait == 30.0


async def test_cancelled_before_a_takeover_knows_that_it_has_begun(stream: Stream) -> None:
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    source, changed = stream.source(), anyio.Event()
    connection = inner(source)._connection
    ask = connection.api

    async def slow_to_hear(subject: str, request: Mapping[str, object] | None = None) -> dict[str, Any]:
        answer = await ask(subject, request)
        if subject.startswith("CONSUMER.CREATE."):
            changed.set()
            await anyio.sleep(0.05)
        return answer

    connection.api = slow_to_hear  # type: ignore[method-assign]
    async with crashing(lanes.Consumer(source, recorder, settings=FAST)):
        with anyio.fail_after(20):
            await changed.wait()
    assert (await stream.consumer_info()).config.ack_wait == 30.0


async def test_without_the_permission_to_change_a_consumer(fresh_stream: MakeStream) -> None:
    server, stream = await fresh_stream(
        config="""
        accounts { A { jetstream: enabled, users: [
            {user: admin, password: admin},
            {user: app, password: app, permissions: {publish: {deny: ["$JS.API.CONSUMER.CREATE.>"]}}}
        ]}}
        no_auth_user: admin
        """
    )
    await stream.publish(200)
    await stream.add_consumer(ack_wait=2_000_000_000, metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    recorder = Recorder()
    url = server.url.replace("nats://", "nats://app:app@")
    async with crashing(lanes.Consumer(stream.source(where=url), recorder, settings=FAST)):
        await recorder.reached(50)
    assert await stream.ack_pending() > 0
    async with running(lanes.Consumer(stream.source(where=url), recorder, settings=FAST)):
        await all_done(stream, recorder)
