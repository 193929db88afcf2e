"""A foreign durable is logged once, and requests without an answer delay neither renewals nor heartbeats."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from lanes.cohort.leases import ConsumerExists, UnknownResult
from lanes.core.cohort.actions import LeaseOwned, LeaseRevoked
from lanes.core.cohort.ledger import NOTHING
from lanes.core.cohort.records import member_key
from memsource.jetstream.epoch_consumers import MemoryEpochConsumers
from memsource.sim.loop.virtual import until
from tests.cohort.members import Servers, config_of, virtual


def test_a_later_foreign_durable_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Shared(MemoryEpochConsumers):
        async def create(self, partition: int, epoch: int, sub: int, *, nonce: str, start: int | None) -> None:
            if epoch and partition in foreign:
                tried.append(partition)
                raise ConsumerExists("consumer S/x: filtered consumer not unique", nonce=None)
            await super().create(partition, epoch, sub, nonce=nonce, start=start)

    foreign, tried = {1}, list[int]()

    async def test() -> None:
        servers = Servers(retention="workqueue")
        member = servers.member("a", config_of(retention="workqueue"), consumers=Shared)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            await anyio.sleep(10.0)
            assert (member.deadline(0) > 0, member.deadline(1) > 0) == (True, False)
            assert 10 < len(tried) < 50
            foreign.clear()
            assert await until(lambda: member.deadline(1) > 0, 2.0)
            tasks.cancel_scope.cancel()

    virtual(test)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for word in ("cohort orders, member a", "partition 1", "consumer S/x", "Delete the foreign durable"):
        assert word in warning


@pytest.mark.parametrize("deaf", ["found", "names"])
def test_unanswered_requests_delay_neither_renewals_nor_heartbeats(deaf: str) -> None:
    class Deaf(MemoryEpochConsumers):
        async def found(self, partition: int) -> Any:
            await self._hear("found")
            return await super().found(partition)

        async def names(self) -> Any:
            await self._hear("names")
            return await super().names()

        async def _hear(self, what: str) -> None:
            if what in silent:
                asked.append(what)
                await anyio.sleep(5.0)
                raise UnknownResult("no answer")

    silent, asked = set[str](), list[str]()

    async def test() -> None:
        servers = Servers()
        member = servers.member("a", consumers=Deaf)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            assert await until(lambda: min(member.deadline(0), member.deadline(1)) > 0, 5.0)
            member.take()
            silent.add(deaf)
            member.takeover(0, NOTHING)
            for _ in range(200):
                await anyio.sleep(0.1)
                assert servers.clock() < member.deadline(0)
                assert servers.bucket.read(member_key("a"), servers.clock()).value
            assert len(asked) > 5
            silent.clear()
            assert await until(lambda: member._keepers[0].machine.consumer is not None, 2.0)
            assert {type(event) for _, event in member.take()} <= {LeaseOwned}
            tasks.cancel_scope.cancel()

    virtual(test)


def test_a_server_that_is_far_away_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Far(MemoryEpochConsumers):
        async def found(self, partition: int) -> Any:
            for _ in range(round_trips[partition]):
                await anyio.sleep(0.2)
            return await super().found(partition)

    round_trips = [2, 4]

    async def test() -> None:
        member = Servers().member("a", consumers=Far)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            await anyio.sleep(60.0)
            assert (member.deadline(0) > 0, member.deadline(1) > 0) == (True, False)
            tasks.cancel_scope.cancel()

    virtual(test)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    for word in ("cohort orders, member a", "partition 1", "5 requests", "0.666667 s", "Cohort(lease=…)"):
        assert word in warning


def test_a_drain_after_a_loss_does_not_drain_the_next_ownership() -> None:
    """The caller of a release may learn of the loss only after it."""

    async def test() -> None:
        servers = Servers()
        async with anyio.create_task_group() as tasks:
            first, second = servers.member("a"), servers.member("b")
            tasks.start_soon(first.run)
            assert await until(lambda: min(first.deadline(0), first.deadline(1)) > 0, 5.0)
            for partition in (0, 1):
                first.gone(partition, "its durable was deleted")
                first.drained(partition, NOTHING)
                first.ended(partition)
            assert await until(lambda: min(first.deadline(0), first.deadline(1)) > 0, 10.0)
            first.take()
            tasks.start_soon(second.run)
            revoked: list[int] = []

            def asked() -> bool:
                revoked.extend(number for number, event in first.take() if isinstance(event, LeaseRevoked))
                return bool(revoked)

            assert await until(asked, 10.0)
            await anyio.sleep(10.0)
            assert second.deadline(revoked[0]) < 0 < first.deadline(revoked[0])
            first.drained(revoked[0], NOTHING)
            assert await until(lambda: second.deadline(revoked[0]) > 0, 5.0)
            tasks.cancel_scope.cancel()

    virtual(test)
