"""What a member of a cohort owns, and what its source is to tell and to do about it: the same for every store.

``Holdings`` stands between a ``Membership`` and the calls of a source. It does no I/O. It makes source events of what
the membership tells, and says which durable to take from, what may still leave the process, what is to be written
down, and when a partition is given up. The source moves messages and acknowledgements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import anyio

from lanes.clock import Clock, monotonic
from lanes.cohort.membership import Membership
from lanes.core.cohort.actions import LeaseEvent, Owned, Revoked
from lanes.core.cohort.actions import Lost as LostTenure
from lanes.core.cohort.ledger import DeliveryLedger, Done
from lanes.core.types import NEVER, Partition, PartitionId, Reader, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Generation, Lost, Revoking, SourceEvent

__all__ = ["Holdings", "MakesMembership", "Tenancy"]


class Tenancy(ABC):
    """``number`` of the cohort partition, from the event that it is owned to the one that it is not.

    A source builds on it: what brings the messages of the durable is its own. ``ledger``: everything delivered and what
    of it is done, that of earlier owners included: what comes and is done is acknowledged again, and told to nobody.
    ``expected``: the number of the durable's next delivery. ``announced``: whoever handles it knows of it. ``revoked``:
    the plan gives it to another. ``releasing``: it is being given up. ``over``: it is handed over, or lost.
    """

    def __init__(self, number: int, partition: Partition, done: Done) -> None:
        self.number = number
        self.partition = partition
        self.ledger = DeliveryLedger(done)
        self.expected = 1
        self.announced = False
        self.revoked = False
        self.releasing = False
        self.over = anyio.Event()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.partition.id}: {self.ledger!r}>"

    @abstractmethod
    def rest(self) -> None:
        """Take nothing more, until there is another durable. Does not block. Idempotent."""

    def begin(self) -> None:
        """Nothing of the durable before is taken any more: the next one brings again what is outstanding, and then what
        is new, and its deliveries count from 1."""
        self.rest()
        self.expected = 1

    def follows(self, delivery: int) -> bool:
        """Whether a delivery is the next one of its durable, by its number; if so the one behind it is expected.

        One is missing otherwise. The server counts it as delivered, and would bring it behind newer ones of its key: so
        everything from here on is dropped, and the partition is to be taken over, see ``Holdings.take_over``.
        """
        if delivery != self.expected:
            return False
        self.expected += 1
        return True


T = TypeVar("T", bound=Tenancy)


class MakesMembership(Protocol):
    """``Membership`` with all of its arguments but one."""

    def __call__(self, *, changed: Callable[[], None]) -> Membership:
        """A membership that is not run yet. ``changed``: see ``Membership``."""


class Holdings(Generic[T]):
    """The ``tenancies`` of a member of a cohort, by number, as a source is to see them.

    ``name``, ``reader`` and ``incarnation`` are those of its partitions. ``membership`` makes the one that it is about.
    ``make`` makes a tenancy; ``follow`` has it take from the durable of an ``Owned``, the first one or another, and
    raises ``SourceError`` where the source cannot go on: that is the ``failure`` then. ``clock``: by which deadlines
    are. ``wake`` is called when there is something new, and must not block: the source is to ``step`` then.

    ``in_flight``: so many messages at most can be in flight; the source raises it as it learns of more. Once more are
    done above the floor, they are written down, so that a crash repeats twice as many at most, what is on its way
    included; a work queue knows them by itself.

    For one event loop. Only ``release`` waits; everything else returns at once. What the membership tells is taken in
    whoever is receiving, and nothing of it is called in that: what it has to hear in turn is left to ``step``.
    """

    def __init__(
        self,
        name: str,
        reader: Reader,
        incarnation: str = "",
        *,
        membership: MakesMembership,
        make: Callable[[int, Partition, Done], T],
        follow: Callable[[T, Owned], None],
        in_flight: int = 1,
        clock: Clock = monotonic,
        wake: Callable[[], None],
    ) -> None:
        self.tenancies: dict[int, T] = {}
        self.failure: SourceError | None = None
        self.in_flight = in_flight
        self._name = name
        self._reader = reader
        self._incarnation = incarnation
        self._make = make
        self._follow = follow
        self._clock = clock
        self._wake = wake
        self._events: list[Assigned | Revoking | Lost | Generation] = []
        self._told: Generation | None = None
        self._releasing: set[int] = set()
        self._lost: list[int] = []
        self.membership = membership(changed=self.changed)
        settings = self.membership.settings
        # Kept until it is drained, however long that takes, or until what runs is cancelled.
        self._drain_within = settings.drain_within if settings.overdue == "force" else NEVER
        self._writes = self.membership.retention != "workqueue"

    def __repr__(self) -> str:
        return f"<Holdings of {len(self.tenancies)} partitions of {self._name}>"

    # --- what is owned

    def of(self, partition: Partition) -> T | None:
        """The tenancy that an assignment stands for; None when it is over."""
        tenancy = self.tenancies.get(partition.id.number)
        return tenancy if tenancy is not None and tenancy.partition is partition else None

    def owned(self, partition: Partition) -> T | None:
        """The same, while it is certainly this member's: of anything else nothing leaves for the server any more."""
        return self.of(partition) if self._clock() < partition.deadline else None

    @property
    def highest(self) -> int:
        """The highest sequence that was read of any partition; 0 = none."""
        return max((self.read_up_to(tenancy.ledger.highest) for tenancy in self.tenancies.values()), default=0)

    def read_up_to(self, highest: int) -> int:
        """The highest sequence that was read, by a ledger that says so. A cohort may begin beyond the stream's end."""
        return 0 if highest == self.membership.first - 1 else highest

    # --- what the membership tells

    def changed(self) -> None:
        """Something has become of a partition, or of the plan: take it in, whoever is receiving."""
        for number, event in self.membership.take():
            self._happened(number, event)
        now = self._clock()
        for tenancy in self.tenancies.values():
            deadline = self.membership.deadline(tenancy.number)
            # One that has passed stays: whoever handles the partition may have found it lost by now.
            if now < tenancy.partition.deadline < deadline:
                tenancy.partition.deadline = deadline
        if self.membership.joined.is_set():
            plan = Generation(self.membership.generation, self.membership.standby)
            if plan != self._told:
                self._told = plan
                self._events.append(plan)
        self._wake()

    def _happened(self, number: int, event: LeaseEvent) -> None:
        tenancy = self.tenancies.get(number)
        if isinstance(event, Owned):
            self._owned(number, tenancy, event)
        elif tenancy is None:
            return
        elif isinstance(event, Revoked):
            tenancy.revoked = True
            tenancy.rest()
            if not tenancy.releasing:
                self._events.append(Revoking(tenancy.partition, self._drain_within))
        else:
            tenancy.rest()
            del self.tenancies[number]
            tenancy.over.set()
            if isinstance(event, LostTenure):
                self._events.append(Lost(tenancy.partition, event.reason))

    def _owned(self, number: int, known: T | None, event: Owned) -> None:
        tenancy = self._make(number, self._partition(number, event), event.done) if known is None else known
        try:
            self._follow(tenancy, event)
        except SourceError as error:
            self.failure = error
            return
        if known is None:
            self.tenancies[number] = tenancy
            self._events.append(Assigned(tenancy.partition))

    def _partition(self, number: int, event: Owned) -> Partition:
        return Partition(
            PartitionId(self._name, number),
            self._reader,
            self._incarnation,
            deadline=self.membership.deadline(number),
            fencing_token=event.token,
        )

    # --- while a source receives

    def step(self) -> None:
        """Tell the membership what whoever handles the partitions knows by now. Before each look for events.

        A loss that was told does not stand in the way of a new assignment any more: what a zombie runs keeps its lane.
        And what was renewed too late for whoever handles it is lost for the membership, too.
        """
        self._end_losses()
        self._lose_late()

    def _end_losses(self) -> None:
        lost, self._lost = self._lost, []
        for number in lost:
            self.membership.ended(number)

    def _lose_late(self) -> None:
        now = self._clock()
        for tenancy in list(self.tenancies.values()):
            if tenancy.partition.deadline <= now < self.membership.deadline(tenancy.number):
                self.lose(tenancy, "the lease was believed to have run out")

    def next_events(self) -> list[SourceEvent]:
        """What has happened, in order. Of a partition that is being released nothing.

        It may be owned again already, and whoever has it released does not know yet that it is.
        """
        now: list[SourceEvent] = []
        later: list[Assigned | Revoking | Lost | Generation] = []
        for event in self._events:
            if isinstance(event, Generation):
                now.append(event)
            elif event.partition.id.number in self._releasing:
                later.append(event)
            else:
                now.append(event)
                self._announced(event)
        self._events = later
        return now

    def _announced(self, event: Assigned | Revoking | Lost) -> None:
        tenancy = self.of(event.partition)
        if isinstance(event, Lost):
            self._lost.append(event.partition.id.number)
        elif isinstance(event, Assigned) and tenancy is not None:
            tenancy.announced = True

    def take_over(self, tenancy: T) -> None:
        """Take a partition over from oneself: a delivery is missing, or the connection is another one.

        Nothing more is taken until there is another durable; what was delivered stays as it is. Idempotent.
        """
        tenancy.rest()
        self.membership.takeover(tenancy.number, tenancy.ledger.snapshot())

    def lose(self, tenancy: T, reason: str) -> None:
        """Give a partition up that is not this member's, as its durable or the clock says. Idempotent."""
        self.membership.gone(tenancy.number, reason)

    def settled(self, settlement: Settlement) -> T | None:
        """Note as done what is settled; see ``lanes.source.Source.settle``. Idempotent.

        The tenancy for which it is to be acknowledged now. None: nothing of it may be sent, and nothing is noted. What
        cannot be sent is acknowledged when it comes again.
        """
        tenancy = self.owned(settlement.partition)
        if tenancy is None:
            return None
        ledger = tenancy.ledger
        for message in settlement.messages:
            ledger.settled(message.position)
        if self._writes and ledger.since_saved > self.in_flight:
            self.membership.checkpoint(tenancy.number, ledger.save())
        return tenancy

    # --- giving up

    async def release(self, partition: Partition, flush: Callable[[], Awaitable[None]]) -> None:
        """Have a drained partition written down, and its lease given up; see ``lanes.source.Source.release``.

        ``flush`` waits until what was sent has reached the server, not for ever. What it raises is raised, but the
        partition is given up all the same, and so it is where this is cancelled: nobody else would ever do it. Where
        something of it still runs, the lease is left to run out, and nobody waits for that here. Raises ``SourceError``
        for one that is lost while nobody was told that.
        """
        tenancy = self.of(partition)
        if tenancy is None:
            self._raise_lost(partition)
            return
        tenancy.releasing = True
        tenancy.rest()
        if not tenancy.revoked:
            # Nobody has asked for it: the consumer stops, and its member leaves.
            self.membership.stop()
        self._releasing.add(tenancy.number)
        ended = not partition.unended
        try:
            try:
                await flush()
            finally:
                self.membership.drained(tenancy.number, tenancy.ledger.snapshot(), ended=ended)
            if ended:
                await tenancy.over.wait()
            self._raise_lost(partition)
        finally:
            # Called twice at once it is one release, and the first that is over tells.
            self._releasing.discard(tenancy.number)
            self._wake()

    def leave(self) -> bool:
        """Give up everything of which nothing runs; for a member that was stopped and receives no more.

        False: of some partition there are messages that are neither settled nor released. Something of it may run, so
        the member does not leave in order: its leases are to run out, as after a crash. Else it is called again
        whenever there is something new, until the membership has ended.
        """
        self._lose_late()
        self._drop_losses()
        for tenancy in list(self.tenancies.values()):
            if tenancy.releasing:
                continue
            if tenancy.announced and len(tenancy.ledger):
                return False
            tenancy.releasing = True
            tenancy.rest()
            self.membership.drained(tenancy.number, tenancy.ledger.snapshot())
        self._drop_losses()
        return True

    def _drop_losses(self) -> None:
        """Nobody reads of these any more, and nothing of them is asked for."""
        self._lost += [event.partition.id.number for event in self._events if isinstance(event, Lost)]
        self._events = [event for event in self._events if not isinstance(event, Lost)]
        self._end_losses()

    def _raise_lost(self, partition: Partition) -> None:
        if any(isinstance(event, Lost) and event.partition is partition for event in self._events):
            raise SourceError(f"{partition.id} was lost before it was released")
