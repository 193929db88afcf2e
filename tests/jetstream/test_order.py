"""Per-key order through restarts, lost connections and dead servers, on the real thing."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

import lanes
from lanes.core.types import Room
from lanes.source import Assigned, Delivered
from tests.components import NatsServer
from tests.jetstream.workload import Recorder, Stream, all_done, crashing, inner, running, until

pytestmark = pytest.mark.anyio

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

FAST = lanes.Settings(concurrency=50, drain_timeout=10)


def jitter() -> Callable[[lanes.Message], float]:
    chance = random.Random(7)
    return lambda message: chance.random() * 0.01


async def test_one_run_handles_everything_once_in_order(stream: Stream) -> None:
    await stream.publish(2_000)
    recorder = Recorder(jitter())
    consumer = lanes.Consumer(stream.source(), recorder, settings=FAST)
    async with running(consumer):
        await all_done(stream, recorder)
    assert recorder.repeats == 0
    assert recorder.most_running > 10  # in parallel across keys
    assert consumer.status().peak_in_flight <= consumer.status().max_in_flight


@pytest.mark.parametrize("takeover", ["auto", "hold-back"])
async def test_restart_before_ack_wait_keeps_key_order(stream: Stream, takeover: str) -> None:
    await stream.publish(1_500)
    recorder = Recorder(jitter())
    ack_wait = 2.0 if takeover == "hold-back" else 30.0
    for crash_at in (300, 800):
        source = stream.source(takeover=takeover, ack_wait=ack_wait)
        async with crashing(lanes.Consumer(source, recorder, settings=FAST)):
            await recorder.reached(crash_at)
        assert await stream.ack_pending() > 0
        await stream.publish(200)
    source = stream.source(takeover=takeover, ack_wait=ack_wait)
    async with running(lanes.Consumer(source, recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert (await stream.consumer_info()).config.ack_wait == ack_wait


async def test_orphans_that_expired_in_batches_come_back_in_order(stream: Stream) -> None:
    """The server queues what expires batch behind batch; a takeover must sort all of it."""
    ack_wait = 1.0
    await stream.publish(400, keys=4)
    await stream.add_consumer(ack_wait=int(ack_wait * 1e9), metadata={"lanes-managed": "1"}, max_ack_pending=1_000)
    held = await stream.pull_raw(400)
    await anyio.sleep(ack_wait / 2)
    for message in held[:100]:
        await message.in_progress()  # these expire half an ack_wait behind the others
    await anyio.sleep(ack_wait * 0.7)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(ack_wait=ack_wait), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert recorder.repeats == 0


async def test_more_orphans_than_may_be_in_flight(stream: Stream) -> None:
    """An earlier process held more than this one may: they come back in order all the same."""
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


@pytest.mark.parametrize("takeover", ["auto", "hold-back"])
async def test_tcp_drop_with_live_pull(stream: Stream, takeover: str) -> None:
    await stream.publish(3_000)
    recorder = Recorder(jitter())
    source = stream.source(takeover=takeover, ack_wait=2.0)
    consumer = lanes.Consumer(source, recorder, settings=FAST)
    async with running(consumer):
        for at in (500, 1_500):
            with anyio.fail_after(30):
                await recorder.reached(at)
            # Reset, not closed: what is on its way is lost.
            transport: Any = inner(source)._connection.client._transport
            transport._io_writer.transport.abort()
        await all_done(stream, recorder)


async def test_server_killed_in_mid_run(fresh_stream: MakeStream) -> None:
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
    # What the server forgot came again and was acknowledged again, not run again.
    assert recorder.repeats == 0


async def test_server_killed_then_the_consumer_crashes(fresh_stream: MakeStream) -> None:
    """The server's own state of the consumer is old after kill -9; the next process must not trust it."""
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


async def test_server_restart_mid_pull_resumes(fresh_stream: MakeStream) -> None:
    """An idle pull is open when the server says 409 Server Shutdown; new messages come over the new connection."""
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


async def test_hung_server_is_noticed_by_missing_heartbeats(fresh_stream: MakeStream) -> None:
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


async def test_queued_message_outlives_ack_wait(stream: Stream) -> None:
    """One slow key: what waits behind it is kept alive too, so nothing is delivered twice."""
    await stream.publish(8, keys=1)
    recorder = Recorder(lambda message: 0.4)
    consumer = lanes.Consumer(stream.source(ack_wait=1.0), recorder, settings=FAST)
    async with running(consumer):
        await all_done(stream, recorder)  # 3.2 s of work, three times ack_wait
        assert consumer.status().redelivered == {}
    assert (await stream.consumer_info()).num_redelivered == 0


async def test_a_lost_delivery_is_seen_by_its_number(stream: Stream, caplog: Any) -> None:
    """A delivery that never arrives would come back behind newer ones of its key."""
    await stream.publish(600, keys=5)
    recorder = Recorder()
    source = stream.source()
    consumer = lanes.Consumer(source, recorder, settings=lanes.Settings(concurrency=5, max_in_flight=100))
    async with running(consumer):
        with anyio.fail_after(20):
            await recorder.reached(100)
        pulls = inner(source)._pulls
        receive = pulls._receive
        dropped: list[Any] = []

        async def drop_once(message: Any) -> None:
            # Not the last one that was asked for: that one would be missed by the heartbeats alone.
            if not dropped and not message.subject.startswith(pulls._inbox) and pulls.outstanding > 1:
                dropped.append(message)
                return
            await receive(message)

        subscription = pulls._subscription._subscription
        assert subscription is not None
        subscription._cb = drop_once
        await all_done(stream, recorder)
    assert dropped
    assert recorder.repeats == 0
    assert "missing" in caplog.text


async def test_two_processes_that_start_together_are_stopped(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sees the other's pull at its start; the numbers of the deliveries give it away."""
    monkeypatch.setattr("lanes_jetstream.durable.source._OTHER_PULLER_WAIT", 1.0)
    await stream.add_consumer(max_ack_pending=1_000, metadata={"lanes-managed": "1"})
    await stream.publish(2_000)
    ended: list[str] = []

    async def run() -> None:
        settings = lanes.Settings(concurrency=20, max_in_flight=100, drain_timeout=1.0)
        try:
            await lanes.run(stream.source(), Recorder(lambda message: 0.02), settings=settings)
        except lanes.LanesError as error:
            ended.append(str(error))

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(run)
            await until(lambda: bool(ended))
            tasks.cancel_scope.cancel()
    assert "pulled by another process" in ended[0]


async def test_stream_that_lost_its_end_stops_loudly(fresh_stream: MakeStream) -> None:
    """Sequences that are used again would pass for settled ones, and be acknowledged without being handled."""
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
    assert "ends at sequence 10 and was read up to 20" in failed[0]


async def test_cancelled_receive_does_not_forget_a_takeover(stream: Stream) -> None:
    """What the pump cancels because there is room again must not end a takeover in the middle."""
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


async def test_acknowledgements_lost_with_a_connection_are_repeated(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean stop right after a reconnect leaves nothing behind that had finished."""
    recorder = Recorder()
    source = stream.source()
    consumer = lanes.Consumer(source, recorder, settings=FAST)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: hasattr(inner(source), "_pulls"))
        client = inner(source)._connection.client
        lost: list[str] = []

        async def lose(client: Client, subjects: Sequence[str], body: bytes) -> None:
            lost.extend(subjects)

        monkeypatch.setattr("lanes_jetstream.wire.acks.send_all", lose)
        await stream.publish(30, keys=30)
        with anyio.fail_after(10):
            await recorder.reached(30)
            await until(lambda: len(lost) == 30)
        monkeypatch.undo()
        transport: Any = client._transport
        transport._io_writer.transport.abort()
        reconnects = client.stats["reconnects"]
        with anyio.fail_after(10):
            await until(lambda: client.stats["reconnects"] > reconnects and client.is_connected)
    # The server works off what it has read a moment later.
    with anyio.fail_after(10):
        await stream.acknowledged()


async def test_stop_and_start_again_repeats_nothing(stream: Stream) -> None:
    await stream.publish(1_000)
    recorder = Recorder(jitter())
    for at in (200, 500):
        async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
            with anyio.fail_after(20):
                await recorder.reached(at)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert recorder.repeats == 0


async def test_two_processes_on_one_durable_are_refused(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.source._OTHER_PULLER_WAIT", 1.0)
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(10):
            await recorder.reached(20)
        with pytest.raises(lanes.ConfigError, match="pulled by another process"):
            await asyncio.wait_for(lanes.run(stream.source(), recorder), 20)
