"""A cohort on three servers: whoever leads its bucket, its stream or a durable dies, nothing is lost or overlaps."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import nats.errors
import nats.js.errors
import pytest

import lanes
from tests.components import MissingComponent
from tests.components.nats_cluster import NatsCluster
from tests.conftest import skip_or_fail
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, settled
from tests.jetstream.conftest import connect
from tests.jetstream.test_source_cluster import leader
from tests.jetstream.workload import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster() -> Iterator[NatsCluster]:
    """Three servers for the tests of this file."""
    cluster = NatsCluster()
    try:
        cluster.start()
        yield cluster
    except MissingComponent as missing:
        skip_or_fail(missing)
    finally:
        cluster.stop()


async def created(stream: CohortStream) -> None:
    """As soon as there is somebody to decide where."""
    with anyio.fail_after(30):
        while True:
            try:
                await stream.create(num_replicas=3)
                return
            except (nats.errors.Error, AssertionError):
                await anyio.sleep(0.2)


async def stored(stream: CohortStream, times: int) -> None:
    """Published, and confirmed by most of the copies: what the servers may lose is not of this test."""
    context = stream.client.jetstream(timeout=2)
    for _ in range(times):
        for key in stream.a_key_each():
            with anyio.fail_after(30):
                while True:
                    try:
                        headers = {"Nats-Msg-Id": str(stream.published)}
                        await context.publish(f"{stream.name}.{key}", b"x", headers=headers)
                        break
                    except (nats.errors.Error, nats.js.errors.Error, OSError):
                        await anyio.sleep(0.1)
            stream.published += 1


@pytest.mark.parametrize("who", ["bucket", "stream", "durable"])
async def test_a_leader_that_is_killed(cluster: NatsCluster, who: str) -> None:
    await anyio.to_thread.run_sync(cluster.start)
    client = await connect(cluster.url.split(",")[0])
    stream, log = CohortStream(cluster.url, client, f"R3{who}"), Log()
    await created(stream)
    a, b = (lanes.Consumer(stream.source(name, lease=10), log.handler(name), settings=FAST) for name in "ab")
    async with members(within=55) as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        await stored(stream, 10)
        await log.handled(stream.published)
        name = f"KV_lanes_{stream.name}_lanes" if who == "bucket" else stream.name
        durable = (await stream.durables())[0] if who == "durable" else None
        (await leader(cluster, client, name, durable)).kill()
        await stored(stream, 10)
        await log.handled(stream.published)
        await until(lambda: a.ready and b.ready)
        await settled(a, b, partitions=4)
    await client.close()
    assert log.violations == []
    assert log.done == set(range(1, stream.published + 1))
    assert log.repeats == []
