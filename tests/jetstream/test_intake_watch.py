"""Deliveries that never arrive make the consumer unhealthy, while the server answers every request."""

from __future__ import annotations

import logging

import anyio
import pytest

import lanes
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.proxy import Losses, Proxy
from tests.jetstream.workload import Stream, running, until

pytestmark = pytest.mark.anyio

UNHEALTHY_AFTER = 3.0


class Counter:
    def __init__(self) -> None:
        self.handled = 0

    async def __call__(self, message: lanes.Message) -> None:
        self.handled += 1


async def is_unhealthy(consumer: lanes.Consumer, losses: Losses) -> str:
    """Wait until lost deliveries make the consumer unhealthy; return the reason."""
    began = anyio.current_time()
    await until(lambda: not consumer.healthy)
    assert anyio.current_time() - began > UNHEALTHY_AFTER and losses.undelivered
    (reason,) = consumer.health().reasons
    return reason


async def test_lost_deliveries_of_a_durable_make_the_consumer_unhealthy(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    losses, counter = Losses(), Counter()
    async with Proxy(stream.url, losses).open() as wire:
        source = stream.source(where=wire.url, ack_wait=2.0)
        consumer = lanes.Consumer(source, counter, settings=lanes.Settings(unhealthy_after=UNHEALTHY_AFTER))
        async with running(consumer):
            with anyio.fail_after(40):
                await stream.publish(5)
                await until(lambda: counter.handled == 5)
                # Without messages at the broker, silence is no fault.
                await anyio.sleep(1.5 * UNHEALTHY_AFTER)
                assert consumer.health().reasons == ()
                losses.deliveries = True
                await stream.publish(7)
                reason = await is_unhealthy(consumer, losses)
                assert reason.startswith(f"{stream.name}/0 delivers nothing for ")
                # The server has delivered each of them, and some of them again.
                await until(lambda: losses.undelivered > 7)
                # A busy machine may have to wait for the next look at the broker.
                await until(lambda: not consumer.healthy)
                (reason,) = consumer.health().reasons
                assert "although 7 messages wait at the broker and the buffer has room; the client reports no" in reason
                losses.deliveries = False
                await until(lambda: counter.handled >= 12)
                await until(lambda: consumer.health().reasons == ())
                await stream.acknowledged()
    lines = [each.getMessage() for each in caplog.records if "delivers" in each.getMessage()]
    assert [f"{stream.name}/0 delivers {what}" in line for line, what in zip(lines, ("nothing", "again"), strict=True)]


async def test_lost_deliveries_of_a_member_make_the_consumer_unhealthy(cohort_stream: CohortStream) -> None:
    losses, counter = Losses(), Counter()
    async with Proxy(cohort_stream.url, losses).open() as wire:
        source = cohort_stream.source("a", where=wire.url)
        consumer = lanes.Consumer(source, counter, settings=lanes.Settings(unhealthy_after=UNHEALTHY_AFTER))
        async with running(consumer):
            with anyio.fail_after(60):
                await until(lambda: len(consumer.status().partitions) == 4)
                await cohort_stream.publish(*cohort_stream.a_key_each())
                await until(lambda: counter.handled == 4)
                await anyio.sleep(1.5 * UNHEALTHY_AFTER)
                assert consumer.health().reasons == ()
                losses.deliveries = True
                await cohort_stream.publish(cohort_stream.key(2), times=3)
                reason = await is_unhealthy(consumer, losses)
                assert reason.startswith(f"{cohort_stream.name}/2 delivers nothing for ")
                losses.deliveries = False
                await until(lambda: counter.handled == 7)
                await until(lambda: consumer.health().reasons == ())


async def test_a_reached_max_ack_pending_of_a_shared_durable_is_the_reason(stream: Stream) -> None:
    release = anyio.Event()

    async def hold(message: lanes.Message) -> None:
        await release.wait()

    def consumer() -> lanes.Consumer:
        settings = lanes.Settings(order="none", unhealthy_after=UNHEALTHY_AFTER, concurrency=10, max_in_flight=10)
        return lanes.Consumer(stream.source(shared=True, max_ack_pending=10), hold, settings=settings)

    first, second = consumer(), consumer()
    await stream.publish(30)
    async with running(first):
        with anyio.fail_after(60):
            await until(lambda: first.status().running == 10)
            async with running(second):
                await until(lambda: second.ready and not second.healthy)
                (reason,) = second.health().reasons
                assert reason.startswith(f"{stream.name}/0 delivers nothing for ")
                assert (
                    f"although 20 messages wait at the broker and the buffer has room; consumer {stream.name}/"
                ) in reason
                assert "has reached max_ack_pending=10: its processes have not acknowledged 10 messages" in reason
                assert "the client" not in reason
                release.set()
                await until(lambda: second.health().reasons == ())
                await stream.acknowledged()
