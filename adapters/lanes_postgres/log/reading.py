"""Reads messages of a log by position, the ends of its partitions, and the times of messages. Needs asyncio."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, LiteralString, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes.dead_letter import Details
from lanes_postgres.log.appending import headers_of
from lanes_postgres.log.sequencer import BATCHES
from lanes_postgres.steps import compose

# Each inner query has an ORDER BY, so that the planner uses an index scan in a nested loop, even with wrong statistics.
_FROM: Final[LiteralString] = (
    "CROSS JOIN LATERAL (SELECT entry.position + message.index AS position, message.key, message.subject, "
    "message.headers::text AS headers, message.value, message.time FROM ("
    "SELECT position, batch FROM {schema}.lanes_log_entries WHERE log = %(log)s AND partition = wanted.partition "
    "AND position >= coalesce((SELECT max(position) FROM {schema}.lanes_log_entries WHERE log = %(log)s "
    "AND partition = wanted.partition AND position <= wanted.start), 0) ORDER BY position) AS entry "
    "CROSS JOIN LATERAL (SELECT index, key, subject, headers, value, time FROM {schema}.lanes_log_messages "
    "WHERE batch = entry.batch AND index >= wanted.start - entry.position ORDER BY index) AS message "
    "LIMIT wanted.most) AS found"
)
_FETCH: Final[LiteralString] = (
    "SELECT wanted.partition, found.position, found.key, found.subject, found.headers, found.value, "
    "extract(epoch FROM found.time)::double precision FROM unnest(%(partitions)s::integer[], %(starts)s::bigint[], "
    "%(mosts)s::integer[]) WITH ORDINALITY AS wanted (partition, start, most, turn) "
    + _FROM
    + " ORDER BY wanted.turn, found.position"
)
_OLDEST: Final[LiteralString] = (
    "SELECT wanted.partition, extract(epoch FROM found.time)::double precision FROM unnest(%(partitions)s::integer[], "
    "%(starts)s::bigint[], %(mosts)s::integer[]) AS wanted (partition, start, most) " + _FROM
)
_ENDS: Final[LiteralString] = (
    "SELECT coalesce((SELECT position + run FROM {schema}.lanes_log_entries WHERE log = %(log)s "
    "AND partition = number ORDER BY position DESC LIMIT 1), 0) FROM generate_series(0, %(partitions)s - 1) AS number "
    "ORDER BY number"
)
_FIRSTS: Final[LiteralString] = (
    "SELECT coalesce((SELECT position FROM {schema}.lanes_log_entries WHERE log = %(log)s "
    "AND partition = number ORDER BY position LIMIT 1), 0) FROM generate_series(0, %(partitions)s - 1) AS number "
    "ORDER BY number"
)
_SINCE: Final[LiteralString] = (
    "SELECT entry.partition, min(entry.position + message.index) FROM {schema}.lanes_log_entries AS entry "
    "JOIN {schema}.lanes_log_messages AS message USING (batch) WHERE entry.log = %(log)s AND message.time >= %(time)s "
    "GROUP BY entry.partition"
)

# Pass the numbers as text, because a client without its C extension would need a millisecond for them in each call.
_VISIT: Final[LiteralString] = (
    "SELECT done, ends, number, position, key, subject, headers, value, time FROM {schema}.lanes_log_visit("
    "%(batches)s::integer, %(log)s::integer, %(partitions)s::integer, %(numbers)s::text::integer[], "
    "%(starts)s::text::bigint[], %(room)s::integer)"
)


class StoredMessage(NamedTuple):
    """A message from the database, for ``Message.raw``.

    Attributes:
        position: Position in the partition.
        key: Key of the message. ``None`` = no key.
        subject: Subject.
        headers: Headers as JSON text. ``None`` = no headers.
        value: Payload.
        time: Time of the message, in seconds since the epoch.
    """

    position: int
    key: bytes | None
    subject: str
    headers: str | None
    value: bytes
    time: float

    @property
    def size(self) -> int:
        """Total size of payload, key and headers in bytes."""
        return len(self.value) + len(self.key or b"") + len(self.headers or "")


class LogReader:
    """Reads the content of stored messages; see ``lanes.core.types.Reader``."""

    def value(self, raw: object) -> bytes:
        """Return the payload."""
        return _stored(raw).value

    def headers(self, raw: object) -> Sequence[tuple[str, bytes]]:
        """Return the headers."""
        headers = _stored(raw).headers
        return () if headers is None else headers_of(json.loads(headers))

    def subject(self, raw: object) -> str:
        """Return the subject."""
        return _stored(raw).subject

    def details(self, raw: object) -> Details:
        """Return the key and the time of the message, which a dead letter stores."""
        stored = _stored(raw)
        return Details(record_key=stored.key, timestamp=stored.time)


READER: Final = LogReader()


def _stored(raw: object) -> StoredMessage:
    assert isinstance(raw, StoredMessage)
    return raw


class Wanted(NamedTuple):
    """A request to read one partition.

    Attributes:
        partition: Number of the partition.
        start: First position.
        most: Maximum number of messages to read.
    """

    partition: int
    start: int
    most: int


class Looked(NamedTuple):
    """The result of one call of ``visit``.

    Attributes:
        done: Number of batches to which the call gave positions. ``None`` = another session gives positions now.
        ends: The next position of each partition.
        messages: The messages by partition, each in the order of the positions.
    """

    done: int | None
    ends: list[int]
    messages: Mapping[int, list[StoredMessage]]


@dataclass(frozen=True)
class LogTables:
    """Reads one log. Each call is one statement, and raises the errors of psycopg.

    Attributes:
        schema: Schema of the tables.
        log: Id of the log.
        partitions: Number of partitions.
        messages: Table or view in ``schema`` that contains the messages.
    """

    schema: str
    log: int
    partitions: int
    messages: str = "lanes_log_messages"

    @property
    def own(self) -> bool:
        """Whether the log has its own messages. The user may delete rows of a user's table at any time."""
        return self.messages == "lanes_log_messages"

    async def fetch(
        self, connection: AsyncConnection[Any], wanted: Sequence[Wanted]
    ) -> Mapping[int, list[StoredMessage]]:
        """Return messages by partition, each in the order of the positions."""
        found: dict[int, list[StoredMessage]] = {}
        for partition, *stored in await self._rows(connection, _FETCH, self._wanted(wanted)):
            found.setdefault(partition, []).append(StoredMessage(*stored))
        return found

    async def visit(self, connection: AsyncConnection[Any], starts: Mapping[int, int], room: int) -> Looked:
        """Give positions to committed messages, and return the messages at or above a position of each partition.

        If the log has more than ``room`` such messages, the result contains no messages. The log must have its own
        messages.
        """
        parameters = {
            "batches": BATCHES,
            "partitions": self.partitions,
            "numbers": _array(starts),
            "starts": _array(starts.values()),
            "room": room,
        }
        (done, ends, *_), *rows = await self._rows(connection, _VISIT, parameters)
        found: dict[int, list[StoredMessage]] = {}
        for _, _, partition, *stored in rows:
            found.setdefault(partition, []).append(StoredMessage(*stored))
        return Looked(done, ends, found)

    async def oldest(self, connection: AsyncConnection[Any], starts: Mapping[int, int]) -> Mapping[int, float]:
        """Return the time of the first message at or above a position, for each partition with such a message."""
        wanted = [Wanted(partition, start, 1) for partition, start in starts.items()]
        return dict(await self._rows(connection, _OLDEST, self._wanted(wanted)))

    async def ends(self, connection: AsyncConnection[Any]) -> list[int]:
        """Return the next position of each partition."""
        return [end for (end,) in await self._rows(connection, _ENDS, {"partitions": self.partitions})]

    async def firsts(self, connection: AsyncConnection[Any]) -> list[int]:
        """Return the lowest remaining position of each partition."""
        return [first for (first,) in await self._rows(connection, _FIRSTS, {"partitions": self.partitions})]

    async def since(self, connection: AsyncConnection[Any], time: datetime) -> Mapping[int, int]:
        """Return the first position with a message at or after a time, by partition. Reads the whole log."""
        return dict(await self._rows(connection, _SINCE, {"time": time}))

    def of_messages(self, query: LiteralString) -> LiteralString:
        """Insert the name of this log's view into a query. The name contains only letters and digits."""
        return query.replace("{schema}.lanes_log_messages", "{schema}." + self.messages)

    def _wanted(self, wanted: Sequence[Wanted]) -> dict[str, object]:
        return {
            "partitions": [each.partition for each in wanted],
            "starts": [each.start for each in wanted],
            "mosts": [each.most for each in wanted],
        }

    async def _rows(
        self, connection: AsyncConnection[Any], query: LiteralString, parameters: Mapping[str, object]
    ) -> list[tuple[Any, ...]]:
        async with connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(compose(self.of_messages(query), self.schema), {"log": self.log, **parameters})
            return await cursor.fetchall()


def _array(numbers: Iterable[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"
