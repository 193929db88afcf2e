"""The base classes of the sources and dead-letter writers in memory. A test can script their calls.

A source in memory waits until its broker changes, and serves its partitions in turn.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Literal, NamedTuple

import anyio
import anyio.lowlevel

from lanes.arguments import check_whole
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.errors import ContractError
from lanes.outputs.publisher import Output
from lanes.source import Delivered, Exhausted, Progressed, SourceEvent
from memsource.memory.broker import Delivery
from memsource.memory.group import Group
from memsource.memory.topic import Record, RecordReader

CallName = Literal["open", "receive", "settle", "extend", "release", "put", "publish", "aclose"]

READER: Final = RecordReader()

BATCH: Final = 100
"""Default of ``batch``, the maximum number of messages of one partition in a delivery."""


class Call(NamedTuple):
    """One call of a method, recorded at its beginning.

    Attributes:
        name: Name of the method.
        room: The room of a ``receive``.
        deliveries: The deliveries of a ``settle`` or ``extend``, in the order of the argument.
        partition: The partition of a ``release``.
        dead_letter: The dead letter of a ``put``.
        commits: The settlements of a source that commits positions.
        outputs: The outputs of a ``publish``.
    """

    name: CallName
    room: Room | None = None
    deliveries: tuple[Delivery, ...] = ()
    partition: int | None = None
    dead_letter: DeadLetter | None = None
    commits: tuple[Settlement, ...] = ()
    outputs: tuple[Output, ...] = ()

    @property
    def positions(self) -> list[int]:
        """The positions of the deliveries."""
        return [delivery.record.position for delivery in self.deliveries]


class Scripted:
    """An object whose calls a test scripts. ``calls`` lists all calls. The methods below do not block."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._failures: dict[CallName, deque[tuple[Exception, bool]]] = {}
        self._gates: dict[CallName, anyio.Event] = {}

    def _changed(self) -> None:
        """Wake the waiting tasks, so that they check the state again."""

    def _meet(self, call: Call) -> AbstractAsyncContextManager[None]:
        """Record a call, and apply its planned faults."""
        self.calls.append(call)
        return self._meet_faults(call.name)

    @asynccontextmanager
    async def _meet_faults(self, call: CallName) -> AsyncIterator[None]:
        """Suspend once, like a call to a broker. As scripted, wait or raise before or after the ``with`` block.

        The context manager does not suspend after the block has begun.
        """
        await anyio.lowlevel.checkpoint()
        while call in self._gates:
            await self._gates[call].wait()
        failures = self._failures.get(call)
        error, done = failures.popleft() if failures else (None, False)
        if error is not None and not done:
            raise error
        yield
        if error is not None:
            raise error

    def fail(self, call: CallName, error: Exception, *, times: int = 1, done: bool = False) -> None:
        """Let the next calls of a method raise.

        Args:
            call: Name of the method.
            error: The error to raise.
            times: Number of calls that raise ``error``.
            done: Whether a call raises after its effect; False = the call has no effect.
        """
        self._failures.setdefault(call, deque()).extend([(error, done)] * times)
        self._changed()

    def block(self, call: CallName) -> None:
        """Hold the calls of a method until ``unblock``. Idempotent.

        Args:
            call: Name of the method.
        """
        self._gates.setdefault(call, anyio.Event())
        self._changed()

    def unblock(self, call: CallName) -> None:
        """Let the held calls of a method continue. Idempotent.

        Args:
            call: Name of the method.
        """
        gate = self._gates.pop(call, None)
        if gate is not None:
            gate.set()

    def called(self, name: CallName) -> list[Call]:
        """Return all calls of a method.

        Args:
            name: Name of the method.

        Returns:
            The calls, the oldest first.
        """
        return [call for call in self.calls if call.name == name]


class ScriptedSource(Scripted):
    """A source that divides the room of each ``receive`` among its partitions, which take turns to begin.

    A subclass maintains ``_owned``, and lists in ``_turns`` the owned partitions that may deliver.
    """

    def __init__(self, batch: int = BATCH) -> None:
        check_whole("batch", batch, 1)
        super().__init__()
        self._batch = batch
        self._owned: dict[int, Partition] = {}
        self._turns: deque[int] = deque()  # the next partition is at the front
        self._finite = False
        self._exhausted = False
        self._waiting: set[anyio.Event] = set()

    def finish(self) -> None:
        """Make the source finite: ``Exhausted`` follows the last message of its own partitions."""
        self._finite = True
        self._changed()

    @property
    def owned(self) -> list[int]:
        """The numbers of the owned partitions, which include revoked partitions until their release or loss."""
        return list(self._owned)

    # --- for each kind of source

    @abstractmethod
    def _take(self, number: int, messages: int, size: int) -> Iterable[Delivered | Progressed]:
        """Return the next events of a partition, with at most ``messages`` messages. Stop at ``size`` bytes."""

    @abstractmethod
    def _at_the_end(self) -> bool:
        """Return whether the source has delivered every message of its own partitions."""

    @abstractmethod
    def _next(self, room: Room) -> Sequence[SourceEvent]:
        """Return the next events of ownership, or without such events the events of ``_dealt``.

        The method must not suspend.
        """

    # --- for all sources

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``.

        Args:
            room: Maximum number and bytes of messages, and the paused partitions.

        Returns:
            The next events in order, at least one.
        """
        self.calls.append(Call("receive", room))
        while True:
            # No suspension between taking events and returning them, so a cancelled receive loses no event.
            async with self._meet_faults("receive"):
                events = self._next(room)
            if events:
                return events
            await self._change()

    def _dealt(self, room: Room) -> list[SourceEvent]:
        events = list(self._shares(room))
        self._turns.rotate(-1)
        if not events and room.messages > 0 and self._finite and not self._exhausted and self._at_the_end():
            self._exhausted = True
            events.append(Exhausted())
        return events

    def _shares(self, room: Room) -> Iterator[SourceEvent]:
        messages, size = room.messages, room.bytes
        for number in list(self._turns):
            if number not in self._turns or room.closed_to(self._owned[number]) or messages <= 0 or size <= 0:
                continue
            for event in self._take(number, min(messages, self._batch), size):
                if isinstance(event, Delivered):
                    messages -= len(event.run)
                    size -= event.size
                yield event

    def _silence(self, number: int) -> None:
        """Stop the delivery of a partition. Idempotent."""
        if number in self._turns:
            self._turns.remove(number)

    def _forget(self, number: int) -> Partition:
        """Remove a partition from the owned partitions.

        Raises ``KeyError`` if the source does not own the partition.
        """
        self._silence(number)
        return self._owned.pop(number)

    def _forget_all(self) -> list[Partition]:
        return [self._forget(number) for number in list(self._owned)]

    async def _change(self) -> None:
        """Wait for a call of ``_changed``."""
        event = anyio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _changed(self) -> None:
        for event in self._waiting:
            event.set()


class CommittingSource(ScriptedSource):
    """A source that commits one position for each partition, for a member of a ``Group``."""

    @property
    @abstractmethod
    def _members(self) -> Group:
        """The group."""

    @abstractmethod
    def _position(self, number: int) -> int:
        """Return the next position to read."""

    @abstractmethod
    def _fetch(self, number: int, messages: int, size: int) -> list[Record]:
        """Read the next records of a partition."""

    def _alive(self) -> None:
        """Raise ``SourceError`` if the process of the source has crashed."""

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing, because the broker has no ``ack_wait``; see ``lanes.source.Source.extend``.

        Args:
            messages: The messages, which need no extension.
        """
        async with self._meet(Call("extend")):
            self._alive()

    def _take(self, number: int, messages: int, size: int) -> Iterator[Delivered | Progressed]:
        partition, position = self._owned[number], self._position(number)
        records = self._fetch(number, messages, size)
        if records:
            position = records[-1].position + 1
            yield delivered(partition, [(record, None) for record in records])
        if self._position(number) > position:
            yield Progressed(partition, self._position(number))

    def _at_the_end(self) -> bool:
        group = self._members
        return not group.rebalancing and all(
            self._position(number) >= group.topic.log(number).end for number in self._turns
        )


def delivered(partition: Partition, records: Iterable[tuple[Record, object]]) -> Delivered:
    """Return a delivery of records, each with the token that settles it; None = the source commits."""
    run = [Message(partition, record.position, record.key, record.size, record, token) for record, token in records]
    return Delivered(partition, run, sum(message.size for message in run))


def delivery(message: Message) -> Delivery:
    """Return the token of a message, which is its ``Delivery``."""
    assert isinstance(message.token, Delivery)
    return message.token


def floor_of(settlement: Settlement) -> int:
    """Return the floor of a settlement. Raises ``ContractError`` for a settlement without a floor."""
    if settlement.floor is None:
        number = settlement.partition.id.number
        raise ContractError(
            f"a settlement of partition {number} has no floor; set floor=…, because the source commits the floor"
        )
    return settlement.floor
