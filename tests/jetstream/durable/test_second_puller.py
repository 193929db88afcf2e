"""A second process on a durable is refused within 3 s, or detected during the run; the error names the cohort."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import anyio
import pytest
from nats.aio.msg import Msg

import lanes
from lanes.core.types import Room
from lanes.source import Assigned, Delivered
from lanes_jetstream.durable.presence import Presence
from lanes_jetstream.durable.takeover import POLL_INTERVAL
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.durable.test_dropped_messages import held_up
from tests.jetstream.workload import DURABLE, SECOND, Recorder, Stream, inner, running, stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


REFUSED = (
    "consumer {} is pulled by another client, so no key's order can be kept; stop one of them, or let them share the "
    "stream: pass cohort=… in place of durable=… in each. (With a durable of its own, each client would handle every "
    'message); or give up order: shared=True and order="none"'
)


@pytest.fixture
def unannounced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that may not publish to the subject of their presence."""

    async def nothing(presence: Presence) -> bool:
        return False

    monkeypatch.setattr(Presence, "ask", nothing)
    monkeypatch.setattr(Presence, "announce", nothing)


async def refusal(stream: Stream, recorder: Recorder) -> tuple[str, float]:
    """Start a second process, and return its error with the seconds of its waits before the error.

    The first process answers each question at once, but a busy machine may take any time for it.
    """
    asked: list[Presence] = []
    ask = Presence.ask

    async def noted(presence: Presence) -> bool | None:
        asked.append(presence)
        return await ask(presence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Presence, "ask", noted)
        with pytest.raises(lanes.ConfigError) as caught:
            await asyncio.wait_for(lanes.run(stream.source(), recorder), 40)
    return str(caught.value), (len(asked) - 1) * POLL_INTERVAL


@pytest.mark.usefixtures("unannounced")
async def test_two_processes_that_start_together_stop(stream: Stream) -> None:
    """Neither process sees the other's pull at its start; the delivery numbers reveal it."""
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
    assert "pulled by another client" in ended[0]


@pytest.mark.parametrize("announced", [True, False])
async def test_a_second_process_is_refused_at_its_start(
    stream: Stream, announced: bool, request: pytest.FixtureRequest
) -> None:
    if not announced:
        request.getfixturevalue("unannounced")
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(10):
            await recorder.reached(20)
        text, seconds = await refusal(stream, recorder)
        assert text == REFUSED.format(f"{stream.name}/{DURABLE}")
        assert 0 <= seconds < 3
        await stream.publish(20, seed=2)
        with anyio.fail_after(10):
            await recorder.reached(40)
    assert recorder.repeats == 0


@pytest.mark.parametrize("slow", ["full", "backlog"])
async def test_a_second_process_beside_a_busy_one_is_refused(stream: Stream, slow: str) -> None:
    """The busy process has no open request that the second could see."""
    await stream.publish(200)
    recorder, other = Recorder(lambda message: 0.05), Recorder()
    handle, release = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=5)
    consumer = lanes.Consumer(stream.source(), handle if slow == "full" else recorder, settings=settings)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        text, seconds = await refusal(stream, other)
        assert text == REFUSED.format(f"{stream.name}/{DURABLE}")
        assert 0 <= seconds < 3
        release.set()
        with anyio.fail_after(20):
            await recorder.reached(200)
    assert not other.done
    assert (recorder.repeats, recorder.violations) == (0, [])


async def test_only_one_of_several_processes_that_start_together_remains(stream: Stream) -> None:
    await stream.add_consumer(max_ack_pending=1_000, metadata={"lanes-managed": "1"})
    await stream.publish(300)
    recorder = Recorder(lambda message: 0.01)
    ended: list[str] = []

    async def run() -> None:
        consumer = lanes.Consumer(stream.source(), recorder, settings=lanes.Settings(concurrency=20, max_in_flight=50))
        try:
            await consumer.run()
        except lanes.LanesError as error:
            ended.append(str(error))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(run)
        with anyio.fail_after(20):
            await recorder.reached(300)
            await until(lambda: len(ended) == 3)
        tasks.cancel_scope.cancel()
    assert all("pass cohort=… in place of durable=…" in text for text in ended)
    assert (recorder.repeats, recorder.violations) == (0, [])


async def test_a_second_process_waits_for_one_that_stops(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    await stream.publish(20)
    recorder = Recorder()
    first = lanes.Consumer(stream.source(), recorder, settings=FAST)
    second = lanes.Consumer(stream.source(), recorder, settings=FAST)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        with anyio.fail_after(10):
            await recorder.reached(20)
        tasks.start_soon(second.run)
        await until(lambda: "another process consumes it; waiting up to 2 s until it stops" in caplog.text)
        first.stop()
        await second.opened()
        await stream.publish(20, seed=2)
        with anyio.fail_after(10):
            await recorder.reached(40)
        second.stop()
    assert recorder.repeats == 0


@pytest.fixture
async def silent(stream: Stream) -> AsyncIterator[list[bytes]]:
    """A process that subscribes and does not answer, as on a lost machine; the questions that reach it."""
    asked: list[bytes] = []

    async def receive(message: Msg) -> None:
        asked.append(message.data)

    subscription = await stream.client.subscribe(f"_INBOX.lanes.{stream.name}.{DURABLE}", cb=receive)
    await stream.client.flush()
    yield asked
    await subscription.unsubscribe()


async def test_a_start_waits_for_the_requests_of_a_lost_machine(
    stream: Stream, silent: list[bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.presence._ASK_TIMEOUT", 0.2)
    await stream.add_consumer(metadata={"lanes-managed": "1"}, ack_wait=30 * SECOND)
    inbox = stream.client.new_inbox()
    subscription = await stream.client.subscribe(inbox)
    # Longer than a start waits for a process that answers.
    request = json.dumps({"batch": 1, "expires": 4 * SECOND}).encode()
    await stream.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{DURABLE}", request, reply=inbox)
    await stream.client.flush()
    recorder = Recorder()
    consumer = lanes.Consumer(stream.source(), recorder, settings=FAST)
    async with running(consumer):
        with anyio.fail_after(20):
            await consumer.opened()
            await stream.publish(20)
            await recorder.reached(20)
    assert silent
    assert "pulls and does not answer, so its machine may be lost; waiting up to 31 s" in caplog.text
    await subscription.unsubscribe()


@pytest.mark.usefixtures("unannounced")
async def test_a_second_process_beside_a_full_one_is_detected(stream: Stream) -> None:
    """The full process has no open request that the second could see; deliveries to the second reveal it."""
    await stream.publish(50)
    recorder, other = Recorder(), Recorder()
    handle, _ = held_up(recorder, 0)
    settings = lanes.Settings(max_in_flight=5, concurrency=5, drain_timeout=0.1, grace=0.1)
    consumer = lanes.Consumer(stream.source(), handle, settings=settings)
    async with stops(consumer, "pulled by another client"):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready and consumer.status().in_flight == 5)
        async with running(lanes.Consumer(stream.source(), other)):
            with anyio.fail_after(10):
                await other.reached(50)


async def test_a_foreign_pull_on_an_idle_durable_is_detected(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.watch.SUSPICION", 0.5)
    await stream.publish(5)
    recorder = Recorder()
    async with stops(lanes.Consumer(stream.source(), recorder), "pulled by another client"):
        with anyio.fail_after(10):
            await recorder.reached(5)
        inbox = stream.client.new_inbox()
        subscription = await stream.client.subscribe(inbox)
        request = json.dumps({"batch": 1, "expires": 30 * SECOND}).encode()
        await stream.client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{DURABLE}", request, reply=inbox)
        await stream.client.flush()
    await subscription.unsubscribe()


async def test_waiting_messages_are_no_sign_of_a_second_process(stream: Stream) -> None:
    """The server counts deliveries that the source has received, and that the busy consumer has not requested yet."""
    source = stream.source()
    await source.open()
    try:
        room = Room(10, 1 << 20)
        assert [type(event) for event in await source.receive(room)] == [Assigned]
        await stream.publish(1)
        await source.receive(room)
        # The request of ten messages is still open.
        await stream.publish(9)
        watch = inner(source)._watch
        await until(lambda: watch.lag == 10 or watch.failure is not None)
        (delivered,) = await source.receive(room)
        assert isinstance(delivered, Delivered)
        assert [message.position for message in delivered.run] == list(range(2, 11))
    finally:
        await source.aclose()
