"""What a member owns of its cohort, and what is to be told of it: from the membership's events to those of a source."""

from __future__ import annotations

from collections.abc import Callable

from lanes.clock import monotonic
from lanes.core.cohort.actions import Lost as LostTenure
from lanes.core.cohort.actions import Owned, Released, Revoked
from lanes.core.types import Partition, PartitionId
from lanes.errors import SourceError
from lanes.membership import Happened, Membership
from lanes.source import Assigned, Generation, Lost, Revoking, SourceEvent
from lanes_jetstream.cohort_pulls import ConsumerPulls
from lanes_jetstream.reading import READER
from lanes_jetstream.tenancy import Tenancy

__all__ = ["Holdings"]


class Holdings:
    """The ``tenancies`` of a member of the cohort on ``stream``, by number. asyncio only; nothing here awaits.

    ``pulls`` makes those of a partition's consumer, of an epoch and a sub-number. ``check_end`` raises ``SourceError``
    for a sequence beyond the end of the stream. ``timeout``: seconds to drain what moves, infinity = as long as it
    takes. ``wake`` is called when there is something new. ``failure``: why the source cannot go on.
    """

    def __init__(
        self,
        stream: str,
        incarnation: str,
        *,
        pulls: Callable[[int, int, int], ConsumerPulls],
        check_end: Callable[[int], None],
        timeout: float,
        wake: Callable[[], None],
    ) -> None:
        self.tenancies: dict[int, Tenancy] = {}
        self.failure: SourceError | None = None
        self._stream = stream
        self._incarnation = incarnation
        self._pulls = pulls
        self._check_end = check_end
        self._first = 0
        self._timeout = timeout
        self._wake = wake
        self._events: list[Assigned | Revoking | Lost | Generation] = []
        self._told: Generation | None = None
        self._releasing: set[int] = set()
        self._lost: list[int] = []
        self._giving_up = False

    def __repr__(self) -> str:
        return f"<Holdings of {len(self.tenancies)} partitions of {self._stream}>"

    def of(self, partition: Partition) -> Tenancy | None:
        """The tenancy that an assignment stands for; None when it is over."""
        tenancy = self.tenancies.get(partition.id.number)
        return tenancy if tenancy is not None and tenancy.partition is partition else None

    @property
    def highest(self) -> int:
        """The highest sequence that was read of any partition; 0 = none."""
        return max((self._read_up_to(tenancy.ledger.highest) for tenancy in self.tenancies.values()), default=0)

    # --- in

    def changed(self, membership: Membership) -> None:
        """Something has become of a partition, or of the plan."""
        self._first = membership.first
        for number, event in membership.take():
            self._happened(Happened(number, event), membership.deadline(number))
        now = monotonic()
        for tenancy in self.tenancies.values():
            deadline = membership.deadline(tenancy.number)
            # One that has passed stays: whoever handles the partition may have found it lost by now.
            if now < tenancy.partition.deadline < deadline:
                tenancy.partition.deadline = deadline
        self._give_up(membership, now)
        if membership.joined.is_set():
            plan = Generation(membership.generation, membership.standby)
            if plan != self._told:
                self._told = plan
                self._events.append(plan)
        self._wake()

    def _give_up(self, membership: Membership, now: float) -> None:
        """Have lost on both sides what was renewed too late for whoever handles it."""
        if self._giving_up:
            return  # What is given up calls `changed`.
        self._giving_up = True
        try:
            for number, tenancy in list(self.tenancies.items()):
                if tenancy.partition.deadline <= now < membership.deadline(number):
                    membership.gone(number, "the lease was believed to have run out")
        finally:
            self._giving_up = False

    def _happened(self, happened: Happened, deadline: float) -> None:
        number, event = happened
        tenancy = self.tenancies.get(number)
        if isinstance(event, Owned):
            self._owned(number, tenancy, event, deadline)
        elif tenancy is None:
            return
        elif isinstance(event, Revoked):
            tenancy.revoked = True
            tenancy.rest()
            if not tenancy.releasing:
                self._events.append(Revoking(tenancy.partition, self._timeout))
        elif isinstance(event, LostTenure):
            self._over(tenancy)
            self._events.append(Lost(tenancy.partition, event.reason))
        elif isinstance(event, Released):
            self._over(tenancy)

    def _owned(self, number: int, tenancy: Tenancy | None, event: Owned, deadline: float) -> None:
        try:
            self._check_end(self._read_up_to(event.done.highest))
        except SourceError as error:
            self.failure = error
            return
        pulls = self._pulls(number, event.epoch, event.sub)
        if tenancy is not None:
            tenancy.follow(pulls)
            return
        partition = Partition(
            PartitionId(self._stream, number),
            READER,
            self._incarnation,
            deadline=deadline,
            fencing_token=event.token,
        )
        self.tenancies[number] = Tenancy(number, partition, event.done, pulls)
        self._events.append(Assigned(partition))

    def _over(self, tenancy: Tenancy) -> None:
        tenancy.rest()
        del self.tenancies[tenancy.number]
        tenancy.over.set()

    def _read_up_to(self, highest: int) -> int:
        # A cohort may begin beyond the end of the stream.
        return 0 if highest == self._first - 1 else highest

    # --- out

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

    def raise_lost(self, partition: Partition) -> None:
        """Raise ``SourceError`` for an assignment that is lost, while nobody was told that."""
        if any(isinstance(event, Lost) and event.partition is partition for event in self._events):
            raise SourceError(f"{partition.id} was lost before it was released")

    def heard(self) -> list[int]:
        """The partitions whose loss has been read since the last call, when the next events are asked for."""
        lost, self._lost = self._lost, []
        return lost

    def unread_losses(self) -> list[int]:
        """The partitions whose loss nobody reads any more, each of them once: nothing of them is asked for."""
        unread = [event.partition.id.number for event in self._events if isinstance(event, Lost)]
        self._events = [event for event in self._events if not isinstance(event, Lost)]
        return [*self.heard(), *unread]

    def release(self, number: int) -> None:
        """Tell nothing of a partition until ``released``: it is being given up."""
        self._releasing.add(number)

    def released(self, number: int) -> None:
        """Whoever has had it released knows that it is."""
        self._releasing.discard(number)
        self._wake()
