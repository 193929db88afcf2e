"""In a cohort on three servers, a kill of the leader of the bucket, stream or durable loses no message and overlaps no
owners."""

from __future__ import annotations

import anyio
import pytest

import lanes
from lanes_jetstream.cohort.lease_store import bucket_name
from tests.components.nats_cluster import NatsCluster
from tests.jetstream.cluster_workload import confirmed, leader, patiently
from tests.jetstream.cohort_workload import FAST, CohortStream, Log, members, settled
from tests.jetstream.conftest import connect
from tests.jetstream.workload import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def stored(stream: CohortStream, times: int) -> None:
    for _ in range(times):
        for key in stream.a_key_each():
            await confirmed(stream.client, f"{stream.name}.{key}", b"x", stream.published)
            stream.published += 1


@pytest.mark.parametrize("who", ["bucket", "stream", "durable"])
async def test_a_killed_leader_loses_nothing(cluster: NatsCluster, who: str) -> None:
    await anyio.to_thread.run_sync(cluster.start)
    client = await connect(cluster.url.split(",")[0])
    stream, log = CohortStream(cluster.url, client, f"R3{who}"), Log()
    await patiently(stream)
    a, b = (lanes.Consumer(stream.source(name, lease=10), log.handler(name), settings=FAST) for name in "ab")
    async with members(within=55) as running:
        running.join(a, b)
        await settled(a, b, partitions=4)
        await stored(stream, 10)
        await log.handled(stream.published)
        name = f"KV_{bucket_name(stream.name, 'lanes')}" if who == "bucket" else stream.name
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
