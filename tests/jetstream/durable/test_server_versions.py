"""Every supported nats-server version runs the source, and older servers are refused."""

from __future__ import annotations

import logging

import anyio
import pytest

import lanes
from lanes_jetstream.durable.takeover import RESET_SINCE
from lanes_jetstream.wire.connection import OLDEST_SERVER
from tests.jetstream.cohort_workload import FAST
from tests.jetstream.conftest import FreshStream
from tests.jetstream.server_versions import OLDER, SUPPORTED, program
from tests.jetstream.workload import Recorder, all_done, crashing, running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def test_the_oldest_tested_version_is_the_oldest_accepted() -> None:
    assert f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]}" == SUPPORTED[0]


async def test_an_older_server_is_refused(fresh_stream: FreshStream) -> None:
    _, stream = await fresh_stream(program=program(OLDER))
    with pytest.raises(lanes.ConfigError, match=r"nats-server 2\.10 is too old; upgrade it to 2\.11 or newer"):
        await lanes.run(stream.source(), Recorder())


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_a_restart_and_a_killed_server_keep_order(
    fresh_stream: FreshStream, version: str, retention: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    server, stream = await fresh_stream(program=program(version))
    await stream.client.jetstream().delete_stream(stream.name)
    await stream.create(retention=retention)
    await stream.publish(1_000)
    recorder = Recorder(lambda message: 0.003)
    async with crashing(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(30):
            await recorder.reached(200)
    await stream.publish(100, seed=2)
    async with running(lanes.Consumer(stream.source(), recorder, settings=FAST)):
        with anyio.fail_after(30):
            await recorder.reached(500)
        await anyio.to_thread.run_sync(server.kill)
        await anyio.to_thread.run_sync(server.start)
        await all_done(stream, recorder)
    resets = tuple(map(int, version.split("."))) >= RESET_SINCE and retention == "workqueue"
    assert ("early redelivery is by RESET" in caplog.text) == resets


@pytest.mark.parametrize("version", SUPPORTED)
async def test_a_backoff_is_removed_and_restored(fresh_stream: FreshStream, version: str) -> None:
    _, stream = await fresh_stream(program=program(version))
    await stream.publish(60, keys=4)
    await stream.add_consumer(backoff=[20_000_000_000, 60_000_000_000], max_ack_pending=1_000)
    await (await stream.pull_raw(40))[10].ack_sync()
    recorder = Recorder()
    async with running(lanes.Consumer(stream.source(takeover="modify"), recorder, settings=FAST)):
        with anyio.fail_after(30):
            await recorder.reached(59)
            await stream.acknowledged()
    assert recorder.violations == []
    assert (await stream.consumer_info()).config.backoff == [20, 60]
