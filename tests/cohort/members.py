"""Members of a cohort without a consumer around them, on servers in memory and in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio

from lanes.cohort.leases import EpochConsumers, LeaseStore
from lanes.cohort.membership import CohortSettings, Membership
from lanes.cohort.roster import Roster
from lanes.core.cohort.actions import LeaseLost, LeaseOwned, LeaseRevoked
from lanes.core.cohort.records import PLAN_KEY, CohortConfig, DrainRequest, PlanRecord, decode, drain_key, encode
from memsource.jetstream.epoch_consumers import EpochStream, MemoryEpochConsumers
from memsource.jetstream.lease_store import Bucket, MemoryLeaseStore
from memsource.jetstream.link import Link
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import current
from memsource.sim.loop.virtual import run

__all__ = ["CONFIG", "Servers", "config_of", "never", "once", "serve", "virtual"]

CONFIG: Final = CohortConfig(
    cohort="orders",
    partitions=2,
    choice="created",
    detail="",
    tokens=(1,),
    incarnation="1",
    retention="limits",
    start="beginning",
)


class Servers:
    """A bucket, a stream and members of cohorts, in virtual time; ``ways`` has the members' links by name."""

    def __init__(self, retention: Any = "limits", partitions: int = 2) -> None:
        self.clock = current().time
        self.bucket = Bucket()
        self.stream = EpochStream(partitions, retention=retention)
        self.links: dict[str, Link] = {}

    def member(
        self,
        name: str,
        config: CohortConfig = CONFIG,
        make: Callable[[Bucket, Link], LeaseStore] = MemoryLeaseStore,
        consumers: Callable[[EpochStream, Link, int], EpochConsumers] = MemoryEpochConsumers,
        roster: Callable[..., Roster] = Roster,
        **settings: Any,
    ) -> Membership:
        link = self.links[name] = Link(self.clock, never)
        chosen = CohortSettings(**{"lease": 4.0, **settings})
        made = Membership(
            make(self.bucket, link),
            consumers(self.stream, link, int(chosen.lease)),
            config,
            member=name,
            settings=chosen,
            changed=lambda: None,
            clock=self.clock,
            wall=lambda: self.clock() + 1e9,
            roster=roster,
        )
        self.bucket.watch(made.hint)
        return made

    def drain(self, member: str) -> None:
        """Request the drain of a member."""
        now, key = self.clock(), drain_key(member)
        self.bucket.write(key, encode(DrainRequest(since=0)), now, revision=self.bucket.read(key, now).revision)

    def revision(self) -> int:
        """The revision of the plan."""
        return self.bucket.read(PLAN_KEY, self.clock()).revision

    def plan(self) -> PlanRecord:
        value = self.bucket.read(PLAN_KEY, self.clock()).value
        assert value is not None
        return decode(PlanRecord, PLAN_KEY, value)


def never(at: float, act: Callable[[float], None]) -> None:
    raise AssertionError("nothing lands late")


def virtual(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test in virtual time."""
    run(test, chooser=Fifo())


def config_of(**changed: Any) -> CohortConfig:
    return CohortConfig(**{name: getattr(CONFIG, name) for name in CohortConfig.__slots__} | changed)


async def serve(member: Membership) -> None:
    """Run a member whose partitions are drained as soon as they are revoked."""
    done = {}

    def changed() -> None:
        for partition, event in member.take():
            if isinstance(event, LeaseOwned):
                done[partition] = event.done
            elif isinstance(event, LeaseRevoked):
                member.drained(partition, done[partition])
            elif isinstance(event, LeaseLost):
                member.ended(partition)

    with anyio.CancelScope():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_told, changed)
            await member.run()
            tasks.cancel_scope.cancel()


async def _told(changed: Callable[[], None]) -> None:
    while True:
        changed()
        await anyio.sleep(0.02)


async def once(member: Membership) -> None:
    """Let a member set up, join and die."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(member.run)
        await member.joined.wait()
        tasks.cancel_scope.cancel()
