"""The status shows the lag of each partition, and its oldest unfinished message."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from lanes.core.types import Settlement
from memsource import GroupSource, MemoryBroker, MemorySource
from tests.fakes.grouped import Knowing, group_of
from tests.fakes.support import Gated, consumer_of, started, until


@pytest.mark.anyio
async def test_the_status_has_the_lag_of_the_source() -> None:
    async with started(consumer_of(Knowing(group_of((), partitions=2), "m"), Gated())) as run:
        await until(lambda: run.consumer.active and len(run.consumer.status().partitions) == 2)
        assert [each.lag for each in run.consumer.status().partitions.values()] == [41, None]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_source_without_lag_has_none_in_the_status() -> None:
    async with started(consumer_of(GroupSource(group_of(()), "m"), Gated())) as run:
        await until(lambda: run.consumer.active)
        assert [each.lag for each in run.consumer.status().partitions.values()] == [None]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_each_partition_has_its_oldest_unfinished_message() -> None:
    group = group_of((), partitions=3)
    # Partition 0: 0 is finished, 1 is not. Partition 1 is empty. Partition 2: no message is finished.
    for number, keys in {0: ("quick", "slow"), 2: ("slow", "quick", "slow")}.items():
        for key in keys:
            group.publish(key, key=key, partition=number)
    handler = Gated(free=[b"quick"])
    async with started(consumer_of(GroupSource(group, "m"), handler, concurrency=5)) as run:
        await until(lambda: run.consumer.active and run.consumer.status().settled == 2)
        status = run.consumer.status()
        oldest = {name: each.oldest for name, each in status.partitions.items()}
        found = {name: each.position for name, each in oldest.items() if each is not None}
        assert found == {"memory/0": 1, "memory/2": 0}
        assert status.oldest in oldest.values() and status.oldest is not None
        handler.let(0)
        await until(lambda: run.consumer.status().partitions["memory/2"].floor == 2)
        later = run.consumer.status().partitions["memory/2"].oldest
        assert later is not None and (later.position, later.partition, later.key) == (2, "memory/2", b"slow")
        handler.let(1, 2)
        await until(lambda: run.consumer.status().settled == 5)
        assert [each.oldest for each in run.consumer.status().partitions.values()] == [None] * 3
        assert await run.stop() is None


@pytest.mark.anyio
async def test_the_oldest_message_is_the_one_delivered_first() -> None:
    group = group_of((), partitions=2)
    group.publish("0", key="slow", partition=1)
    handler = Gated()
    async with started(consumer_of(GroupSource(group, "m"), handler)) as run:
        for number in (1, 0):
            await until(lambda: run.consumer.active and run.consumer.status().in_flight == 2 - number)  # noqa: B023
            group.publish("1", key="other", partition=number)
        await until(lambda: run.consumer.status().in_flight == 3)
        status = run.consumer.status()
        found = {name: each.oldest.position for name, each in status.partitions.items() if each.oldest is not None}
        assert found == {"memory/0": 0, "memory/1": 0}
        assert status.oldest is not None and (status.oldest.partition, status.oldest.position) == ("memory/1", 0)
        ages = [each.oldest.age for each in status.partitions.values() if each.oldest is not None]
        assert status.oldest.age == max(ages) > min(ages)
        handler.let(0, 1)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_message_that_waits_for_its_settlement_is_not_unfinished() -> None:
    settling, confirmed = anyio.Event(), anyio.Event()

    class Slow(MemorySource):
        async def settle(self, settlements: Sequence[Settlement]) -> None:
            settling.set()
            await confirmed.wait()
            await super().settle(settlements)

    broker = MemoryBroker()
    broker.publish("0", key="a")
    async with started(consumer_of(Slow(broker), Gated(free=[b"a"]))) as run:
        await settling.wait()
        (found,) = run.consumer.status().partitions.values()
        assert (found.holes, found.oldest, run.consumer.status().oldest) == (1, None, None)
        confirmed.set()
        assert await run.stop() is None
