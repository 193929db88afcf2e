"""A stream or a consumer that is deleted, created again or changed during the run stops the source with an error."""

from __future__ import annotations

import json
import shutil
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream.durable.consumer import DurableConsumer
from lanes_jetstream.wire.answers import ApiError
from lanes_jetstream.wire.connection import Connection
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.durable.test_dropped_messages import held_up
from tests.jetstream.workload import DURABLE, Recorder, Stream, stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


async def test_a_recreated_stream_stops_the_source(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "^stream .* was deleted "):
        with anyio.fail_after(10):
            await recorder.reached(20)
        await stream.client.jetstream().delete_stream(stream.name)
        await stream.create()
        await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=10_000)
        await stream.publish(20, seed=2)
    # No message of the new stream passes for a handled one of the old stream.
    assert await stream.ack_pending() + len(recorder.done) <= 40


async def test_a_stream_recreated_beside_a_full_consumer_stops_the_source(stream: Stream) -> None:
    """The source has no open pull request, so the server cannot end one."""
    await stream.publish(20)
    recorder = Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    # A check may find that the stream does not exist.
    async with stops(consumer, "^stream .* was deleted (and created again|during the run)"):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        await stream.client.jetstream().delete_stream(stream.name)
        await stream.create()
        await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=10_000)


def test_a_consumer_deleted_with_its_stream_names_the_stream() -> None:
    """The deletion may happen between the checks of the stream and of the consumer."""
    fields: Any = dict.fromkeys(("filter_subject", "ack_wait", "max_ack_pending"), 1)
    durable = DurableConsumer(Connection("nats://x"), "S", "d", **fields, start={}, modify=False, hold_back=False)
    assert durable.failure_text(ApiError(10059, "stream not found", 404)).startswith(
        "stream 'S' was deleted during the run"
    )
    assert durable.failure_text(ApiError(10014, "consumer not found", 404)).startswith(
        "consumer S/d was deleted; prevent the deletion"
    )


async def test_a_deleted_stream_stops_the_source(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "^stream .* was deleted during the run"):
        await stream.publish(5)
        with anyio.fail_after(10):
            await recorder.reached(5)
        await stream.client.jetstream().delete_stream(stream.name)
    # The error of the run has the cause.
    assert "did not confirm the release" not in caplog.text
    await stream.create()


async def test_a_deleted_durable_stops_a_full_consumer(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    async with stops(
        consumer, "was deleted; prevent the deletion, or start again with a new consumer, which begins at start="
    ):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        await stream.client.jetstream().delete_consumer(stream.name, DURABLE)


async def test_a_changed_durable_stops_the_source(stream: Stream) -> None:
    await stream.publish(5)
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), r"was changed.*max_deliver is 3"):
        with anyio.fail_after(10):
            await recorder.reached(5)
        info = await stream.client.request(f"$JS.API.CONSUMER.INFO.{stream.name}.{DURABLE}", b"", timeout=5)
        config = {**json.loads(info.data)["config"], "max_deliver": 3}
        request = {"stream_name": stream.name, "config": config, "action": "update"}
        await stream.client.request(
            f"$JS.API.CONSUMER.CREATE.{stream.name}.{DURABLE}", json.dumps(request).encode(), timeout=5
        )


async def test_a_stream_that_lost_its_end_stops_the_source(fresh_stream: FreshStream) -> None:
    """Reused sequences would count as settled, and be acknowledged without a handler call."""
    server, stream = await fresh_stream()
    await stream.publish(10, keys=2)
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder, settings=FAST)
    failed: list[str] = []

    async def run() -> None:
        try:
            await consumer.run()
        except lanes.SourceError as error:
            failed.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        with anyio.fail_after(10):
            await recorder.reached(10)
        server.kill()
        copy = server.folder / "copy"
        shutil.copytree(server.folder / "data", copy)
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(20):
            await until(lambda: stream.client.is_connected)
            await stream.publish(10, keys=2, seed=2)
            await recorder.reached(20)
        server.kill()
        shutil.rmtree(server.folder / "data")
        copy.rename(server.folder / "data")
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(20):
            await until(lambda: bool(failed))
    assert "ends at sequence 10 but was read up to 20" in failed[0]


async def test_a_deleted_consumer_stops_the_source(stream: Stream) -> None:
    await stream.publish(10)
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder)
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def delete() -> None:
                await recorder.reached(10)
                await stream.client.jetstream().delete_consumer(stream.name, DURABLE)

            tasks.start_soon(delete)
            with pytest.raises(lanes.SourceError, match="deleted"):
                await consumer.run()
