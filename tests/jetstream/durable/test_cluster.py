"""A stream with three copies: a killed leader or server loses nothing, repeats nothing, and keeps the order."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

import lanes
from tests.components.nats_cluster import NatsCluster
from tests.jetstream.cluster_workload import UNDECIDED, confirmed, leader, patiently
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import connect
from tests.jetstream.workload import DURABLE, Recorder, Stream, inner, running, unique

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def stream(cluster: NatsCluster) -> AsyncIterator[Stream]:
    """A stream with three copies; a server that the previous test killed runs again."""
    await anyio.to_thread.run_sync(cluster.start)
    client = await connect(cluster.url.split(",")[0])
    stream = Stream(cluster.url, client, unique("R"))
    await patiently(stream)
    yield stream
    await client.close()


async def published(stream: Stream, count: int) -> None:
    for number in range(count):
        subject = f"{stream.name}.{number % 20}"
        await confirmed(stream.client, subject, b"x" * 40, stream.published + number)
    stream.published += count


async def all_done(stream: Stream, recorder: Recorder) -> None:
    with anyio.fail_after(40):
        await recorder.reached(stream.published)
        while True:
            try:
                if not await stream.ack_pending():
                    break
            except UNDECIDED:
                pass
            await anyio.sleep(0.1)
    assert recorder.violations == []
    assert recorder.repeats == 0


@pytest.mark.parametrize("acks", ["fire-and-forget", "confirmed"])
async def test_a_killed_leader_of_the_consumer_loses_nothing(cluster: NatsCluster, stream: Stream, acks: str) -> None:
    await published(stream, 600)
    recorder = Recorder(lambda message: 0.01)
    source = stream.source(acks=acks)
    async with running(lanes.Consumer(source, recorder, settings=FAST)):
        with anyio.fail_after(30):
            await recorder.reached(200)
        killed = await leader(cluster, stream.client, stream.name, DURABLE)
        await anyio.to_thread.run_sync(killed.kill)
        await published(stream, 50)
        await all_done(stream, recorder)
        await anyio.to_thread.run_sync(killed.start)
        await published(stream, 50)
        await all_done(stream, recorder)


async def test_a_killed_server_of_the_connection_loses_nothing(cluster: NatsCluster, stream: Stream) -> None:
    """The client moves to another server of the cluster, and the source takes over from itself."""
    await published(stream, 400)
    recorder = Recorder(lambda message: 0.01)
    source = stream.source()
    async with running(lanes.Consumer(source, recorder, settings=FAST)):
        with anyio.fail_after(30):
            await recorder.reached(100)
        url = inner(source).connection.client.connected_url
        assert url is not None
        killed = next(server for server in cluster.servers if server.url.endswith(f":{url.port}"))
        await anyio.to_thread.run_sync(killed.kill)
        await all_done(stream, recorder)
        await anyio.to_thread.run_sync(killed.start)


async def test_delivery_continues_after_a_leader_steps_down(cluster: NatsCluster, stream: Stream) -> None:
    """No server dies and no connection ends: an open pull gets only a status."""
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await published(stream, 50)
        await all_done(stream, recorder)
        for what in (f"CONSUMER.LEADER.STEPDOWN.{stream.name}.{DURABLE}", f"STREAM.LEADER.STEPDOWN.{stream.name}"):
            await stream.client.request(f"$JS.API.{what}", b"", timeout=5)
            await published(stream, 50)
            await all_done(stream, recorder)


async def test_a_source_waits_for_a_majority(cluster: NatsCluster, stream: Stream) -> None:
    """Two of three servers are down: without a leader nothing is delivered, and delivery resumes with a new leader."""
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await published(stream, 50)
        await all_done(stream, recorder)
        gone = cluster.servers[1:]
        for server in gone:
            await anyio.to_thread.run_sync(server.kill)
        await anyio.lowlevel.checkpoint()
        async with anyio.create_task_group() as tasks:
            for server in gone:
                tasks.start_soon(anyio.to_thread.run_sync, server.start)
        await published(stream, 50)
        await all_done(stream, recorder)
