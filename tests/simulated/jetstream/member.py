"""A member of a run: the real source, which tells the simulated broker what its consumer receives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from lanes.core.types import Partition, Room
from lanes.dead_letter import DeadLetter
from lanes.errors import ConfigError, SourceError
from lanes.source import Assigned, Lost, Revoking, SourceEvent, SourceTraits
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, subject_token
from lanes_jetstream.cohort.owned_partition import PulledPartition
from lanes_jetstream.cohort.source import CohortSource
from lanes_jetstream.durable.source import DurableSource
from memsource.adapters.choices import Phase
from tests.simulated.jetstream.network import HOST

STREAM: Final = "orders"

_URL: Final = f"nats://{HOST}:4222"

_STARTS: Final = 300
_RESTART: Final = 1.0
"""Number of starts of a process, and the seconds between two starts."""


class Judge(Protocol):
    """The part of the broker that its members use, which judges their assignments, losses and starts."""

    def assigned(self, member: SimulatedMember, partition: Partition) -> None:
        """Record an assignment."""

    def lost(self, member: SimulatedMember, partition: Partition, reason: str) -> None:
        """Record a loss."""

    def relied(self, member: SimulatedMember) -> None:
        """Judge the deadlines of a member."""

    def judge_refused_start(self, member: SimulatedMember, error: ConfigError) -> None:
        """Judge a refused start."""

    async def turn(self, member: str) -> None:
        """Wait for the turn of a member."""

    def dismiss(self, member: str) -> None:
        """Let the next member start."""

    def is_stopped(self, member: str) -> bool:
        """Return whether the process of a member has received the request to stop."""

    def confirmed(self, member: str, letter: DeadLetter) -> None:
        """Judge the confirmation of a dead letter."""


class SimulatedWriter(JetStreamDeadLetters):
    """The real writer of the dead letters of one member, whose confirmations the simulated broker judges.

    Args:
        broker: The broker.
        member: Name of the member.
        subject: Subject of the dead letters.
    """

    def __init__(self, broker: Judge, member: str, subject: str) -> None:
        super().__init__(_URL, subject)
        self._broker = broker
        self._member = member

    async def open(self) -> None:
        for left in reversed(range(_STARTS)):
            try:
                await super().open()
                return
            except SourceError:
                if not left:
                    raise
            await self.aclose()
            await asyncio.sleep(_RESTART)
            super().__init__(_URL, self._subject)

    async def put(self, dead_letter: DeadLetter) -> None:
        await super().put(dead_letter)
        self._broker.confirmed(self._member, dead_letter)


class SimulatedMember(JetStreamSource):
    """The real source of one member, with a record of its assignments.

    Like a process under a supervisor, the member starts again if its start fails.

    Args:
        broker: The broker.
        member: Name of the member.
        **arguments: Arguments of ``JetStreamSource``.

    Attributes:
        member: Name of the member.
        announced: All assignments of the member, by partition number and fencing token.
        state: ``"open"``, ``"steady"`` or ``"close"``.
        leaving: Numbers of partitions that the member releases, or has released.
    """

    def __init__(self, broker: Judge, member: str, **arguments: Any) -> None:
        self._arguments = {"stream": STREAM, "key": subject_token(-1), **arguments}
        super().__init__(_URL, **self._arguments)
        self.member = member
        self.announced: dict[tuple[int, int], Partition] = {}
        self.state: Phase = "open"
        self.leaving: set[int] = set()
        self._draining: set[int] = set()
        self._broker = broker

    async def open(self) -> SourceTraits:
        await self._broker.turn(self.member)
        for left in reversed(range(_STARTS)):
            try:
                traits = await super().open()
            except (SourceError, ConfigError) as error:
                if isinstance(error, ConfigError):
                    self._broker.judge_refused_start(self, error)
                if not left or self._broker.is_stopped(self.member):
                    # The supervisor does not start a process again that it has stopped.
                    raise SourceError(str(error), retryable=True) from error
            else:
                self.state = "steady"
                return traits
            await super().aclose()
            await asyncio.sleep(_RESTART)
            super().__init__(_URL, **self._arguments)
        raise AssertionError("the last start returns or raises")

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await super().receive(room)
        for event in events:
            if isinstance(event, Assigned):
                self.leaving.discard(event.partition.id.number)
                self._broker.assigned(self, event.partition)
            elif isinstance(event, Revoking):
                self._leave(event.partition)
            elif isinstance(event, Lost):
                self._draining.discard(event.partition.id.number)
                self._broker.lost(self, event.partition, event.reason)
        self._broker.relied(self)
        return events

    def _leave(self, partition: Partition) -> None:
        self.leaving.add(partition.id.number)
        self._draining.add(partition.id.number)

    async def release(self, partition: Partition) -> None:
        self._leave(partition)
        try:
            await super().release(partition)
        finally:
            self._draining.discard(partition.id.number)

    @property
    def phase(self) -> Phase:
        """The activity of the member."""
        if self.state != "steady":
            return self.state
        return "drain" if self._draining else "takeover" if self._takes_over else "steady"

    @property
    def _takes_over(self) -> bool:
        inner = self._source
        if isinstance(inner, DurableSource):
            return not inner._taken_over
        return any(owned.pulls is None and not owned.revoked for owned in self.owned)

    @property
    def owned(self) -> list[PulledPartition]:
        """The owned partitions; none for a durable."""
        inner = self._source
        return [*inner._partitions.by_number.values()] if isinstance(inner, CohortSource) else []

    async def aclose(self) -> None:
        self.state = "close"
        try:
            await super().aclose()
        finally:
            self._broker.dismiss(self.member)

    def lacks(self, partition: Partition) -> bool:
        """Return whether the source knows that it no longer owns a partition."""
        inner = self._source
        return isinstance(inner, CohortSource) and inner._partitions.of(partition) is None
