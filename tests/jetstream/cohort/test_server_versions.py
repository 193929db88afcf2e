"""Every supported nats-server version runs a cohort, and older servers are refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import anyio
import pytest

import lanes
from tests.components import NatsServer
from tests.jetstream.cohort_workload import FAST, LEASE, CohortStream, Gate, Log, members, settled
from tests.jetstream.conftest import connect
from tests.jetstream.server_versions import OLDER, SUPPORTED, program
from tests.jetstream.workload import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_an_older_server_is_refused(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats(program=program(OLDER))
    client = await connect(server.url)
    stream = CohortStream(server.url, client, "OLD")
    await stream.create()
    with pytest.raises(
        lanes.ConfigError, match=r"too old for a cohort.*upgrade the server to 2\.11 or newer, or .*durable="
    ):
        await lanes.run(stream.source("a"), Log().handler("a"))
    answer = await client.request("$JS.API.STREAM.NAMES", timeout=5)
    assert json.loads(answer.data)["streams"] == [stream.name], "the refused member created nothing"
    await client.close()


@pytest.mark.parametrize("version", SUPPORTED)
@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
async def test_members_join_die_and_leave_without_loss(
    fresh_nats: Callable[..., NatsServer], version: str, retention: str
) -> None:
    """The order holds without loss while a member joins, a member dies, the server restarts, and a member leaves."""
    server = fresh_nats(program=program(version))
    client = await connect(server.url)
    stream = CohortStream(server.url, client, "OLD")
    stream.lease = LEASE
    await stream.create(retention=retention)
    log, gate = Log(), Gate(*stream.a_key_each())
    a, b, c = (
        lanes.Consumer(stream.source(name), log.handler(name, inner), settings=FAST)
        for name, inner in (("a", None), ("b", gate), ("c", None))
    )
    async with members() as running:
        running.join(a)
        await settled(a, partitions=4)
        await stream.publish(*stream.a_key_each(), times=20)
        await log.handled(stream.published)
        running.join(b)
        await settled(a, b, partitions=4)
        await stream.publish(*stream.a_key_each(), times=20)
        await until(lambda: gate.waiting == 2)
        await running.crash(b)
        running.join(c)
        await settled(a, c, partitions=4)
        await log.handled(stream.published)
        await anyio.to_thread.run_sync(server.kill)
        await until(lambda: not client.is_connected)
        await anyio.to_thread.run_sync(server.start)
        await until(lambda: client.is_connected)
        await stream.publish(*stream.a_key_each(), times=20)
        await log.handled(stream.published)
        await running.leave(a)
        await settled(c, partitions=4)
        await stream.publish(*stream.a_key_each(), times=20)
        await log.handled(stream.published)
    await client.close()
    assert log.violations == []
    assert log.repeats == []
