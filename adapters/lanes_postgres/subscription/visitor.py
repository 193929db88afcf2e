"""Runs the task of a member, which gives positions to messages, acquires and releases partitions, and reads messages.

This file is longer than most, because all steps of a member use one connection and the times of its last steps.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, LiteralString

import psycopg
from psycopg import AsyncConnection, Notify

from lanes.clock import monotonic
from lanes.core.types import Partition, PartitionId, Room
from lanes.errors import ConfigError, LanesError, SourceError, is_retryable
from lanes.line_limit import OutageLog
from lanes.ownership import Locks, StateKey, StateLocked, StateStore, acquire
from lanes.source import Assigned, BrokerContact, Lost, Progressed, Revoking, SourceEvent
from lanes_postgres.errors import lanes_error
from lanes_postgres.log.reading import LogTables, StoredMessage, Wanted
from lanes_postgres.log.sequencer import looking
from lanes_postgres.steps import compose_names, perform_async
from lanes_postgres.subscription.connections import Connections
from lanes_postgres.subscription.kept import KeptWatch
from lanes_postgres.subscription.members import exchange, leave
from lanes_postgres.subscription.owned import Owned, lock_name
from lanes_postgres.subscription.visits import Hold, Member, Visit, Work, acquirable, given_up, in_order, waits

log = logging.getLogger("lanes.postgres")

OutOfRange = Literal["earliest", "latest", "fail"]
"""Reaction to a trim that deleted unread messages: a position to continue at, or an error."""

ACTIVE_POLL: Final = 0.02
"""Seconds between two polls, for one second after a message that arrived without a notification."""

_ACTIVE: Final = 1.0
_RECONNECT: Final = 0.25

_COOL: Final = 1.0
"""Seconds after a release before the member may acquire the same partition again."""

LONGEST_COOL: Final = 8.0
"""Maximum seconds for which a member skips a partition while a transaction locks its state."""

TOLD: Final = 4.0
"""If a member skips a partition for this many seconds or longer, it logs a warning about the locked state."""

TRIES: Final = 8
"""Maximum number of locks that a member tries at once while the other members report that they own all partitions."""

_SIGN: Final = 1.0
"""Maximum seconds between two heartbeats. After 3 s without a heartbeat a member counts as stopped."""

_FIRST_READ: Final = 100
_READ: Final = 2_000
"""Number of messages in the first read, and maximum number in any read."""

_CHANNEL: Final[LiteralString] = "SELECT 'lanes_log_' || '{schema}.lanes_log_pending'::regclass::oid"


@dataclass(eq=False, repr=False, kw_only=True)
class Visitor:
    """Acquires partitions and reads their messages. All calls belong to one event loop.

    Attributes:
        connections: Connections to the database.
        tables: Database access to the log.
        log_name: Name of the log.
        incarnation: Identity of the log.
        subscription: Name of the subscription.
        member: Name of this member.
        starts: First position of each partition.
        locks: Opened locks of the members.
        states: Store of the partition states.
        visit: Order in which the member visits partitions.
        time_budget: Seconds for which a member keeps a partition while other members wait.
        poll_interval: Seconds between two polls while no messages arrive.
        out_of_range: Position at which to continue after a trim.
        name: Name of the source, for errors and the log.
        kept: Object that checks the bytes that the log keeps.
        wake: Non-blocking function that the visitor calls after new events or new messages.
        consumer: Name of this member in the map of ranges; None = a member without ranges.
        owned: Owned partitions by ``Owned.unit``.
        room: Room of the last call of ``receive``.
        failure: Error that stops the source; None = no error.
        contact: Record of the database's answers and failures.
    """

    connections: Connections
    tables: LogTables
    log_name: str
    incarnation: str
    subscription: str
    member: str
    starts: Sequence[int]
    locks: Locks
    states: StateStore
    visit: Visit
    time_budget: float
    poll_interval: float
    out_of_range: OutOfRange
    name: str
    kept: KeptWatch
    wake: Callable[[], None]
    consumer: str | None = None
    owned: dict[int, Owned] = field(default_factory=dict)
    room: Room = field(default_factory=lambda: Room(0, 0))
    failure: LanesError | None = None
    contact: BrokerContact = field(default_factory=BrokerContact)

    def __post_init__(self) -> None:
        self._events: list[SourceEvent] = []
        self._kicked = asyncio.Event()
        self._notified = False
        self._backend = 0
        self._looked_at = -math.inf
        self._shared_at = -math.inf
        self._sequenced_at = -math.inf
        self._active_until = -math.inf
        self._ends: list[int] = list(self.starts)
        self._cool: dict[int, float] = {}
        self._locked: dict[int, float] = {}
        self._others: list[Member] = []
        self._waits = False
        self._silent = False
        self._outage_log = OutageLog(log, self.name, "PostgreSQL server", "no position is stored", monotonic)
        self._releasing: set[asyncio.Future[None]] = set()
        self._acquiring = False
        self._bytes_each = 0.0
        self._order: list[int] = []
        self._earliest = math.inf

    def __repr__(self) -> str:
        return f"<Visitor {self.name}, {len(self.owned)} partitions>"

    # --- what the source calls

    def kick(self) -> None:
        """Make the task poll now. Does not block."""
        self._kicked.set()

    def events(self) -> list[SourceEvent]:
        """Return the new events of ownership, in order."""
        self.check_owned()
        if self._acquiring:
            # Deliver the assignments of one poll together.
            return []
        events, self._events = self._events, []
        return events

    def delivery_order(self) -> list[Owned]:
        """Return the owned partitions in the order of the last visits."""
        visited = dict.fromkeys(self._order)  # A member with ranges owns hundreds of pieces.
        known = [self.owned[number] for number in visited if number in self.owned]
        return known + [owned for number, owned in self.owned.items() if number not in visited]

    def check_owned(self) -> None:
        """Report the partitions as lost whose deadline has passed. ``lock_changed`` has handled all other losses."""
        if monotonic() < self._earliest:
            return
        for owned in list(self.owned.values()):
            self._check(owned)
        self._earliest = min((owned.partition.deadline for owned in self.owned.values()), default=math.inf)

    def _check(self, owned: Owned) -> None:
        if not owned.over and (reason := owned.lost()):
            self.lose(owned, reason)

    def lose(self, owned: Owned, reason: str) -> None:
        """Report a partition as lost, because another process may own it. Idempotent."""
        if self._end(owned):
            # Another process may already have the lock, because the lease has ended.
            owned.partition.deadline = min(owned.partition.deadline, monotonic())
            if not self._forget_assigned(owned.partition):
                self._events.append(Lost(owned.partition, reason))
            # The runtime logs one warning about all partitions that are lost together.
            log.debug("%s: partition %d is lost: %s", self.name, owned.number, reason)
            self._let_go(owned)

    def _let_go(self, owned: Owned) -> None:
        """Release the lock of an ended ownership in the background."""
        task = asyncio.ensure_future(owned.held.release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        self._released(owned)

    def _forget_assigned(self, partition: Partition) -> bool:
        """If the queue contains the assignment of a partition, remove the partition's events and return True.

        After a freeze, another owner may have a higher epoch before the consumer receives this assignment.
        """
        if Assigned(partition) not in self._events:
            return False
        self._events = [each for each in self._events if getattr(each, "partition", None) is not partition]
        return True

    async def release(self, owned: Owned) -> None:
        """Release the lock of a drained partition. Idempotent."""
        owned.over = True
        owned.rest()
        try:
            await owned.held.release()
        finally:
            # The locks continue a cancelled release, and this member may acquire the partition again.
            if self._end(owned):
                self._released(owned)

    def _end(self, owned: Owned) -> bool:
        owned.over = True
        owned.waiting.clear()
        if self.owned.get(owned.unit) is not owned:
            return False
        del self.owned[owned.unit]
        return True

    def _released(self, owned: Owned) -> None:
        now = monotonic()
        # Each split of a range creates new pieces, and therefore new units.
        self._cool = {unit: until for unit, until in self._cool.items() if until > now}
        self._cool[owned.unit] = now + _COOL
        self._looked_at = -math.inf
        self.kick()
        self.wake()

    # --- the task

    async def run(self) -> None:
        """Work until the task is cancelled, or until ``failure`` is set. In an outage the task waits for the server."""
        while self.failure is None:
            sent, connected = monotonic(), False
            try:
                async with self.connections.lend() as connection:
                    connected = True
                    await self._serve(connection)
            except psycopg.Error as error:
                self._failed(lanes_error(self.name, error), sent, connected)
            except LanesError as error:
                self._failed(error, sent, connected)
            self.wake()
            await asyncio.sleep(_RECONNECT)

    async def leave(self) -> None:
        """Tell the other members that this member has left. Ignores a failure."""
        with suppress(psycopg.Error, LanesError):
            async with self.connections.lend() as connection:
                await leave(connection, self.tables, self.subscription, self.member)

    def _failed(self, error: LanesError, sent: float, connected: bool) -> None:
        # The server accepted this login before. Retry, because a person may repair the server.
        if (connected or isinstance(error, ConfigError)) and not is_retryable(error, unknown=False):
            self.failure = error
            return
        self.contact.unanswered(sent, str(error))
        if (outage := self.contact.outage()) is not None:
            self._outage_log.look(outage)

    def _answered(self) -> None:
        """Record an answer of the database, and log the end of a reported outage."""
        self.contact.answered()
        self._outage_log.look(None)

    async def _serve(self, connection: AsyncConnection[Any]) -> None:
        await connection.execute("SET default_transaction_isolation TO 'read committed'")
        cursor = await connection.execute(compose_names(_CHANNEL, self.tables.schema), ())
        row = await cursor.fetchone()
        assert row is not None, "a SELECT of an expression returns a row"
        connection.add_notify_handler(self._heard)
        await connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(row[0])))
        self._backend = connection.pgconn.backend_pid
        self._notified, self._looked_at = False, -math.inf
        try:
            while True:
                self._kicked.clear()
                await self._step(connection)
                self._answered()
                await self._pause(connection)
        finally:
            connection.remove_notify_handler(self._heard)
            if not connection.closed:
                with suppress(psycopg.Error):
                    await connection.execute("UNLISTEN *")
                    await connection.execute("RESET default_transaction_isolation")

    def _heard(self, notify: Notify) -> None:
        self._told(notify.pid, notify.payload)

    def _told(self, backend: int, payload: str) -> None:
        """Process a notification of the server. Only members with ranges use the payload."""
        # Ignore the notification of this connection's own sequencing, because the member has read these messages.
        if backend != self._backend:
            self._notified = True
            self._active_until = -math.inf

    async def _pause(self, connection: AsyncConnection[Any]) -> None:
        """Wait for a notification, a call of ``kick``, or the time of the next poll."""
        now = monotonic()
        seconds = min(self._looked_at + self.poll_interval, self._shared_at + _SIGN) - now
        if now < self._active_until:
            seconds = min(seconds, ACTIVE_POLL)
        if seconds <= 0 or self._kicked.is_set() or self._notified:
            await asyncio.sleep(0)
            return
        loop, descriptor = asyncio.get_running_loop(), connection.fileno()
        loop.add_reader(descriptor, self._kicked.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._kicked.wait()
        finally:
            loop.remove_reader(descriptor)
        self._hear(connection)

    def _hear(self, connection: AsyncConnection[Any]) -> None:
        """Process the notifications that have arrived, before the next poll."""
        connection.pgconn.consume_input()
        while (notify := connection.pgconn.notifies()) is not None:
            self._told(notify.be_pid, notify.extra.decode())

    async def _step(self, connection: AsyncConnection[Any]) -> None:
        self.check_owned()
        now = monotonic()
        due = now >= self._looked_at + self.poll_interval
        active = now < self._active_until and now >= self._sequenced_at + ACTIVE_POLL
        if due or active or self._notified:
            self._sequenced_at = now
            await self._look(connection)
        if due:
            self._looked_at = now
        if due or now >= self._shared_at + _SIGN:
            self._shared_at = now
            await self._share(connection)
            await self.kept.look(connection)
        await self._read(connection)

    async def _look(self, connection: AsyncConnection[Any]) -> None:
        """Give positions to new messages, and read the ends of the partitions.

        Also read the new messages if all of them fit.
        """
        told, self._notified = self._notified, False
        tables = self.tables
        reading, left = self._reading()
        starts = {number: owned.read for number, owned in reading.items()}
        if starts and tables.own:
            done, ends, found = await tables.visit(connection, starts, left)
        else:
            looked = looking(tables.schema, tables.log, tables.partitions)
            (done, ends), found = await perform_async(connection, looked, self.name), {}
        if (done or ends != self._ends) and not (told or self._notified):
            # The program that appended the messages sends no notification, or the notification was lost. A notification
            # during the poll was not lost.
            self._active_until = monotonic() + _ACTIVE
        self._ends = ends
        for owned in self.owned.values():
            owned.end = max(owned.end, ends[owned.number])
        if found:
            self._order = list(found)
            wanted = [Wanted(number, starts[number], len(messages)) for number, messages in found.items()]
            await self._take(connection, wanted, found, reading)
            # The consumer takes these messages before the rest of the poll.
            await asyncio.sleep(0)

    async def _share(self, connection: AsyncConnection[Any]) -> None:
        """Exchange heartbeats with the other members, acquire free partitions, and release partitions."""
        if self._silent:
            await self._speak_again()
        await self._exchange(connection, len(self.owned))
        try:
            await self._acquire(connection)
        except SourceError:
            await self._fall_silent(connection)
            raise
        partitions = self.tables.partitions
        short = waits(len(self.owned), partitions, len(self._others))
        if short != self._waits:
            self._waits = short
            self._looked_at = -math.inf
        now = monotonic()
        holds = {number: Hold(each.since, each.got_on()) for number, each in self.owned.items() if not each.revoked}
        for number in given_up(holds, now, self.time_budget, partitions, self._others):
            self.revoke(self.owned[number])

    async def _exchange(self, connection: AsyncConnection[Any], owned: int) -> None:
        """Exchange heartbeats with the other members."""
        me = None if self._silent else Member(owned, self._waits)
        self._others = await exchange(connection, self.tables, self.subscription, self.member, me, self.consumer)

    async def _fall_silent(self, connection: AsyncConnection[Any]) -> None:
        """Withdraw the heartbeat.

        Otherwise the other members would leave partitions to a member that cannot acquire them.
        """
        self._silent = True
        await leave(connection, self.tables, self.subscription, self.member)

    async def _speak_again(self) -> None:
        """Allow heartbeats again. Raises ``SourceError`` while this member can acquire no lock or has no connection."""
        name = lock_name(self.tables.schema, self.log_name, self.subscription, -1)
        held = await self.locks.try_acquire(f"{name}/{self.member}", lambda: None)
        if held is not None:
            await held.release()
        try:
            async with self.connections.lend() as connection:
                await self._exchange(connection, 0)
        except psycopg.Error as error:
            raise lanes_error(self.name, error) from error
        self._silent = False

    def revoke(self, owned: Owned) -> None:
        """Revoke a partition from the consumer. The member keeps the lock until running handlers have ended."""
        owned.revoked = True
        owned.rest()
        self._events.append(Revoking(owned.partition, math.inf))
        self.wake()

    async def _acquire(self, connection: AsyncConnection[Any]) -> None:
        room = acquirable(len(self.owned), self.tables.partitions, self._others)
        if not room:
            return
        now = monotonic()
        free = [
            number
            for number in range(self.tables.partitions)
            if number not in self.owned and now >= self._cool.get(number, 0.0)
        ]
        if not free:
            return
        states = await self.states.read([self.state_key(number) for number in free])
        floors = {}
        for number in free:
            state = states.get(self.state_key(number))
            floors[number] = self.starts[number] if state is None else state.floor
        works = await self._works(connection, floors, ordered=True)
        visits = [work.partition for work in works]
        known = set(visits)
        visits += [number for number in free if number not in known]
        if sum(member.owned for member in self._others) + len(self.owned) >= self.tables.partitions:
            # The row of a killed member is outdated, so try some locks anyway.
            visits = visits[:TRIES]
        self._acquiring = True
        try:
            for number in visits:
                if room <= 0:
                    break
                if await self._try(number):
                    room -= 1
        finally:
            self._acquiring = False
            self.wake()

    async def _try(self, number: int) -> bool:
        key = self.state_key(number)
        try:
            acquired = await acquire(
                self.locks,
                self.states,
                key,
                name=lock_name(self.tables.schema, self.log_name, self.subscription, number),
                start=self.starts[number],
                changed=partial(self.lock_changed, number),
            )
        except StateLocked as error:
            self._leave_for_later(number, error)
            return False
        # No transaction locks the state any more, or another member has the lock of the partition.
        self._locked.pop(number, None)
        if acquired is None:
            return False
        self.own(Owned.begin(key, *acquired, self._ends[number]))
        return True

    def own(self, owned: Owned) -> None:
        """Begin an ownership, and queue the assignment for the consumer."""
        self.owned[owned.unit] = owned
        self._earliest = min(self._earliest, owned.partition.deadline)
        self._events.append(Assigned(owned.partition))

    def _leave_for_later(self, number: int, error: StateLocked) -> None:
        """Skip a partition whose state a transaction locks. Each repetition skips the partition for longer."""
        former = self._locked.get(number, _COOL / 2)
        pause = self._locked[number] = min(2 * former, LONGEST_COOL)
        self._cool[number] = monotonic() + pause
        if former < TOLD <= pause:
            log.warning(
                "%s: partition %d has no owner, because a former owner is frozen in a transaction: %s; end its session "
                "by pg_terminate_backend, and set idle_in_transaction_session_timeout",
                self.name,
                number,
                error,
            )

    def lock_changed(self, unit: int) -> None:
        """Raise the deadline of a unit with a renewed lock, or report a unit with a lost lock as lost."""
        if (owned := self.owned.get(unit)) is not None:
            self._check(owned)
        self.wake()

    def state_key(self, number: int) -> StateKey:
        """Return the name of the state of a partition."""
        return StateKey(self.subscription, PartitionId(self.log_name, number), self.incarnation)

    async def _works(self, connection: AsyncConnection[Any], reads: Mapping[int, int], *, ordered: bool) -> list[Work]:
        """Return the partitions with messages at or above a position, in the order of the visits."""
        works = [Work(number, self._ends[number] - read) for number, read in reads.items() if self._ends[number] > read]
        if not ordered or len(works) < 2:
            return works
        if self.visit == "oldest":
            times = await self.tables.oldest(connection, {work.partition: reads[work.partition] for work in works})
            works = [work._replace(oldest=times.get(work.partition)) for work in works]
        return in_order(works, self.visit)

    async def _read(self, connection: AsyncConnection[Any]) -> None:
        """Read messages for the room of the last ``receive``, from partitions in the order of the visits."""
        if not any(owned.end > owned.read for owned in self.owned.values()):
            return  # The poll has already read all messages.
        reading, left = self._reading()
        backlog = sum(max(0, owned.end - owned.read) for owned in reading.values())
        if not backlog:
            return
        works = await self._works(
            connection, {number: owned.read for number, owned in reading.items()}, ordered=backlog > left
        )
        wanted: list[Wanted] = []
        for work in works:
            count = min(left, work.messages)
            if count <= 0:
                break
            wanted.append(Wanted(work.partition, reading[work.partition].read, count))
            left -= count
        if wanted:
            self._order = [each.partition for each in wanted]
            await self._fetch(connection, wanted, reading)

    def _reading(self) -> tuple[Mapping[int, Owned], int]:
        """Return the partitions to read, by number, and the number of messages that fit into the room."""
        room = self.room
        reading = {
            number: owned
            for number, owned in self.owned.items()
            if not owned.revoked and not owned.over and owned.partition not in room.paused
        }
        left = room.messages - sum(len(owned.waiting) for owned in reading.values())
        if left <= 0 or room.bytes <= 0:
            return {}, 0
        return reading, min(left, self._within_bytes())

    def _within_bytes(self) -> int:
        if not self._bytes_each:
            return _FIRST_READ
        return max(1, min(_READ, int(self.room.bytes / self._bytes_each)))

    async def _fetch(
        self, connection: AsyncConnection[Any], wanted: Sequence[Wanted], reading: Mapping[int, Owned]
    ) -> None:
        await self._take(connection, wanted, await self.tables.fetch(connection, wanted), reading)

    async def _take(
        self,
        connection: AsyncConnection[Any],
        wanted: Sequence[Wanted],
        found: Mapping[int, list[StoredMessage]],
        reading: Mapping[int, Owned],
    ) -> None:
        """Queue the messages of a read for ``receive``."""
        self.check_owned()
        count = size = 0
        for each in wanted:
            owned = reading[each.partition]
            messages = found.get(each.partition, [])
            if owned.over or owned.revoked or owned.read != each.start:
                continue
            if not messages or messages[0].position != each.start:
                if owned.waiting:
                    continue  # Messages after the gap would overtake it. A later read finds the gap again.
                if self.tables.own or each.start < (await self.tables.firsts(connection))[each.partition]:
                    await self._trimmed(connection, owned)
                    continue
                if not messages:
                    # The user has deleted all rows up to the known end.
                    self._pass(owned, owned.end)
                    continue
            owned.waiting.extend(messages)
            owned.read = messages[-1].position + 1
            count += len(messages)
            size += sum(message.size for message in messages)
        if count:
            self._bytes_each = max(1.0, size / count, self._bytes_each / 2)
            self.wake()

    async def _trimmed(self, connection: AsyncConnection[Any], owned: Owned) -> None:
        """Skip unread messages that a trim deleted, or stop the source. ``out_of_range`` decides between both."""
        first = (await self.tables.firsts(connection))[owned.number]
        found = (await self.tables.fetch(connection, [Wanted(owned.number, owned.read, 1)])).get(owned.number)
        target = owned.end if not found else found[0].position
        if target <= owned.read:
            return
        what = (
            f"{self.name}: partition {owned.number} continues at position {owned.read}, and a trim deleted "
            f"its messages below {target}"
        )
        if self.out_of_range == "fail":
            self.failure = SourceError(f'{what}; set out_of_range to "earliest" or "latest" to continue without them')
            self.wake()
            return
        target = owned.end if self.out_of_range == "latest" else target
        log.error('%s; its first stored position is %d, out_of_range="%s"', what, first, self.out_of_range)
        self._pass(owned, target)

    def _pass(self, owned: Owned, target: int) -> None:
        """Continue at a higher position. The log has no unread message below this position."""
        owned.read = target
        self._events.append(Progressed(owned.partition, target))
        self.wake()
