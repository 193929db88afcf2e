"""What a contract check works with: a harness that the author of a source writes, and an open source under watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, NamedTuple, Protocol

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered, Generation, Progressed, Source, SourceEvent, SourceTraits

__all__ = [
    "BYTES",
    "Ability",
    "ContractBroken",
    "Harness",
    "Sample",
    "Session",
    "expect",
    "messages_of",
    "numbered",
    "opened",
    "rising",
]

Ability = Literal["ack wait", "revoke", "lose", "finish", "commits", "hands over"]
"""``ack wait``: the broker delivers again what is not settled in time. ``revoke``, ``lose``: the harness can have
partitions taken away. ``finish``: the source may have an end. ``commits``: the source commits one position a
partition; ``hands over``: and with it what is completed above."""

TIMEOUT: Final = 20.0
"""Seconds within which a broker does what is expected of it."""

BYTES: Final = 1 << 20
"""Room for bytes where a check is not about bytes."""

ROOM: Final = Room(10, BYTES)
"""Room for more than what is expected to come."""


class ContractBroken(AssertionError):
    """A source does not do what ``lanes.source`` says; names the promise and what was seen."""


class Sample(NamedTuple):
    """One message to publish."""

    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()


class Harness(Protocol):
    """One broker with nothing in it, and sources on it. Used for one check."""

    @property
    def can(self) -> Collection[Ability]:
        """What the broker and the source are able to: see ``Ability``. What is left out is not checked."""

    @property
    def patience(self) -> float:
        """Seconds after which nothing comes any more when nothing has come until then. Many checks wait for so long."""

    async def publish(self, samples: Sequence[Sample]) -> None:
        """Publish them in this order; the source must find ``Sample.key`` as the key."""

    def source(self) -> Source:
        """A new source, not open. It goes on where the former one, closed by then, stopped.

        That one was closed without a ``release``, as after a crash. Where the broker keeps for it what it left, until
        some time has passed, let that time pass here, or choose it well below 20 s.
        """

    async def unsettled(self) -> int:
        """How many messages the broker has delivered and not seen settled, as it knows now.

        A check asks again until it is what is expected, for 20 s; behind ``release`` it asks once.
        """

    @property
    def ack_wait(self) -> float:
        """Seconds after which the broker delivers again. Asked for only with ``ack wait``."""

    async def elapse(self, seconds: float) -> None:
        """Let time pass at the broker. Asked for only with ``ack wait``."""

    async def revoke(self, partition: Partition) -> None:
        """Have the newest source asked for a partition. Asked for only with ``revoke``."""

    async def lose(self, partition: Partition) -> None:
        """Have a partition taken from the newest source. Asked for only with ``lose``."""

    async def finish(self) -> None:
        """Let the newest source end behind what is published. Asked for only with ``finish``."""


class Committing:
    """How far a partition of a source that commits is. Naive: it looks at everything for each answer."""

    def __init__(self, floor: int, completed: Sequence[tuple[int, int]]) -> None:
        self.highest = floor - 1
        self._completed = list(completed)
        self._unfinished: set[int] = set()
        self._finished: set[int] = set()

    def deliver(self, position: int) -> None:
        """A message was delivered."""
        self.highest = position
        (self._finished if self.has_completed(position) else self._unfinished).add(position)

    def has_completed(self, position: int) -> bool:
        """Whether a predecessor had handled it."""
        return any(start <= position < end for start, end in self._completed)

    def settle(self, position: int) -> None:
        """A message is finished. Idempotent."""
        self._unfinished.discard(position)
        self._finished.add(position)

    def progress(self, position: int) -> None:
        """There is nothing more below ``position``."""
        self.highest = position - 1

    def floor(self) -> int:
        """Next to read: everything below it is finished or was never there."""
        return min(self._unfinished, default=self.highest + 1)

    def completed(self) -> list[tuple[int, int]]:
        """What is finished above the floor, as rising half-open runs; with what a predecessor left."""
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
    """An open source, and what it has announced. Every event is looked at as it comes.

    Of a source that commits it keeps what an engine keeps: ``ledgers`` say how far each partition is, ``committed``
    is what was committed of it last. ``plans``: what the source has said of its group's plan.
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
        """The next events. Cancel-safe if the source is. ``otherwise``: what is to be said when there are none."""
        events: Sequence[SourceEvent] = ()
        with anyio.move_on_after(TIMEOUT):
            received: Sequence[SourceEvent] = [Generation(0, standby=False)]
            while received and not events:
                # What the plan of a group is may be said at any time.
                received = await self.source.receive(room)
                self.plans += [event for event in received if isinstance(event, Generation)]
                events = [event for event in received if not isinstance(event, Generation)]
        expect(len(events) > 0, f"receive({room}) brought no event within {TIMEOUT:g} s{otherwise}")
        for event in events:
            if isinstance(event, Assigned):
                known = event.partition in self.partitions
                expect(not known, f"{event.partition!r} was assigned twice: every assignment has a new Partition")
                self.partitions.append(event.partition)
                self._keep(event.partition)
            elif isinstance(event, Delivered):
                self._look_at(event)
                expect(event.partition not in room.paused, f"a message of {event.partition!r} came, which is paused")
            elif isinstance(event, Progressed):
                self._look_at_progress(event)
        count = len(messages_of(events))
        expect(count <= room.messages, f"{count} messages came where there was room for {room.messages}")
        return events

    def _look_at(self, event: Delivered) -> None:
        expect(event.partition in self.partitions, f"a message of {event.partition!r} came before its Assigned")
        expect(len(event.run) > 0, "an empty run was delivered")
        expect(all(m.partition is event.partition for m in event.run), "a message of a run is of another partition")
        size = sum(message.size for message in event.run)
        expect(event.size == size, f"the size of a run is {event.size}, the sum of its messages {size}")
        ledger = self.ledgers.get(event.partition)
        if ledger is not None:
            for message in event.run:
                rises = message.position > ledger.highest
                expect(rises, f"position {message.position} came after {ledger.highest}: a floor goes only onwards")
                ledger.deliver(message.position)

    def _keep(self, partition: Partition) -> None:
        commits = self.traits.settles == "cumulative"
        expect((partition.floor is not None) == commits, f"{partition!r} has floor {partition.floor}, {self.traits!r}")
        if partition.floor is not None:
            self.ledgers[partition] = Committing(partition.floor, partition.completed)

    def _look_at_progress(self, event: Progressed) -> None:
        ledger = self.ledgers.get(event.partition)
        expect(ledger is not None, f"{event!r} came of a partition that was not assigned, or has no floor")
        assert ledger is not None
        expect(event.position > ledger.highest + 1, f"{event!r} came after position {ledger.highest}: nothing new")
        ledger.progress(event.position)

    async def take(self, count: int, *, size: int = BYTES, otherwise: str = "") -> list[Message]:
        """The next ``count`` messages a predecessor had not completed, with room for exactly them."""
        messages: list[Message] = []
        while len(messages) < count:
            messages += self._unfinished(await self.receive(Room(count - len(messages), size), otherwise=otherwise))
        return messages

    async def assigned(self) -> list[Partition]:
        """The partitions that the source begins with."""
        while not self.partitions:
            await self.receive(Room(0, 0))
        # There may be more, each in a call of its own.
        await self.expect_nothing(Room(0, 0))
        return list(self.partitions)

    async def expect_nothing(self, room: Room = ROOM) -> None:
        """Nothing but assignments come; and what a predecessor had completed, and gaps."""
        with anyio.move_on_after(self._harness.patience):
            while True:
                for event in await self.receive(room):
                    known = isinstance(event, Delivered) and not self._unfinished([event])
                    nothing = known or isinstance(event, Assigned | Progressed)
                    expect(nothing, f"{event!r} came, nothing was expected")

    async def settle(self, messages: Sequence[Message]) -> None:
        """Settle them, one settlement a partition."""
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
        """The ``chosen`` ones; as many from the beginning where what is finished behind a gap is not kept."""
        keeps = self.traits.settles == "individual" or self.traits.hands_over
        return [messages[number] for number in (chosen if keeps else range(len(chosen)))]

    def commit_of(self, partition: Partition) -> Settlement:
        """What is to be committed of a partition now; the caller does."""
        ledger = self.ledgers[partition]
        settlement = Settlement(partition, [], ledger.floor(), ledger.completed())
        self.committed[partition.id] = settlement
        return settlement

    def _unfinished(self, events: Sequence[SourceEvent]) -> list[Message]:
        """The messages of some events that no predecessor had completed."""
        return [message for message in messages_of(events) if not self._known(message)]

    def _known(self, message: Message) -> bool:
        ledger = self.ledgers.get(message.partition)
        return ledger is not None and ledger.has_completed(message.position)

    async def expect_unsettled(self, count: int) -> None:
        """Settlements are sent, not always confirmed: the broker may learn of them a little later."""
        unsettled = -1
        with anyio.move_on_after(TIMEOUT):
            while (unsettled := await self._harness.unsettled()) != count:
                await anyio.lowlevel.checkpoint()
        expect(unsettled == count, f"{unsettled} messages are unsettled at the broker, not {count}")


@asynccontextmanager
async def opened(harness: Harness) -> AsyncIterator[Session]:
    """A new source of the harness, open; closed at the end, also after a failure."""
    source = harness.source()
    try:
        yield Session(harness, source, await source.open())
    finally:
        with anyio.CancelScope(shield=True):
            await source.aclose()


def numbered(count: int) -> list[Sample]:
    """Samples of five keys, each with a value of its own."""
    return [Sample(f"key-{number % 5}".encode(), f"value-{number}".encode()) for number in range(count)]


def messages_of(events: Sequence[SourceEvent]) -> list[Message]:
    """The messages of some events, in their order."""
    return [message for event in events if isinstance(event, Delivered) for message in event.run]


def rising(messages: Sequence[Message]) -> None:
    """Positions of a partition rise."""
    highest: dict[Partition, int] = {}
    for message in messages:
        last = highest.get(message.partition, -1)
        expect(message.position > last, f"position {message.position} came behind position {last}")
        highest[message.partition] = message.position


def expect(condition: bool, otherwise: str) -> None:
    """Raise ``ContractBroken`` unless the condition holds; not ``assert``, which ``python -O`` leaves out."""
    if not condition:
        raise ContractBroken(otherwise)
