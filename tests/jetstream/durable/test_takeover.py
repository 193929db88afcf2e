"""A takeover delivers messages of an earlier run first and in order, and restores the consumer's timers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

import lanes
from lanes.core.types import Room
from lanes.source import Assigned, Delivered
from lanes_jetstream.durable.consumer import ORIGINAL_ACK_WAIT
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.durable.test_dropped_messages import held_up
from tests.jetstream.workload import DURABLE, Recorder, Stream, all_done, crashing, inner, running

pytestmark = pytest.mark.anyio


async def shrink(stream: Stream) -> None:
    """Shrink ack_wait like a takeover."""
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


async def test_a_killed_takeover_is_repaired_by_the_next_start(stream: Stream) -> None:
    """A process that dies with ack_wait shrunk leaves the original in the metadata; the next start restores it."""
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    await shrink(stream)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    restored = (await stream.consumer_info()).config
    assert restored.ack_wait == 30.0
    assert ORIGINAL_ACK_WAIT not in (restored.metadata or {})


async def test_a_running_process_undoes_the_late_shrink_of_a_dead_one(stream: Stream) -> None:
    await stream.publish(50)
    recorder = Recorder()
    handle, go_on = held_up(recorder, 1)
    async with running(lanes.Consumer(stream.source(), handle, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(1)
            await shrink(stream)
            await stream.publish(50, seed=2)
            while (await stream.consumer_info()).config.ack_wait != 30.0:
                await anyio.sleep(0.05)
            go_on.set()
        await all_done(stream, recorder)


async def test_a_cancelled_takeover_restores_the_timers(stream: Stream) -> None:
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(20):
            while (await stream.consumer_info()).config.ack_wait != 0.001:
                await anyio.sleep(0.002)
    assert (await stream.consumer_info()).config.ack_wait == 30.0


async def test_a_takeover_cancelled_during_the_shrink_restores_the_timers(stream: Stream) -> None:
    await stream.publish(100)
    recorder = Recorder()
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(20)
    source, changed = stream.source(), anyio.Event()
    connection = inner(source).connection
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


async def test_a_takeover_without_permission_to_change_the_consumer_holds_back(fresh_stream: FreshStream) -> None:
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


async def test_messages_that_expired_in_batches_return_in_order(stream: Stream) -> None:
    """The server queues expired messages batch after batch; a takeover must sort all of them."""
    ack_wait = 1.0
    await stream.publish(400, keys=4)
    await stream.add_consumer(ack_wait=int(ack_wait * 1e9), metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    held = await stream.pull_raw(400)
    await anyio.sleep(ack_wait / 2)
    for message in held[:100]:
        await message.in_progress()  # these expire half an ack_wait after the others
    await anyio.sleep(ack_wait * 0.7)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(ack_wait=ack_wait), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert recorder.repeats == 0


async def test_more_messages_than_max_in_flight_return_in_order(stream: Stream) -> None:
    """An earlier process held more messages than the bound of this process; the messages still return in order."""
    ack_wait = 1.0
    await stream.publish(400, keys=4)
    await stream.add_consumer(ack_wait=int(ack_wait * 1e9), metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    held = await stream.pull_raw(300)
    await anyio.sleep(ack_wait / 2)
    for message in held[:100]:
        await message.in_progress()
    await anyio.sleep(ack_wait * 0.7)
    recorder = Recorder()
    settings = lanes.Settings(concurrency=8, max_in_flight=40)
    consumer = lanes.Consumer(stream.source(ack_wait=ack_wait), recorder, settings=settings)
    async with running(consumer):
        await all_done(stream, recorder)
    assert recorder.repeats == 0
    assert consumer.status().peak_in_flight <= 40


async def test_a_cancelled_receive_repeats_the_takeover(stream: Stream) -> None:
    """If room becomes free, the consumer cancels ``receive``, and that must not end a takeover halfway."""
    await stream.publish(200, keys=4)
    await stream.add_consumer(ack_wait=1_500_000_000, max_ack_pending=1_000)
    held = await stream.pull_raw(50)
    source = stream.source()
    await source.open()
    room = Room(500, 1 << 20)
    (assigned,) = await source.receive(room)
    assert isinstance(assigned, Assigned)
    for _ in range(3):
        with anyio.move_on_after(0.4):
            await source.receive(room)
    with anyio.fail_after(10):
        (first,) = await source.receive(room)
    assert isinstance(first, Delivered)
    assert [message.position for message in first.run][: len(held)] == list(range(1, len(held) + 1))
    await source.aclose()
