"""Reads the messages of some slots of a log. One statement can read several pieces. Needs asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, LiteralString, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes_postgres.log.reading import LogTables, StoredMessage
from lanes_postgres.ring.slots import Slots
from lanes_postgres.steps import compose

# Each inner query has an ORDER BY, so that the planner uses an index scan in a nested loop, even with wrong statistics.
# The bound limits the positions of a read that finds few messages of its slots.
_FETCH: Final[LiteralString] = (
    "SELECT wanted.turn, first.position, found.* FROM unnest(%(partitions)s::integer[], %(starts)s::bigint[], "
    "%(ends)s::bigint[], %(mosts)s::integer[], %(slots)s::text[]::int4multirange[], %(keyless)s::boolean[]) "
    "WITH ORDINALITY "
    "AS wanted (partition, start, bound, most, slots, keyless, turn) "
    "CROSS JOIN LATERAL (SELECT coalesce((SELECT position FROM {schema}.lanes_log_entries WHERE log = %(log)s "
    "AND partition = wanted.partition ORDER BY position LIMIT 1), 0) AS position) AS first "
    "LEFT JOIN LATERAL (SELECT entry.position + message.index AS position, message.key, message.subject, "
    "message.headers::text, message.value, extract(epoch FROM message.time)::double precision FROM ("
    "SELECT position, batch FROM {schema}.lanes_log_entries WHERE log = %(log)s AND partition = wanted.partition "
    "AND position < wanted.bound AND position >= coalesce((SELECT max(position) FROM {schema}.lanes_log_entries "
    "WHERE log = %(log)s AND partition = wanted.partition AND position <= wanted.start), 0) ORDER BY position) "
    "AS entry CROSS JOIN LATERAL (SELECT index, key, subject, headers, value, time FROM {schema}.lanes_log_messages "
    "WHERE batch = entry.batch AND index >= wanted.start - entry.position AND index < wanted.bound - entry.position "
    "AND CASE WHEN slot IS NULL THEN wanted.keyless ELSE slot <@ wanted.slots END ORDER BY index) "
    "AS message LIMIT wanted.most) AS found ON true ORDER BY wanted.turn, found.position"
)


class WantedSlots(NamedTuple):
    """A request to read the messages of some slots of one partition.

    Attributes:
        partition: Number of the partition.
        start: First position to read.
        end: Position after the last position to read.
        most: Maximum number of messages to read, 1 or more.
        slots: Slots of the messages to read.
        keyless: Whether the read includes the messages without a key.
    """

    partition: int
    start: int
    end: int
    most: int
    slots: Slots
    keyless: bool


class FoundSlots(NamedTuple):
    """The result of a read.

    Attributes:
        first: The lowest remaining position of the partition.
        messages: The messages in the order of their positions.
        read: The next position to read.
    """

    first: int
    messages: list[StoredMessage]
    read: int


async def fetch(connection: AsyncConnection[Any], tables: LogTables, wanted: Sequence[WantedSlots]) -> list[FoundSlots]:
    """Return the results in the order of the reads, by one statement. Raises the errors of psycopg."""
    parameters = {
        "log": tables.log,
        "partitions": [each.partition for each in wanted],
        "starts": [each.start for each in wanted],
        "ends": [each.end for each in wanted],
        "mosts": [each.most for each in wanted],
        "slots": [str(each.slots) for each in wanted],
        "keyless": [each.keyless for each in wanted],
    }
    firsts = [0] * len(wanted)
    messages: list[list[StoredMessage]] = [[] for _ in wanted]
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(compose(_FETCH, tables.schema), parameters)
        for turn, first, position, *rest in await cursor.fetchall():
            firsts[turn - 1] = first
            if position is not None:
                messages[turn - 1].append(StoredMessage(position, *rest))
    return [
        FoundSlots(first, found, found[-1].position + 1 if len(found) >= each.most else each.end)
        for each, first, found in zip(wanted, firsts, messages, strict=True)
    ]
