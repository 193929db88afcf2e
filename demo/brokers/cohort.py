"""The demo's streams for a cohort: a stream with partitions, and their owners in the cohort's bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from demo.brokers.broker import Left
from demo.brokers.jetstream import JetStreamBroker
from demo.config import Retention
from demo.errors import DemoError, NoAnswer
from demo.membership import NONE, Member, Snapshot
from lanes.clock import monotonic
from lanes.core.cohort.records import Heartbeat, Lease, PlanRecord
from lanes.core.types import PartitionId
from lanes.errors import ConfigError, SourceError
from lanes_jetstream.cohort.lease_store import bucket_name
from lanes_jetstream.cohort.partitioning import partition_of
from lanes_jetstream.cohort.view import CohortView

NAMESPACE: Final = "lanes"
"""Namespace of the demo's cohort, which is the default namespace."""

LEASES_EVERY: Final = 0.5
"""Seconds between two readings of heartbeats and leases under an unchanged plan."""


class CohortBroker(JetStreamBroker):
    """A ``GroupBroker`` on JetStream.

    ``stream`` stores the subjects ``<partition>.declarations.<name>.<case>``. With a ``width`` above 1, the partitions
    are the physical queues, and ``stream`` stores the events under their own subjects.
    """

    def __init__(self, server: str, name: str, partitions: int, retention: Retention, width: int = 1) -> None:
        transform = _transform(partitions) if width == 1 else None
        super().__init__(server, name, retention=retention, transform=transform, width=width)
        self.partitions = partitions
        names = self.queue.names if width > 1 else (self.stream,) * partitions
        self._places = [(source, number) for number, source in enumerate(names)]
        self._view = CohortView(self._connection, self.stream, NAMESPACE)
        self._there = False
        self._latest = NONE
        self._looked = 0.0

    async def open(self) -> None:
        """See ``Broker.open``. The first member creates the bucket, and ``close`` removes it."""
        await super().open()
        self._made.append(f"KV_{bucket_name(self.stream, NAMESPACE)}")

    def _place(self, case: str) -> PartitionId:
        if self.queue.partitions > 1:
            return super()._place(case)
        return PartitionId(self.stream, partition_of([case], self.partitions))

    async def left(self) -> Left | None:
        """Return the backlog of all partitions, see ``Broker.left``."""
        try:
            durables = (await self._view.durables()).values()
        except SourceError as error:
            raise NoAnswer(str(error)) from None
        except ConfigError as error:
            raise DemoError(str(error)) from None
        if not durables:
            return None
        return Left(
            pending=sum(one.pending for one in durables),
            unacknowledged=sum(one.unacknowledged for one in durables),
            floor=min(one.floor for one in durables) + 1,
        )

    async def group(self) -> Snapshot:
        """Return the members with a heartbeat and the owners of leases, see ``GroupBroker.group``."""
        asked = monotonic()
        try:
            if not self._there:
                await self._view.check()
                self._there = True
            plan = await self._view.plan()
            if plan is None:
                return NONE
            if self._latest.generation != plan.generation or asked >= self._looked + LEASES_EVERY:
                self._looked = asked
                heartbeats, leases = await self._view.heartbeats(), await self._view.leases()
                self._latest = _snapshot(self._places, asked, plan, heartbeats, leases)
        except ConfigError:
            # The bucket does not exist until the first member has started.
            return NONE
        except SourceError as error:
            raise NoAnswer(str(error)) from None
        return self._latest


def _snapshot(
    places: Sequence[tuple[str, int]],
    asked: float,
    plan: PlanRecord,
    heartbeats: dict[str, Heartbeat],
    leases: dict[int, Lease],
) -> Snapshot:
    held = {number: lease.member for number, lease in leases.items() if lease.member in heartbeats}
    # A partition with an epoch has nearly finished its takeover.
    settled = all(
        number in held and held[number] == owner and leases[number].epoch is not None
        for number, owner in enumerate(plan.owners)
    )
    members = {
        name: Member(one.nonce, frozenset(places[number] for number, owner in held.items() if owner == name))
        for name, one in heartbeats.items()
    }
    return Snapshot(asked, monotonic(), "STABLE" if settled else "MOVING", members, plan.generation, plan.owners)


def _transform(partitions: int) -> str:
    return f"{{{{partition({partitions},1)}}}}"
