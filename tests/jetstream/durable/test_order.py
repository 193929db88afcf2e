"""Order within a key on a real server: over one run, restarts, long handlers and lost deliveries."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

import lanes
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.workload import Recorder, Stream, all_done, crashing, inner, running

pytestmark = pytest.mark.anyio


def jitter() -> Callable[[lanes.Message], float]:
    chance = random.Random(7)
    return lambda message: chance.random() * 0.01


async def test_one_run_handles_each_message_once_in_order(stream: Stream) -> None:
    await stream.publish(2_000)
    recorder = Recorder(jitter())
    consumer = lanes.Consumer(stream.source(), recorder, settings=FAST)
    async with running(consumer):
        await all_done(stream, recorder)
    assert recorder.repeats == 0
    assert recorder.most_running > 10  # in parallel across keys
    assert consumer.status().peak_in_flight <= consumer.status().max_in_flight


@pytest.mark.parametrize("takeover", ["auto", "hold-back"])
async def test_a_restart_before_ack_wait_keeps_order(stream: Stream, takeover: str) -> None:
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


async def test_a_queued_message_outlives_ack_wait(stream: Stream) -> None:
    """Messages after a slow one of the same key are extended too, so no message is delivered twice."""
    await stream.publish(8, keys=1)
    recorder = Recorder(lambda message: 1.5)
    consumer = lanes.Consumer(stream.source(ack_wait=5.0), recorder, settings=FAST)
    async with running(consumer):
        await all_done(stream, recorder)  # 12 s of work, more than twice ack_wait
        assert consumer.status().redelivered == {}
    assert (await stream.consumer_info()).num_redelivered == 0


async def test_a_lost_delivery_is_detected_by_its_number(stream: Stream, caplog: Any) -> None:
    """A lost delivery would return after newer messages of its key."""
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

        def drop_once(message: Any) -> None:
            # Not the last requested message: only heartbeats would reveal its loss.
            if not dropped and not message.subject.startswith(pulls.inbox) and pulls.outstanding > 1:
                dropped.append(message)
                return
            receive(message)

        subscription = pulls._subscription._subscription
        assert subscription is not None
        subscription._pending_queue._receive = drop_once  # type: ignore[attr-defined]
        await all_done(stream, recorder)
    assert dropped
    assert recorder.repeats == 0
    assert "missing" in caplog.text


async def test_a_clean_restart_repeats_nothing(stream: Stream) -> None:
    await stream.publish(1_000)
    recorder = Recorder(jitter())
    for at in (200, 500):
        async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
            with anyio.fail_after(20):
                await recorder.reached(at)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        await all_done(stream, recorder)
    assert recorder.repeats == 0
