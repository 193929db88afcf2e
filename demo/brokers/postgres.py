"""The demo's log in PostgreSQL: publishing, the subscription's backlog and members, and the dead letters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, LiteralString

import psycopg
from psycopg import AsyncConnection, sql

from demo.brokers.broker import Left, Published
from demo.errors import DemoError, NoAnswer
from demo.events import Event
from demo.ledger import Step
from demo.membership import Member, Snapshot
from lanes.clock import monotonic
from lanes.core.types import PartitionId
from lanes.errors import LanesError, is_retryable
from lanes.history.recorder import Recorder
from lanes.queues.partitioned import PartitionedQueue
from lanes_postgres import Log, Record, migrate
from lanes_postgres.advisory_locks import key_of
from lanes_postgres.errors import lanes_error
from lanes_postgres.log.reading import LogTables, StoredMessage, Wanted
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.steps import perform_async
from lanes_postgres.subscription.owned import lock_name
from lanes_postgres.subscription.visits import most_owned

_BATCH: Final = 1_000
"""Number of events in one transaction."""

_CONNECT: Final = 5
"""Most seconds until a connection is open."""

_PATIENCE: Final = 300.0
"""Most seconds that the publisher waits for an unreachable server."""

_RETRY: Final = 0.2
_POLL: Final = 0.01
"""Seconds between two requests for the positions of published events."""

MEMBERS: Final[LiteralString] = (
    "SELECT application_name, each.pid || ' ' || backend_start, "
    "array_remove(array_agg((classid::bigint << 32) | objid::bigint), NULL) FROM pg_stat_activity AS each "
    "LEFT JOIN pg_locks AS held ON held.pid = each.pid AND locktype = 'advisory' AND objsubid = 1 AND granted "
    "WHERE starts_with(application_name, %s) GROUP BY 1, 2"
)
_LEFT: Final[LiteralString] = (
    "SELECT coalesce((SELECT sum(run) FROM {schema}.lanes_log_pending), 0), "
    "coalesce((SELECT sum(floor) FROM {schema}.lanes_states), 0), (SELECT count(*) FROM {schema}.lanes_states)"
)

_LETTERS: Final[LiteralString] = "SELECT value FROM {schema}.lanes_dead_letters ORDER BY number"


def application_name(stream: str, member: str) -> str:
    """Return the name under which the locks of a member appear in ``pg_stat_activity``."""
    return f"{stream} {member}"


class PostgresBroker:
    """A ``GroupBroker`` on PostgreSQL, with a schema of its own.

    ``stream`` is the name of the log and of the schema. ``durable`` is the subscription, and ``dead_subject`` the name
    of the dead letters.

    Args:
        server: URL of the database.
        name: Name of the run.
        partitions: Number of partitions of the log.

    Attributes:
        log: The log.
    """

    def __init__(self, server: str, name: str, partitions: int) -> None:
        self._server = server
        self.partitions = partitions
        self.connected = False
        self.stream = f"declarations-{name}"
        self.queue = PartitionedQueue(self.stream, 1)
        self.durable = "approvals"
        self.dead_subject = "approvals"
        self.log = Log(self.stream, partitions=partitions, schema=self.stream)
        self._tables: LogTables
        self._made = False
        self._transactions = 0
        # The next position to publish of each partition.
        self._ends = [0] * partitions
        self._numbers = {
            key_of(lock_name(self.stream, self.stream, self.durable, number)): number for number in range(partitions)
        }
        self._idle: list[AsyncConnection[Any]] = []

    async def open(self) -> None:
        """See ``Broker.open``."""
        try:
            async with self._lent() as connection:
                if await self.row(connection, "SELECT FROM pg_namespace WHERE nspname = %s", self.stream) is not None:
                    raise DemoError(f"the schema {self.stream} exists: drop the schema, or choose another --name")
                self._made = True
                await migrate(connection, schema=self.stream)
                facts = await self.log.create(connection)
                await connection.execute(
                    self.query("CREATE TABLE {schema}.published (transaction integer PRIMARY KEY)")
                )
        except psycopg.Error as error:
            raise DemoError(
                f"{lanes_error('PostgreSQL', error)}: start a server, correct the address, or use a user that may "
                "create a schema"
            ) from None
        self._tables = LogTables(self.stream, facts.id, facts.partitions)
        self.connected = True

    async def close(self) -> list[str]:
        """See ``Broker.close``."""
        stayed = []
        if self._made:
            try:
                async with self._lent() as connection:
                    await connection.execute(self.query("DROP SCHEMA IF EXISTS {schema} CASCADE"))
            except psycopg.Error:
                stayed.append(self.stream)
        self._made = False
        while self._idle:
            await self._idle.pop().close()
        return stayed

    # --- publishing

    async def publish(self, events: Sequence[Event], history: Recorder, published: Published) -> None:
        """See ``Broker.publish``."""
        for begin in range(0, len(events), _BATCH):
            batch = events[begin : begin + _BATCH]
            found = await self._publish(batch)
            now = monotonic()
            for partition, messages in found.items():
                place = PartitionId(self.stream, partition)
                for message in messages:
                    assert message.key is not None, "the demo publishes no event without a key"
                    history.produced(place, message.position, message.key, now)
                self._ends[partition] += len(messages)
            await published(begin + len(batch))
        history.flush()

    async def _publish(self, events: Sequence[Event]) -> dict[int, list[StoredMessage]]:
        """Publish events in one transaction, and return them by partition. The call waits for an unreachable server."""
        self._transactions += 1
        deadline = monotonic() + _PATIENCE
        while True:
            try:
                await self._append(self._transactions, events)
                return await self._positions(len(events))
            except (psycopg.Error, LanesError) as failure:
                error = lanes_error("PostgreSQL", failure) if isinstance(failure, psycopg.Error) else failure
                if not is_retryable(error, unknown=False) or monotonic() > deadline:
                    raise DemoError(
                        f"the server refused events from case {events[0].case!r} step {events[0].step} on: {error}: "
                        "free space on the server's disk, or check that the server runs"
                    ) from None
            self.connected = False
            await asyncio.sleep(_RETRY)

    async def _append(self, transaction: int, events: Sequence[Event]) -> None:
        """Append events, unless an earlier call with a lost answer has committed this transaction."""
        async with self._lent() as connection, connection.transaction():
            # The insert waits for an earlier transaction with this number.
            new = await self.row(
                connection,
                "INSERT INTO {schema}.published VALUES (%s) ON CONFLICT DO NOTHING RETURNING transaction",
                transaction,
            )
            if new is not None:
                await self.log.append(connection, [Record(event.payload, event.case) for event in events])

    async def _positions(self, count: int) -> dict[int, list[StoredMessage]]:
        """Return the ``count`` published messages that follow the former ones, by partition."""
        wanted = [Wanted(partition, end, count) for partition, end in enumerate(self._ends)]
        async with self._lent() as connection:
            while True:
                await perform_async(connection, sequencing(self.stream), "PostgreSQL")
                found = await self._tables.fetch(connection, wanted)
                if sum(map(len, found.values())) >= count:
                    return dict(found)
                await asyncio.sleep(_POLL)

    # --- questions

    async def left(self) -> Left | None:
        """Return the number of messages above the stored positions, see ``Broker.left``."""
        async with self.asking() as connection:
            row = await self.row(connection, _LEFT)
            ends = await self._tables.ends(connection)
        assert row is not None, "a SELECT of expressions returns a row"
        waiting, floors, states = row
        if not states:
            return None
        return Left(pending=max(0, sum(ends) + int(waiting) - int(floors)), unacknowledged=0, floor=int(floors))

    async def count_dead_letters(self) -> int:
        """See ``Broker.count_dead_letters``."""
        async with self.asking() as connection:
            row = await self.row(connection, "SELECT count(DISTINCT id) FROM {schema}.lanes_dead_letters")
        assert row is not None, "a SELECT of expressions returns a row"
        return int(row[0])

    async def dead_letters(self) -> list[Step]:
        """Return the events of the dead letters, see ``Broker.dead_letters``."""
        async with self.asking() as connection:
            cursor = await connection.execute(self.query(_LETTERS))
            events = [json.loads(value) for (value,) in await cursor.fetchall()]
        return [(str(event["case"]), int(event["step"])) for event in events]

    async def group(self) -> Snapshot:
        """Return the sessions of the members and their locked partitions, see ``GroupBroker.group``."""
        asked = monotonic()
        prefix = application_name(self.stream, "")
        async with self.asking() as connection:
            rows = await (await connection.execute(MEMBERS, (prefix,))).fetchall()
        members = {
            name.removeprefix(prefix): Member(
                session, frozenset((self.stream, self._numbers[key]) for key in keys if key in self._numbers)
            )
            for name, session, keys in rows
        }
        owned = [len(member.partitions) for member in members.values()]
        most = most_owned(self.partitions, max(0, len(owned) - 1))
        settled = sum(owned) == self.partitions and min(owned, default=0) > 0 and max(owned, default=0) <= most
        return Snapshot(asked, monotonic(), "STABLE" if settled else "MOVING", members, sessions=True)

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection for a request. Raises ``NoAnswer`` while the server is unreachable."""
        try:
            async with self._lent() as connection:
                yield connection
        except psycopg.OperationalError as error:
            self.connected = False
            raise NoAnswer(str(lanes_error("PostgreSQL", error))) from None
        except psycopg.Error as error:
            raise DemoError(f"{lanes_error('PostgreSQL', error)}: do not change the schema during the demo") from None
        self.connected = True

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection with autocommit, and close the connection after an error or a cancellation."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = await AsyncConnection.connect(self._server, autocommit=True, connect_timeout=_CONNECT)
        try:
            yield connection
        except BaseException:
            with suppress(psycopg.Error):
                await connection.close()
            raise
        self._idle.append(connection)

    async def row(
        self, connection: AsyncConnection[Any], text: LiteralString, *values: object
    ) -> tuple[Any, ...] | None:
        """Return the first row of the answer to a statement."""
        row: tuple[Any, ...] | None = await (await connection.execute(self.query(text), values)).fetchone()
        return row

    def query(self, text: LiteralString) -> sql.Composed:
        """Return a statement with the schema in it."""
        return sql.SQL(text).format(schema=sql.Identifier(self.stream))
