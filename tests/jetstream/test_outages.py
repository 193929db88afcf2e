"""A server that is gone or hangs makes an idle consumer unhealthy, until the server answers again."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from anyio.to_thread import run_sync

import lanes
from lanes_jetstream import JetStreamSource
from tests.components import NatsServer
from tests.jetstream.cohort_workload import CohortStream
from tests.jetstream.conftest import connect
from tests.jetstream.workload import Stream, never_called, running, unique, until

pytestmark = pytest.mark.anyio

PATIENCE = 60.0
"""Seconds for a slow machine. Two requests without an answer take about 12 s."""


async def _survives(source: JetStreamSource, end: Callable[[], None], begin: Callable[[], None]) -> str:
    """Take the server away from an idle consumer, and give it back; return the reason of the outage."""
    consumer = lanes.Consumer(source, never_called, settings=lanes.Settings(unhealthy_after=3.0))
    async with running(consumer):
        with anyio.fail_after(PATIENCE):
            await until(lambda: consumer.ready)
            assert (consumer.health().reasons, consumer.status().outage) == ((), 0.0)
            await run_sync(end)
            await until(lambda: not consumer.healthy)
        health = consumer.health()
        assert health.no_broker and consumer.ready
        assert (consumer.status().outage or 0.0) > 3.0
        await run_sync(begin)
        with anyio.fail_after(PATIENCE):
            await until(lambda: consumer.healthy)
        assert (consumer.health().no_broker, consumer.status().outage) == (False, 0.0)
    return health.reasons[0]


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_an_idle_durable_notices_a_lost_server(
    fresh_stream: Callable[..., tuple[NatsServer, Stream]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lanes.jetstream")
    server, stream = await fresh_stream()  # type: ignore[misc]
    reason = await _survives(stream.source(), server.kill, server.start)
    assert reason.startswith("no broker answers for ") and "ConnectionRefusedError" in reason
    name = f"jetstream {stream.name}/"
    warnings = [one for one in caplog.records if ": no NATS server has answered for " in one.getMessage()]
    (end,) = [one for one in caplog.records if ": a NATS server answers again after " in one.getMessage()]
    assert {(one.name, one.levelname) for one in warnings} == {("lanes.jetstream", "WARNING")}
    assert all(one.getMessage().startswith(name) for one in (*warnings, end)) and end.levelname == "INFO"


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_an_idle_durable_notices_a_server_that_hangs(
    fresh_stream: Callable[..., tuple[NatsServer, Stream]],
) -> None:
    server, stream = await fresh_stream()  # type: ignore[misc]
    reason = await _survives(stream.source(), server.pause, server.resume)
    assert reason.startswith("no broker answers for ") and "no answer to STREAM.INFO." in reason


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_an_idle_member_notices_a_lost_server(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats()
    client = await connect(server.url)
    stream = CohortStream(server.url, client, unique("T"))
    await stream.create()
    reason = await _survives(stream.source("a"), server.kill, server.start)
    assert reason.startswith("no broker answers for ")
    await client.close()
