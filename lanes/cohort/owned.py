"""The cohort partitions that a member owns, as its source sees them. The module works with any lease store.

``OwnedPartitions`` connects a ``Membership`` with the calls of a source, and does no I/O. The object turns the events
of the membership into source events. The object selects the durable to read, the settlements to send, the ledgers to
store, and the partitions to give up. The source itself receives messages and sends acknowledgements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import anyio

from lanes.clock import Clock, monotonic
from lanes.cohort.membership import Membership
from lanes.core.cohort.actions import LeaseEvent, LeaseLost, LeaseOwned, LeaseRevoked
from lanes.core.cohort.ledger import DeliveryLedger, Done
from lanes.core.types import NEVER, Partition, PartitionId, Reader, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Generation, Lost, Revoking, SourceEvent


class OwnedPartition(ABC):
    """One ownership of a cohort partition, from its first event to its last event.

    A source derives a class that also pulls the messages of the durable.

    Args:
        number: Number of the cohort partition.
        partition: The assignment that the consumer receives.
        done: Messages that former owners finished. If the server redelivers a finished message, the source acknowledges
            the message and does not deliver it.

    Attributes:
        number: Number of the cohort partition.
        partition: The assignment that the consumer receives.
        ledger: The delivered messages, with the finished messages among them.
        expected: Number of the durable's next delivery.
        announced: Whether the consumer has received the assignment.
        revoked: Whether the member must hand the partition over, because the plan changed or the member stops.
        releasing: Whether this member is giving up the partition.
        over: Event that is set when the member has handed over or lost the partition.
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
        """Stop pulling messages until ``begin`` selects the next durable. The call does not block. Idempotent."""

    def unsaved(self) -> Done | None:
        """Return the ledger for a write, if a finished message above the floor is unsaved.

        Returns:
            The whole ledger, whose messages now count as saved. The result is None if every message is saved.
        """
        return self.ledger.save() if self.ledger.since_saved else None

    def begin(self) -> None:
        """Begin to read a durable.

        The durable first redelivers outstanding messages, and numbers its deliveries from 1.
        """
        self.rest()
        self.expected = 1

    def follows(self, delivery: int) -> bool:
        """Return whether a delivery is the next delivery of its durable.

        If so, the method expects the delivery after it. If not, an earlier delivery is missing. The server would
        redeliver the missing message after newer messages of its key. The source therefore drops this and all later
        deliveries, and calls ``OwnedPartitions.take_over``.

        Args:
            delivery: Number of the delivery, counted by the durable from 1.

        Returns:
            True = the delivery is the next one; False = an earlier delivery is missing.
        """
        if delivery != self.expected:
            return False
        self.expected += 1
        return True


T = TypeVar("T", bound=OwnedPartition)


class MakesMembership(Protocol):
    """A function that makes a ``Membership`` from only the argument ``changed``."""

    def __call__(self, *, changed: Callable[[], None]) -> Membership:
        """Make a membership that does not run yet.

        Args:
            changed: See ``Membership``.

        Returns:
            The membership.
        """


class OwnedPartitions(Generic[T]):
    """The cohort partitions that a member owns.

    All calls belong to one event loop. Only ``release`` waits; all other calls return at once. ``changed`` reads the
    events of the membership as they happen. ``step`` later reports the consumer's answers to the membership.

    Args:
        name: Source name of the partitions, as in ``PartitionId``, or a function that returns it for a number.
        reader: Reader of the partitions.
        incarnation: Incarnation of the partitions; "" = the source has none.
        membership: Function that makes the membership.
        make: Function that makes the object of one ownership.
        follow: Function that starts reading the durable in a ``LeaseOwned``, after an acquisition or a takeover. If the
            source cannot continue, ``follow`` raises ``SourceError``, which becomes the ``failure``.
        in_flight: Number of messages that can be in flight, which the source may raise. The member stores a ledger
            immediately when more unsaved finished messages than this number are above its floor. After a crash, at most
            twice this number of messages therefore run again. Below this number, the member stores the ledger by
            ``Membership.checkpoint_soon``. For a work queue, the member stores no such ledger.
        clock: Clock of the deadlines.
        wake: Function that the object calls when the source should call ``step`` and ``next_events``; must not block.

    Attributes:
        by_number: The owned partitions by number.
        failure: The error with which the source must end; None = no error.
        in_flight: Number of messages that can be in flight.
        membership: The membership.
    """

    def __init__(
        self,
        name: str | Callable[[int], str],
        reader: Reader,
        incarnation: str = "",
        *,
        membership: MakesMembership,
        make: Callable[[int, Partition, Done], T],
        follow: Callable[[T, LeaseOwned], None],
        in_flight: int = 1,
        clock: Clock = monotonic,
        wake: Callable[[], None],
    ) -> None:
        self.by_number: dict[int, T] = {}
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
        # "keep" drains without a limit; "force" cancels handlers at the limit.
        self._drain_within = settings.drain_within if settings.overdue == "force" else NEVER
        self._writes = self.membership.retention != "workqueue"

    def __repr__(self) -> str:
        name = self._name if isinstance(self._name, str) else self._name(0)
        return f"<OwnedPartitions of {len(self.by_number)} partitions of {name}>"

    # --- what is owned

    def of(self, partition: Partition) -> T | None:
        """Return the ownership of an assignment.

        Args:
            partition: The assignment.

        Returns:
            The ownership; None = the ownership is over.
        """
        owned = self.by_number.get(partition.id.number)
        return owned if owned is not None and owned.partition is partition else None

    def leased(self, partition: Partition) -> T | None:
        """Return the ownership of an assignment if its lease has certainly not expired.

        The source must send nothing to the server for an assignment without such a lease.

        Args:
            partition: The assignment.

        Returns:
            The ownership; None = the ownership is over, or its deadline has passed.
        """
        return self.of(partition) if self._clock() < partition.deadline else None

    @property
    def highest(self) -> int:
        """The highest sequence read from any partition; 0 = none."""
        return max((self.read_up_to(owned.ledger.highest) for owned in self.by_number.values()), default=0)

    def read_up_to(self, highest: int) -> int:
        """Return the highest sequence that the consumer has read, given the highest sequence of a ledger.

        Before the first message, the highest sequence of the ledger is directly below the start of the cohort, and the
        consumer has not read it.

        Args:
            highest: The highest sequence of the ledger.

        Returns:
            The sequence; 0 = the consumer has read no message.
        """
        return 0 if highest == self.membership.first - 1 else highest

    # --- events of the membership

    def changed(self) -> None:
        """Read the new events of the membership, the deadlines and the plan."""
        for number, event in self.membership.take():
            self._happened(number, event)
        now = self._clock()
        for owned in self.by_number.values():
            deadline = self.membership.deadline(owned.number)
            # A deadline that has passed stays: the consumer may have found the partition lost already.
            if now < owned.partition.deadline < deadline:
                owned.partition.deadline = deadline
        if self.membership.joined.is_set():
            member = self.membership
            plan = Generation(member.generation, member.standby, member.under_provisioned, member.target_honoured)
            if plan != self._told:
                self._told = plan
                self._events.append(plan)
        self._wake()

    def _happened(self, number: int, event: LeaseEvent) -> None:
        owned = self.by_number.get(number)
        if isinstance(event, LeaseOwned):
            self._owned(number, owned, event)
        elif owned is None:
            return
        elif isinstance(event, LeaseRevoked):
            owned.revoked = True
            owned.rest()
            if not owned.releasing:
                self._events.append(Revoking(owned.partition, self._drain_within))
        else:
            owned.rest()
            del self.by_number[number]
            owned.over.set()
            if isinstance(event, LeaseLost):
                self._events.append(Lost(owned.partition, event.reason))

    def _owned(self, number: int, known: T | None, event: LeaseOwned) -> None:
        owned = self._make(number, self._partition(number, event), event.done) if known is None else known
        try:
            self._follow(owned, event)
        except SourceError as error:
            self.failure = error
            return
        if known is None:
            self.by_number[number] = owned
            self._events.append(Assigned(owned.partition))

    def _partition(self, number: int, event: LeaseOwned) -> Partition:
        name = self._name if isinstance(self._name, str) else self._name(number)
        return Partition(
            PartitionId(name, number),
            self._reader,
            self._incarnation,
            deadline=self.membership.deadline(number),
            fencing_token=event.token,
        )

    # --- while a source receives

    def step(self) -> None:
        """Tell the membership which assignments and losses the consumer has received.

        The source calls this method before ``next_events``.

        The member may acquire a partition again after the consumer has received its loss. If the member renews a lease
        after the consumer has reported its deadline as passed, the membership also treats the partition as lost.
        """
        self._end_losses()
        self._lose_late()

    def _end_losses(self) -> None:
        lost, self._lost = self._lost, []
        for number in lost:
            self.membership.ended(number)

    def _lose_late(self) -> None:
        now = self._clock()
        for owned in list(self.by_number.values()):
            if owned.partition.deadline <= now < self.membership.deadline(owned.number):
                self.lose(owned, "the deadline passed before the renewal of the lease was seen")

    def next_events(self) -> list[SourceEvent]:
        """Return the new events for the consumer, in order, except the events of partitions during their release.

        The member may own a released partition again before the consumer has received the end of the release.

        Returns:
            The events.
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
        owned = self.of(event.partition)
        if isinstance(event, Lost):
            self._lost.append(event.partition.id.number)
        elif isinstance(event, Assigned) and owned is not None:
            owned.announced = True

    def take_over(self, owned: T) -> None:
        """Request a new durable, because a delivery is missing or the connection is new.

        The source pulls no message until the new durable exists. Delivered messages stay in flight. Idempotent. The
        call has no effect for an ownership that has ended, because the member may own the partition again.

        Args:
            owned: The partition.
        """
        owned.rest()
        if self.of(owned.partition) is owned:
            self.membership.takeover(owned.number, owned.ledger.snapshot())

    def lose(self, owned: T, reason: str) -> None:
        """Give up a partition after its durable or the clock has shown that this member no longer owns it. Idempotent.

        The call has no effect for an ownership that has ended, because the member may own the partition again.

        Args:
            owned: The partition.
            reason: Reason of the loss, for the log and the ``Lost`` event.
        """
        if self.of(owned.partition) is owned:
            self.membership.gone(owned.number, reason)

    def settled(self, settlement: Settlement) -> T | None:
        """Record the settled messages as finished; see ``lanes.source.Source.settle``. Idempotent.

        Args:
            settlement: Messages of one partition.

        Returns:
            The ownership whose messages the source may acknowledge now; None = no lease. Without a lease, the call
            records nothing, and the source must acknowledge no message.
        """
        owned = self.leased(settlement.partition)
        if owned is None:
            return None
        ledger = owned.ledger
        for message in settlement.messages:
            ledger.settled(message.position)
        if self._writes and ledger.since_saved:
            if ledger.since_saved > self.in_flight:
                self.membership.checkpoint(owned.number, ledger.save())
            else:
                self.membership.checkpoint_soon(owned.number, len(ledger), owned.unsaved)
        return owned

    # --- giving up

    async def release(self, partition: Partition, flush: Callable[[], Awaitable[None]]) -> None:
        """Store the ledger of a drained partition and release its lease; see ``lanes.source.Source.release``.

        The call gives the partition up even when ``flush`` raises or the call is cancelled. While a handler of the
        partition still runs, the call returns early, and the lease expires.

        Args:
            partition: The assignment.
            flush: Function that waits, for a limited time, until the sent acknowledgements have reached the
                server. The call raises the errors of ``flush``.

        Raises:
            SourceError: The partition was lost, and the consumer has not received the ``Lost`` event.
        """
        owned = self.of(partition)
        if owned is None:
            self._raise_lost(partition)
            return
        owned.releasing = True
        owned.rest()
        if not owned.revoked:
            # The plan did not revoke the partition, so the consumer stops and its member leaves.
            self.membership.stop()
        self._releasing.add(owned.number)
        ended = not partition.unended
        try:
            try:
                await flush()
            finally:
                self.membership.drained(owned.number, owned.ledger.snapshot(), ended=ended)
            if ended:
                await owned.over.wait()
            self._raise_lost(partition)
        finally:
            # Two calls at once are one release, which ends with the first of the calls.
            self._releasing.discard(owned.number)
            self._wake()

    def leave(self) -> bool:
        """Give up the partitions of a stopped member, up to the first partition with unsettled messages.

        Call this method again after every new event, until the membership has ended.

        Returns:
            False = a partition has unsettled messages. A handler may still run, so the member must not release its
            leases. The leases expire, as after a crash.
        """
        self._lose_late()
        self._drop_losses()
        for owned in list(self.by_number.values()):
            if owned.releasing:
                continue
            if owned.announced and len(owned.ledger):
                return False
            owned.releasing = True
            owned.rest()
            self.membership.drained(owned.number, owned.ledger.snapshot())
        self._drop_losses()
        return True

    def _drop_losses(self) -> None:
        """Drop losses, because the stopped consumer does not read them."""
        self._lost += [event.partition.id.number for event in self._events if isinstance(event, Lost)]
        self._events = [event for event in self._events if not isinstance(event, Lost)]
        self._end_losses()

    def _raise_lost(self, partition: Partition) -> None:
        if any(isinstance(event, Lost) and event.partition is partition for event in self._events):
            raise SourceError(
                f"{partition.id} was lost before it was released; its next owner receives its unsettled messages"
            )
