"""Where a consumer begins, how it acknowledges, who else may pull it, and what it tells of its lag."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any, cast

import anyio
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import lanes
from lanes.core.types import Room
from lanes.errors import SourceError
from lanes.source import Delivered
from lanes_jetstream import JetStreamSource, subject_token, whole_subject
from lanes_jetstream.wire.acks import send_all
from lanes_jetstream.wire.stream import start_fields
from tests.components import NatsServer
from tests.jetstream.workload import DURABLE, Recorder, Stream, all_done, inner, moment_behind, running, until

pytestmark = pytest.mark.anyio

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

ALONE = lanes.Settings(concurrency=50)
SHARED = lanes.Settings(concurrency=20, order="none")


# --- start points


async def began_at(stream: Stream, **arguments: Any) -> int:
    """The first sequence that a consumer delivers which is made now and then finds one more message."""
    recorder = Recorder()
    source = stream.source(**arguments)
    consumer = lanes.Consumer(source, recorder, settings=ALONE)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready)
            await stream.publish(1)
            await recorder.reached(1)
            await until(lambda: stream.published in recorder.done)
    return min(recorder.done)


async def test_start_points(stream: Stream) -> None:
    await stream.publish(5)
    moment = (await moment_behind(stream.client, stream.name, 5)).astimezone(timezone(timedelta(hours=5)))
    await stream.publish(5)
    assert await began_at(stream, durable="all") == 1
    assert await began_at(stream, durable="next", start="next") == 12
    assert await began_at(stream, durable="sequence", start=4) == 4
    assert await began_at(stream, durable="time", start=moment) == 6


async def test_start_is_for_the_first_run_only(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lanes")
    await stream.publish(5)
    assert await began_at(stream) == 1
    assert await began_at(stream, start=3) == 7
    assert "start=… applies to a new consumer only" in caplog.text


async def test_start_that_a_workqueue_cannot_have(stream: Stream) -> None:
    await stream.client.jetstream().delete_stream(stream.name)
    await stream.create(retention="workqueue")
    with pytest.raises(lanes.ConfigError, match=r"cannot be created: .*deliver all"):
        await lanes.run(stream.source(start="next"), Recorder())


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("end", "start='end'"),
        (0, "start=0"),
        (True, "start=True"),
        (1 << 64, "sequence of 1 or more"),
        (datetime(2026, 1, 1), "start=2026-01-01T00:00:00 has no time zone"),  # noqa: DTZ001 - that is what is refused
    ],
)
async def test_start_that_is_none(start: Any, words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", durable="d", key=None, start=start)


async def test_start_time_is_told_in_utc() -> None:
    assert start_fields(datetime(2026, 1, 2, 3, tzinfo=UTC)) == {
        "deliver_policy": "by_start_time",
        "opt_start_time": "2026-01-02T03:00:00.000000Z",
    }


# --- acknowledgements


@pytest.mark.parametrize("acks", ["fire-and-forget", "confirmed", "confirmed-at-drain"])
async def test_acknowledgements_are_read_when_a_stop_returns(stream: Stream, acks: str) -> None:
    await stream.publish(300)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(stream.source(acks=acks), recorder, settings=ALONE)):
        with anyio.fail_after(20):
            await recorder.reached(300)
    with anyio.fail_after(5):
        await stream.acknowledged()
    assert recorder.repeats == 0


@pytest.mark.parametrize("acks", ["confirmed", "confirmed-at-drain"])
async def test_drained_survives_a_server_killed_at_once(fresh_stream: MakeStream, acks: str) -> None:
    """One copy: what such a server was told less than 0.1 s before it forgets, so a drain waits longer than that."""
    server, stream = await fresh_stream()
    await stream.publish(200)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(stream.source(acks=acks), recorder, settings=ALONE)):
        with anyio.fail_after(20):
            await recorder.reached(200)
    server.kill()
    await anyio.to_thread.run_sync(server.start)
    with anyio.fail_after(20):
        await until(lambda: stream.client.is_connected)
    info = await stream.consumer_info()
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_settled_means_confirmed(fresh_stream: MakeStream) -> None:
    """A server that stands still has not read an acknowledgement, so what it is for is in flight."""
    server, stream = await fresh_stream()
    await stream.publish(1)
    running_now, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def handle(message: lanes.Message) -> None:
        running_now.set()
        await go_on.wait()
        ended.set()

    source = stream.source(acks="confirmed")
    consumer = lanes.Consumer(source, handle, settings=ALONE)
    async with running(consumer):
        with anyio.fail_after(10):
            await running_now.wait()
            server.pause()
            try:
                go_on.set()
                await ended.wait()
                await until(lambda: bool(inner(source)._acks._unconfirmed))
                await inner(source)._connection.client._flush_pending()
                assert consumer.status().in_flight == 1
            finally:
                server.resume()
            await until(lambda: not consumer.status().in_flight)
        await stream.acknowledged()


async def test_confirmation_that_does_not_come_is_asked_for_again(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.acks.CONFIRM_TIMEOUT", 0.2)
    await stream.publish(1)
    source = stream.source(acks="confirmed")
    consumer = lanes.Consumer(source, recorder := Recorder(), settings=ALONE)
    lost: list[str] = []
    async with running(consumer):
        with anyio.fail_after(10):
            await recorder.reached(1)
            await until(lambda: not consumer.status().in_flight)
            client = inner(source)._connection.client
            publish = client.publish

            async def lose_one(subject: str, payload: bytes = b"", *rest: Any, **more: Any) -> None:
                if payload == b"+ACK" and not lost:
                    lost.append(subject)
                else:
                    await publish(subject, payload, *rest, **more)

            client.publish = lose_one  # type: ignore[method-assign]
            await stream.publish(1)
            await until(lambda: bool(lost))
            await stream.acknowledged()
            await until(lambda: not consumer.status().in_flight)
    assert recorder.repeats == 0


# --- several processes on one durable


async def test_shared_durable_is_worked_off_by_several(stream: Stream) -> None:
    await stream.publish(400)
    recorder = Recorder(lambda message: 0.005)
    few = lanes.Settings(concurrency=5, max_in_flight=10, order="none")
    consumers = [lanes.Consumer(stream.source(shared=True), recorder, settings=few) for _ in range(3)]
    finished: list[int] = []

    def count(message: lanes.Message) -> float:
        finished.append(message.position)
        return 0.005

    recorder._pause = count
    async with anyio.create_task_group() as tasks:
        for consumer in consumers:
            tasks.start_soon(consumer.run)
        with anyio.fail_after(20):
            await recorder.reached(400)
            await stream.acknowledged()
        for consumer in consumers:
            consumer.stop()
    assert sorted(finished) == list(range(1, 401))


async def test_shared_durable_is_not_taken_over_from_those_that_hold(stream: Stream) -> None:
    """The second one that starts leaves to the first what that one is working on."""
    await stream.publish(40)
    release = anyio.Event()
    held: list[int] = []

    async def hold(message: lanes.Message) -> None:
        held.append(message.position)
        await release.wait()

    first = lanes.Consumer(
        stream.source(shared=True), hold, settings=lanes.Settings(concurrency=10, max_in_flight=10, order="none")
    )
    async with running(first):
        with anyio.fail_after(10):
            await until(lambda: len(held) == 10)
        other = Recorder()
        async with running(lanes.Consumer(stream.source(shared=True), other, settings=SHARED)):
            with anyio.fail_after(10):
                await other.reached(30)
        release.set()
    assert other.done.isdisjoint(held)


@pytest.mark.parametrize("order", ["key", "partition", "serial"])
async def test_shared_durable_keeps_no_order(stream: Stream, order: Any) -> None:
    with pytest.raises(
        lanes.ConfigError, match=rf'order="{order}": several processes .* no order can be kept; use order="none"'
    ):
        await lanes.run(stream.source(shared=True), Recorder(), settings=lanes.Settings(order=order))


# --- the rest


async def test_lag_is_what_is_not_acknowledged(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.watch.CHECK_INTERVAL", 0.05)
    await stream.publish(30, keys=30)
    release = anyio.Event()

    async def hold(message: lanes.Message) -> None:
        await release.wait()

    consumer = lanes.Consumer(stream.source(), hold, settings=lanes.Settings(concurrency=10, max_in_flight=10))

    def lags() -> list[int | None]:
        return [partition.lag for partition in consumer.status().partitions.values()]

    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: lags() == [30])
            release.set()
            await until(lambda: lags() == [0])


async def test_inbox_on_a_given_connection_has_no_limits(stream: Stream) -> None:
    """With a limit the client would drop what the loop was too busy to take, and it would come back out of order."""
    source = stream.source(where=stream.client, acks="confirmed")
    await stream.publish(3_000, size=10)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(source, recorder, settings=ALONE)):
        await all_done(stream, recorder)
        for opened in (inner(source)._pulls._subscription, inner(source)._acks._subscription):
            subscription = opened._subscription
            assert subscription is not None
            assert (subscription._pending_msgs_limit, subscription._pending_bytes_limit) == (0, 0)


async def test_key_of_several_tokens(stream: Stream) -> None:
    await stream.client.publish(f"{stream.name}.eu.42.paid", b"")
    source = stream.source(key=subject_token(1, 2), durable=DURABLE)
    await source.open()
    room = Room(10, 1 << 20)
    await source.receive(room)
    with anyio.fail_after(10):
        (run,) = await source.receive(room)
    await source.aclose()
    assert isinstance(run, Delivered)
    assert run.run[0].key == b"eu.42"
    assert repr(subject_token(1, -1)) == "subject_token(1, -1)"
    assert whole_subject(run.run[0].raw) == f"{stream.name}.eu.42.paid".encode()  # type: ignore[arg-type]


async def test_no_leader_is_waited_for_and_then_said(fresh_stream: MakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer: for as long as ``start_timeout`` says, and the error can be tried again."""
    monkeypatch.setattr("lanes_jetstream.wire.connection.API_TIMEOUT", 0.2)
    server, stream = await fresh_stream()
    source = stream.source(where=stream.client, start_timeout=0.5)
    server.pause()
    try:
        with anyio.fail_after(10):
            with pytest.raises(SourceError, match=r"no answer to STREAM\.INFO") as refused:
                await source.open()
    finally:
        server.resume()
        await source.aclose()
    assert refused.value.retryable


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"acks": "later"}, "acks='later'.*confirmed-at-drain"),
        ({"out_of_range": "latest"}, "out_of_range='latest'"),
        ({"start_timeout": -1}, "start_timeout=-1"),
    ],
)
async def test_arguments_are_checked_when_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", durable="d", key=None, **arguments)


async def test_many_are_sent_in_one_piece_and_one_by_one_alike(stream: Stream) -> None:
    """Without what the client does not promise, and while it is not connected, each is published by itself."""
    arrived: list[tuple[str, bytes]] = []

    async def note(message: Msg) -> None:
        arrived.append((message.subject, message.data))

    subjects = [f"acks.{stream.name}.{number}" for number in range(50)]
    subscription = await stream.client.subscribe(f"acks.{stream.name}.*", cb=note)
    await send_all(stream.client, subjects, b"+ACK")
    await send_all(cast(Client, Publisher(stream.client)), subjects, b"+WPI")
    await stream.client.flush()
    with anyio.fail_after(10):
        await until(lambda: len(arrived) == 100)
    await subscription.unsubscribe()
    assert arrived == [(subject, b"+ACK") for subject in subjects] + [(subject, b"+WPI") for subject in subjects]


class Publisher:
    """A client of which only what it promises is there."""

    def __init__(self, client: Client) -> None:
        self.publish = client.publish
