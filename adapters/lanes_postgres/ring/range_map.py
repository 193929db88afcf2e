"""Stores the map of a group as an append-only list of assignments, which determine the owner of each slot."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple, overload

from psycopg import AsyncConnection, Connection
from psycopg.types.numeric import Int4

from lanes.arguments import check_whole, kind_of, names_unknown_options
from lanes.core.ring import SLOTS
from lanes.core.ring_map import Assignment, Range, RingMap
from lanes.errors import ConfigError
from lanes_postgres.log.appending import Log
from lanes_postgres.names import check_name
from lanes_postgres.ring.pieces import BOUNDED, assigning, beginning, has_begun, locking
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import alone

# A snapshot of the whole transaction would miss an assignment that another transaction commits during the wait.
_HISTORY: Final[LiteralString] = (
    "SELECT array_agg(number ORDER BY number), array_agg(lo ORDER BY number), array_agg(hi ORDER BY number), "
    "array_agg(consumer ORDER BY number), array_agg(time ORDER BY number), array_agg(login ORDER BY number) "
    "FROM {schema}.lanes_ring_assignments WHERE log = %s AND subscription = %s"
)
_APPEND: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_ring_assignments (log, subscription, number, lo, hi, consumer) "
    "VALUES (%s, %s, %s, %s, %s, %s)"
)


class RangeEvent(NamedTuple):
    """One assignment of slots in the history of a map.

    Attributes:
        number: Number of the assignment in the map: 1, 2, 3 …
        range: The assigned slots.
        consumer: Name of the consumer that owns the slots after the assignment.
        time: Time of the assignment, with a time zone.
        login: Database user who made the assignment.
    """

    number: int
    range: Range
    consumer: str
    time: datetime
    login: str


class RangeMember(NamedTuple):
    """A consumer of a group, for ``PostgresSource(…, ranges=…)``; see ``RangeMap.member``.

    Attributes:
        map: The map of the group.
        consumer: Name of the consumer.
    """

    map: RangeMap
    consumer: str


@names_unknown_options("lanes_postgres.RangeMap")
class RangeMap:
    """The ranges of ring slots that the consumers of a group own, stored as an append-only list of assignments.

    The last assignment of a slot determines its owner. A slot that no assignment names has no owner. A consumer name
    belongs to one group, so two groups can use the same name for different consumers. A group and the subscription of
    its consumers have the same name. Each log has its own groups.

    The object opens no connection. Two objects with the same log and group are interchangeable. Thread-safe.

    Args:
        log: The log.
        group: Name of the group, which is the subscription of its consumers, 1 to 200 characters.

    Attributes:
        log: The log.
        group: Name of the group.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, log: Log, *, group: str) -> None:
        if not isinstance(log, Log):
            raise ConfigError(f'log is {kind_of(log)}; pass lanes_postgres.Log("orders")')
        check_name("group", group, "name the purpose of its consumers, such as 'billing'")
        self.log = log
        self.group = group
        self._history = compose(_HISTORY, log.schema)
        self._append = compose(_APPEND, log.schema)

    def __repr__(self) -> str:
        return f"<RangeMap of the group {self.group!r} of {self.log!r}>"

    @overload
    def assign(self, connection: AsyncConnection[Any], lo: int, hi: int, consumer: str) -> Awaitable[bool]: ...

    @overload
    def assign(self, connection: Connection[Any], lo: int, hi: int, consumer: str) -> bool: ...

    def assign(
        self, connection: AsyncConnection[Any] | Connection[Any], lo: int, hi: int, consumer: str
    ) -> Awaitable[bool] | bool:
        """Give the slots ``lo`` … ``hi`` to a consumer, in a separate transaction. Idempotent.

        The slots must all have the same owner, or must all have no owner. If the slots are a part of a range, the call
        splits the range, and the other slots keep their owner. Calls for one group run one after the other.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.
            lo: First slot, 0 … 65,535.
            hi: Last slot, which the range includes, ``lo`` … 65,535.
            consumer: Name of the consumer, 1 to 200 characters.

        Returns:
            Whether the map has changed; awaitable for an asynchronous connection. False = the consumer owned all the
            slots already.

        Raises:
            ConfigError: An argument is invalid, the range has slots of several owners, the log does not exist, or a
                table or permission is missing. The error leaves the map unchanged.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        check_name("consumer", consumer, "name the process, such as 'b'")
        return alone(connection, self._assigning(Assignment(Range(lo, hi), consumer)), self._where, "RangeMap.assign")

    @overload
    def split(self, connection: AsyncConnection[Any], slot: int, consumer: str) -> Awaitable[bool]: ...

    @overload
    def split(self, connection: Connection[Any], slot: int, consumer: str) -> bool: ...

    def split(
        self, connection: AsyncConnection[Any] | Connection[Any], slot: int, consumer: str
    ) -> Awaitable[bool] | bool:
        """Split the range of a slot, and assign the part from ``slot`` on to a consumer, in a separate transaction.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.
            slot: First slot to assign, 1 … 65,535. One range must contain this slot and the slot below.
            consumer: Name of the consumer, 1 to 200 characters.

        Returns:
            Whether the map has changed; awaitable for an asynchronous connection. False = the consumer owned the slots
            already.

        Raises:
            ConfigError: An argument is invalid, no consumer owns the slot, the slot is the first slot of its range, or
                the log, a table or a permission is missing. The error leaves the map unchanged.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        check_name("consumer", consumer, "name the process, such as 'b'")
        check_whole("slot", slot, 0)
        if slot >= SLOTS:
            raise ConfigError(f"slot={slot}: must be a slot, a whole number in 0 … {SLOTS - 1}")
        return alone(connection, self._splitting(slot, consumer), self._where, "RangeMap.split")

    @overload
    def ranges(self, connection: AsyncConnection[Any]) -> Awaitable[Sequence[Assignment]]: ...

    @overload
    def ranges(self, connection: Connection[Any]) -> Sequence[Assignment]: ...

    def ranges(
        self, connection: AsyncConnection[Any] | Connection[Any]
    ) -> Awaitable[Sequence[Assignment]] | Sequence[Assignment]:
        """Return the owned ranges and their owners, in order of slots. Other slots have no owner. Read-only.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.

        Returns:
            The ranges; awaitable for an asynchronous connection.

        Raises:
            ConfigError: The log does not exist, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return alone(connection, self._reading(), self._where, "RangeMap.ranges")

    @overload
    def history(self, connection: AsyncConnection[Any]) -> Awaitable[Sequence[RangeEvent]]: ...

    @overload
    def history(self, connection: Connection[Any]) -> Sequence[RangeEvent]: ...

    def history(
        self, connection: AsyncConnection[Any] | Connection[Any]
    ) -> Awaitable[Sequence[RangeEvent]] | Sequence[RangeEvent]:
        """Return all assignments that changed the map, the oldest first. Read-only.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.

        Returns:
            The assignments; awaitable for an asynchronous connection.

        Raises:
            ConfigError: The log does not exist, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return alone(connection, self._remembering(), self._where, "RangeMap.history")

    def member(self, consumer: str) -> RangeMember:
        """Return a consumer of the group, for ``PostgresSource(…, ranges=…)``. Does not block.

        Args:
            consumer: Name of the consumer, 1 to 200 characters. If a process starts again with its former name, it owns
                its ranges again. If two processes use one name, each piece still has a single owner.

        Returns:
            The consumer.

        Raises:
            ConfigError: The name is invalid.
        """
        check_name("consumer", consumer, "name the process, such as 'b'")
        return RangeMember(self, consumer)

    @property
    def _where(self) -> str:
        return f"ranges of the group {self.group!r} of the log {self.log.name!r} in the schema {self.log.schema!r}"

    def _remembering(self) -> Steps[list[RangeEvent]]:
        facts = yield from self.log.finding()
        found = yield Statement(self._history, (Int4(facts.id), self.group))
        if found is None or found[0] is None:
            return []
        return [RangeEvent(number, Range(lo, hi), *facts) for number, lo, hi, *facts in zip(*found, strict=True)]

    def _replaying(self) -> Steps[tuple[RingMap, int]]:
        """Replay the assignments, and return the resulting map and the number of assignments."""
        events = yield from self._remembering()
        return RingMap.replay(Assignment(event.range, event.consumer) for event in events), len(events)

    def _reading(self) -> Steps[Sequence[Assignment]]:
        ring, _ = yield from self._replaying()
        return ring.owned

    def _locking(self) -> Steps[int]:
        """Block other assignments of the group until the transaction ends. Returns the number of the log."""
        yield Statement(BOUNDED.encode())
        facts = yield from self.log.finding()
        yield from locking(self.log.schema, facts.id, self.group)
        return facts.id

    def _assigning(self, assignment: Assignment) -> Steps[bool]:
        log = yield from self._locking()
        ring, count = yield from self._replaying()
        return (yield from self._appending(log, ring, count, assignment))

    def _splitting(self, slot: int, consumer: str) -> Steps[bool]:
        log = yield from self._locking()
        ring, count = yield from self._replaying()
        with self._placed():
            assignment = ring.split(slot, consumer)
        return (yield from self._appending(log, ring, count, assignment))

    def _appending(self, log: int, ring: RingMap, count: int, assignment: Assignment) -> Steps[bool]:
        with self._placed():
            after = ring.assign(assignment)
        if after is ring:
            return False
        wanted, consumer = assignment
        row = (Int4(log), self.group, Int4(count + 1), Int4(wanted.lo), Int4(wanted.hi), consumer)
        yield Statement(self._append, row)
        if (yield from has_begun(self.log.schema, log, self.group)):
            yield from assigning(self.log.schema, log, self.group, wanted, consumer)
        return True

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """Add the name of the map to the error of a refused change."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self._where}: {error}") from None

    def beginning(self, starts: Sequence[int]) -> Steps[None]:
        """Return the statements that create the missing pieces of the group. For ``PostgresSource``.

        Args:
            starts: First position of each partition.

        Returns:
            The statements of one transaction.
        """
        return self._beginning(starts)

    def _beginning(self, starts: Sequence[int]) -> Steps[None]:
        log = yield from self._locking()
        if not (yield from has_begun(self.log.schema, log, self.group)):
            ring, _ = yield from self._replaying()
            yield from beginning(self.log.schema, log, self.group, ring, starts)
