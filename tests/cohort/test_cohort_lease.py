"""Members of one cohort with different leases never own a partition concurrently."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest

from lanes import ConfigError
from lanes.cohort.leases import EpochConsumer
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.records import CONFIG_KEY, CohortConfig, decode, encode
from memsource.jetstream.epoch_consumers import MemoryEpochConsumers
from memsource.sim.loop.virtual import until
from tests.cohort.members import CONFIG, Servers, config_of, once, virtual

LONG, SHORT = 30.0, 4.0


def test_a_member_with_another_lease_is_refused_with_the_remedy() -> None:
    async def test() -> None:
        servers = Servers()
        await once(servers.member("a", lease=LONG))
        with pytest.raises(
            ConfigError, match=r"lease is 30, this member has 4.*same settings.*delete the key 'config'"
        ):
            await servers.member("b", lease=SHORT).run()

    virtual(test)


def test_a_record_without_a_lease_gets_the_members_own_lease() -> None:
    async def test() -> None:
        servers = Servers()
        await once(servers.member("a"))
        entry = servers.bucket.read(CONFIG_KEY, servers.clock())
        found = decode(CohortConfig, CONFIG_KEY, entry.value or b"")
        assert found.lease == SHORT
        servers.bucket.write(CONFIG_KEY, encode(CONFIG), servers.clock(), revision=entry.revision)
        await once(servers.member("b", lease=LONG))

    virtual(test)


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_after_a_lost_bucket_a_shorter_lease_waits_for_longer_ones(
    retention: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        servers, config = Servers(retention), config_of(retention=retention)
        async with anyio.create_task_group() as tasks:
            first = servers.member("a", config, lease=LONG)
            tasks.start_soon(first.run)
            assert await until(lambda: min(first.deadline(0), first.deadline(1)) > 0, 5.0)
            # The first member relies on its leases until their deadlines, although the bucket has lost them.
            servers.links["a"].cut = True
            servers.bucket.lose(servers.clock())
            second = servers.member("b", config, lease=SHORT)
            tasks.start_soon(second.run)
            believed = first.deadline(0)
            assert believed > servers.clock() + LONG / 2
            assert await until(lambda: second.deadline(0) > 0, 3 * LONG)
            assert servers.clock() >= believed
            assert first.deadline(0) < 0
            tasks.cancel_scope.cancel()

    virtual(test)
    # The log has one line for each partition, because such a long wait needs a reason.
    said = [line for line in caplog.messages if "waits for 30 s, because the cohort's bucket was lost" in line]
    assert len(said) == 2
    assert any("partition 0 waits" in line for line in said)


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_a_member_that_is_frozen_during_its_start_waits_for_the_owners_of_a_lost_bucket(retention: str) -> None:
    async def test() -> None:
        looked, awake = anyio.Event(), anyio.Event()

        class Frozen(MemoryEpochConsumers):
            async def found(self, partition: int) -> tuple[Sequence[EpochConsumer], int]:
                found = await super().found(partition)
                if partition == 1:
                    looked.set()
                    await awake.wait()
                return found

        servers, config = Servers(retention), config_of(retention=retention)
        async with anyio.create_task_group() as tasks:
            second = servers.member("b", config, consumers=Frozen)
            tasks.start_soon(second.run)
            # The second member found no durables, so it takes itself for the first member.
            await looked.wait()
            first = servers.member("a", config)
            tasks.start_soon(first.run)
            assert await until(lambda: min(first.deadline(0), first.deadline(1)) > 0, 5.0)
            servers.links["a"].cut = True
            servers.bucket.lose(servers.clock())
            awake.set()
            await second.joined.wait()
            believed = [first.deadline(partition) for partition in (0, 1)]
            assert min(believed) > servers.clock() + SHORT / 2
            assert await until(lambda: max(second.deadline(0), second.deadline(1)) > 0, 10 * SHORT)
            assert servers.clock() >= min(believed)
            assert await until(lambda: min(second.deadline(0), second.deadline(1)) > 0, SHORT)
            assert servers.clock() >= max(believed)
            tasks.cancel_scope.cancel()

    virtual(test)


@pytest.mark.parametrize(("partitions", "joined"), [(1, False), (2, False), (1, True)])
def test_an_owner_between_two_durables_of_a_work_queue_keeps_its_partition(partitions: int, joined: bool) -> None:
    """An owner deletes its old durable before it creates a new durable."""

    class Cut(MemoryEpochConsumers):
        async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
            if sub:
                await anyio.sleep_forever()
            await super().create(partition, epoch, sub, nonce=nonce, start=start)

    async def test() -> None:
        servers, config = Servers("workqueue", partitions), config_of(retention="workqueue", partitions=partitions)
        numbers = range(partitions)
        async with anyio.create_task_group() as tasks:
            first = servers.member("a", config, consumers=Cut, lease=LONG)
            second = servers.member("b", config, lease=LONG if joined else SHORT)
            tasks.start_soon(first.run)
            assert await until(lambda: min(map(first.deadline, numbers)) > 0, 5.0)
            if joined:
                tasks.start_soon(second.run)
                await second.joined.wait()
            first.take()
            for number in numbers:
                first.takeover(number, NOTHING)
            assert await until(lambda: not any(map(servers.stream.names, numbers)), 5.0)
            servers.links["a"].cut = True
            servers.bucket.lose(servers.clock())
            believed = max(map(first.deadline, numbers))
            assert min(map(first.deadline, numbers)) > servers.clock()
            if not joined:
                tasks.start_soon(second.run)
            assert await until(lambda: max(map(second.deadline, numbers)) > 0, 10 * LONG)
            assert servers.clock() >= believed
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_joining_member_marks_a_cohort_of_an_earlier_version() -> None:
    async def test() -> None:
        servers, config = Servers("workqueue"), config_of(retention="workqueue")
        await once(servers.member("a", config))
        assert servers.stream.marked == SHORT
        servers.stream.marked = None
        await once(servers.member("b", config))
        assert servers.stream.marked == SHORT

    virtual(test)


def test_a_join_waits_for_the_heartbeat_of_a_longer_lease() -> None:
    async def test() -> None:
        servers = Servers()
        await once(servers.member("a", lease=LONG))
        # The documented way to change the lease.
        servers.bucket.drop(CONFIG_KEY, servers.clock())
        async with anyio.create_task_group() as tasks:
            second = servers.member("a", lease=SHORT)
            began = servers.clock()
            tasks.start_soon(second.run)
            assert await until(second.joined.is_set, 2 * LONG)
            assert servers.clock() > began + 2 * SHORT
            tasks.cancel_scope.cancel()

    virtual(test)
