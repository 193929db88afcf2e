"""What a contract check works with: a harness that the author of a source writes, and an open source under watch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final, Literal, NamedTuple, Protocol

import anyio
import anyio.lowlevel

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Assigned, Delivered, Source, SourceEvent, SourceTraits

__all__ = ["Ability", "ContractBroken", "Harness", "Sample", "Session", "expect", "messages_of", "opened"]

Ability = Literal["ack wait", "revoke", "lose", "finish"]
"""``ack wait``: the broker delivers again what is not settled in time. ``revoke``, ``lose``: the harness can have
partitions taken away. ``finish``: the source may have an end."""

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
        """What the broker and the source are able to."""

    @property
    def patience(self) -> float:
        """Seconds after which nothing comes any more when nothing has come until then."""

    async def publish(self, samples: Sequence[Sample]) -> None:
        """Publish them in this order; the source must find ``Sample.key`` as the key."""

    def source(self) -> Source:
        """A new source, not open. It goes on where the former one, closed by then, stopped."""

    async def unsettled(self) -> int:
        """How many messages the broker has delivered and not seen settled, as it knows now."""

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


class Session:
    """An open source, and what it has announced. Every event is looked at as it comes."""

    def __init__(self, harness: Harness, source: Source, traits: SourceTraits) -> None:
        self.source = source
        self.traits = traits
        self.partitions: list[Partition] = []
        self._harness = harness

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """The next events. Cancel-safe if the source is."""
        events: Sequence[SourceEvent] = ()
        with anyio.move_on_after(TIMEOUT):
            events = await self.source.receive(room)
        expect(len(events) > 0, f"receive({room}) brought no event within {TIMEOUT:g} s")
        for event in events:
            if isinstance(event, Assigned):
                known = event.partition in self.partitions
                expect(not known, f"{event.partition!r} was assigned twice: every assignment has a new Partition")
                self.partitions.append(event.partition)
            elif isinstance(event, Delivered):
                self._look_at(event)
        count = len(messages_of(events))
        expect(count <= room.messages, f"{count} messages came where there was room for {room.messages}")
        return events

    def _look_at(self, event: Delivered) -> None:
        expect(event.partition in self.partitions, f"a message of {event.partition!r} came before its Assigned")
        expect(len(event.run) > 0, "an empty run was delivered")
        expect(all(m.partition is event.partition for m in event.run), "a message of a run is of another partition")
        size = sum(message.size for message in event.run)
        expect(event.size == size, f"the size of a run is {event.size}, the sum of its messages {size}")

    async def take(self, count: int, *, size: int = BYTES) -> list[Message]:
        """The next ``count`` messages, with room for exactly them."""
        messages: list[Message] = []
        while len(messages) < count:
            messages += messages_of(await self.receive(Room(count - len(messages), size)))
        return messages

    async def assigned(self) -> list[Partition]:
        """The partitions that the source begins with."""
        while not self.partitions:
            await self.receive(Room(0, 0))
        # There may be more, each in a call of its own.
        await self.expect_nothing(Room(0, 0))
        return list(self.partitions)

    async def expect_nothing(self, room: Room = ROOM) -> None:
        """Nothing but assignments come."""
        with anyio.move_on_after(self._harness.patience):
            while True:
                for event in await self.receive(room):
                    expect(isinstance(event, Assigned), f"{event!r} came, nothing was expected")

    async def settle(self, messages: Sequence[Message]) -> None:
        """Settle them, one settlement a partition."""
        by_partition: dict[Partition, list[Message]] = {}
        for message in messages:
            by_partition.setdefault(message.partition, []).append(message)
        await self.source.settle([Settlement(partition, each) for partition, each in by_partition.items()])

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


def messages_of(events: Sequence[SourceEvent]) -> list[Message]:
    """The messages of some events, in their order."""
    return [message for event in events if isinstance(event, Delivered) for message in event.run]


def expect(condition: bool, otherwise: str) -> None:
    """Raise ``ContractBroken`` unless the condition holds; not ``assert``, which ``python -O`` leaves out."""
    if not condition:
        raise ContractBroken(otherwise)
