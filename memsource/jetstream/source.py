"""A source over a ``JetStreamBroker``: one member of its cohort.

``JetStreamMemberSource`` keeps the contract of ``lanes.source`` for a source with individual acknowledgements, on
asyncio and on trio. The source has no timer, because changes of the broker wake it. A test or simulation calls
``advance`` of the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lanes.clock import Clock, monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.errors import SourceError
from lanes.source import Assigned, Delivered, Lost, Revoking, SourceEvent, SourceTraits
from memsource.jetstream.broker import JetStreamBroker
from memsource.jetstream.takeover import Takeover
from memsource.memory.broker import Delivery
from memsource.memory.scripted import READER, Call, ScriptedSource, delivered, delivery

_ACKS_KEPT: Final = 10_000
"""Maximum number of acknowledgements that the source repeats after a lost connection."""


@dataclass(eq=False, slots=True)
class _Slot:
    """The state of an assigned partition. Without a ``takeover`` the partition delivers no further message."""

    epoch: int
    takeover: Takeover | None


class JetStreamMemberSource(ScriptedSource):
    """The source of a member of the broker's cohort. The member joins with ``open`` and leaves with ``aclose``.

    Tokens are ``Delivery`` values. After ``sever``, ``aclose`` still works, and any other call raises ``SourceError``.

    Args:
        broker: The broker.
        member: Name of the member, with ``#`` and a number.
        clock: Function that returns the broker's time in seconds.

    Attributes:
        announced: All assignments of the member, by partition number and epoch.
        calls: All calls of the source's methods.
    """

    def __init__(self, broker: JetStreamBroker, member: str, clock: Clock) -> None:
        super().__init__()
        self.broker = broker
        self.member = member
        self.clock = clock
        self.announced: dict[tuple[int, int], Partition] = {}
        self._slots: dict[int, _Slot] = {}
        self._acks: deque[tuple[int, int]] = deque(maxlen=_ACKS_KEPT)
        self._restarts = broker.restarts
        self._severed = False
        broker.introduce(self)

    def __repr__(self) -> str:
        return f"<JetStreamMemberSource {self.member} of {self.broker.topic.name}: {len(self._owned)} partitions>"

    def sever(self) -> None:
        """End the process of the member. Idempotent."""
        self._severed = True
        self.broker.unwatch(self._changed)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Join the cohort; see ``lanes.source.Source.open``."""
        async with self._meet(Call("open")):
            self._alive()
            self.broker.watch(self._changed)
            self.broker.cohort.join(self.member, self.clock())
            self._restarts = self.broker.restarts
            return SourceTraits(
                name=f"{self.broker.topic.name}/{self.member}",
                system="nats",
                extend_interval=self.broker.settings.wait(0) / 3,
                max_in_flight=self.broker.settings.max_ack_pending,
            )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages of owned partitions; see ``lanes.source.Source.settle``."""
        messages = [message for settlement in settlements for message in settlement.messages]
        async with self._meet(Call("settle", deliveries=tuple(map(delivery, messages)))):
            self._alive()
            for message in messages:
                if self._owns(message.partition):
                    number = message.partition.id.number
                    self._acks.append((number, message.position))
                    self.broker.consumer(number).ack(message.position, self.clock())

    async def extend(self, messages: Sequence[Message]) -> None:
        """Restart the ``ack_wait`` of messages; see ``lanes.source.Source.extend``."""
        async with self._meet(Call("extend", deliveries=tuple(map(delivery, messages)))):
            self._alive()
            for message in messages:
                if self._owns(message.partition):
                    self.broker.consumer(message.partition.id.number).extend(message.position, self.clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition back to the cohort; see ``lanes.source.Source.release``."""
        number = partition.id.number
        async with self._meet(Call("release", partition=number)):
            self._alive()
            if self._owns(partition):
                epoch = self._slots[number].epoch
                self._forget(number)
                self.broker.cohort.release(self.member, number, epoch, self.clock())

    async def aclose(self) -> None:
        """Leave the cohort; see ``lanes.source.Source.aclose``."""
        async with self._meet(Call("aclose")):
            if not self._severed:
                self.broker.unwatch(self._changed)
                self._forget_all()
                self.broker.cohort.leave(self.member, self.clock())

    # --- in

    def _alive(self) -> None:
        if self._severed:
            raise SourceError(f"member {self.member} of {self.broker.topic.name} has crashed; make a new source")

    def _next(self, room: Room) -> list[SourceEvent]:
        self._alive()
        now = self.clock()
        if not self.broker.cohort.runs(self.member):
            return []
        # Return these events without messages, because no message may precede the Assigned of its partition.
        if events := self._noticed():
            return events
        if self._restarts != self.broker.restarts:
            self._reconnect(now)
        for number in self._turns:
            self._takeover_of(number).step(now)
        return self._dealt(room)

    def _noticed(self) -> list[SourceEvent]:
        events: list[SourceEvent] = []
        for kind, number, epoch, timeout in self.broker.cohort.poll(self.member):
            if kind == "assigned":
                partition = Partition(self.broker.place(number), READER, fencing_token=epoch)
                self.announced[number, epoch] = self._owned[number] = partition
                self._slots[number] = _Slot(epoch, self._takeover(number))
                self._turns.append(number)
                events.append(Assigned(partition))
            elif number in self._slots and self._slots[number].epoch == epoch:
                if kind == "revoking":
                    self._silence(number)
                    events.append(Revoking(self._owned[number], timeout))
                else:
                    events.append(
                        Lost(self._forget(number), "the member's lease has expired, or the cohort took the partition")
                    )
        return events

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered]:
        """Yield the collected messages of the takeover, and after the takeover the next messages of the consumer."""
        takeover = self._takeover_of(number)
        run: list[Delivery] = []
        if takeover.done and not takeover.taken:
            run = self.broker.consumer(number).pull(messages, size, self.clock())
        while takeover.taken and len(run) < messages and size > 0:
            run.append(takeover.taken.popleft())
            size -= run[-1].record.size
        if run:
            yield delivered(self._owned[number], [(each.record, each) for each in run])

    def _at_the_end(self) -> bool:
        takeovers = [self._takeover_of(number) for number in self._turns]
        taken = all(takeover.done and not takeover.taken for takeover in takeovers)
        left = any(self.broker.consumer(number).waiting for number in self._turns)
        return taken and not left and not self.broker.cohort.moving

    def _reconnect(self, now: float) -> None:
        """Repeat acknowledgements that a restarted server may have lost, and repeat the takeover of all partitions."""
        self._restarts = self.broker.restarts
        for number, position in self._acks:
            self.broker.consumer(number).ack(position, now)
        for number in self._turns:
            self._takeover_of(number).cancel(now)
            self._slots[number].takeover = self._takeover(number)

    # --- out

    def _takeover(self, number: int) -> Takeover:
        return Takeover(self.broker.consumer(number), self.broker.wake_at)

    def _takeover_of(self, number: int) -> Takeover:
        takeover = self._slots[number].takeover
        assert takeover is not None, "only partitions that deliver have turns"
        return takeover

    def _owns(self, partition: Partition) -> bool:
        return self._owned.get(partition.id.number) is partition

    def _silence(self, number: int) -> None:
        super()._silence(number)
        slot = self._slots[number]
        if slot.takeover is not None:
            slot.takeover.cancel(self.clock())
            slot.takeover = None

    def _forget(self, number: int) -> Partition:
        partition = super()._forget(number)
        del self._slots[number]
        return partition


class JetStreamPersonality(JetStreamBroker):
    """A ``JetStreamBroker`` that creates the sources of its members; see ``memsource.personality.Personality``."""

    def source(self, member: str, clock: Clock = monotonic) -> JetStreamMemberSource:
        """Create the source of a new member. An earlier member of this name must have crashed or left."""
        return JetStreamMemberSource(self, f"{member}#{len(self._by_lease) + 1}", clock)
