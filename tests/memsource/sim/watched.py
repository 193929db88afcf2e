"""Checks of the calls between a worker and its broker that no history records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import anyio.lowlevel

from lanes.clock import Clock
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Delivered, Lost, Source, SourceEvent, SourceTraits
from memsource.kafka.source import KafkaMemberSource
from memsource.personality import Personality

__all__ = ["Watched", "Watching", "watching"]


class Watched:
    """A source that passes everything on. ``paused``: the user has stopped the intake. ``found``: check → its first
    finding."""

    def __init__(self, inner: Source, found: dict[str, str]) -> None:
        self.paused = False
        self._was_paused = False
        self._inner = inner
        self._found = found
        self._lost: set[Partition] = set()
        self._newest: dict[tuple[Partition, int], object] = {}

    def pause(self, *, paused: bool) -> None:
        """Note that the user stops or continues the intake."""
        self.paused = paused
        self._was_paused = False

    @property
    def degraded(self) -> int:
        """Number of completed sets that the broker's limit cut."""
        return self._inner.degraded if isinstance(self._inner, KafkaMemberSource) else 0

    async def open(self) -> SourceTraits:
        return await self._inner.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        # The call that the pause interrupted may have been planned before it.
        if self.paused and self._was_paused and room.messages > 0:
            self._found.setdefault("PauseTakesNothing", f"asked for {room.messages} messages while paused by the user")
        self._was_paused = self.paused
        events = await self._inner.receive(room)
        for event in events:
            if isinstance(event, Lost):
                self._lost.add(event.partition)
            elif isinstance(event, Delivered):
                self._newest.update(((event.partition, m.position), m.token) for m in event.run)
        return events

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        messages = [message for settlement in settlements for message in settlement.messages]
        tokens = [message.token for message in messages]
        for message in messages:
            # A message that was redelivered since its settlement may be settled by each of its tokens.
            if self._newest[message.partition, message.position] not in tokens:
                what = f"position {message.position} settled by the token of an old delivery"
                self._found.setdefault("NewestToken", what)
        failed: Exception | None = None
        try:
            await self._inner.settle(settlements)
        except Exception as error:
            failed = error
        for settlement in settlements:
            if settlement.floor is not None and settlement.partition in self._lost:
                # A task that was woken together with the loss may take one more step before it is cancelled.
                await anyio.lowlevel.checkpoint_if_cancelled()
                what = f"{settlement.partition.id} was lost, and what was on its way to commit it went on"
                self._found.setdefault("NoCommitAfterLoss", what)
        if failed is not None:
            raise failed

    async def extend(self, messages: Sequence[Message]) -> None:
        await self._inner.extend(messages)

    async def release(self, partition: Partition) -> None:
        await self._inner.release(partition)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Watching:
    """A broker whose sources are ``Watched``. It passes all other calls on."""

    def __init__(self, inner: Personality, found: dict[str, str]) -> None:
        self.found = found
        self._inner = inner
        self.sources: dict[str, Watched] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if callable(found):
            # The broker's methods are the same for its life, and called very often.
            setattr(self, name, found)
        return found

    @property
    def degraded(self) -> int:
        """Number of completed sets of all sources that the broker's limit cut."""
        return sum(source.degraded for source in self.sources.values())

    def source(self, member: str, clock: Clock) -> Source:
        """A source for a new member of this name."""
        watched = self.sources[member] = Watched(self._inner.source(member, clock), self.found)
        return watched


def watching(inner: Personality, found: dict[str, str]) -> Personality:
    """``inner`` with watched sources."""
    return cast(Personality, Watching(inner, found))
