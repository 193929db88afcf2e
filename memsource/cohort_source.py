"""A source over a ``CohortBroker``: one member of its cohort, by the real membership.

``CohortMemberSource`` keeps the contract of ``lanes.source`` for a source with individual acknowledgements, on asyncio
and on trio. What it decides is what every source of a cohort has to: what of a partition is new, held or done; that a
missing delivery or another connection is a takeover from oneself; and that nothing leaves for the server behind a
partition's deadline.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio

from lanes.clock import Clock
from lanes.core.cohort.actions import Lost as TenureLost
from lanes.core.cohort.actions import Owned, Released, Revoked
from lanes.core.cohort.ledger import DeliveryLedger
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import SourceError
from lanes.membership import Membership
from lanes.source import Assigned, Delivered, Generation, Lost, Revoking, SourceEvent, SourceTraits
from memsource.background import Background
from memsource.broker import Delivery
from memsource.calls import Call
from memsource.epoch_consumers import Durable, MemoryEpochConsumers
from memsource.lease_store import MemoryLeaseStore
from memsource.topic import Record
from memsource.turns import READER, Turns, delivered

if TYPE_CHECKING:
    from memsource.cohort_broker import CohortBroker

__all__ = ["CohortMemberSource", "Token"]


class Token(NamedTuple):
    """A delivery, and of which durable it is: only that one can be told that it is finished."""

    durable: Durable
    delivery: Delivery


class _Slot:
    """A partition it owns. ``durable`` = None: nothing is delivered, for it is taken over; ``count``: the deliveries of
    the durable so far; ``gone``: it is drained, and released or about to be."""

    __slots__ = ("count", "durable", "gone", "ledger", "partition", "revoked", "token")

    def __init__(self, partition: Partition, token: int, ledger: DeliveryLedger, durable: Durable) -> None:
        self.partition = partition
        self.token = token
        self.ledger = ledger
        self.durable: Durable | None = durable
        self.count = 0
        self.revoked = False
        self.gone = anyio.Event()


class CohortMemberSource(Turns):
    """``member`` of the broker's cohort as a source: it joins with ``open`` and leaves with ``aclose``.

    ``clock``: seconds, the time in which the broker is advanced; the member's own clock is faster by ``drift``, 0.1 is
    a tenth. ``number`` tells it from others that had its name. Tokens are ``Token`` values. ``announced``: the
    assignments so far, by their number and fencing token; ``released``: those of them that were given back, or known to
    be lost. ``calls`` is what was called so far.
    """

    def __init__(self, broker: CohortBroker, member: str, clock: Clock, *, number: int = 0, drift: float = 0.0) -> None:
        super().__init__()
        self.broker = broker
        self.member = member
        self.announced: dict[tuple[int, int], Partition] = {}
        self.released: set[Partition] = set()
        self._clock = clock
        self._pace = 1.0 + drift
        self._random = random.Random(f"member {broker.seed} {number}")
        self.way = broker.way(member, clock)
        self.membership = Membership(
            MemoryLeaseStore(broker.bucket, self.way),
            MemoryEpochConsumers(broker.stream, self.way, int(broker.cohort.lease)),
            broker.config,
            member=member,
            settings=broker.cohort,
            changed=self._take_in,
            clock=lambda: clock() * self._pace,
            wall=lambda: broker.stream.server_ms(clock()) / 1000,
            nonce=lambda: f"{self._random.getrandbits(64):016x}",
        )
        self._background: Background | None = None
        self._slots: dict[int, _Slot] = {}
        self._events: deque[SourceEvent] = deque()
        self._withheld: dict[int, list[SourceEvent]] = {}  # while a release is under way
        self._generation = (0, False)
        self._restarts = broker.restarts
        self._giving_up = False

    def __repr__(self) -> str:
        return f"<CohortMemberSource {self.member} of {self.broker.stream.topic.name}: {len(self._owned)} partitions>"

    def sever(self) -> None:
        """Its process is gone. Idempotent."""
        self.way.sever()
        self._unwatch()

    def poke(self) -> None:
        """Have it look again."""
        self._changed()

    @property
    def alive(self) -> bool:
        """Whether it is a member that was not severed."""
        return self._background is not None and not self._background.ended.is_set() and not self.way.severed

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the cohort; see ``lanes.source.Source.open``."""
        self.calls.append(Call("open"))
        broker = self.broker
        async with self._faults.meet("open"):
            self._alive()
            broker.stream.watch(self.poke)
            if broker.hints:
                broker.bucket.watch(self.membership.hint)
            self._restarts = broker.restarts
            self._background = Background(self.membership.run, self._take_in)
        while not self.membership.joined.is_set():
            self._raise_failure()
            await self._change()
        return SourceTraits(
            name=f"{broker.stream.topic.name}/{self.member}",
            system="nats",
            extend_interval=broker.stream.settings.wait(0) / 3,
            max_in_flight=broker.stream.settings.max_ack_pending,
            partitions=len(broker.partitions),
            plans=True,
            remembers=True,
        )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``. Not those of a partition that is or may be lost."""
        owned = [(slot, each) for each in settlements if (slot := self._slot(each.partition)) is not None]
        done = [(slot, message) for slot, each in owned for message in each.messages]
        self.calls.append(Call("settle", deliveries=tuple(_token(message).delivery for _, message in done)))
        for slot, message in done:
            slot.ledger.settled(message.position)  # whoever is next is told, also where the broker is not in time
        async with self._faults.meet("settle"):
            self._alive()
            for slot, message in done:
                if self._slot(message.partition) is slot:
                    self._settled(slot, message)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Start their ``ack_wait`` anew; see ``lanes.source.Source.extend``."""
        self.calls.append(Call("extend", deliveries=tuple(_token(message).delivery for message in messages)))
        async with self._faults.meet("extend"):
            self._alive()
            for message in messages:
                if self._slot(message.partition) is not None and not self.way.cut:
                    self.broker.stream.extend(_token(message).durable, message.position, self._clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the cohort; see ``lanes.source.Source.release``.

        It is given up before this suspends, whoever waits. Nobody does where something runs: then its lease runs out.
        """
        self.calls.append(Call("release", partition=partition.id.number))
        if self.way.severed:
            return
        slot = self._slots.get(partition.id.number)
        if slot is None or slot.partition is not partition:
            return
        number = partition.id.number
        # What comes of it meanwhile is for who has let go of it: the same partition may be this member's again. Called
        # twice at once it is one release, and the first that is over tells.
        self._withheld.setdefault(number, [])
        try:
            self._silence(number)
            if not slot.revoked:
                # Who gives back what nobody has asked for is leaving.
                self.membership.stop()
            ended = not partition.unended
            self.membership.drained(number, slot.ledger.snapshot(), ended=ended)
            async with self._faults.meet("release"):
                if ended:
                    await slot.gone.wait()
            if any(isinstance(event, Lost) for event in self._withheld.get(number, ())):
                raise SourceError(f"partition {number} was lost before it was released")
        finally:
            self._events.extend(self._withheld.pop(number, ()))
            self._changed()

    async def aclose(self) -> None:
        """Leave the cohort; see ``lanes.source.Source.aclose``."""
        self.calls.append(Call("aclose"))
        async with self._faults.meet("aclose"):
            background = self._background
            if background is not None and not self.way.severed:
                self.membership.stop()
                for number, slot in list(self._slots.items()):
                    self._silence(number)
                    self.membership.drained(number, slot.ledger.snapshot())
                while self._events:
                    self._heard(self._events.popleft())
                try:
                    await background.ended.wait()
                finally:
                    background.cancel()
            self._unwatch()

    # --- in

    def _alive(self) -> None:
        if self.way.severed:
            raise SourceError(f"member {self.member} has crashed: make a new source")

    def _raise_failure(self) -> None:
        background = self._background
        if background is not None and background.failure is not None:
            raise background.failure

    def _next(self, room: Room) -> list[SourceEvent]:
        self._alive()
        self._raise_failure()
        # Alone, so that no message comes before the event that its partition begins with.
        if self._events:
            return [self._heard(self._events.popleft())]
        if self._restarts != self.broker.restarts:
            self._restarts = self.broker.restarts
            for number in list(self._turns):
                self._take_over(number)
        return self._dealt(room)

    def _heard(self, event: SourceEvent) -> SourceEvent:
        """The engine has it, or nobody asks any more: what a zombie runs of a loss keeps its lane, wherever it ends."""
        if isinstance(event, Assigned):
            number = event.partition.id.number
            slot = self._slots.get(number)
            if slot is not None and slot.partition is event.partition and not slot.revoked:
                self._turns.append(number)
        elif isinstance(event, Lost):
            self.membership.ended(event.partition.id.number)
        return event

    def _emit(self, number: int, event: SourceEvent) -> None:
        self._withheld.get(number, self._events).append(event)

    def _take_in(self) -> None:
        """The membership has something new: take it over at once, whoever is receiving."""
        for number, event in self.membership.take():
            if isinstance(event, Owned):
                self._begin(number, event)
            elif isinstance(event, Revoked):
                slot = self._slots[number]
                slot.revoked = True
                self._silence(number)
                # Kept until it is drained, however long that takes, or until what runs is cancelled.
                within = math.inf if self.broker.cohort.overdue == "keep" else self.broker.cohort.drain_within
                self._emit(number, Revoking(slot.partition, within))
            elif isinstance(event, Released | TenureLost):
                slot = self._slots[number]
                self.released.add(self._forget(number))
                slot.gone.set()
                if isinstance(event, TenureLost):
                    self._emit(number, Lost(slot.partition, event.reason))
        for number, slot in list(self._slots.items()):
            deadline = self.membership.deadline(number) / self._pace
            # One that has passed is lost, whoever notices first, and for the membership too.
            if self._clock() < slot.partition.deadline < deadline:
                slot.partition.deadline = deadline
            elif slot.partition.deadline <= self._clock() < deadline and not self._giving_up:
                self._giving_up = True  # It calls this again.
                try:
                    self.membership.gone(number, "the lease was believed to have run out")
                finally:
                    self._giving_up = False
        generation = self.membership.generation, self.membership.standby
        if generation != self._generation:
            self._generation = generation
            self._events.append(Generation(*generation))
        self._changed()

    def _begin(self, number: int, event: Owned) -> None:
        durable = Durable(number, event.epoch, event.sub)
        if event.again:
            slot = self._slots[number]
            slot.durable, slot.count = durable, 0
            return
        partition = Partition(
            PartitionId(self.broker.stream.topic.name, number),
            READER,
            deadline=self.membership.deadline(number) / self._pace,
            fencing_token=event.token,
        )
        self.announced[number, event.token] = self._owned[number] = partition
        self.broker.owned.append((number, event.token, self.member))
        self._slots[number] = _Slot(partition, event.token, DeliveryLedger(event.done), durable)
        self._emit(number, Assigned(partition))

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered]:
        slot = self._slots[number]
        if not self.way.cut and slot.durable is not None and self._clock() < slot.partition.deadline:
            records = self._pull(number, slot, slot.durable, messages, size)
            if records:
                yield delivered(slot.partition, records)

    def _pull(self, number: int, slot: _Slot, durable: Durable, messages: int, size: int) -> list[tuple[Record, Token]]:
        """What the durable has, as far as nothing is missing; what is done already is acknowledged again."""
        stream = self.broker.stream
        deliveries = stream.pull(durable, messages, size, self._clock())
        if deliveries is None:
            self.membership.gone(number, f"its durable {durable} is gone")
            return []
        run: list[tuple[Record, Token]] = []
        for delivery in deliveries:
            if self.broker.loses_delivery(durable):
                continue
            slot.count += 1
            if delivery.token != slot.count:
                # Behind newer messages of its key it would come out of order.
                self._take_over(number)
                break
            record = delivery.record
            if not slot.ledger.delivered(record.position):
                stream.ack(durable, record.position, self._clock())
            else:
                run.append((record, Token(durable, delivery)))
        return run

    def _take_over(self, number: int) -> None:
        slot = self._slots[number]
        slot.durable = None
        self.membership.takeover(number, slot.ledger.snapshot())

    def _at_the_end(self) -> bool:
        stream = self.broker.stream
        durables = [self._slots[number].durable for number in self._turns]
        if None in durables or not len(durables) == len(self._slots) == self.membership.planned:
            return False
        return not any(stream.consumer(durable).waiting for durable in durables if durable and stream.exists(durable))

    # --- out

    def _slot(self, partition: Partition) -> _Slot | None:
        """What it knows of a partition that is certainly its own at this moment."""
        slot = self._slots.get(partition.id.number)
        if slot is None or slot.partition is not partition or self._clock() >= partition.deadline:
            return None
        return slot

    def _settled(self, slot: _Slot, message: Message) -> None:
        token = _token(message)
        number = message.partition.id.number
        if not self.way.cut and not self._ack(token) and token.durable == slot.durable:
            self.membership.gone(number, f"its durable {token.durable} took no acknowledgement")
        if slot.ledger.since_saved > self.broker.in_flight:
            self.membership.checkpoint(number, slot.ledger.save())

    def _ack(self, token: Token) -> bool:
        """Acknowledge; False where it is known that nobody took it."""
        stream, position = self.broker.stream, token.delivery.record.position
        if self.way.latency:
            at = self._clock() + self.way.latency
            self.broker.later(at, lambda now: _late_ack(self.broker, token, now))
            return True
        return stream.ack(token.durable, position, self._clock())

    def _forget(self, number: int) -> Partition:
        partition = super()._forget(number)
        del self._slots[number]
        return partition

    def _unwatch(self) -> None:
        self.broker.stream.unwatch(self.poke)
        self.broker.bucket.unwatch(self.membership.hint)


def _token(message: Message) -> Token:
    assert isinstance(message.token, Token)
    return message.token


def _late_ack(broker: CohortBroker, token: Token, now: float) -> None:
    broker.stream.ack(token.durable, token.delivery.record.position, now)
