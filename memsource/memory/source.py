"""A source over a ``MemoryBroker``, and a writer of dead letters, for tests of a handler without a server.

``MemorySource`` keeps the contract of ``lanes.source`` on asyncio and on trio. A test triggers the events that a real
broker causes: ``assign``, ``revoke``, ``lose``, ``redeliver``, ``fail`` and ``block``.

    async def test_every_order_is_booked() -> None:
        broker = MemoryBroker(partitions=2)
        for number in range(100):
            broker.publish(f"order {number}", key=f"customer-{number % 7}")
        source = MemorySource(broker)
        source.finish()  # the source has an end, so run() returns when every message is handled
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

from lanes.arguments import check_flag, check_positive, check_text, kind_of, names_unknown_options
from lanes.clock import Clock, monotonic
from lanes.core.types import NEVER, Message, Partition, PartitionId, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError
from lanes.source import Assigned, Delivered, Generation, Lost, Revoking, SourceEvent, SourceTraits
from memsource.memory.broker import KeepsDeadLetters, MemoryBroker
from memsource.memory.scripted import (
    BATCH,
    READER,
    Call,
    CallName,
    Scripted,
    ScriptedSource,
    delivered,
    delivery,
)

__all__ = ["Call", "CallName", "MemoryDeadLetters", "MemorySource"]


@names_unknown_options("MemorySource")
class MemorySource(ScriptedSource):
    """A source of the messages of a broker. A later source over the same broker continues with the unfinished messages.

    Methods outside the contract of ``lanes.source.Source`` do not block.

    Args:
        broker: The broker.
        name: Name of the source; None = the name of the broker.
        assigned: Partitions that the source owns from the start; None = all.
        batch: Maximum number of messages of one partition in a delivery, 1 or more.
        extend_interval: Seconds between extensions, as in ``SourceTraits``; None = a third of the broker's
            ``ack_wait``.
        plans: Whether the test calls ``plan`` to report plans of the group; see ``SourceTraits``.
        clock: Function that returns the time in seconds, for the deadlines of deliveries. Only ``broker.expire(now)``
            acts on these deadlines.

    Attributes:
        calls: All calls of the source's methods.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
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
        if not isinstance(broker, MemoryBroker):
            raise ConfigError(f"broker is {kind_of(broker)}: pass a memsource.MemoryBroker(…)")
        if name is not None:
            check_text("name", name)
        if extend_interval is not None:
            check_positive("extend_interval", extend_interval)
        check_flag("plans", plans)
        if not callable(clock):
            raise ConfigError(f"clock is {kind_of(clock)}: pass a function that returns seconds, or leave it out")
        self.broker = broker
        self._name = name or broker.name
        self._initial = tuple(broker.partitions) if assigned is None else _numbers(assigned, broker)
        self._extend_interval = broker.ack_wait / 3 if extend_interval is None else extend_interval
        self._plans = plans
        self._clock = clock
        self._ownership: deque[SourceEvent] = deque()

    def __repr__(self) -> str:
        return f"<MemorySource {self._name}: {len(self._owned)} of {len(self.broker.partitions)} partitions>"

    # --- the calls of a test

    def assign(self, partition: int, *, deadline: float = NEVER, fencing_token: int | None = None) -> None:
        """Assign a partition. The source first delivers the unacknowledged messages of the partition.

        Args:
            partition: Number of the partition.
            deadline: Deadline of the lease, as in ``lanes.Partition``; infinity = no lease.
            fencing_token: Fencing token, as in ``lanes.Partition``; None = no token.

        Raises:
            ValueError: The source owns the partition already. A revoked partition stays owned until its release.
        """
        if partition in self._owned:
            raise ValueError(f"partition {partition} is owned already; wait for its release, or call lose() first")
        self.broker.requeue(partition)
        owned = Partition(self._place(partition), READER, deadline=deadline, fencing_token=fencing_token)
        self._owned[partition] = owned
        self._turns.append(partition)
        self._tell(Assigned(owned))

    def renew(self, partition: int, deadline: float) -> None:
        """Renew the lease of a partition.

        Args:
            partition: Number of the partition.
            deadline: The new deadline, in seconds of ``lanes.clock.monotonic``.

        Raises:
            KeyError: The source does not own the partition.
        """
        self._owned[partition].deadline = deadline

    def plan(
        self, number: int, *, standby: bool = False, under_provisioned: bool = False, target_honoured: bool = False
    ) -> None:
        """Report a plan of the group, as the event ``Generation``.

        Args:
            number: Number of the plan.
            standby: Whether the plan gives this member no partition.
            under_provisioned: Whether the plan gives a member more partitions than its target.
            target_honoured: Whether the rules of the plan use targets.
        """
        self._tell(Generation(number, standby, under_provisioned, target_honoured))

    def revoke(self, partition: int, timeout: float = 30.0) -> None:
        """Revoke a partition, which delivers no more messages.

        Args:
            partition: Number of the partition.
            timeout: Seconds that the event ``Revoking`` grants for the release.

        Raises:
            KeyError: The source does not own the partition.
        """
        owned = self._owned[partition]
        self._silence(partition)
        self._tell(Revoking(owned, timeout))

    def lose(self, partition: int, reason: str = "lost by the test") -> None:
        """Take a partition away without a revocation.

        Args:
            partition: Number of the partition.
            reason: Reason in the event ``Lost``.

        Raises:
            KeyError: The source does not own the partition.
        """
        self._tell(Lost(self._forget(partition), reason))

    def redeliver(self, positions: Iterable[int], *, partition: int = 0) -> None:
        """Redeliver messages; see ``MemoryBroker.redeliver``.

        Args:
            positions: Positions of the messages.
            partition: Number of the partition.
        """
        self.broker.redeliver(positions, partition=partition)

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Assign the first partitions; see ``lanes.source.Source.open``."""
        async with self._meet(Call("open")):
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
        """Acknowledge messages; see ``lanes.source.Source.settle``.

        Args:
            settlements: The settlements.
        """
        messages = [message for settlement in settlements for message in settlement.messages]
        async with self._meet(Call("settle", deliveries=tuple(map(delivery, messages)))):
            for message in messages:
                self.broker.ack(delivery(message).token)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Restart the ``ack_wait`` of messages; see ``lanes.source.Source.extend``.

        Args:
            messages: The messages.
        """
        async with self._meet(Call("extend", deliveries=tuple(map(delivery, messages)))):
            for message in messages:
                self.broker.extend(delivery(message).token, self._clock())

    async def release(self, partition: Partition) -> None:
        """Give a partition up; see ``lanes.source.Source.release``.

        Args:
            partition: The partition.
        """
        number = partition.id.number
        async with self._meet(Call("release", partition=number)):
            if self._owned.get(number) is partition:
                self._forget(number)

    async def aclose(self) -> None:
        """Give all partitions up; see ``lanes.source.Source.aclose``."""
        async with self._meet(Call("aclose")):
            self.broker.unwatch(self._changed)
            self._forget_all()

    # --- in

    def _place(self, number: int) -> PartitionId:
        """Return the name of partition n."""
        return PartitionId(self.broker.name, number)

    def _next(self, room: Room) -> list[SourceEvent]:
        if self._ownership:
            # Return these events without messages, because no message may precede the Assigned of its partition.
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


def _numbers(assigned: object, broker: MemoryBroker) -> tuple[int, ...]:
    """Return the numbers of the partitions that a source owns from the start."""
    numbers = None if isinstance(assigned, str) or not isinstance(assigned, Iterable) else tuple(assigned)
    if numbers is None or any(type(number) is not int or number not in broker.partitions for number in numbers):
        raise ConfigError(
            f"assigned={assigned!r}: must be numbers of partitions in 0 … {len(broker.partitions) - 1}, or None for all"
        )
    return numbers


@names_unknown_options("MemoryDeadLetters")
class MemoryDeadLetters(Scripted):
    """A writer of dead letters into ``broker.dead_letters``.

    Args:
        broker: The broker that keeps the dead letters.

    Attributes:
        calls: All calls of the writer's methods.

    Raises:
        ConfigError: The broker is of a wrong type.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__()
        if not isinstance(broker, KeepsDeadLetters):
            raise ConfigError(f"broker is {kind_of(broker)}: pass a memsource.MemoryBroker(…)")
        self.broker = broker

    def __repr__(self) -> str:
        return f"<MemoryDeadLetters of {self.broker.name}: {len(self.broker.dead_letters)} dead letters>"

    async def open(self) -> None:
        """Do nothing; see ``lanes.source.DeadLetters.open``."""
        async with self._meet(Call("open")):
            pass

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write a dead letter. A second call with the same id changes nothing; see ``lanes.source.DeadLetters.put``.

        Args:
            dead_letter: The dead letter.
        """
        async with self._meet(Call("put", dead_letter=dead_letter)):
            self.broker.write_dead_letter(dead_letter)

    async def aclose(self) -> None:
        """Do nothing; see ``lanes.source.DeadLetters.aclose``."""
        async with self._meet(Call("aclose")):
            pass
