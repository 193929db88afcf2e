"""What the sources in memory have in common: they wait until something has changed, and their partitions take turns."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import anyio

from lanes.core.types import Message, Partition, Room
from lanes.source import Delivered, Exhausted, Progressed, SourceEvent
from memsource.memory.broker import Delivery
from memsource.memory.calls import Call, ScriptedSource
from memsource.memory.topic import Record, RecordReader

__all__ = ["BATCH", "READER", "Turns", "delivered", "delivery"]

READER: Final = RecordReader()

BATCH: Final = 100
"""Messages of one partition delivered at once, at most, where nothing else is said."""


class Turns(ScriptedSource):
    """A source that deals the room of a ``receive`` out to its partitions, each time to another one first.

    Whoever builds on it keeps ``_owned`` and, of that, ``_turns``: what is delivered of.
    """

    def __init__(self, batch: int = BATCH) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch}: must be 1 or more")
        super().__init__()
        self._batch = batch
        self._turns: deque[int] = deque()  # whose turn is next is in front
        self._exhausted = False
        self._waiting: set[anyio.Event] = set()

    # --- what is to be said about one partition, or all of them

    @abstractmethod
    def _take(self, number: int, messages: int, size: int) -> Iterable[Delivered | Progressed]:
        """What comes next of a partition, within this room, of which there is some."""

    @abstractmethod
    def _at_the_end(self) -> bool:
        """Whether everything published in its own partitions is delivered."""

    @abstractmethod
    def _next(self, room: Room) -> Sequence[SourceEvent]:
        """What is to be told now: ownership, and without any what is ``_dealt``. Nothing suspends in it."""

    # --- what all have

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for events; see ``lanes.source.Source.receive``."""
        self.calls.append(Call("receive", room))
        while True:
            # From the end of this call to the return nothing suspends: a cancelled receive has taken nothing.
            async with self._faults.meet("receive"):
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
            if number not in self._turns or self._owned[number] in room.paused or messages <= 0 or size <= 0:
                continue
            for event in self._take(number, min(messages, self._batch), size):
                if isinstance(event, Delivered):
                    messages -= len(event.run)
                    size -= event.size
                yield event

    def _silence(self, number: int) -> None:
        """Nothing more of a partition is delivered. Idempotent."""
        if number in self._turns:
            self._turns.remove(number)

    def _forget(self, number: int) -> Partition:
        """It is not owned any more. Raises ``KeyError`` where it was not."""
        self._silence(number)
        return self._owned.pop(number)

    def _forget_all(self) -> list[Partition]:
        return [self._forget(number) for number in list(self._owned)]

    async def _change(self) -> None:
        """Wait until something has changed."""
        event = anyio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _changed(self) -> None:
        for event in self._waiting:
            event.set()


def delivered(partition: Partition, records: Iterable[tuple[Record, object]]) -> Delivered:
    """A run of these records, each with what settles it."""
    run = [Message(partition, record.position, record.key, record.size, record, token) for record, token in records]
    return Delivered(partition, run, sum(message.size for message in run))


def delivery(message: Message) -> Delivery:
    """What settles a message whose token is its delivery."""
    assert isinstance(message.token, Delivery)
    return message.token
