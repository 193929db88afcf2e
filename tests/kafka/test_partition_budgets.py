"""On a real broker, a partition whose handlers hang keeps to its own bounds and takes nothing from another."""

from __future__ import annotations

import pytest

import lanes
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

HANGING = [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_hanging_partition_keeps_to_its_bounds(topic: MakeTopic, protocol: str) -> None:
    events = topic(2)
    produce(events, 400, keys=HANGING, partition=0)
    produce(events, 400, keys=[b"a", b"b", b"c"], partition=1)
    work = Work(Story())
    work.hold(*HANGING)
    settings = lanes.Settings(concurrency=6, concurrency_per_partition=4, max_in_flight_per_partition=40)
    async with group(events, protocol, work) as members:
        one = members.start("one", settings=settings)
        await until(lambda: len(work.ended) == 400)
        await until(lambda: one.consumer.status().partitions[f"{events.name}/0"].full)
        await until(lambda: one.consumer.status().partitions[f"{events.name}/0"].running > 0)
        hanging, other = (one.consumer.status().partitions[f"{events.name}/{number}"] for number in (0, 1))
        assert {partition for partition, _ in work.ended} == {1}
        assert (hanging.running, hanging.full, other.full) == (4, True, False)
        assert hanging.in_flight <= 40
        assert one.consumer.status().capacity == lanes.Capacity(concurrency=6, max_in_flight=80)
        work.let_go(*HANGING)
        await until(lambda: len(work.ended) == 800)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == events.ends()
