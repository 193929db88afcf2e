"""A source between a consumer and a broker: it notes what no history says, and can be cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Delivered, SourceEvent, SourceTraits
from memsource.group_source import GroupSource
from memsource.source import MemorySource

Find = Callable[[str, str], None]
"""Takes the name of a check and what it has found."""


class Watched:
    """Hands everything on to ``inner``. ``paused``: whether the user stopped the intake. ``leaving``: it stops, so that
    what it releases goes back to its group when it leaves: before that it would be given to itself again.

    After ``cut`` nothing that the consumer says reaches the broker: it waits for ever.
    """

    def __init__(self, inner: MemorySource | GroupSource, find: Find) -> None:
        self.inner = inner
        self.paused = False
        self.leaving = False
        self._find = find
        self._cut = False
        self._newest: dict[tuple[Partition, int], object] = {}
        self._committing: set[Partition] = set()

    def cut(self) -> None:
        """From here on its process is dead."""
        self._cut = True

    async def _reach(self) -> None:
        if self._cut:
            await anyio.sleep_forever()

    async def open(self) -> SourceTraits:
        return await self.inner.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        await self._reach()
        if self.paused and room.messages:
            self._find("PauseTakesNothing", f"asked for {room.messages} messages while paused by the user")
        events = await self.inner.receive(room)
        for event in events:
            if isinstance(event, Delivered):
                self._newest.update(((m.partition, m.position), m.token) for m in event.run)
        return events

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        messages = [message for settlement in settlements for message in settlement.messages]
        tokens = {message.token for message in messages}
        for message in messages:
            # What was delivered several times since it was settled may be settled by all of these tokens.
            if self._newest[message.partition, message.position] not in tokens:
                self._find("NewestToken", f"position {message.position} settled by the token of an old delivery")
        committing = {settlement.partition for settlement in settlements if settlement.floor is not None}
        for partition in committing & self._committing:
            self._find("OneCommitAtATime", f"{partition.id} has another commit on its way")
        self._committing |= committing
        try:
            await self._reach()
            await self.inner.settle(settlements)
        finally:
            self._committing -= committing

    async def extend(self, messages: Sequence[Message]) -> None:
        await self._reach()
        await self.inner.extend(messages)

    async def release(self, partition: Partition) -> None:
        await self._reach()
        if not (self.leaving and partition.floor is not None):
            await self.inner.release(partition)

    async def aclose(self) -> None:
        await self.inner.aclose()
