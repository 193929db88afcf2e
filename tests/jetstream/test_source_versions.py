"""The servers that users still run, from the oldest supported one on; an older one is refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

import lanes
from lanes_jetstream.durable.takeover import RESET_SINCE
from lanes_jetstream.wire.connection import OLDEST_SERVER
from tests.components import MissingComponent, NatsServer
from tests.components.nats_versions import fetch_program
from tests.conftest import skip_or_fail
from tests.jetstream.workload import Recorder, Stream, all_done, crashing, running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MakeStream = Callable[..., Awaitable[tuple[NatsServer, Stream]]]

FAST = lanes.Settings(concurrency=50, drain_timeout=10)

OLDER = "2.10"
SUPPORTED = ["2.11", "2.12", "2.14"]


def program(version: str) -> Path:
    """Where it is; without it the test is skipped, or fails where `CI` is set."""
    try:
        return fetch_program(version)
    except MissingComponent as missing:
        skip_or_fail(missing)


def test_the_oldest_that_is_tested_is_the_oldest_that_is_let_pass() -> None:
    assert f"{OLDEST_SERVER[0]}.{OLDEST_SERVER[1]}" == SUPPORTED[0]


async def test_older_server_is_refused(fresh_stream: MakeStream) -> None:
    _, stream = await fresh_stream(program=program(OLDER))
    with pytest.raises(lanes.ConfigError, match=r"nats-server 2\.10 is too old; upgrade it to 2\.11 or newer"):
        await lanes.run(stream.source(), Recorder())


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
async def test_restart_and_killed_server(
    fresh_stream: MakeStream, version: str, retention: str, caplog: pytest.LogCaptureFixture
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
    assert ("start barrier is RESET" in caplog.text) == resets


@pytest.mark.parametrize("version", SUPPORTED)
async def test_backoff_is_taken_off_and_put_back(fresh_stream: MakeStream, version: str) -> None:
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
