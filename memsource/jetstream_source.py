"""A source over a ``JetStreamBroker``: one member of its cohort.

``JetStreamMemberSource`` keeps the contract of ``lanes.source`` for a source with individual acknowledgements, on
asyncio and on trio. It never sleeps by itself: it wakes when the broker has something new, and whoever runs the broker
calls ``advance``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from lanes.clock import Clock
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, Exhausted, Lost, Revoking, SourceEvent, SourceTraits
from memsource.broker import Delivery
from memsource.jetstream_takeover import Takeover
from memsource.topic import RecordReader

if TYPE_CHECKING:
    from memsource.jetstream import JetStreamBroker

__all__ = ["JetStreamMemberSource"]

_READER: Final = RecordReader()

_BATCH: Final = 100
"""Messages of one partition delivered at once, at most."""

_ACKS_KEPT: Final = 10_000
"""How many acknowledgements are repeated after a connection was lost."""


class _Slot:
    """A partition it has announced. ``takeover`` = None: nothing more of it is delivered."""

    __slots__ = ("epoch", "partition", "takeover")

    def __init__(self, partition: Partition, epoch: int, takeover: Takeover) -> None:
        self.partition = partition
        self.epoch = epoch
        self.takeover: Takeover | None = takeover


class JetStreamMemberSource:
    """``member`` of the broker's cohort as a source: it joins with ``open`` and leaves with ``aclose``.

    ``clock``: seconds, the time in which the broker is advanced. Tokens are ``Delivery`` values. After ``sever`` every
    call but ``aclose`` raises ``SourceError``, and nothing it does reaches the broker. ``announced``: the assignments
    so far, by their number and the epoch of the cohort.
    """

    def __init__(self, broker: JetStreamBroker, member: str, clock: Clock) -> None:
        self.broker = broker
        self.member = member
        self.clock = clock
        self.announced: dict[tuple[int, int], Partition] = {}
        self._slots: dict[int, _Slot] = {}
        self._turns: deque[int] = deque()  # whose turn is next is in front
        self._acks: deque[tuple[int, int]] = deque(maxlen=_ACKS_KEPT)
        self._restarts = broker.restarts
        self._severed = False
        self._finite = False
        self._exhausted = False
        self._wake = anyio.Event()

    def __repr__(self) -> str:
        return f"<JetStreamMemberSource {self.member} of {self.broker.topic.name}: {len(self._slots)} partitions>"

    def finish(self) -> None:
        """Make it finite: ``Exhausted`` follows once everything published in its own partitions is delivered."""
        self._finite = True
        self._wake.set()

    def sever(self) -> None:
        """Its process is gone. Idempotent."""
        self._severed = True
        self.broker.unwatch(self._changed)

    @property
    def owned(self) -> list[int]:
        """The partitions it has announced and neither released nor reported lost."""
        return list(self._slots)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the cohort; see ``lanes.source.Source.open``."""
        await self._reach()
        self.broker.watch(self._changed)
        self.broker.cohort.join(self.member, self.clock())
        self._restarts = self.broker.restarts
        return SourceTraits(
            name=f"{self.broker.topic.name}/{self.member}",
            system="nats",
            extend_interval=self.broker.settings.wait(0) / 3,
            max_in_flight=self.broker.settings.max_ack_pending,
            redelivers=True,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``."""
        while True:
            # From the end of this call to the return nothing suspends: a cancelled receive has taken nothing.
            self._wake = anyio.Event()
            await self._reach()
            events = self._next(room, self.clock())
            if events:
                return events
            await self._wake.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``. Not those of a partition known to be lost."""
        await self._reach()
        for settlement in settlements:
            number = settlement.partition.id.number
            if self._owns(settlement.partition):
                for message in settlement.messages:
                    self._acks.append((number, message.position))
                    self.broker.consumer(number).ack(message.position, self.clock())

    async def extend(self, messages: Sequence[Message]) -> None:
        """Start their ``ack_wait`` anew; see ``lanes.source.Source.extend``."""
        await self._reach()
        for message in messages:
            if self._owns(message.partition):
                self.broker.consumer(message.partition.id.number).extend(message.position, self.clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the cohort; see ``lanes.source.Source.release``."""
        await self._reach()
        if self._owns(partition):
            number = partition.id.number
            epoch = self._slots[number].epoch
            self._forget(number)
            self.broker.cohort.release(self.member, number, epoch, self.clock())

    async def aclose(self) -> None:
        """Leave the cohort; see ``lanes.source.Source.aclose``."""
        await anyio.lowlevel.checkpoint()
        if not self._severed:
            self.broker.unwatch(self._changed)
            for number in list(self._slots):
                self._forget(number)
            self.broker.cohort.leave(self.member, self.clock())

    # --- in

    async def _reach(self) -> None:
        """Suspend once, as every call to a broker may."""
        await anyio.lowlevel.checkpoint()
        if self._severed:
            raise SourceError(f"member {self.member} of {self.broker.topic.name} has crashed: make a new source")

    def _next(self, room: Room, now: float) -> list[SourceEvent]:
        if not self.broker.cohort.runs(self.member):
            return []
        # Alone, so that no message comes before the event that its partition begins with.
        return self._noticed(now) or self._delivered(room, now)

    def _noticed(self, now: float) -> list[SourceEvent]:
        events: list[SourceEvent] = []
        for kind, number, epoch, timeout in self.broker.cohort.poll(self.member):
            if kind == "assigned":
                partition = Partition(PartitionId(self.broker.topic.name, number), _READER)
                self.announced[number, epoch] = partition
                self._slots[number] = _Slot(partition, epoch, self._takeover(number))
                self._turns.append(number)
                events.append(Assigned(partition))
            elif number in self._slots and self._slots[number].epoch == epoch:
                partition = self._slots[number].partition
                if kind == "revoking":
                    self._silence(number, now)
                    events.append(Revoking(partition, timeout))
                else:
                    self._forget(number)
                    events.append(Lost(partition, "its lease has expired or was taken"))
        return events

    def _delivered(self, room: Room, now: float) -> list[SourceEvent]:
        if self._restarts != self.broker.restarts:
            self._reconnect(now)
        events: list[SourceEvent] = []
        messages, size = room.messages, room.bytes
        for _ in range(len(self._turns)):
            number = self._turns[0]
            self._turns.rotate(-1)
            slot = self._slots[number]
            assert slot.takeover is not None, "only what is delivered has turns"
            if slot.takeover.step(now) and slot.partition not in room.paused and messages > 0 and size > 0:
                run = self._take(number, slot.takeover, min(messages, _BATCH), size, now)
                if run:
                    event = _delivered(slot.partition, run)
                    messages -= len(run)
                    size -= event.size
                    events.append(event)
        if not events and room.messages > 0 and self._finite and not self._exhausted and self._at_the_end():
            self._exhausted = True
            events.append(Exhausted())
        return events

    def _take(self, number: int, takeover: Takeover, messages: int, size: int, now: float) -> list[Delivery]:
        """What the takeover has collected, and only then what the consumer has."""
        if not takeover.taken:
            return self.broker.consumer(number).pull(messages, size, now)
        run: list[Delivery] = []
        while takeover.taken and len(run) < messages and size > 0:
            run.append(takeover.taken.popleft())
            size -= run[-1].record.size
        return run

    def _at_the_end(self) -> bool:
        takeovers = [self._slots[number].takeover for number in self._turns]
        taken = all(takeover is not None and takeover.done and not takeover.taken for takeover in takeovers)
        left = any(self.broker.consumer(number).waiting for number in self._turns)
        return taken and not left and not self.broker.cohort.moving

    def _reconnect(self, now: float) -> None:
        """The server was started anew: repeat what it may have forgotten, and take over from oneself."""
        self._restarts = self.broker.restarts
        for number, position in self._acks:
            self.broker.consumer(number).ack(position, now)
        for number in self._turns:
            takeover = self._slots[number].takeover
            assert takeover is not None, "only what is delivered has turns"
            takeover.cancel(now)
            self._slots[number].takeover = self._takeover(number)

    # --- out

    def _takeover(self, number: int) -> Takeover:
        return Takeover(self.broker.consumer(number), self.broker.wake_at)

    def _owns(self, partition: Partition) -> bool:
        slot = self._slots.get(partition.id.number)
        return slot is not None and slot.partition is partition

    def _silence(self, number: int, now: float) -> None:
        slot = self._slots[number]
        if slot.takeover is not None:
            slot.takeover.cancel(now)
            slot.takeover = None
            self._turns.remove(number)

    def _forget(self, number: int) -> None:
        self._silence(number, self.clock())
        del self._slots[number]

    def _changed(self) -> None:
        self._wake.set()


def _delivered(partition: Partition, deliveries: Sequence[Delivery]) -> Delivered:
    run = [
        Message(partition, each.record.position, each.record.key, each.record.size, each.record, each)
        for each in deliveries
    ]
    return Delivered(partition, run, sum(message.size for message in run))
