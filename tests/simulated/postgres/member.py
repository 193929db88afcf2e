"""A member of a run: the real source, which tells the simulated broker what its consumer receives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, Protocol

from lanes.core.types import Partition, Room
from lanes.dead_letter import DeadLetter
from lanes.errors import SourceError
from lanes.source import Assigned, Lost, Revoking, SourceEvent, SourceTraits
from lanes_postgres import AdvisoryLocks, Log, PostgresDeadLetters, PostgresSource
from memsource.adapters.choices import Phase
from tests.simulated.postgres.client import Line
from tests.simulated.postgres.statements import LOG, SCHEMA

URL: Final = "postgresql://simulated/test"
SUBSCRIPTION: Final = "billing"

_STARTS: Final = 300
_RESTART: Final = 1.0
"""Number of starts of a process, and the seconds between two starts."""


def unit_of(partition: Partition) -> int:
    """Return the number of the piece of an assignment, or of its partition."""
    return partition.id.piece or partition.id.number


class Judge(Protocol):
    """The part of the broker that its members use."""

    def opened(self, member: SimulatedMember) -> None:
        """Judge the first positions that a member has read."""

    def assigned(self, member: SimulatedMember, partition: Partition) -> None:
        """Record an assignment."""

    def lost(self, member: SimulatedMember, partition: Partition) -> None:
        """Record a loss."""

    def confirmed(self, member: str, letter: DeadLetter) -> None:
        """Judge the confirmation of a dead letter."""


class SimulatedWriter(PostgresDeadLetters):
    """The real writer of the dead letters of one member, whose confirmations the simulated broker judges."""

    def __init__(self, broker: Judge, member: str) -> None:
        super().__init__(URL, SUBSCRIPTION, schema=SCHEMA)
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
            await asyncio.sleep(_RESTART)

    async def put(self, dead_letter: DeadLetter) -> None:
        await super().put(dead_letter)
        self._broker.confirmed(self._member, dead_letter)


class SimulatedMember(PostgresSource):
    """The real source of one member, with a record of its assignments.

    Like a process under a supervisor, the member starts again if its start fails.

    Args:
        broker: The broker.
        member: Name of the member.
        lease: Lease of its locks, in seconds.
        **arguments: Arguments of ``PostgresSource``.

    Attributes:
        member: Name of the member.
        owned: The assignments that the consumer has received and neither released nor lost, by ``unit_of``.
        state: ``"open"``, ``"steady"`` or ``"close"``.
    """

    def __init__(self, broker: Judge, member: str, lease: float, **arguments: Any) -> None:
        self._lease = lease
        self._arguments = arguments
        self._make()
        self.member = member
        self.owned: dict[int, Partition] = {}
        self.state: Phase = "open"
        self._draining: set[int] = set()
        self._broker = broker

    def _make(self) -> None:
        locks = AdvisoryLocks(URL, lease=self._lease)
        super().__init__(URL, Log(LOG, schema=SCHEMA), subscription=SUBSCRIPTION, locks=locks, **self._arguments)

    async def open(self) -> SourceTraits:
        for left in reversed(range(_STARTS)):
            try:
                traits = await super().open()
            except SourceError:
                if not left:
                    raise
            else:
                self.state = "steady"
                self._broker.opened(self)
                return traits
            await super().aclose()
            await asyncio.sleep(_RESTART)
            self._make()
        raise AssertionError("the last start returns or raises")

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await super().receive(room)
        for event in events:
            if isinstance(event, Assigned):
                self.owned[unit_of(event.partition)] = event.partition
                self._broker.assigned(self, event.partition)
            elif isinstance(event, Revoking):
                self._draining.add(unit_of(event.partition))
            elif isinstance(event, Lost):
                self._over(event.partition)
                self._broker.lost(self, event.partition)
        return events

    async def release(self, partition: Partition) -> None:
        self._draining.add(unit_of(partition))
        try:
            await super().release(partition)
        finally:
            self._over(partition)

    def _over(self, partition: Partition) -> None:
        self._draining.discard(unit_of(partition))
        if self.owned.get(unit_of(partition)) is partition:
            del self.owned[unit_of(partition)]

    @property
    def phase(self) -> Phase:
        """The activity of the member."""
        if self.state != "steady":
            return self.state
        return "drain" if self._draining else "takeover" if self._visitor._acquiring else "steady"

    @property
    def starts(self) -> list[int]:
        """The first positions that the member has read."""
        return list(self._visitor.starts)

    @property
    def lock_line(self) -> Line | None:
        """The connection of the member's locks; None without a connection."""
        locks: Any = self._locks
        session = locks._session
        return None if session is None else session.connection.line

    async def aclose(self) -> None:
        self.state = "close"
        await super().aclose()
