"""``OwnedPartitions`` over a stub membership, whose events a test chooses and whose calls it records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import anyio

from lanes.clock import Clock, monotonic
from lanes.cohort.membership import CohortSettings, Happened
from lanes.cohort.owned import OwnedPartition, OwnedPartitions
from lanes.core.cohort.actions import LeaseLost, LeaseOwned
from lanes.core.cohort.ledger import Done
from lanes.core.types import Partition
from memsource.memory.topic import RecordReader

__all__ = ["FORCED", "StubCohort", "StubMembership", "StubPartition", "stub_cohort", "taken_over"]

FORCED: Final = CohortSettings(drain_within=7.0, overdue="force")


class StubMembership:
    """A membership that records its calls with their partitions in ``told``, and their ledgers in ``dones``.

    ``soon`` has the calls of ``checkpoint_soon``.
    """

    def __init__(self, first: int, retention: str, settings: CohortSettings) -> None:
        self.first = first
        self.retention = retention
        self.settings = settings
        self.happened: list[Happened] = []
        self.deadlines: dict[int, float] = {}
        self.told: list[tuple[str, int, str]] = []
        self.dones: list[Done] = []
        self.soon: list[tuple[int, int, Callable[[], Done | None]]] = []
        self.changed: Callable[[], None] = lambda: None
        self.generation = 1
        self.standby = False
        self.under_provisioned = False
        self.target_honoured = False
        self.joined = anyio.Event()
        self.joined.set()

    def take(self) -> list[Happened]:
        happened, self.happened = self.happened, []
        return happened

    def gone(self, partition: int, reason: str) -> None:
        self.told.append(("gone", partition, reason))
        del self.deadlines[partition]
        self.happened.append(Happened(partition, LeaseLost(reason)))
        self.changed()

    def takeover(self, partition: int, done: Done) -> None:
        self._note("takeover", partition, done)

    def checkpoint(self, partition: int, done: Done) -> None:
        self._note("checkpoint", partition, done)

    def checkpoint_soon(self, partition: int, outstanding: int, ledger: Callable[[], Done | None]) -> None:
        self.soon.append((partition, outstanding, ledger))

    def drained(self, partition: int, done: Done, *, ended: bool = True) -> None:
        self._note("drained" if ended else "drained, and it runs", partition, done)

    def ended(self, partition: int) -> None:
        self.told.append(("ended", partition, ""))

    def stop(self) -> None:
        self.told.append(("stop", -1, ""))

    def deadline(self, partition: int) -> float:
        return self.deadlines.get(partition, float("-inf"))

    def _note(self, what: str, partition: int, done: Done) -> None:
        self.told.append((what, partition, ""))
        self.dones.append(done)


class StubPartition(OwnedPartition):
    """``durable`` is the epoch and sub-number of its durable, None while it rests; ``rests`` counts the rests."""

    durable: tuple[int, int] | None = None
    rests = 0

    def rest(self) -> None:
        self.durable = None
        self.rests += 1


T = TypeVar("T", bound=OwnedPartition)


class StubCohort(Generic[T]):
    """``wakes`` counts the calls of ``wake``."""

    def __init__(
        self,
        make: Callable[[int, Partition, Done], T],
        follow: Callable[[T, LeaseOwned], None],
        *,
        first: int = 0,
        retention: str = "limits",
        settings: CohortSettings = FORCED,
        clock: Clock = monotonic,
        name: str | Callable[[int], str] = "S",
    ) -> None:
        self.stub = StubMembership(first, retention, settings)
        self.clock = clock
        self.wakes = 0
        self.partitions = OwnedPartitions(
            name,
            RecordReader(),
            "now",
            membership=self._membership,
            make=make,
            follow=follow,
            clock=clock,
            wake=self.wake,
        )
        self.tell()

    def _membership(self, *, changed: Callable[[], None]) -> Any:
        self.stub.changed = changed
        return self.stub

    def wake(self) -> None:
        self.wakes += 1

    def tell(self, *events: tuple[int, Any], deadline: float = 60.0) -> None:
        """Let these events happen, each with a deadline after so many seconds."""
        for number, event in events:
            self.stub.happened.append(Happened(number, event))
            self.stub.deadlines[number] = self.clock() + deadline
        self.stub.changed()

    def names(self) -> list[str]:
        """The names of the next events."""
        return [type(event).__name__ for event in self.partitions.next_events()]

    def told(self) -> list[tuple[str, int]]:
        """The calls of the membership."""
        return [(what, number) for what, number, _ in self.stub.told]


def stub_cohort(**about: Any) -> StubCohort[StubPartition]:
    """``OwnedPartitions`` with stub partitions."""

    def follow(owned: StubPartition, lease: LeaseOwned) -> None:
        owned.begin()
        owned.durable = lease.epoch, lease.sub

    return StubCohort(StubPartition, follow, **about)


def taken_over(epoch: int, sub: int = 0, *, again: bool = False, done: Done = Done(0, ())) -> LeaseOwned:  # noqa: B008
    return LeaseOwned(epoch, sub, epoch, done, again)
