"""out_of_range=: messages that a purge or the limits dropped before their delivery stop the source, or are skipped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream.durable.consumer import ConsumerState
from lanes_jetstream.durable.watch import DurableWatch
from lanes_jetstream.wire.intake import Intake
from lanes_jetstream.wire.stream import StreamState
from tests.jetstream.workload import Recorder, Stream, running, stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


def held_up(recorder: Recorder, positions: int) -> tuple[Callable[[lanes.Message], Awaitable[None]], anyio.Event]:
    """A handler that lets the first positions through, and the others only after the event."""
    go_on = anyio.Event()

    async def handle(message: lanes.Message) -> None:
        if message.position > positions:
            await go_on.wait()
        await recorder(message)

    return handle, go_on


def lag_of(consumer: lanes.Consumer) -> int | None:
    """The lag of the only partition."""
    return next((partition.lag for partition in consumer.status().partitions.values()), None)


@pytest.mark.parametrize("filtered", [False, True])
async def test_a_purge_of_undelivered_messages_stops_the_source(stream: Stream, filtered: bool) -> None:
    await stream.publish(100)
    recorder = Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    source = stream.source(filter_subject=f"{stream.name}.*" if filtered else None)
    consumer = lanes.Consumer(source, handle, settings=settings)
    async with stops(consumer, r"begins at sequence 101, .*dropped before they were delivered.*purged"):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and lag_of(consumer) == 100)
        await stream.client.jetstream().purge_stream(stream.name)


async def test_a_purge_is_skipped_with_out_of_range_earliest(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    await stream.publish(100, keys=100)
    recorder = Recorder()
    handle, go_on = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5)
    consumer = lanes.Consumer(stream.source(out_of_range="earliest"), handle, settings=settings)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
            await stream.client.jetstream().purge_stream(stream.name)
            await until(lambda: "dropped before they were delivered" in caplog.text)
            go_on.set()
            await stream.publish(10, seed=2)
            await recorder.reached(15)
    assert caplog.text.count("dropped before they were delivered") == 1
    assert recorder.done == {1, 2, 3, 4, 5, *range(101, 111)}


async def test_limits_that_dropped_messages_of_a_stopped_consumer_stop_the_start(stream: Stream) -> None:
    await stream.publish(20)
    async with running(lanes.Consumer(stream.source(), recorder := Recorder())):
        with anyio.fail_after(10):
            await recorder.reached(20)
    await stream.publish(20)
    await stream.client.jetstream().update_stream(name=stream.name, subjects=[f"{stream.name}.>"], max_msgs=10)
    with pytest.raises(lanes.SourceError, match=r"sequences 21 to 30 were dropped.*earliest"), anyio.fail_after(10):
        await lanes.run(stream.source(), recorder)


@pytest.mark.parametrize(
    ("retention", "highest", "lost"),
    [
        ("limits", 0, "sequences 6 to 10"),
        ("workqueue", 0, None),  # the dropped messages were acknowledged before the kill
        ("workqueue", 8, "sequences 9 to 10"),
        ("limits", 10, None),
    ],
)
def test_a_stale_cursor_of_a_killed_server_is_no_loss(retention: str, highest: int, lost: str | None) -> None:
    stream = StreamState(
        "now",
        first=11,
        last=20,
        retention=retention,
        drops_single_messages=False,
        loses_last_acks=True,
        intake=Intake({}, (), transforms=False),
    )
    state = ConsumerState(0, 0, highest=5, deliveries=5, settled_above_floor=False, undelivered=15, paused=False)
    consumer: Any = SimpleNamespace(config={}, stream="S")
    watch = DurableWatch(connection=consumer, durable=consumer, name="jetstream S/d", out_of_range="fail", alone=True)
    if lost is None:
        watch.check_dropped(stream, state, highest)
    else:
        with pytest.raises(lanes.SourceError, match=lost):
            watch.check_dropped(stream, state, highest)


async def test_a_purge_of_finished_messages_is_ignored(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(20)
            await stream.acknowledged()
            await stream.client.jetstream().purge_stream(stream.name)
            await stream.publish(20, seed=2)
            await recorder.reached(40)


async def test_a_stream_that_keeps_one_message_a_subject_is_not_checked(stream: Stream) -> None:
    """Such a stream drops single messages by design."""
    await stream.client.jetstream().delete_stream(stream.name)
    await stream.create(max_msgs_per_subject=1)
    first = stream.source()
    await first.open()
    await first.aclose()
    for number in range(15):
        # With an answer, so that each message is stored before the start.
        await stream.client.jetstream().publish(f"{stream.name}.{number % 5}", b"", timeout=20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(5)
    assert recorder.done == set(range(11, 16))
