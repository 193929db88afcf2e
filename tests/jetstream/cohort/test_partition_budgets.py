"""In a cohort, a partition whose handlers hang keeps to its own bounds, and the bound of the member holds."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
from nats.aio.client import Client

import lanes
from lanes_jetstream import Cohort, JetStreamSource, header
from tests.components import NatsServer
from tests.jetstream.cohort.stubs import StubInbox, owned_partition
from tests.jetstream.cohort_workload import CohortStream, members, settled
from tests.jetstream.workload import unique, until

pytestmark = pytest.mark.anyio

HANGING = 0


async def test_a_hanging_partition_keeps_to_its_bounds(cohort_stream: CohortStream) -> None:
    stream, released = cohort_stream, anyio.Event()
    ended: list[int] = []
    most = 0

    async def handler(message: lanes.Message) -> None:
        nonlocal most
        most = max(most, *(each.in_flight for each in consumer.status().partitions.values()))
        if message.partition.id.number == HANGING:
            await released.wait()
        await anyio.sleep(0.001)
        ended.append(message.partition.id.number)

    settings = lanes.Settings(
        concurrency=8, max_in_flight=60, concurrency_per_partition=3, max_in_flight_per_partition=20
    )
    consumer = lanes.Consumer(stream.source("a"), handler, settings=settings)
    await stream.publish(*(f"key{number}" for number in range(60)), times=10)
    async with members() as running:
        running.join(consumer)
        await settled(consumer, partitions=4)
        (hangs,) = [name for name in consumer.status().partitions if name.endswith(f"/{HANGING}")]
        await until(lambda: all(each.lag == 0 for name, each in consumer.status().partitions.items() if name != hangs))
        status = consumer.status()
        hanging = status.partitions[hangs]
        assert (hanging.running, hanging.full, status.running) == (3, True, 3)
        assert HANGING not in ended
        assert status.capacity == lanes.Capacity(concurrency=8, max_in_flight=60)
        released.set()
        await until(lambda: len(ended) == 600)
    assert most <= 20
    assert consumer.status().peak_in_flight <= 60


async def test_the_bounds_per_partition_bound_each_physical_queue(nats_server: NatsServer, client: Client) -> None:
    """Each physical queue is one partition of the cohort, also with several subjects."""
    queue = lanes.PartitionedQueue(unique("Q"), partitions=2)
    subjects = [subject for name in queue.names for subject in (name, f"{name}.>")]
    stream = client.jetstream()
    await stream.add_stream(name=queue.name, subjects=subjects, storage="memory")
    for number in range(200):
        name = queue.names[number % 2]
        await stream.publish(name if number % 4 < 2 else f"{name}.x", b"v", headers={"k": f"{number}"})
    released = anyio.Event()
    ended: Counter[str] = Counter()

    async def handler(message: lanes.Message) -> None:
        if message.partition.id.source == queue.name:
            await released.wait()
        ended[message.partition.id.source] += 1

    source = JetStreamSource(
        nats_server.url, stream=queue.name, key=header("k"), queue=queue, cohort=Cohort("work", member="m")
    )
    settings = lanes.Settings(concurrency=8, concurrency_per_partition=3, max_in_flight_per_partition=20)
    with anyio.fail_after(50):
        async with lanes.Consumer(source, handler, settings=settings) as consumer:
            await until(lambda: ended[queue.names[1]] == 100)
            # The status adds up both physical queues. The handled messages of the other one are settled a little later.
            await until(lambda: consumer.status().queues[queue.name].in_flight <= 20)
            found = consumer.status().queues[queue.name]
            assert (found.running, found.in_flight <= 20, ended[queue.name]) == (3, True, 0)
            assert found.capacity == lanes.Capacity(concurrency=6, max_in_flight=40)
            released.set()
            await until(lambda: ended[queue.name] == 100)
    await stream.delete_stream(queue.name)


async def test_messages_that_arrived_before_a_pause_wait_for_room() -> None:
    side = StubInbox()
    (pulls,) = side.pulls
    owned = owned_partition(pulls)
    for delivery, sequence in enumerate((4, 9, 11), start=1):
        await side.deliver("c", sequence, delivery)
    await side.say(pulls, Status="100", Description="Idle Heartbeat", Nats_Last_Consumer="3")
    taken = [owned.take(None, None, limit) for limit in (0, 2, 0, 2)]
    assert [None if each is None else [m.position for m in each.run] for each in taken] == [None, [4, 9], None, [11]]
    assert pulls.check() is None
