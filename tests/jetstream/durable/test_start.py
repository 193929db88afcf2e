"""A new consumer begins at the position of start=, and an invalid start is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import anyio
import pytest

import lanes
from lanes.errors import SourceError
from lanes_jetstream import JetStreamSource
from lanes_jetstream.wire.stream import start_fields
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.workload import Recorder, Stream, moment_behind, running, until

pytestmark = pytest.mark.anyio


async def first_sequence(stream: Stream, **arguments: Any) -> int:
    """The first sequence that a new consumer delivers, after one more message is published."""
    recorder = Recorder()
    source = stream.source(**arguments)
    consumer = lanes.Consumer(source, recorder, settings=FAST)
    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: consumer.ready)
            await stream.publish(1)
            await recorder.reached(1)
            await until(lambda: stream.published in recorder.done)
    return min(recorder.done)


async def test_a_new_consumer_begins_at_start(stream: Stream) -> None:
    await stream.publish(5)
    moment = (await moment_behind(stream.client, stream.name, 5)).astimezone(timezone(timedelta(hours=5)))
    await stream.publish(5)
    assert await first_sequence(stream, durable="all") == 1
    assert await first_sequence(stream, durable="next", start="next") == 12
    assert await first_sequence(stream, durable="sequence", start=4) == 4
    assert await first_sequence(stream, durable="time", start=moment) == 6


async def test_start_applies_to_a_new_consumer_only(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lanes")
    await stream.publish(5)
    assert await first_sequence(stream) == 1
    assert await first_sequence(stream, start=3) == 7
    assert "start=… applies to a new consumer only" in caplog.text


async def test_a_start_within_a_work_queue_is_refused(stream: Stream) -> None:
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
async def test_an_invalid_start_is_refused(start: Any, words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        JetStreamSource("nats://x", stream="S", durable="d", key=None, start=start)


async def test_a_start_time_is_sent_in_utc() -> None:
    assert start_fields(datetime(2026, 1, 2, 3, tzinfo=UTC)) == {
        "deliver_policy": "by_start_time",
        "opt_start_time": "2026-01-02T03:00:00.000000Z",
    }


async def test_a_missing_leader_is_waited_for_until_start_timeout(
    fresh_stream: FreshStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer is retried until ``start_timeout``, and the error is retryable."""
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
