"""The lag of a durable counts unacknowledged and undelivered messages."""

from __future__ import annotations

import anyio
import pytest

import lanes
from tests.jetstream.workload import Stream, running, until

pytestmark = pytest.mark.anyio


async def test_lag_counts_unacknowledged_and_undelivered_messages(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.durable.watch.CHECK_INTERVAL", 0.05)
    await stream.publish(30, keys=30)
    release = anyio.Event()

    async def hold(message: lanes.Message) -> None:
        await release.wait()

    consumer = lanes.Consumer(stream.source(), hold, settings=lanes.Settings(concurrency=10, max_in_flight=10))

    def lags() -> list[int | None]:
        return [partition.lag for partition in consumer.status().partitions.values()]

    async with running(consumer):
        with anyio.fail_after(10):
            await until(lambda: lags() == [30])
            release.set()
            await until(lambda: lags() == [0])
