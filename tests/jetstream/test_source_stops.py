"""What no source can go on from: it stops by itself and says what happened, also while its connection holds."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

import lanes
from lanes_jetstream.durable.consumer import ConsumerState, DurableConsumer
from lanes_jetstream.durable.watch import DurableWatch
from lanes_jetstream.wire.connection import ApiError, Connection
from lanes_jetstream.wire.stream import StreamState
from tests.components import NatsServer
from tests.jetstream.conftest import connect
from tests.jetstream.workload import DURABLE, Recorder, Stream, running, until

pytestmark = pytest.mark.anyio

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second between two looks tells nothing that a tenth of it does not."""
    monkeypatch.setattr("lanes_jetstream.durable.watch.CHECK_INTERVAL", 0.1)


@asynccontextmanager
async def stops(consumer: lanes.Consumer, words: str) -> AsyncIterator[None]:
    """Run the consumer beside the block, and see that it ends by itself, with an error that says so."""
    ended = anyio.Event()

    async def run() -> None:
        with pytest.raises(lanes.SourceError, match=words):
            await consumer.run()
        ended.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield
        with anyio.fail_after(20):
            await ended.wait()


def held_up(recorder: Recorder, positions: int) -> tuple[Callable[[lanes.Message], Awaitable[None]], anyio.Event]:
    """A handler that lets so many positions through, and the others only after the event."""
    go_on = anyio.Event()

    async def handle(message: lanes.Message) -> None:
        if message.position > positions:
            await go_on.wait()
        await recorder(message)

    return handle, go_on


def lag_of(consumer: lanes.Consumer) -> int | None:
    """Of its one partition."""
    return next((partition.lag for partition in consumer.status().partitions.values()), None)


async def test_stream_recreated_stops_loudly(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "^stream .* was deleted "):
        with anyio.fail_after(10):
            await recorder.reached(20)
        await stream.client.jetstream().delete_stream(stream.name)
        await stream.create()
        await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=10_000)
        await stream.publish(20, seed=2)
    # Nothing of the new stream passes for what was handled of the old one.
    assert await stream.ack_pending() + len(recorder.done) <= 40


async def test_stream_recreated_behind_a_full_consumer(stream: Stream) -> None:
    """No pull request is open that the server could end."""
    await stream.publish(20)
    recorder = Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    # It may be looked at while it is not there.
    async with stops(consumer, "^stream .* was deleted (and created again|during the run)"):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        await stream.client.jetstream().delete_stream(stream.name)
        await stream.create()
        await stream.add_consumer(metadata={"lanes-managed": "1"}, max_ack_pending=10_000)


def test_a_consumer_that_went_with_its_stream_is_told_as_that() -> None:
    """It may go between a look at the stream and one at the consumer."""
    fields: Any = dict.fromkeys(("filter_subject", "ack_wait", "max_ack_pending"), 1)
    durable = DurableConsumer(Connection("nats://x"), "S", "d", **fields, start={}, modify=False, hold_back=False)
    assert durable.failure_text(ApiError(10059, "stream not found", 404)).startswith(
        "stream 'S' was deleted during the run"
    )
    assert durable.failure_text(ApiError(10014, "consumer not found", 404)).startswith(
        "consumer S/d was deleted; prevent that"
    )


async def test_stream_deleted(stream: Stream) -> None:
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "^stream .* was deleted during the run"):
        await stream.publish(5)
        with anyio.fail_after(10):
            await recorder.reached(5)
        await stream.client.jetstream().delete_stream(stream.name)
    await stream.create()


@pytest.mark.parametrize("filtered", [False, True])
async def test_purge_of_what_was_not_delivered(stream: Stream, filtered: bool) -> None:
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


async def test_purge_is_gone_on_from_where_that_is_asked_for(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
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


async def test_limits_that_overtook_a_stopped_consumer(stream: Stream) -> None:
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
        ("workqueue", 0, None),  # what is gone was acknowledged before the server was killed
        ("workqueue", 8, "sequences 9 to 10"),
        ("limits", 10, None),
    ],
)
def test_what_a_killed_server_has_forgotten_is_not_lost(retention: str, highest: int, lost: str | None) -> None:
    stream = StreamState(
        "now", first=11, last=20, retention=retention, drops_single_messages=False, loses_last_acks=True
    )
    state = ConsumerState(0, 0, highest=5, deliveries=5, settled_above_floor=False, undelivered=15, paused=False)
    consumer: Any = SimpleNamespace(config={})
    watch = DurableWatch(consumer, consumer, "jetstream S/d", out_of_range="fail", alone=True)
    if lost is None:
        watch.check_dropped(stream, state, highest)
    else:
        with pytest.raises(lanes.SourceError, match=lost):
            watch.check_dropped(stream, state, highest)


async def test_purge_of_what_is_finished_is_nothing(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(20)
            await stream.acknowledged()
            await stream.client.jetstream().purge_stream(stream.name)
            await stream.publish(20, seed=2)
            await recorder.reached(40)


async def test_stream_that_keeps_one_message_a_subject(stream: Stream) -> None:
    """What it drops it drops by design."""
    await stream.client.jetstream().delete_stream(stream.name)
    await stream.create(max_msgs_per_subject=1)
    first = stream.source()
    await first.open()
    await first.aclose()
    for number in range(15):
        await stream.client.publish(f"{stream.name}.{number % 5}", b"")
    await stream.client.flush()
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder)):
        with anyio.fail_after(10):
            await recorder.reached(5)
    assert recorder.done == set(range(11, 16))


async def test_durable_deleted_behind_a_full_consumer(stream: Stream) -> None:
    await stream.publish(20)
    recorder = Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    async with stops(consumer, "was deleted; prevent that, or start again with a new one, which begins at start="):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        await stream.client.jetstream().delete_consumer(stream.name, DURABLE)


async def test_durable_changed_in_mid_run(stream: Stream) -> None:
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


async def test_second_process_on_a_durable_whose_first_is_full(stream: Stream) -> None:
    """The first has no request open that the second could see; what the second is given gives it away."""
    await stream.publish(50)
    recorder, other = Recorder(), Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    async with stops(consumer, "pulled by another process"):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        async with running(lanes.Consumer(stream.source(), other)):
            with anyio.fail_after(10):
                await other.reached(50)


async def test_somebody_else_pulls_an_idle_durable(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.watch.SUSPICION", 0.5)
    await stream.publish(5)
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "pulled by another process"):
        with anyio.fail_after(10):
            await recorder.reached(5)
        inbox = stream.client.new_inbox()
        subscription = await stream.client.subscribe(inbox)
        request = json.dumps({"batch": 1, "expires": 30 * SECOND}).encode()
        await stream.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{DURABLE}", request, reply=inbox)
        await stream.client.flush()
    await subscription.unsubscribe()


_USERS = """
accounts {{ A {{ jetstream: enabled, users: [
    {{user: admin, password: admin}},
    {{user: app, password: app, permissions: {{publish: {{deny: [{denied}]}}}}}}
]}}}}
no_auth_user: admin
"""


@pytest.mark.parametrize("verb", ["MSG.NEXT", "ACK"])
@pytest.mark.parametrize("own", [True, False])
async def test_permission_lost_in_mid_run(fresh_stream: MakeStream, verb: str, own: bool) -> None:
    server, stream = await fresh_stream(config=_USERS.format(denied=""))
    await stream.publish(20)
    recorder = Recorder()
    url = server.url.replace("nats://", "nats://app:app@")
    client = None
    if not own:
        client = await connect(url)
    settings = lanes.Settings(max_in_flight=10, concurrency=10)
    consumer = lanes.Consumer(stream.source(where=client or url), recorder, settings=settings)
    async with stops(consumer, r"permissions violation for publish to .*permit it"):
        with anyio.fail_after(10):
            await recorder.reached(20)
            await stream.acknowledged()
        denied = '"$JS.API.CONSUMER.MSG.NEXT.>"' if verb == "MSG.NEXT" else '"$JS.ACK.>"'
        reload(server, _USERS.format(denied=denied))
        with anyio.move_on_after(15):
            # The server reads its file a moment after it was told to.
            while consumer.ready:
                await stream.publish(20, seed=2)
                await anyio.sleep(0.1)
    if client is not None:
        await client.close()


async def test_permission_missing_at_the_start(fresh_stream: MakeStream) -> None:
    server, stream = await fresh_stream(config=_USERS.format(denied='"$JS.API.CONSUMER.INFO.>"'))
    url = server.url.replace("nats://", "nats://app:app@")
    with anyio.fail_after(4):
        with pytest.raises(lanes.SourceError, match=r"permissions violation .*consumer\.info.*; permit it"):
            await lanes.run(stream.source(where=url), Recorder())


async def test_account_that_may_not_have_another_consumer(fresh_stream: MakeStream) -> None:
    accounts = "accounts { A { jetstream: { max_consumers: 1 }, users: [{user: a, password: b}] } }\nno_auth_user: a"
    _, stream = await fresh_stream(config=accounts)
    first = stream.source(durable="first")
    await first.open()
    await first.aclose()
    with pytest.raises(lanes.ConfigError, match=r"cannot be created: maximum consumers limit reached"):
        await lanes.run(stream.source(), Recorder())


def reload(server: NatsServer, config: str) -> None:
    """Give a server another configuration while it runs."""
    (server.folder / "nats.conf").write_text(config)
    server._process.signal(signal.SIGHUP)
