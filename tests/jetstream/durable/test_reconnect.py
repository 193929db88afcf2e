"""Lost connections and dead servers: the source reconnects, loses nothing, and keeps the order within a key."""

from __future__ import annotations

import signal
from typing import Any

import anyio
import pytest

import lanes
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.durable.test_order import jitter
from tests.jetstream.workload import Recorder, Stream, all_done, crashing, inner, running, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("takeover", ["auto", "hold-back"])
async def test_a_reset_connection_loses_nothing(stream: Stream, takeover: str) -> None:
    await stream.publish(3_000)
    recorder = Recorder(jitter())
    source = stream.source(takeover=takeover, ack_wait=2.0)
    consumer = lanes.Consumer(source, recorder, settings=FAST)
    async with running(consumer):
        for at in (500, 1_500):
            with anyio.fail_after(30):
                await recorder.reached(at)
            # A reset instead of a close loses all data in transit.
            transport: Any = inner(source).connection.client._transport
            transport._io_writer.transport.abort()
        await all_done(stream, recorder)


async def test_a_killed_server_loses_nothing(fresh_stream: FreshStream) -> None:
    server, stream = await fresh_stream()
    await stream.publish(3_000)
    recorder = Recorder(jitter())
    consumer = lanes.Consumer(stream.source(), recorder, settings=FAST)
    async with running(consumer):
        for at in (500, 1_500):
            with anyio.fail_after(30):
                await recorder.reached(at)
            await anyio.to_thread.run_sync(server.kill)
            await anyio.to_thread.run_sync(server.start)
        await all_done(stream, recorder)
    # Messages whose acknowledgement the server lost were redelivered and acknowledged again, without a run.
    assert recorder.repeats == 0


async def test_a_killed_server_and_a_crashed_consumer_keep_order(fresh_stream: FreshStream) -> None:
    """After kill -9 the server's state of the consumer is old; the next process must not trust it."""
    server, stream = await fresh_stream()
    await stream.publish(3_000)
    recorder = Recorder(jitter())
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await recorder.reached(500)
        await anyio.to_thread.run_sync(server.kill)
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(30):
            await recorder.reached(1_500)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)


async def test_an_open_pull_survives_a_server_restart(fresh_stream: FreshStream) -> None:
    """An idle pull is open when the server sends 409 Server Shutdown; new messages arrive over the new connection."""
    server, stream = await fresh_stream()
    await stream.publish(50)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(50)
        server._process.signal(signal.SIGTERM)
        await anyio.to_thread.run_sync(server._process.wait)
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(20):
            await until(lambda: stream.client.is_connected)
        await stream.publish(50, seed=2)
        await all_done(stream, recorder)


async def test_a_frozen_server_is_detected_by_missing_heartbeats(fresh_stream: FreshStream) -> None:
    server, stream = await fresh_stream()
    await stream.publish(200)
    recorder = Recorder(jitter())
    source = stream.source()
    async with running(lanes.Consumer(source, recorder, settings=FAST)):
        with anyio.fail_after(20):
            await recorder.reached(200)
        server.pause()
        try:
            with anyio.fail_after(20):
                await until(lambda: inner(source)._pulls.check() is not None)
        finally:
            server.resume()
        await stream.publish(200, seed=2)
        await all_done(stream, recorder)
