"""The source of ``lanes`` that reads a log in PostgreSQL as a named subscription. Needs asyncio."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import psycopg

from lanes.arguments import OF_CONSUMERS, check_one_of, check_seconds, check_whole, kind_of, names_unknown_options
from lanes.core.types import Message, Part, Partition, Room, Settlement
from lanes.errors import ConfigError, SourceError
from lanes.ownership import Locks, State, StateChange, StateStore
from lanes.source import Backlog, KeptLog, Outage, SettlementError, SourceEvent, SourceTraits
from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.cancellation import cancelled_once
from lanes_postgres.errors import lanes_error
from lanes_postgres.log.appending import Log
from lanes_postgres.log.reading import LogTables
from lanes_postgres.log.trigger import checking, upkeep
from lanes_postgres.migrations import check_schema
from lanes_postgres.names import check_subscription
from lanes_postgres.ring.pieces import Pieces
from lanes_postgres.ring.range_map import RangeMember
from lanes_postgres.ring.slots import MovedSlots
from lanes_postgres.states import PostgresStates, are_beside
from lanes_postgres.steps import perform_async
from lanes_postgres.subscription.connections import Connections, Pool
from lanes_postgres.subscription.kept import LIMIT, KeptWatch
from lanes_postgres.subscription.owned import Owned
from lanes_postgres.subscription.owned_piece import OwnedPiece
from lanes_postgres.subscription.piece_visitor import PieceVisitor
from lanes_postgres.subscription.starts import Start, check_start, decide_starts
from lanes_postgres.subscription.visitor import OutOfRange, Visitor
from lanes_postgres.subscription.visits import Visit
from lanes_postgres.transactions import alone_async

log = logging.getLogger("lanes.postgres")


@names_unknown_options("lanes_postgres.PostgresSource", homes=OF_CONSUMERS)
class PostgresSource:
    """A source of ``lanes`` that reads a log in PostgreSQL as a named subscription. Needs asyncio.

    Subscriptions with different names are independent, and each subscription reads every message. The sources with one
    name are the members of a subscription. The members share the partitions, and each partition has one owner at a
    time. A member acquires free partitions up to its share. If a member waits for partitions, the other members release
    partitions that they have owned for longer than ``time_budget``, until the waiting member can have its share. If a
    subscription has more members than partitions, the members own the partitions in turn.

    The source stores the position of each partition in ``states``. Each owner of a partition has a higher epoch, and
    the store refuses the writes of a former owner. Handlers read the epoch as ``message.epoch``.

    Args:
        dsn_or_pool: Address of the database, or a ``psycopg_pool.AsyncConnectionPool`` that the caller opens and
            closes. The source uses two connections, and its locks use one more.
        log: The log.
        subscription: Name of the subscription, 1 to 200 characters.
        start: First message of a new subscription, decided once for all partitions. ``"beginning"`` = the first message
            of the log. ``"next"`` = the first message of a later commit. A ``datetime`` = the first message of each
            partition at or after this time.
        visit: Order in which a member visits partitions with messages: by the time of the oldest unread message, by
            ``"backlog"``, or by ``"name"``. The messages of a partition keep their order.
        time_budget: Seconds for which a member keeps a partition while another member waits. A release always waits for
            running handlers. With more members than partitions, a member also keeps its partition until it has settled
            a message.
        poll_interval: Seconds between two polls of an idle log, at least 0.01. A notification wakes the source earlier.
            A poll also finds messages after a lost notification. The members exchange heartbeats every second, or every
            ``poll_interval`` if this time is shorter.
        out_of_range: Position at which to continue if a trim deleted unread messages: the first remaining message, or
            the end of the partition. ``"fail"`` = stop with an error.
        kept_limit: Bytes of kept messages above which the source raises an alarm. The alarm is a logged error and a
            finding in the health report. A log keeps the messages that its slowest subscription has not finished.
        locks: Locks of the members. ``None`` = ``AdvisoryLocks`` in the same database.
        states: Store of the positions. ``None`` = the tables in the schema of the log. A trim of the log cannot read
            positions in another schema, in another database, or in a store of another kind.
        ranges: Name of this consumer in a map of ranges, from ``RangeMap(log, group=…).member(…)``. The source then
            reads only the keys whose slots the map gives this consumer. ``subscription`` must be the name of the group.
            Any member may receive messages without a key. ``None`` = the members share whole partitions.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        dsn_or_pool: str | Pool,
        log: Log,
        *,
        subscription: str,
        start: Start = "beginning",
        visit: Visit = "oldest",
        time_budget: float = 5.0,
        poll_interval: float = 0.5,
        out_of_range: OutOfRange = "fail",
        kept_limit: int = LIMIT,
        locks: Locks | None = None,
        states: StateStore | None = None,
        ranges: RangeMember | None = None,
    ) -> None:
        check_subscription(subscription)
        if not isinstance(log, Log):
            raise ConfigError(f'log is {kind_of(log)}; pass lanes_postgres.Log("orders")')
        check_start(start)
        check_one_of("visit", visit, ("oldest", "backlog", "name"))
        check_seconds("time_budget", time_budget, 0.0)
        check_seconds("poll_interval", poll_interval, 0.01)
        check_one_of("out_of_range", out_of_range, ("fail", "earliest", "latest"))
        check_whole("kept_limit", kept_limit, 1)
        if ranges is not None:
            _check_ranges(ranges, log, subscription, states)
        self._ranges = ranges
        self._name = f"postgres {log.name}/{subscription}"
        self._kept_limit = kept_limit
        self._connections = Connections(dsn_or_pool, self._name)
        self._connections.check_address()
        self._log = log
        self._subscription = subscription
        self._start: Start = start
        self._visit: Visit = visit
        self._time_budget = time_budget
        self._poll_interval = poll_interval
        self._out_of_range: OutOfRange = out_of_range
        self._locks = AdvisoryLocks(_address_of(dsn_or_pool, self._name)) if locks is None else locks
        self._states = PostgresStates(self._connections.lend, schema=log.schema) if states is None else states
        self._own_states = states is not None
        self._member = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._opened = AsyncExitStack()
        self._arrived: asyncio.Event
        self._visitor: Visitor
        self._locking: asyncio.Task[None] | None = None
        self._store: Callable[[Sequence[StateChange]], Awaitable[Sequence[bool | SourceError]]]

    def __repr__(self) -> str:
        return f"<PostgresSource {self._name}>"

    # --- lanes.source.Source

    async def open(self) -> SourceTraits:
        """Connect, find the log, decide the start of a new subscription, and begin to acquire partitions.

        See ``lanes.source.Source.open``.
        """
        return await cancelled_once(self._open())

    async def _open(self) -> SourceTraits:
        self._arrived = asyncio.Event()
        self._opened.push_async_callback(self._connections.aclose)
        try:
            async with self._connections.lend() as connection:
                await check_schema(connection, schema=self._log.schema)
                facts = await perform_async(connection, self._log.finding(), self._name)
                fault = await perform_async(connection, checking(self._log.schema, facts), self._name)
                if fault is not None:
                    raise ConfigError(f"{self._name}: {fault.text}; {fault.remedy}")
                left = await perform_async(connection, upkeep(self._log.schema, facts), self._name)
                if left is not None:
                    log.warning("%s: %s; %s", self._name, left.text, left.remedy)
                if self._own_states:
                    self._own_states = not await are_beside(self._states, self._log.schema, facts.incarnation)
                tables = LogTables(self._log.schema, facts.id, facts.partitions, facts.messages)
                if self._ranges is not None and not tables.own:
                    raise ConfigError(
                        f"{self._name}: a log over a table has no slots, which ranges= needs; append to a Log instead"
                    )
                starts = await decide_starts(
                    connection,
                    tables,
                    self._subscription,
                    self._start,
                    self._name,
                    own_states=self._own_states,
                    ring=self._ranges is not None,
                )
                if self._ranges is not None:
                    await alone_async(connection, self._ranges.map.beginning(starts), self._name)
        except psycopg.Error as error:
            raise lanes_error(self._name, error) from error
        self._opened.push_async_callback(self._locks.aclose)
        await self._locks.open()
        self._visitor = self._make_visitor(
            connections=self._connections,
            tables=tables,
            log_name=self._log.name,
            incarnation=facts.incarnation,
            subscription=self._subscription,
            member=self._member,
            starts=starts,
            locks=self._locks,
            states=self._states,
            visit=self._visit,
            time_budget=self._time_budget,
            poll_interval=self._poll_interval,
            out_of_range=self._out_of_range,
            name=self._name,
            kept=KeptWatch(
                tables=tables,
                log_name=self._log.name,
                incarnation=facts.incarnation,
                name=self._name,
                limit=self._kept_limit,
                subscription=self._subscription,
                floors=self._read_floors if self._own_states else None,
            ),
            wake=self._arrived.set,
        )
        self._locking = asyncio.create_task(self._locks.run())
        self._opened.push_async_callback(_end, self._locking)
        self._locking.add_done_callback(lambda _: self._arrived.set())
        self._opened.push_async_callback(self._visitor.kept.aclose)
        self._opened.push_async_callback(self._visitor.leave)
        visiting = asyncio.create_task(self._visitor.run())
        self._visiting = visiting
        visiting.add_done_callback(lambda _: self._arrived.set())
        self._opened.push_async_callback(_end, visiting)
        return replace(self.declared(), partitions=facts.partitions)

    def _make_visitor(self, *, tables: LogTables, **arguments: Any) -> Visitor:
        if self._ranges is None:
            self._store = self._states.store
            return Visitor(tables=tables, **arguments)
        group, consumer = self._ranges.map.group, self._ranges.consumer
        pieces = Pieces(self._connections.lend, tables.schema, tables.log, group, consumer, self._name)
        self._store = pieces.store
        return PieceVisitor(tables=tables, **arguments, pieces=pieces, consumer=consumer)

    def declared(self) -> SourceTraits:
        """Return the traits that do not depend on the log; see ``lanes.source.Declaring.declared``."""
        ranged = self._ranges is not None
        return SourceTraits(
            name=self._name,
            system="postgresql",
            settles="cumulative",
            hands_over=True,
            exclusive=not ranged,
            divides=ranged,
        )

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        """Wait for messages and for partition events; see ``lanes.source.Source.receive``.

        Args:
            room: Maximum number and size of the messages of this call.

        Returns:
            Events in the order of the source.
        """
        visitor = self._visitor
        while True:
            self._arrived.clear()
            self._raise_failure()
            visitor.room = room
            events = visitor.events() or self._take(room)
            visitor.kick()
            if events:
                return events
            await self._arrived.wait()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Store the positions of owned partitions; see ``lanes.source.Source.settle``.

        The call stores nothing for a partition that this member no longer owns.

        Args:
            settlements: The positions to store.

        Raises:
            SourceError: The database does not answer, or refuses the call.
            SettlementError: The positions of some pieces are not stored.
        """
        changes: list[StateChange] = []
        stored: list[Owned] = []
        for settlement in settlements:
            owned = self._of(settlement.partition)
            if owned is None or owned.lost() or settlement.floor is None:
                continue
            state = State(owned.epoch, settlement.floor, list(settlement.completed))
            changes.append(StateChange(owned.key, state))
            stored.append(owned)
        if not changes:
            return
        visitor = self._visitor
        failed: dict[Partition, SourceError] = {}
        for owned, change, done in zip(stored, changes, await self._store(changes), strict=True):
            if done is True:
                owned.stored(change.state)
            elif isinstance(done, SourceError):
                # No other process could store the position, so this member keeps the piece.
                assert isinstance(owned, OwnedPiece), "only a store of pieces answers with errors"
                failed[owned.partition] = done
                owned.unstored = str(done)
            else:
                visitor.lose(owned, "another process owns the partition")
        if failed:
            raise SettlementError(str(next(iter(failed.values()))), failed)

    async def extend(self, messages: Sequence[Message]) -> None:
        """Do nothing, because a message has no time limit; see ``lanes.source.Source.extend``.

        Args:
            messages: Ignored.
        """

    async def release(self, partition: Partition) -> None:
        """Release the lock of a drained partition; see ``lanes.source.Source.release``.

        Args:
            partition: The assignment to hand back.
        """
        owned = self._of(partition)
        if owned is not None:
            await self._visitor.release(owned)

    async def hand_over(self, partition: Partition, parts: Sequence[Part]) -> None:
        """Hand parts of a piece over to their next owners; see ``lanes.source.Dividing.hand_over``.

        Args:
            partition: The assignment of the piece, which continues without the parts.
            parts: The parts to hand over.
        """
        owned, visitor = self._of(partition), self._visitor
        if owned is None:
            return  # The member has lost the piece, so the next owners begin at the stored position.
        assert isinstance(visitor, PieceVisitor) and isinstance(owned, OwnedPiece), "only a piece has parts"
        for part in parts:
            assert isinstance(part, MovedSlots), "this source has named the part"
            await visitor.hand_over(owned, part)

    async def aclose(self) -> None:
        """Release all partitions, and close the connections that the source opened. Idempotent."""
        await self._opened.aclose()

    # --- optional parts

    def lag(self, partition: Partition) -> int | None:
        """Return the number of unfinished positions; see ``lanes.source.Lagging``.

        Args:
            partition: An assignment of this source.

        Returns:
            The number; None = the assignment has ended.
        """
        owned = self._of(partition)
        return None if owned is None else max(0, owned.end - owned.floor)

    def backlog(self, partition: Partition) -> Backlog:
        """Return the messages that wait for their delivery; see ``lanes.source.Backlogged``.

        Args:
            partition: An assignment of this source.

        Returns:
            The last known number.
        """
        owned = self._of(partition)
        if owned is None:
            return Backlog(None)
        return Backlog(max(0, owned.end - owned.read) + len(owned.waiting))

    def outage(self) -> Outage | None:
        """Return the present outage of the database; see ``lanes.source.Connected``.

        The result also reports an outage of only the session of the locks.
        """
        found = self._visitor.contact.outage()
        return self._locks.outage() if found is None and isinstance(self._locks, AdvisoryLocks) else found

    def kept_log(self) -> KeptLog | None:
        """Return the messages that the log keeps for its slowest subscription; see ``lanes.source.Keeping``."""
        return self._visitor.kept.kept

    def unowned(self) -> int | None:
        """Return the number of messages in slots without an owner; see ``lanes.source.Ranged``.

        Returns:
            The number, with at most 1,000 messages of each partition; None = unknown, or no ranges.
        """
        visitor = self._visitor
        return visitor.unowned if isinstance(visitor, PieceVisitor) else None

    def findings(self) -> Sequence[str]:
        """Return alarms about kept messages, slots without an owner and pieces with faults.

        See ``lanes.source.Reporting``.

        Returns:
            The texts of the alarms.
        """
        visitor = self._visitor
        kept = visitor.kept.finding()
        return [*([kept] if kept else []), *(visitor.findings() if isinstance(visitor, PieceVisitor) else [])]

    # --- helpers

    def _of(self, partition: Partition) -> Owned | None:
        owned = self._visitor.owned.get(partition.id.piece or partition.id.number)
        return owned if owned is not None and owned.partition is partition else None

    def _take(self, room: Room) -> list[SourceEvent]:
        """Return waiting messages within ``room``. Does not suspend, so a cancelled ``receive`` loses no message."""
        events: list[SourceEvent] = []
        messages, size = room.messages, room.bytes
        for owned in self._visitor.delivery_order():
            if owned.revoked or owned.over or owned.partition in room.paused:
                continue
            if owned.waiting and (delivered := owned.take(Room(messages, size))) is not None:
                events.append(delivered)
                messages -= len(delivered.run)
                size -= delivered.size
            if isinstance(owned, OwnedPiece) and (passed := owned.passed()) is not None:
                events.append(passed)
        return events

    async def _read_floors(self) -> list[int]:
        """Return the stored position of each partition."""
        visitor = self._visitor
        keys = [visitor.state_key(number) for number in range(visitor.tables.partitions)]
        states = await self._states.read(keys)
        return [
            start if (state := states.get(key)) is None else state.floor
            for key, start in zip(keys, visitor.starts, strict=True)
        ]

    def _raise_failure(self) -> None:
        for task in (self._locking, self._visiting):
            if task is not None and task.done() and not task.cancelled():
                error = task.exception()
                if error is not None:
                    raise error
        if self._visitor.failure is not None:
            raise self._visitor.failure


def _check_ranges(ranges: object, log: Log, subscription: str, states: StateStore | None) -> None:
    if not isinstance(ranges, RangeMember):
        raise ConfigError(f"ranges is {kind_of(ranges)}; pass RangeMap(log, group={subscription!r}).member('a')")
    if (ranges.map.log.name, ranges.map.log.schema) != (log.name, log.schema):
        raise ConfigError(f"ranges is a map of {ranges.map.log!r}, and the source reads {log!r}; pass one log to both")
    if ranges.map.group != subscription:
        raise ConfigError(
            f"subscription={subscription!r} and ranges of the group {ranges.map.group!r}: the group is the "
            "subscription; use one name"
        )
    if states is not None:
        raise ConfigError("states= with ranges=: the positions of pieces move with the map; leave out states=")


def _address_of(dsn_or_pool: str | Pool, name: str) -> str:
    if isinstance(dsn_or_pool, str):
        return dsn_or_pool
    address = getattr(dsn_or_pool, "conninfo", None)
    if isinstance(address, str):
        return address
    raise ConfigError(
        f"{name}: the pool has no conninfo, which the locks need; pass locks=lanes_postgres.AdvisoryLocks(dsn)"
    )


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
