"""Stores dead letters in a table, and lists, republishes and disposes of them for an operator. Needs asyncio."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, LiteralString

import anyio
import psycopg
from psycopg import AsyncConnection

from lanes.arguments import names_unknown_options
from lanes.dead_letter import DeadLetter
from lanes.dead_letters.box import Disposition, FoundDeadLetters, StoredDeadLetter, check_origin
from lanes.dead_letters.wire import REPLAYED
from lanes.errors import ConfigError, SourceError
from lanes_postgres.cancellation import cancelled_once
from lanes_postgres.errors import lanes_error
from lanes_postgres.log.appending import Log, Record
from lanes_postgres.migrations import check_schema
from lanes_postgres.names import SCHEMA, check_name, check_schema_name, is_address
from lanes_postgres.steps import compose, perform_async
from lanes_postgres.subscription.connections import Connections, Pool

_SYSTEM: Final = "postgresql"
_CONNECTIONS: Final = 4
"""Maximum number of connections that one object uses."""

_PUT: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_dead_letters (box, id, record, value) SELECT %(box)s, %(id)s, %(record)s, %(value)s "
    "WHERE NOT EXISTS (SELECT FROM {schema}.lanes_dead_letters WHERE box = %(box)s AND id = %(id)s "
    "AND disposition IS NULL)"
)
_IDS: Final[LiteralString] = (
    "SELECT id FROM {schema}.lanes_dead_letters WHERE box = %s AND disposition IS NULL AND record IS NOT NULL "
    "GROUP BY id ORDER BY min(number) LIMIT %s"
)
_BOXES: Final[LiteralString] = (
    "SELECT DISTINCT box FROM {schema}.lanes_dead_letters WHERE disposition IS NULL AND record IS NOT NULL "
    "ORDER BY 1 LIMIT %s"
)
_OTHERS: Final[LiteralString] = "SELECT count(*) FROM {schema}.lanes_dead_letters WHERE box = %s AND record IS NULL"
_FIND: Final[LiteralString] = (
    "SELECT DISTINCT ON (id) id, number, record, value, disposition FROM {schema}.lanes_dead_letters "
    "WHERE box = %s AND id = ANY(%s) AND record IS NOT NULL ORDER BY id, disposition IS NOT NULL, number"
)
_DISPOSE: Final[LiteralString] = (
    "UPDATE {schema}.lanes_dead_letters SET disposition = %s, value = '' WHERE box = %s AND id = %s "
    "AND disposition IS NULL"
)

_NAMED: Final = 5
"""Maximum number of other names that ``why_empty`` shows."""

_BYTES: Final = ("key", "record_key")


@names_unknown_options("lanes_postgres.PostgresDeadLetters")
class PostgresDeadLetters:
    """Dead letters in the table ``lanes_dead_letters``, for ``Consumer(dead_letters=…)``; also a ``DeadLetterBox``.

    Give each subscription a different name, because two subscriptions derive the same dead-letter id from one message.
    Needs asyncio.

    Args:
        dsn_or_pool: Address of the database, or a ``psycopg_pool.AsyncConnectionPool``.
        name: Name of the dead letters, 1 to 200 characters, such as the name of the subscription.
        schema: Schema in which ``migrate`` created the tables.

    Attributes:
        name: Name of the dead letters.
        remembers: Always True, because ``find`` distinguishes a disposed dead letter from an unknown id.
        other_messages: Number of rows of other programs that the last ``ids`` found.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, dsn_or_pool: str | Pool, name: str, *, schema: str = SCHEMA) -> None:
        if is_address(name) or (isinstance(name, str) and "host=" in name):
            # Do not show the name, because an address may contain a password.
            raise ConfigError(
                "name= is the address of a server; pass the connection string first and the name of the subscription "
                "second"
            )
        check_name("name", name, "use the name of the subscription, such as 'billing'")
        check_schema_name(schema)
        self.name = name
        self.remembers = True
        self.other_messages = 0
        self._where = f"dead letters {name!r} in the schema {schema!r}"
        self._connections = Connections(dsn_or_pool, self._where)
        self._connections.check_address()
        self._schema = schema
        self._places = anyio.CapacityLimiter(_CONNECTIONS)

    def __repr__(self) -> str:
        return f"<PostgresDeadLetters {self.name!r} in the schema {self._schema!r}>"

    async def open(self) -> None:
        """Connect and check the tables; see ``lanes.source.DeadLetters.open``."""
        await cancelled_once(self._open())

    async def _open(self) -> None:
        async with self._lent() as connection:
            await check_schema(connection, schema=self._schema)

    async def put(self, dead_letter: DeadLetter) -> None:
        """Write one dead letter, unless the table already has it; see ``lanes.source.DeadLetters.put``.

        Args:
            dead_letter: The dead letter to write.
        """
        row = {
            "box": self.name,
            "id": dead_letter.id,
            "record": record_of(dead_letter),
            "value": dead_letter.value,
        }
        await cancelled_once(self._put(row))

    async def _put(self, row: Mapping[str, object]) -> None:
        async with self._lent() as connection:
            await connection.execute(self._query(_PUT), row)

    async def ids(self, limit: int | None = None) -> Sequence[str]:
        """List the dead letters, the oldest first; see ``lanes.dead_letters.DeadLetterBox.ids``.

        Args:
            limit: Maximum number of ids; None = no limit.

        Returns:
            The ids.
        """
        async with self._lent() as connection:
            found = await (await connection.execute(self._query(_OTHERS), (self.name,))).fetchone()
            self.other_messages = found[0] if found else 0
            rows = await (await connection.execute(self._query(_IDS), (self.name, limit))).fetchall()
        return [each for (each,) in rows]

    async def why_empty(self) -> str:
        """Name other dead letters of the table; see ``lanes.dead_letters.box.Explaining.why_empty``.

        Returns:
            A text with the names; "" = the table is empty.
        """
        async with self._lent() as connection:
            rows = await (await connection.execute(self._query(_BOXES), (_NAMED + 1,))).fetchall()
        names = ", ".join(name for (name,) in rows[:_NAMED]) + (" and more" if len(rows) > _NAMED else "")
        return f"; the table has dead letters of the names {names}" if names else ""

    async def find(self, ids: Sequence[str]) -> FoundDeadLetters:
        """Read dead letters; see ``lanes.dead_letters.DeadLetterBox.find``.

        Args:
            ids: Ids of dead letters.

        Returns:
            The dead letters and dispositions by id, in the order of ``ids``.
        """
        async with self._lent() as connection:
            rows = await (await connection.execute(self._query(_FIND), (self.name, list(ids)))).fetchall()
        found: dict[str, StoredDeadLetter | Disposition] = {}
        for each, number, record, value, disposition in rows:
            found[each] = disposition or StoredDeadLetter(
                dead_letter=dead_letter_of(record, value), place=f"{self._schema}.lanes_dead_letters number {number}"
            )
        return {each: found[each] for each in ids if each in found}

    async def dispose(self, stored: StoredDeadLetter, how: Disposition, /) -> None:
        """Remove a dead letter from the list; see ``lanes.dead_letters.DeadLetterBox.dispose``.

        Args:
            stored: A result of ``find``.
            how: The disposition.
        """
        async with self._lent() as connection:
            await connection.execute(self._query(_DISPOSE), (how, self.name, stored.dead_letter.id))

    async def publish(self, stored: StoredDeadLetter, /) -> str:
        """Append the original message to its log; see ``lanes.dead_letters.DeadLetterBox.publish``.

        Every subscription of the log reads the message again.

        Args:
            stored: A result of ``find``.

        Returns:
            Text that names the log of the message.
        """
        letter = stored.dead_letter
        if letter.system and letter.system != _SYSTEM:
            check_origin(letter, [_SYSTEM])
        headers = [header for header in letter.headers if header[0] != REPLAYED]
        headers.append((REPLAYED, letter.id.encode()))
        try:
            log = Log(letter.source, schema=self._schema)
            async with self._lent() as connection:
                facts = await perform_async(connection, log.finding(), self._where)
                check_origin(letter, [_SYSTEM], "incarnation", facts.incarnation)
                async with connection.transaction():
                    record = Record(letter.value, letter.key, letter.subject, headers)
                    await log.append(connection, [record])
        except ConfigError as error:
            raise SourceError(
                f"dead letter {letter.id} cannot be published to its log {letter.source[:80]!a}: {error}"
            ) from error
        return f"at the end of log {letter.source}"

    async def aclose(self) -> None:
        """Close the connections that this object opened. Idempotent."""
        await self._connections.aclose()

    def _query(self, text: LiteralString) -> bytes:
        return compose(text, self._schema)

    @asynccontextmanager
    async def _lent(self) -> AsyncIterator[AsyncConnection[Any]]:
        try:
            async with self._places, self._connections.lend() as connection:
                yield connection
        except psycopg.Error as error:
            raise lanes_error(self._where, error) from error


def record_of(letter: DeadLetter) -> bytes:
    """Return all fields except the value as ASCII JSON. A database text cannot contain each name that JSON can."""
    fields = {field.name: getattr(letter, field.name) for field in dataclasses.fields(letter) if field.name != "value"}
    for name in _BYTES:
        if fields[name] is not None:
            fields[name] = _encoded(fields[name])
    fields["headers"] = [(name, _encoded(value)) for name, value in letter.headers]
    fields["null_headers"] = list(letter.null_headers)
    return json.dumps(fields).encode("ascii")


def dead_letter_of(record: bytes, value: bytes) -> DeadLetter:
    """Return the dead letter that ``record_of`` stored. The result omits fields of a newer version."""
    known = {field.name for field in dataclasses.fields(DeadLetter)}
    fields = {name: field for name, field in json.loads(record).items() if name in known}
    for name in _BYTES:
        if fields[name] is not None:
            fields[name] = base64.b64decode(fields[name])
    fields["headers"] = tuple((name, base64.b64decode(text)) for name, text in fields["headers"])
    fields["null_headers"] = tuple(fields["null_headers"])
    return DeadLetter(value=value, **fields)


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
