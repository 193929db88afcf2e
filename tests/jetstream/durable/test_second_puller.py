"""A second process that pulls the durable is detected at the start and during the run."""

from __future__ import annotations

import asyncio
import json

import anyio
import pytest

import lanes
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.durable.test_dropped_messages import held_up
from tests.jetstream.workload import DURABLE, SECOND, Recorder, Stream, running, stops, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("frequent_checks")]


async def test_two_processes_that_start_together_stop(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither process sees the other's pull at its start; the delivery numbers reveal it."""
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


async def test_a_second_process_is_refused_at_its_start(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.source._OTHER_PULLER_WAIT", 1.0)
    await stream.publish(20)
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(10):
            await recorder.reached(20)
        with pytest.raises(lanes.ConfigError, match="pulled by another process"):
            await asyncio.wait_for(lanes.run(stream.source(), recorder), 20)


async def test_a_second_process_beside_a_full_one_is_detected(stream: Stream) -> None:
    """The full process has no open request that the second could see; deliveries to the second reveal it."""
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


async def test_a_foreign_pull_on_an_idle_durable_is_detected(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
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
