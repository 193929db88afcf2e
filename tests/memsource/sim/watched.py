"""Checks of the calls between a worker and its broker that no history records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import anyio.lowlevel

from lanes.clock import Clock, monotonic
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.retention import by_age
from lanes.source import (
    Assigned,
    Backlogged,
    Confirming,
    Delivered,
    Lost,
    Retaining,
    Retention,
    Source,
    SourceEvent,
    SourceTraits,
)
from memsource.kafka.broker import KafkaBroker
from memsource.kafka.source import KafkaMemberSource
from memsource.personality import Personality

__all__ = ["Watched", "Watching", "watching"]


class Watched:
    """A source that passes everything on. ``paused``: the user has stopped the intake. ``found``: check → its first
    finding."""

    retention: Callable[[Message], Retention | None]
    """Only if the broker has a retention. Without this attribute, the source is not ``lanes.source.Retaining``."""

    def __init__(self, inner: Source, found: dict[str, str]) -> None:
        self.paused = False
        self._was_paused = False
        self._inner = inner
        self._found = found
        self.clock: Clock = monotonic
        self._lost: set[Partition] = set()
        self._newest: dict[tuple[Partition, int], object] = {}
        reporting: object = inner
        if isinstance(reporting, Backlogged):
            self.backlog = reporting.backlog
        if isinstance(reporting, Retaining):
            self.retention = reporting.retention
        self._assigned: set[Partition] = set()
        self._freezes = 0
        self.doubtful: set[Partition] = set()
        if isinstance(reporting, Confirming):
            self._confirming = reporting
            self.freeze_limit, self.confirm = reporting.freeze_limit, self._confirm

    def freeze(self, seconds: float) -> None:
        """Note that the process does not run for some time."""
        reporting: object = self
        if isinstance(reporting, Confirming) and seconds > max(1.0, reporting.freeze_limit()):
            self._freezes += 1
            self.doubtful |= self._assigned

    async def _confirm(self, partitions: Sequence[Partition]) -> Sequence[Partition]:
        before = self._freezes
        confirmed = await self._confirming.confirm(partitions)
        if self._freezes == before:
            self.doubtful -= set(confirmed)
        return confirmed

    def pause(self, *, paused: bool) -> None:
        """Note that the user stops or continues the intake."""
        self.paused = paused
        self._was_paused = False

    def positions(self) -> dict[str, int]:
        """The next position to deliver of each owned partition of a Kafka broker, by its name in a status."""
        inner = self._inner
        if not isinstance(inner, KafkaMemberSource):
            return {}
        partitions = inner.client.partitions.values()
        return {str(each.partition.id): each.position for each in partitions if each.partition is not None}

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
            if isinstance(event, Assigned):
                self._assigned.add(event.partition)
                inner = self._inner
                if isinstance(inner, KafkaMemberSource) and not inner.broker.lists(inner.client):
                    self._found.setdefault(
                        "NothingStartsInDoubt",
                        f"{event.partition.id} was assigned to a client that the group has removed",
                    )
            elif isinstance(event, Lost):
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
    """A broker whose sources are ``Watched``. It passes all other calls on.

    With a ``span``, the sources report that the broker deletes each message ``span`` seconds after the time in
    ``written``. The broker deletes nothing, so that every message can still be handled.
    """

    def __init__(self, inner: Personality, found: dict[str, str], span: float | None = None) -> None:
        self.found = found
        self.span = span
        self.written: dict[tuple[int, int], float] = {}
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

    @property
    def kafka(self) -> KafkaBroker:
        """The broker, which is a Kafka broker."""
        assert isinstance(self._inner, KafkaBroker)
        return self._inner

    def freeze(self, member: str, until: float) -> None:
        """Suspend a member's process, which has to confirm its partitions if it is suspended for long."""
        source = self.sources[member]
        source.freeze(until - source.clock())
        self._inner.freeze(member, until)

    def source(self, member: str, clock: Clock) -> Source:
        """A source for a new member of this name."""
        watched = self.sources[member] = Watched(self._inner.source(member, clock), self.found)
        watched.clock = clock
        if self.span is not None:
            watched.retention = lambda message: self.retention(message, clock())
        return watched

    def retention(self, message: Message, now: float) -> Retention:
        """When the broker would delete a message."""
        assert self.span is not None
        return by_age(self.written[message.partition.id.number, message.position], self.span, now, "the span")


def watching(inner: Personality, found: dict[str, str], span: float | None = None) -> Personality:
    """``inner`` with watched sources, which report a retention of ``span`` seconds."""
    return cast(Personality, Watching(inner, found, span))
