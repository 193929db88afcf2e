"""max_in_flight and max_in_flight_bytes bound the messages that a source requests and holds."""

from __future__ import annotations

import anyio
import pytest

import lanes
from tests.jetstream.workload import Recorder, Stream, inner, running

pytestmark = pytest.mark.anyio


async def test_requests_never_exceed_max_in_flight(stream: Stream) -> None:
    """Messages held here and messages still to come stay within the bound together.

    The server's own count is no measure. The server applies acknowledgements a moment after it reads them, and may
    answer the next pull earlier.
    """
    await stream.publish(1_500)
    source = stream.source()
    bound, most = 64, 0

    async def handler(message: lanes.Message) -> None:
        nonlocal most
        pulls = inner(source)._pulls
        most = max(most, consumer.status().in_flight + pulls.outstanding + len(pulls.arrived))
        await recorder(message)

    recorder = Recorder(lambda message: 0.002)
    consumer = lanes.Consumer(source, handler, settings=lanes.Settings(concurrency=20, max_in_flight=bound))
    async with running(consumer):
        with anyio.fail_after(40):
            await recorder.reached(1_500)
    assert most == bound
    assert consumer.status().peak_in_flight <= bound


async def test_a_slow_handler_bounds_the_memory(stream: Stream) -> None:
    """100 messages of 50 kB and room for 10: the source never holds much more than the bound."""
    size, bound = 50_000, 500_000
    await stream.publish(100, keys=100, size=size)
    recorder = Recorder(lambda message: 0.02)
    settings = lanes.Settings(concurrency=4, max_in_flight_bytes=bound)
    consumer = lanes.Consumer(stream.source(), recorder, settings=settings)
    async with running(consumer):
        with anyio.fail_after(40):
            await recorder.reached(100)
        assert bound / 2 < consumer.status().peak_in_flight_bytes <= 2 * bound
    assert recorder.violations == []


async def test_a_message_above_the_byte_bound_is_handled(stream: Stream) -> None:
    await stream.publish(3, keys=3, size=100)
    await stream.publish(2, keys=3, size=200_000)
    await stream.publish(3, keys=3, size=100)
    recorder = Recorder()
    settings = lanes.Settings(concurrency=4, max_in_flight_bytes=10_000)
    async with running(lanes.Consumer(stream.source(), recorder, settings=settings)):
        with anyio.fail_after(20):
            await recorder.reached(8)
    assert recorder.violations == []
