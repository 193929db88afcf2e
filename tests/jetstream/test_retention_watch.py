"""A held message raises an alarm before the server deletes it, by ``max_age`` or ``max_msgs`` of the stream."""

from __future__ import annotations

import time

import anyio
import pytest

import lanes
from lanes.observe.status import Expiring
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.conftest import MakeCohortStream
from tests.jetstream.workload import Stream, running, unique, until

pytestmark = pytest.mark.anyio

AGE = 20


def expiring(consumer: lanes.Consumer) -> Expiring | None:
    found = [each.expiring for each in consumer.status().partitions.values() if each.expiring is not None]
    return found[0] if found else None


async def first_sequence(stream: Stream | CohortStream) -> int:
    info = await stream.client.jetstream().stream_info(stream.name)
    return info.state.first_seq


async def hold_first(message: lanes.Message) -> None:
    """Hold the first message of the stream."""
    if message.position == 1:
        raise lanes.Nak("later", delay=600)


@pytest.fixture
async def aged(stream: Stream) -> Stream:
    """A second stream, whose messages live for ``AGE`` seconds."""
    return Stream(stream.url, stream.client, unique("A"))


@pytest.mark.slow
async def test_a_held_message_of_a_durable_raises_an_alarm_before_max_age(
    aged: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    await aged.create(max_age=AGE)
    consumer = lanes.Consumer(aged.source(), hold_first)
    written = time.time()
    await aged.publish(5)
    async with running(consumer):
        with anyio.fail_after(60):
            await until(lambda: consumer.active and consumer.status().held == 1)
            await until(lambda: expiring(consumer) is not None)
            raised, left = time.time() - written, expiring(consumer)
            assert left is not None and (left.position, left.rule) == (1, f"max_age={AGE} s")
            # A tenth is left at least, and not much more.
            assert 2.0 <= left.left <= 5.0 and raised <= 18.0
            assert await first_sequence(aged) == 1
            while await first_sequence(aged) == 1:
                await anyio.sleep(0.1)
            assert time.time() - written >= raised + left.left - 0.5
            await until(lambda: "may have deleted it" in caplog.text)
    await aged.client.jetstream().delete_stream(aged.name)
    lines = [line for line in caplog.messages if " is unfinished for " in line]
    assert len(lines) == 2 and f"{aged.name}/0 position 1, key " in lines[0] and f"by max_age={AGE} s" in lines[0]


@pytest.mark.slow
async def test_a_held_message_of_a_durable_raises_an_alarm_before_max_msgs(aged: Stream) -> None:
    await aged.create(max_msgs=400)
    consumer = lanes.Consumer(aged.source(), hold_first)
    await aged.publish(1)
    alarm: Expiring | None = None
    rounds = at = 0
    async with running(consumer):
        with anyio.fail_after(60):
            await until(lambda: consumer.active and consumer.status().held == 1)
            while await first_sequence(aged) == 1:
                await aged.publish(8)
                await anyio.sleep(0.5)
                rounds += 1
                if alarm is None and (alarm := expiring(consumer)) is not None:
                    at = rounds
    await aged.client.jetstream().delete_stream(aged.name)
    assert alarm is not None and alarm.position == 1 and alarm.rule == "max_msgs=400"
    assert 0.5 * rounds <= at <= 0.9 * rounds, (at, rounds, alarm)


@pytest.mark.slow
async def test_a_held_message_of_a_member_raises_an_alarm_before_max_age(make_cohort_stream: MakeCohortStream) -> None:
    stream = await make_cohort_stream(max_age=AGE * 1_000_000_000)
    consumer = lanes.Consumer(stream.source("a"), hold_first)
    written = time.time()
    await stream.publish(*stream.a_key_each())
    async with running(consumer):
        with anyio.fail_after(60):
            await until(lambda: consumer.active and consumer.status().held == 1)
            await until(lambda: expiring(consumer) is not None)
            left = expiring(consumer)
            assert left is not None and (left.position, left.rule) == (1, f"max_age={AGE} s")
            assert 2.0 <= left.left <= 5.0 and time.time() - written <= 18.0
