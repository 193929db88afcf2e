"""A source over a ``MemoryBroker``, and its dead letters: what a test of a handler needs instead of a server.

``MemorySource`` keeps the contract of ``lanes.source`` on asyncio and on trio. Everything that a real broker does
by itself, a test does here by a call: give partitions, revoke them, lose them, deliver again, fail, hang.

    async def test_every_order_is_booked() -> None:
        broker = MemoryBroker(partitions=2)
        for number in range(100):
            broker.publish(f"order {number}", key=f"customer-{number % 7}")
        source = MemorySource(broker)
        source.finish()  # it has an end: run() returns when everything is handled
        booked: list[bytes] = []

        async def book(message: lanes.Message) -> None:
            booked.append(message.value)

        await lanes.run(source, book)
        assert len(booked) == 100
        assert broker.unfinished == 0
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from lanes.clock import Clock, monotonic
from lanes.core.types import NEVER, Message, Partition, PartitionId, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.source import Assigned, Delivered, Generation, Lost, Revoking, SourceEvent, SourceTraits
from memsource.memory.broker import MemoryBroker
from memsource.memory.calls import Call, CallName, Scripted
from memsource.memory.turns import BATCH, READER, Turns, delivered, delivery

__all__ = ["Call", "CallName", "MemoryDeadLetters", "MemorySource"]


class MemorySource(Turns):
    """The messages of ``broker`` as a source; another one on the same broker later goes on where this one stopped.

    ``assigned``: the partitions it owns from the start, None = all. ``batch``: messages of one partition
    delivered at once, at most. ``extend_interval``: see ``SourceTraits``; None = a third of the broker's
    ``ack_wait``. ``plans``: see ``SourceTraits``. ``clock``: seconds, for the deadlines of deliveries; they are acted
    upon by ``broker.expire(now)`` alone.

    ``calls`` is what was called so far. Every method but those of the contract is plain and does not block.
    """

    def __init__(
        self,
        broker: MemoryBroker,
        *,
        name: str | None = None,
        assigned: Iterable[int] | None = None,
        batch: int = BATCH,
        extend_interval: float | None = None,
        plans: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(batch)
        self.broker = broker
        self._name = name or broker.name
        self._initial = tuple(broker.partitions if assigned is None else assigned)
        self._extend_interval = broker.ack_wait / 3 if extend_interval is None else extend_interval
        self._plans = plans
        self._clock = clock
        self._ownership: deque[SourceEvent] = deque()

    def __repr__(self) -> str:
        return f"<MemorySource {self._name}: {len(self._owned)} of {len(self.broker.partitions)} partitions>"

    # --- what a test does in place of a broker

    def assign(self, partition: int, *, deadline: float = NEVER, fencing_token: int | None = None) -> None:
        """Give it a partition: what is unacknowledged of it is delivered first. See ``lanes.Partition`` for the rest.

        Raises ``ValueError`` when it owns it already: revoked is owned until it is released.
        """
        if partition in self._owned:
            raise ValueError(f"partition {partition} is owned: wait for its release, or lose() it, first")
        self.broker.requeue(partition)
        identity = PartitionId(self.broker.name, partition)
        owned = Partition(identity, READER, deadline=deadline, fencing_token=fencing_token)
        self._owned[partition] = owned
        self._turns.append(partition)
        self._tell(Assigned(owned))

    def renew(self, partition: int, deadline: float) -> None:
        """Have the lease of a partition hold until then. Raises ``KeyError`` when it does not own it."""
        self._owned[partition].deadline = deadline

    def plan(self, number: int, *, standby: bool = False) -> None:
        """Say that the group has a plan of this number, by which it owns nothing if it is a ``standby``."""
        self._tell(Generation(number, standby))

    def revoke(self, partition: int, timeout: float = 30.0) -> None:
        """Ask for a partition back within ``timeout`` seconds; nothing more of it is delivered.

        Raises ``KeyError`` when it does not own it.
        """
        owned = self._owned[partition]
        self._silence(partition)
        self._tell(Revoking(owned, timeout))

    def lose(self, partition: int, reason: str = "lost by the test") -> None:
        """Take a partition away without asking. Raises ``KeyError`` when it does not own it."""
        self._tell(Lost(self._forget(partition), reason))

    def redeliver(self, positions: Iterable[int], *, partition: int = 0) -> None:
        """Have messages delivered again; see ``MemoryBroker.redeliver``."""
        self.broker.redeliver(positions, partition=partition)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Take the first partitions; see ``lanes.source.Source.open``."""
        self.calls.append(Call("open"))
        async with self._faults.meet("open"):
            self.broker.watch(self._changed)
            for partition in self._initial:
                self.assign(partition)
            return SourceTraits(
                name=self._name,
                system="memory",
                extend_interval=self._extend_interval,
                max_in_flight=self.broker.max_unacked,
                plans=self._plans,
            )

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Acknowledge messages; see ``lanes.source.Source.settle``."""
        messages = [message for settlement in settlements for message in settlement.messages]
        self.calls.append(Call("settle", deliveries=tuple(map(delivery, messages))))
        async with self._faults.meet("settle"):
            for message in messages:
                self.broker.ack(delivery(message).token)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Start their ``ack_wait`` anew; see ``lanes.source.Source.extend``."""
        self.calls.append(Call("extend", deliveries=tuple(map(delivery, messages))))
        async with self._faults.meet("extend"):
            for message in messages:
                self.broker.extend(delivery(message).token, self._clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition up; see ``lanes.source.Source.release``."""
        number = partition.id.number
        self.calls.append(Call("release", partition=number))
        async with self._faults.meet("release"):
            if self._owned.get(number) is partition:
                self._forget(number)

    async def aclose(self) -> None:
        """Own nothing any more; see ``lanes.source.Source.aclose``."""
        self.calls.append(Call("aclose"))
        async with self._faults.meet("aclose"):
            self.broker.unwatch(self._changed)
            self._forget_all()

    # --- in

    def _next(self, room: Room) -> list[SourceEvent]:
        if self._ownership:
            # Alone, so that no message comes before the event that its partition begins with.
            events = list(self._ownership)
            self._ownership.clear()
            return events
        return self._dealt(room)

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered]:
        deliveries = self.broker.deliver(number, messages, size, self._clock())
        if deliveries:
            yield delivered(self._owned[number], [(each.record, each) for each in deliveries])

    def _at_the_end(self) -> bool:
        return not any(self.broker.waiting(number) for number in self._turns)

    def _tell(self, event: SourceEvent) -> None:
        self._ownership.append(event)
        self._changed()


class MemoryDeadLetters(Scripted):
    """Dead letters into ``broker.dead_letters``; ``calls`` is what was called so far."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__()
        self.broker = broker

    def __repr__(self) -> str:
        return f"<MemoryDeadLetters of {self.broker.name}: {len(self.broker.dead_letters)} letters>"

    async def open(self) -> None:
        """See ``lanes.source.DeadLetters.open``."""
        self.calls.append(Call("open"))
        async with self._faults.meet("open"):
            pass

    async def put(self, letter: DeadLetter) -> None:
        """Write a letter, once however often it is put; see ``lanes.source.DeadLetters.put``."""
        self.calls.append(Call("put", letter=letter))
        async with self._faults.meet("put"):
            self.broker.write_dead_letter(letter)

    async def aclose(self) -> None:
        """See ``lanes.source.DeadLetters.aclose``."""
        self.calls.append(Call("aclose"))
        async with self._faults.meet("aclose"):
            pass
