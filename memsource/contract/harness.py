"""The tools of the checks of a source: the harness that the author writes, and a session that watches a source."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered, Generation, Progressed, Source, SourceEvent, SourceTraits

Ability = Literal["ack wait", "revoke", "lose", "finish", "commits", "hands over"]
"""An ability of a source, its broker or its harness.

- ``ack wait``: The broker redelivers a message that stays unsettled for a certain time.
- ``revoke``, ``lose``: The harness can take partitions away.
- ``finish``: The harness can make the source finite.
- ``commits``: The source commits one position a partition.
- ``hands over``: The source also commits the positions completed above the floor.
"""

AnyCheck = TypeVar("AnyCheck")

TIMEOUT: Final = 20.0
"""Seconds within which a source must return an event, and a broker must apply a settlement."""

BYTES: Final = 1 << 20
"""Room for bytes in checks that do not test bytes."""

ROOM: Final = Room(10, BYTES)
"""Room for more messages than a check expects."""


class ContractBroken(AssertionError):
    """A backend breaks its contract. The text of the error names the broken promise and the observation."""


class Sample(NamedTuple):
    """A message to publish.

    Attributes:
        key: Key that the source must report.
        value: Payload that the source must deliver.
        headers: Names and values, in the order of publication.
    """

    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class Harness(Protocol):
    """An empty broker, and sources over it. Each check needs a new harness."""

    @property
    def can(self) -> Collection[Ability]:
        """The abilities of broker, source and harness. The suite omits a check that needs any other ability."""

    @property
    def patience(self) -> float:
        """Seconds without an event after which a check expects no further event. Many checks wait for this time."""

    async def publish(self, samples: Sequence[Sample]) -> None:
        """Publish messages in this order.

        Args:
            samples: The messages. The source must find ``Sample.key`` as the key.
        """

    def source(self) -> Source:
        """Return a new, unopened source, which continues where the former source stopped.

        The check has closed the former source, in most checks without a ``release``, as after a crash. If the broker
        delays the messages of a crashed source by a time near 20 s or longer, the call must wait for that time.
        """

    async def unsettled(self) -> int:
        """Return the number of delivered and unsettled messages at the broker.

        A check repeats the call for up to 20 s until the number is right. After a ``release`` a check calls the method
        once.
        """

    @property
    def ack_wait(self) -> float:
        """Seconds after which the broker redelivers. Only checks of the ability ``ack wait`` use this member."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass at the broker. Only checks of the ability ``ack wait`` use this member.

        Args:
            seconds: The time to pass.
        """

    async def revoke(self, partition: Partition) -> None:
        """Make the broker revoke a partition of the newest source.

        Only checks of the ability ``revoke`` use this member.

        Args:
            partition: The partition to revoke.
        """

    async def lose(self, partition: Partition) -> None:
        """Make the broker take a partition from the newest source. Only checks of the ability ``lose`` use this member.

        Args:
            partition: The partition to take.
        """

    async def finish(self) -> None:
        """Make the newest source finite: ``Exhausted`` follows all published messages.

        Only checks of the ability ``finish`` use this member.
        """


class Committing:
    """The expected progress of a partition of a source that commits. Each query scans all positions."""

    def __init__(self, floor: int, completed: Sequence[tuple[int, int]]) -> None:
        self.highest = floor - 1
        self._completed = list(completed)
        self._unfinished: set[int] = set()
        self._finished: set[int] = set()

    def deliver(self, position: int) -> None:
        """Record the delivery of a message."""
        self.highest = position
        (self._finished if self.has_completed(position) else self._unfinished).add(position)

    def has_completed(self, position: int) -> bool:
        """Return whether a former owner had completed the position."""
        return any(start <= position < end for start, end in self._completed)

    def settle(self, position: int) -> None:
        """Record that the handler of a message has finished. Idempotent."""
        self._unfinished.discard(position)
        self._finished.add(position)

    def progress(self, position: int) -> None:
        """Record that the source delivers no more messages below ``position``."""
        self.highest = position - 1

    def floor(self) -> int:
        """Return the next position to read. All lower positions are finished or absent."""
        return min(self._unfinished, default=self.highest + 1)

    def completed(self) -> list[tuple[int, int]]:
        """Return the positions finished above the floor, also by a former owner, as rising half-open runs."""
        runs: list[tuple[int, int]] = []
        for position in sorted(self._finished):
            if position >= self.floor():
                if runs and runs[-1][1] == position:
                    runs[-1] = (runs[-1][0], position + 1)
                else:
                    runs.append((position, position + 1))
        above = self.highest + 1
        return runs + [(max(start, above), end) for start, end in self._completed if end > above]


class Session:
    """An open source and its partitions. The session checks each event that the source delivers.

    For a source that commits, the session stores the same state as an engine.

    Args:
        harness: The harness of the check.
        source: The open source.
        traits: The traits that ``open`` returned.

    Attributes:
        source: The open source.
        traits: The traits of the source.
        partitions: The assigned partitions, in order.
        ledgers: Progress of each partition, for a source that commits.
        committed: Last commit of each partition.
        plans: Reports of the group's plan, in order.
    """

    def __init__(self, harness: Harness, source: Source, traits: SourceTraits) -> None:
        self.source = source
        self.traits = traits
        self.partitions: list[Partition] = []
        self.ledgers: dict[Partition, Committing] = {}
        self.committed: dict[PartitionId, Settlement] = {}
        self.plans: list[Generation] = []
        self._harness = harness

    async def receive(self, room: Room, *, otherwise: str = "") -> Sequence[SourceEvent]:
        """Return the next events. Cancel-safe if ``Source.receive`` is cancel-safe.

        Args:
            room: Argument of ``Source.receive``.
            otherwise: End of the error text for a missing event.

        Returns:
            The next events in order, without ``Generation``.
        """
        events: Sequence[SourceEvent] = ()
        with anyio.move_on_after(TIMEOUT):
            received: Sequence[SourceEvent] = [Generation(0, standby=False)]
            while received and not events:
                # A source may deliver a Generation at any time.
                received = await self.source.receive(room)
                self.plans += [event for event in received if isinstance(event, Generation)]
                events = [event for event in received if not isinstance(event, Generation)]
        expect(len(events) > 0, f"receive({room}) returned no event within {TIMEOUT:g} s{otherwise}")
        for event in events:
            if isinstance(event, Assigned):
                known = event.partition in self.partitions
                expect(not known, f"{event.partition!r} was assigned twice: every assignment needs a new Partition")
                self.partitions.append(event.partition)
                self._keep(event.partition)
            elif isinstance(event, Delivered):
                self._look_at(event)
                expect(event.partition not in room.paused, f"a message of the paused {event.partition!r} was delivered")
            elif isinstance(event, Progressed):
                self._look_at_progress(event)
        count = len(messages_of(events))
        expect(
            count <= room.messages, f"receive() returned {count} messages, but its room was {room.messages} messages"
        )
        return events

    def _look_at(self, event: Delivered) -> None:
        expect(event.partition in self.partitions, f"a message was delivered before Assigned of {event.partition!r}")
        expect(len(event.run) > 0, "an empty run was delivered: a run needs a message")
        expect(all(m.partition is event.partition for m in event.run), "a message of a run has another partition")
        size = sum(message.size for message in event.run)
        expect(event.size == size, f"the size of a run is {event.size}, but its messages have {size} bytes")
        ledger = self.ledgers.get(event.partition)
        if ledger is not None:
            for message in event.run:
                rises = message.position > ledger.highest
                what = f"position {message.position} was delivered after {ledger.highest}: positions must rise"
                expect(rises, what)
                ledger.deliver(message.position)

    def _keep(self, partition: Partition) -> None:
        commits = self.traits.settles == "cumulative"
        what = f"{partition!r} has the floor {partition.floor}, but settles is {self.traits.settles!r}"
        expect((partition.floor is not None) == commits, f"{what}: only a source that commits sets floors")
        if partition.floor is not None:
            self.ledgers[partition] = Committing(partition.floor, partition.completed)

    def _look_at_progress(self, event: Progressed) -> None:
        ledger = self.ledgers.get(event.partition)
        expect(ledger is not None, f"{event!r} was delivered for a partition that is not assigned or has no floor")
        assert ledger is not None
        rises = event.position > ledger.highest + 1
        expect(rises, f"{event!r} was delivered after position {ledger.highest}, and must be above the next position")
        ledger.progress(event.position)

    async def take(self, count: int, *, size: int = BYTES, otherwise: str = "") -> list[Message]:
        """Receive the next ``count`` messages that no former owner completed, with room for ``count`` messages."""
        messages: list[Message] = []
        while len(messages) < count:
            messages += self._unfinished(await self.receive(Room(count - len(messages), size), otherwise=otherwise))
        return messages

    async def assigned(self) -> list[Partition]:
        """Return the partitions of the assignments at the start."""
        while not self.partitions:
            await self.receive(Room(0, 0))
        # A later call may return each further partition.
        await self.expect_nothing(Room(0, 0))
        return list(self.partitions)

    async def expect_nothing(self, room: Room = ROOM) -> None:
        """Expect no events except assignments, plans, ``Progressed``, and messages that a former owner completed."""
        with anyio.move_on_after(self._harness.patience):
            while True:
                for event in await self.receive(room):
                    known = isinstance(event, Delivered) and not self._unfinished([event])
                    nothing = known or isinstance(event, Assigned | Progressed)
                    expect(nothing, f"receive() returned {event!r}, but no event was expected")

    async def settle(self, messages: Sequence[Message]) -> None:
        """Settle messages, with one settlement for each partition."""
        by_partition: dict[Partition, list[Message]] = {}
        for message in messages:
            by_partition.setdefault(message.partition, []).append(message)
        for partition, each in by_partition.items():
            for message in each if partition in self.ledgers else ():
                self.ledgers[partition].settle(message.position)
        await self.source.settle(
            [
                self.commit_of(partition) if partition in self.ledgers else Settlement(partition, each)
                for partition, each in by_partition.items()
            ]
        )

    def to_settle(self, messages: Sequence[Message], chosen: Sequence[int]) -> list[Message]:
        """Return the ``chosen`` messages, or equally many first messages if the source cannot settle above a gap."""
        keeps = self.traits.settles == "individual" or self.traits.hands_over
        return [messages[number] for number in (chosen if keeps else range(len(chosen)))]

    def commit_of(self, partition: Partition) -> Settlement:
        """Return the settlement of a partition for its present floor.

        The caller passes the settlement to the source.
        """
        ledger = self.ledgers[partition]
        settlement = Settlement(partition, [], ledger.floor(), ledger.completed())
        self.committed[partition.id] = settlement
        return settlement

    def _unfinished(self, events: Sequence[SourceEvent]) -> list[Message]:
        """Return the messages of some events that no former owner completed."""
        return [message for message in messages_of(events) if not self._known(message)]

    def _known(self, message: Message) -> bool:
        ledger = self.ledgers.get(message.partition)
        return ledger is not None and ledger.has_completed(message.position)

    async def expect_unsettled(self, count: int) -> None:
        """Wait until the broker has ``count`` unsettled messages, because settlements may reach the broker late."""
        unsettled = -1
        with anyio.move_on_after(TIMEOUT):
            while (unsettled := await self._harness.unsettled()) != count:
                await anyio.lowlevel.checkpoint()
        expect(unsettled == count, f"{unsettled} messages are unsettled at the broker, but must be {count}")


@asynccontextmanager
async def opened(harness: Harness) -> AsyncIterator[Session]:
    """Open a new source of the harness, and close it at the end."""
    source = harness.source()
    try:
        yield Session(harness, source, await source.open())
    finally:
        with anyio.CancelScope(shield=True):
            await source.aclose()


def numbered(count: int) -> list[Sample]:
    """Return samples of five keys, each with a different value."""
    return [Sample(f"key-{number % 5}".encode(), f"value-{number}".encode()) for number in range(count)]


def messages_of(events: Sequence[SourceEvent]) -> list[Message]:
    """Return the messages of some events, in order."""
    return [message for event in events if isinstance(event, Delivered) for message in event.run]


def rising(messages: Sequence[Message]) -> None:
    """Expect that the positions of each partition rise."""
    highest: dict[Partition, int] = {}
    for message in messages:
        last = highest.get(message.partition, -1)
        expect(message.position > last, f"position {message.position} was delivered after position {last}")
        highest[message.partition] = message.position


def checks_of(names: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the checks among the names of a module, in the order of their definition."""
    return tuple(check for name, check in names.items() if name.startswith("check_"))


def checks_within(
    table: Iterable[tuple[AnyCheck, Collection[str]]], can: Collection[str], known: Collection[str]
) -> list[AnyCheck]:
    """Return the checks of a table whose needed abilities are all in ``can``.

    Raise ``ValueError`` for a name that is not in ``known``.
    """
    for each in can:
        if each not in known:
            raise ValueError(f"{each!r} in can={can!r} is not an ability: must be one of {', '.join(map(repr, known))}")
    return [check for check, needs in table if all(each in can for each in needs)]


def expect(condition: bool, otherwise: str) -> None:
    """Raise ``ContractBroken`` unless the condition is true.

    Unlike ``assert``, the function also works with ``python -O``.
    """
    if not condition:
        raise ContractBroken(otherwise)


async def cut_short(call: Callable[[], Awaitable[object]], turns: int) -> None:
    """Cancel a call after a number of turns of the event loop."""

    async def run() -> None:
        await call()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
