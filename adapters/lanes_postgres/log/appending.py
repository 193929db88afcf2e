"""An ordered log to which transactions append messages. ``docs/design/postgres.md`` explains the order."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Awaitable, Iterable, Sequence
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple, overload

from psycopg import AsyncConnection, Connection
from psycopg.types.numeric import Int4

from lanes.arguments import did_you_mean, kind_of, names_unknown_options, shown_value
from lanes.core.ring import partition as partition_of
from lanes.core.ring import slot
from lanes.core.types import PartitionKey, key_bytes
from lanes.errors import ConfigError
from lanes_postgres.log.over import Columns, Over
from lanes_postgres.names import SCHEMA, check_schema_name, refuse_address
from lanes_postgres.steps import Statement, Steps, compose, compose_names
from lanes_postgres.transactions import alone, inside, outside

PARTITIONS: Final = 64
"""Default number of partitions of a new log."""

_MOST_PARTITIONS: Final = 65_536
_NAME_LIMIT: Final = 200

_NAMES: Final[LiteralString] = "SELECT array_agg(name) FROM (SELECT name FROM {schema}.lanes_logs LIMIT 1000) AS named"
_FIND: Final[LiteralString] = "SELECT id, partitions, incarnation, relation FROM {schema}.lanes_logs WHERE name = %s"
# A session with another search_path may not find a table name without a schema.
_IS_OVER: Final[LiteralString] = (
    "SELECT to_regclass(%s) IS NULL OR to_regclass(%s) IS NOT DISTINCT FROM to_regclass(%s)"
)
# A snapshot of the whole transaction would miss a log that another transaction created during the wait for that
# transaction.
_READ_COMMITTED: Final[LiteralString] = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_CREATE: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_logs (name, partitions) VALUES (%s, %s) ON CONFLICT DO NOTHING "
    "RETURNING id, partitions, incarnation, relation"
)
# Insert a single message by a plain INSERT, because an outbox mostly appends one message at a time.
_ONE: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_log_messages (batch, index, log, partition, run, slot, time, key, subject, headers, "
    "value) VALUES (nextval('{schema}.lanes_log_batches'), 0, %s, %s, 1, %s, coalesce(%s, clock_timestamp()), %s, %s, "
    "%s::jsonb, %s)"
)
_MANY: Final[LiteralString] = (
    "WITH batches AS MATERIALIZED (SELECT number, nextval('{schema}.lanes_log_batches') AS batch "
    "FROM generate_series(1, %s) AS number) "
    "INSERT INTO {schema}.lanes_log_messages (batch, index, log, partition, run, slot, time, key, subject, headers, "
    "value) SELECT batch, index, %s, partition, run, slot, coalesce(time, clock_timestamp()), key, subject, "
    "headers::jsonb, value FROM unnest(%s::integer[], %s::integer[], %s::integer[], %s::integer[], %s::integer[], "
    "%s::timestamptz[], %s::bytea[], %s::text[], %s::text[], %s::bytea[]) "
    "AS message (number, index, partition, run, slot, time, key, subject, headers, value) JOIN batches USING (number)"
)


_NOTIFY: Final[LiteralString] = "SELECT pg_notify('lanes_log_' || '{schema}.lanes_log_pending'::regclass::oid, '')"


@names_unknown_options("lanes_postgres.Record")
class Record(NamedTuple):
    """A message to append.

    Attributes:
        value: The payload; a ``str`` becomes UTF-8 bytes.
        key: The key: bytes, a ``str``, or an unsigned 128-bit ``int``. ``None`` = the message has no order.
        subject: The subject. "" = the name of the log.
        headers: Pairs of a name and a value.
        time: Time of the message, with a time zone. ``None`` = the time of the call, by the server's clock.
    """

    value: bytes | str
    key: PartitionKey | None = None
    subject: str = ""
    headers: Sequence[tuple[str, bytes]] = ()
    time: datetime | None = None


class LogFacts(NamedTuple):
    """The facts of a log that the database stores.

    Attributes:
        id: Number of the log in its schema.
        partitions: Number of partitions.
        incarnation: Identity of this creation of the log.
        relation: The user's table that the log reads, with its schema. ``None`` = the log has its own messages.
    """

    id: int
    partitions: int
    incarnation: str
    relation: str | None = None

    @property
    def messages(self) -> str:
        """Name of the table or view of the messages, in the schema of the log."""
        return "lanes_log_messages" if self.relation is None else f"lanes_log_over_{self.id}"


@names_unknown_options("lanes_postgres.Log")
class Log:
    """An ordered log in PostgreSQL. Appended messages become visible with the transaction that appends them.

    Messages of one key are in one partition. The positions of a partition follow the order of the commits. If
    transaction B waited for a lock of transaction A, the messages of B follow the messages of A. ``append`` takes no
    lock, so two transactions that append never wait for each other.

    The object opens no connection. Two objects with the same name and schema are interchangeable. Thread-safe.

    Args:
        name: Name of the log, 1 to 200 characters.
        partitions: Number of partitions, 1 to 65,536, that ``create`` gives a new log. ``None`` = 64, or the number of
            the existing log. The number of an existing log cannot change.
        schema: Schema in which ``migrate`` created the tables.

    Attributes:
        name: Name of the log.
        schema: Schema of the tables.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, name: str, *, partitions: int | None = None, schema: str = SCHEMA) -> None:
        refuse_address("name", name, "name what the messages are, such as Log('orders')")
        if not isinstance(name, str) or "\0" in name or not 0 < len(name) <= _NAME_LIMIT or not _encodable(name):
            raise ConfigError(
                f"name={shown_value(name)}: must be a str of 1 to {_NAME_LIMIT} characters, without zero bytes; name "
                "what the messages are, such as Log('orders')"
            )
        if partitions is not None and (
            not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= _MOST_PARTITIONS
        ):
            raise ConfigError(f"partitions={shown_value(partitions)}: must be a number in 1 … 65536; omit it for 64")
        check_schema_name(schema)
        self.name = name
        self.schema = schema
        self._partitions = partitions
        self._over: Over | None = None
        self._facts: LogFacts | None = None
        self._find = compose(_FIND, schema)
        self._create = compose(_CREATE, schema)
        self._one = compose_names(_ONE, schema)
        self._many = compose_names(_MANY, schema)
        self._notify = compose_names(_NOTIFY, schema)

    @classmethod
    def over(
        cls,
        table: str,
        *,
        columns: Columns = Columns(),  # noqa: B008 (a tuple of names)
        name: str | None = None,
        partitions: int | None = None,
        schema: str = SCHEMA,
    ) -> Log:
        """Return a log that reads an existing table of the user, such as an outbox.

        At the COMMIT, a trigger on each inserted row decides the position of the row in the order of the log. A source
        refuses a table without the trigger. ``create`` and the statement of ``migration`` install the trigger. A source
        delivers neither deleted rows nor rows from before the trigger. Messages of one key are in one partition.
        ``append`` refuses this log; insert rows instead.

        Args:
            table: Name of the table, perhaps with its schema: ``outbox`` or ``shop.outbox``.
            columns: Names of the columns to read.
            name: Name of the log. ``None`` = the name of the table.
            partitions: Number of partitions, 1 to 65,536. ``None`` = 64.
            schema: Schema in which ``migrate`` created the tables of ``lanes``.

        Returns:
            The log.

        Raises:
            ConfigError: An argument is invalid.
        """
        if not isinstance(table, str) or not table or "\0" in table or not _encodable(table):
            raise ConfigError(
                f"table={shown_value(table)} is not the name of a table; use a name such as 'shop.outbox'"
            )
        if not isinstance(columns, Columns):
            raise ConfigError(f"columns is {kind_of(columns)}; pass lanes_postgres.Columns(key=…, value=…)")
        log = cls(table if name is None else name, partitions=partitions, schema=schema)
        log._over = Over(table, columns)
        return log

    def migration(self) -> str:
        """Return the SQL statement that ``create`` executes for a log over a table, for the user's own migrations.

        Returns:
            One statement without parameters. The user who executes the statement must own the table.

        Raises:
            ConfigError: The log reads no table of the user.
        """
        if self._over is None:
            raise ConfigError(f"{self._where()} is not over a table, so it has no migration; call Log.create")
        return self._over.migration(self.name, self._wanted_partitions(), self.schema)

    def _wanted_partitions(self) -> int:
        return PARTITIONS if self._partitions is None else self._partitions

    def __repr__(self) -> str:
        return f"<Log {self.name!r} in the schema {self.schema!r}>"

    @overload
    def create(self, connection: AsyncConnection[Any]) -> Awaitable[LogFacts]: ...

    @overload
    def create(self, connection: Connection[Any]) -> LogFacts: ...

    def create(self, connection: AsyncConnection[Any] | Connection[Any]) -> Awaitable[LogFacts] | LogFacts:
        """Create the log, unless the log exists, in a separate transaction. Idempotent.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.

        Returns:
            The facts of the log; awaitable for an asynchronous connection.

        Raises:
            ConfigError: The log exists with another number of partitions, or a table or permission is missing.
            SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
        """
        return alone(connection, self._creating(), self._where(), "Log.create")

    @overload
    def append(self, connection: AsyncConnection[Any], messages: Iterable[Record]) -> Awaitable[None]: ...

    @overload
    def append(self, connection: Connection[Any], messages: Iterable[Record]) -> None: ...

    def append(
        self, connection: AsyncConnection[Any] | Connection[Any], messages: Iterable[Record]
    ) -> Awaitable[None] | None:
        """Append messages in the caller's transaction. The messages exist if and only if the transaction commits.

        The call is one statement. Messages without a key go to one random partition for each call.

        Args:
            connection: A psycopg connection, blocking or asynchronous, inside a transaction.
            messages: The messages, in order.

        Returns:
            Nothing; awaitable for an asynchronous connection.

        Raises:
            ConfigError: A message is invalid, the log does not exist, or the connection has autocommit and is in no
                transaction.
            SourceError: The database did not answer or refused a statement; retryable if a later transaction may
                succeed.
        """
        return inside(connection, self._appending(self._checked(messages)), self._where(), "Log.append")

    @overload
    def notify(self, connection: AsyncConnection[Any]) -> Awaitable[None]: ...

    @overload
    def notify(self, connection: Connection[Any]) -> None: ...

    def notify(self, connection: AsyncConnection[Any] | Connection[Any]) -> Awaitable[None] | None:
        """Wake the consumers of all logs of the schema. The call is optional, because consumers also poll for messages.

        Call this method after the COMMIT of an append. The call refuses a connection in a transaction, because a
        notification at a COMMIT takes a lock of the whole server. One call is enough for many appends. A lost
        notification delays messages only until the next poll.

        Args:
            connection: A psycopg connection, blocking or asynchronous, that is in no transaction.

        Returns:
            Nothing; awaitable for an asynchronous connection.

        Raises:
            ConfigError: The connection is in a transaction, or a table or permission is missing.
            SourceError: The database did not answer or refused the statement; retryable if a later call may succeed.
        """
        return outside(connection, self._notifying(), self._where(), "Log.notify")

    def _notifying(self) -> Steps[None]:
        yield Statement(self._notify, ())

    def finding(self) -> Steps[LogFacts]:
        """Return the facts of the log.

        Raises ``ConfigError`` if the log does not exist, has another number of partitions, or reads another table.
        """
        if self._facts is None:
            found = yield Statement(self._find, (self.name,))
            if found is None and self._over is not None:
                meant = yield from similar_log(self.schema, self.name)
                raise ConfigError(
                    f"the schema {self.schema!r} has no log {self.name!r} over the table {self._over.table}{meant}; "
                    "call Log.over(…).create(connection), or execute the statement of Log.over(…).migration(), once"
                )
            if found is None:
                meant = yield from similar_log(self.schema, self.name)
                raise ConfigError(
                    f"the schema {self.schema!r} has no log {self.name!r}{meant}; call "
                    f"Log({self.name!r}).create(connection) once, for example in the deployment that calls "
                    "lanes_postgres.migrate"
                )
            facts = self._same(LogFacts(*found))
            if self._over is not None:
                table = self._over.table
                is_over = yield Statement(_IS_OVER.encode(), (table, table, facts.relation))
                if is_over != (True,):
                    raise ConfigError(
                        f"{self._where()} reads the table {facts.relation}, and not {table}; use another name="
                    )
            self._facts = facts
        return self._facts

    def _where(self) -> str:
        return f"log {self.name!r} in the schema {self.schema!r}"

    def _creating(self) -> Steps[LogFacts]:
        yield Statement(_READ_COMMITTED.encode())
        if self._over is not None:
            yield Statement(self.migration().replace("%", "%%").encode(), ())
            found = yield Statement(self._find, (self.name,))
            assert found is not None, "the function has made the log"
            return self._same(LogFacts(*found))
        found = yield Statement(self._create, (self.name, Int4(self._wanted_partitions())))
        if found is None:
            # The conflicting row was committed after the first statement began, so a second statement sees it.
            found = yield Statement(self._find, (self.name,))
        assert found is not None, "an insert that conflicts has a row"
        return self._same(LogFacts(*found))

    def _same(self, facts: LogFacts) -> LogFacts:
        if self._over is not None and facts.relation is None:
            raise ConfigError(
                f"{self._where()} stores its own messages, and is not over a table; use Log({self.name!r})"
            )
        if self._partitions not in (None, facts.partitions):
            raise ConfigError(
                f"{self._where()} has {facts.partitions} partitions, but partitions={self._partitions} differs; omit "
                "partitions, or use a log of another name"
            )
        return facts

    def _checked(self, messages: object) -> list[Record]:
        if isinstance(messages, Record | str | bytes) or not isinstance(messages, Iterable):
            raise ConfigError(
                f"messages is a single {type(messages).__name__}; pass a list, such as [Record(value, key)]"
            )
        checked = []
        for number, message in enumerate(messages):
            if not isinstance(message, Record):
                raise ConfigError(f"message {number} is a {type(message).__name__}; pass lanes_postgres.Record")
            checked.append(message)
        return checked

    def _appending(self, messages: Sequence[Record]) -> Steps[None]:
        if not messages:
            return
        facts = yield from self.finding()
        if facts.relation is not None:
            raise ConfigError(f"{self._where()} reads the table {facts.relation}; insert rows there instead of append")
        spread = random.randrange(facts.partitions)
        rows = [self._row(number, message, facts, spread) for number, message in enumerate(messages)]
        if len(rows) == 1:
            (row,) = rows
            yield Statement(self._one, (Int4(facts.id), Int4(row[0]), *row[1:]))
            return
        # The sort is stable, so the messages of a partition stay in the order of the caller.
        rows.sort(key=lambda row: row[0])
        runs: dict[int, int] = {}
        for row in rows:
            runs[row[0]] = runs.get(row[0], 0) + 1
        numbers = {partition: number for number, partition in enumerate(runs, start=1)}
        indexes: list[int] = []
        for run in runs.values():
            indexes.extend(range(run))
        partitions = [row[0] for row in rows]
        yield Statement(
            self._many,
            (
                Int4(len(runs)),
                Int4(facts.id),
                [numbers[partition] for partition in partitions],
                indexes,
                partitions,
                [runs[partition] if index == 0 else None for partition, index in zip(partitions, indexes, strict=True)],
                *([row[column] for row in rows] for column in range(1, 7)),
            ),
        )

    def _row(self, number: int, message: Record, facts: LogFacts, spread: int) -> tuple[Any, ...]:
        """Return the columns of a message: partition, slot, time, key, subject, headers and value."""
        try:
            key = None if message.key is None else key_bytes(message.key)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"message {number}: {error}") from None
        value = message.value.encode() if isinstance(message.value, str) else message.value
        if not isinstance(value, bytes):
            raise ConfigError(f"message {number}: the value is a {type(value).__name__}; pass bytes or str")
        if not (message.time is None or isinstance(message.time, datetime)):
            raise ConfigError(
                f"message {number}: time={shown_value(message.time)} is not a datetime; use datetime.now(UTC)"
            )
        if message.time is not None and message.time.tzinfo is None:
            raise ConfigError(f"message {number}: time={message.time} has no time zone; use datetime.now(UTC)")
        subject = message.subject or self.name
        if not isinstance(subject, str) or "\0" in subject or not _encodable(subject):
            raise ConfigError(
                f"message {number}: subject={shown_value(subject)}: must be a str without zero bytes; correct the "
                "subject"
            )
        place = spread if key is None else partition_of(key, facts.partitions)
        headers = headers_text(message.headers, f"message {number}")
        return place, None if key is None else slot(key), message.time, key, subject, headers, value


def similar_log(schema: str, name: str) -> Steps[str]:
    """Return a "did you mean" text about a log with a name like a missing log; "" = no similar log."""
    found = yield Statement(compose(_NAMES, schema), ())
    return did_you_mean(name, (found and found[0]) or ())


def headers_text(headers: Sequence[tuple[str, bytes]], what: str) -> str | None:
    """Return the headers as JSON text; None = no headers. Raises ``ConfigError`` for an invalid header."""
    pairs: list[tuple[str, object]] = []
    for header in headers:
        try:
            name, value = header
        except (TypeError, ValueError):
            raise ConfigError(f"{what}: a header must be a pair of a name and bytes") from None
        if not isinstance(name, str) or not isinstance(value, bytes) or "\0" in name or not _encodable(name):
            raise ConfigError(f"{what}: the header {shown_value(name)} must have a str name and a bytes value")
        try:
            text = value.decode()
        except UnicodeDecodeError:
            text = "\0"
        # JSON in PostgreSQL cannot contain a zero character.
        pairs.append((name, {"base64": base64.b64encode(value).decode()} if "\0" in text else text))
    return json.dumps(pairs, ensure_ascii=False) if pairs else None


def headers_of(pairs: Sequence[Sequence[Any]] | None) -> list[tuple[str, bytes]]:
    """Return the headers that ``headers_text`` stored."""
    return [
        (name, value.encode() if isinstance(value, str) else base64.b64decode(value["base64"]))
        for name, value in pairs or ()
    ]


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
