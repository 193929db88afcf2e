"""``acks=`` decides when an acknowledgement counts as sent, and a reconnect repeats lost acknowledgements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

import lanes
from lanes_jetstream.wire.acks import send_all
from tests.jetstream.cohort_workload import FAST, CohortStream
from tests.jetstream.conftest import FreshStream
from tests.jetstream.workload import Recorder, Stream, all_done, inner, running, until

pytestmark = pytest.mark.anyio


SETTINGS = lanes.Settings(concurrency=50)


class Publisher:
    """A client with only its public methods."""

    def __init__(self, client: Client) -> None:
        self.publish = client.publish


@pytest.mark.parametrize("acks", ["fire-and-forget", "confirmed", "confirmed-at-drain"])
async def test_acknowledgements_are_read_when_a_stop_returns(stream: Stream, acks: str) -> None:
    await stream.publish(300)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(stream.source(acks=acks), recorder, settings=SETTINGS)):
        with anyio.fail_after(20):
            await recorder.reached(300)
    # Long before the server delivers a message again.
    with anyio.fail_after(20):
        await stream.acknowledged()
    assert recorder.repeats == 0


@pytest.mark.parametrize("kind", ["durable", "cohort"])
async def test_a_handler_that_acknowledges_its_messages_itself_is_named_once(
    stream: Stream, cohort_stream: CohortStream, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = stream.source() if kind == "durable" else cohort_stream.source("a")
    recorder = Recorder()

    async def handle(message: lanes.Message) -> None:
        await cast(Msg, message.raw).ack()
        await recorder(message)

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if "settled the message at" in each.getMessage()]

    async with running(lanes.Consumer(source, handle)):
        with anyio.fail_after(20):
            for count in (20, 40):
                if kind == "durable":
                    await stream.publish(20)
                else:
                    await cohort_stream.publish("a", "b", times=10)
                await recorder.reached(count)
            await until(lambda: bool(told()))
    (line,) = told()
    assert re.search(r"settled the message at \S+/\d+ position \d+ by message\.raw\. ", line), line
    assert line.endswith("Return from the handler instead")


async def test_no_redelivery_is_promised_for_a_message_that_its_handler_has_acknowledged(stream: Stream) -> None:
    await stream.publish(1)

    async def handle(message: lanes.Message) -> None:
        await cast(Msg, message.raw).ack()
        raise ValueError("after the ack")

    consumer = lanes.Consumer(stream.source(), handle, settings=lanes.Settings(retry=lanes.Retry(attempts=1)))
    with anyio.fail_after(20), pytest.raises(lanes.HandlerHalted, match="drained and the handler settled this message"):
        await consumer.run()


async def test_a_handler_that_leaves_the_acknowledgement_to_lanes_is_not_named(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        await all_done(stream, recorder)
    assert "settled the message" not in caplog.text


@pytest.mark.parametrize("acks", ["confirmed", "confirmed-at-drain"])
async def test_a_drain_survives_a_server_that_is_killed_at_once(fresh_stream: FreshStream, acks: str) -> None:
    """A killed server with one copy loses the last 0.1 s of acknowledgements, so a drain waits longer than that."""
    server, stream = await fresh_stream()
    await stream.publish(200)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(stream.source(acks=acks), recorder, settings=SETTINGS)):
        with anyio.fail_after(20):
            await recorder.reached(200)
    server.kill()
    await anyio.to_thread.run_sync(server.start)
    with anyio.fail_after(20):
        await until(lambda: stream.client.is_connected)
    info = await stream.consumer_info()
    assert (info.num_ack_pending, info.num_pending) == (0, 0)


async def test_confirmed_messages_stay_in_flight_until_the_server_confirms(fresh_stream: FreshStream) -> None:
    """A frozen server has not read an acknowledgement, so its message is in flight."""
    server, stream = await fresh_stream()
    await stream.publish(1)
    running_now, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    async def handle(message: lanes.Message) -> None:
        running_now.set()
        await go_on.wait()
        ended.set()

    source = stream.source(acks="confirmed")
    consumer = lanes.Consumer(source, handle, settings=SETTINGS)
    async with running(consumer):
        with anyio.fail_after(10):
            await running_now.wait()
            server.pause()
            try:
                go_on.set()
                await ended.wait()
                await until(lambda: bool(inner(source)._acks._unconfirmed))
                await inner(source).connection.client._flush_pending()
                assert consumer.status().in_flight == 1
            finally:
                server.resume()
            await until(lambda: not consumer.status().in_flight)
        await stream.acknowledged()


async def test_a_missing_confirmation_is_requested_again(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.acks.CONFIRM_TIMEOUT", 0.2)
    await stream.publish(1)
    source = stream.source(acks="confirmed")
    consumer = lanes.Consumer(source, recorder := Recorder(), settings=SETTINGS)
    lost: list[str] = []
    async with running(consumer):
        with anyio.fail_after(10):
            await recorder.reached(1)
            await until(lambda: not consumer.status().in_flight)
            client = inner(source).connection.client
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


async def test_a_batch_is_sent_like_single_acknowledgements(stream: Stream) -> None:
    """If the client lacks its private calls, or is not connected, each acknowledgement is published separately."""
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


async def test_an_inbox_on_a_callers_client_has_no_limits(stream: Stream) -> None:
    """With a limit, the client drops messages while the loop is busy, and they return out of order."""
    source = stream.source(where=stream.client, acks="confirmed")
    await stream.publish(3_000, size=10)
    recorder = Recorder(lambda message: 0.0)
    async with running(lanes.Consumer(source, recorder, settings=SETTINGS)):
        await all_done(stream, recorder)
        for opened in (inner(source)._pulls._subscription, inner(source)._acks._subscription):
            subscription = opened._subscription
            assert subscription is not None
            assert (subscription._pending_msgs_limit, subscription._pending_bytes_limit) == (0, 0)


async def test_acknowledgements_lost_with_a_connection_are_repeated(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clean stop right after a reconnect leaves no finished message unacknowledged."""
    recorder = Recorder()
    source = stream.source()
    consumer = lanes.Consumer(source, recorder, settings=FAST)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: hasattr(inner(source), "_pulls"))
        client = inner(source).connection.client
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
    # The server acts a moment after it has read the acknowledgements.
    with anyio.fail_after(10):
        await stream.acknowledged()
