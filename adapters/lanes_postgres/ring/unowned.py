"""The messages in slots that nobody owns: their number, and where the log begins to keep them. Needs asyncio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes_postgres.steps import compose

LOOK: Final = 10_000
"""Number of positions of each partition that one look of a member reads, at most."""

# A later position has no message of the slots below it. The first entry is the one that holds the piece's position.
_COUNT: Final[LiteralString] = (
    "SELECT piece.id, piece.floor, until.position, found.first, found.count "
    "FROM {schema}.lanes_ring_pieces AS piece CROSS JOIN LATERAL (SELECT coalesce(least("
    "piece.floor + %(look)s::bigint, (%(ends)s::bigint[])[piece.partition + 1]), 9223372036854775807) AS position) "
    "AS until CROSS JOIN LATERAL (SELECT min(counted.position) AS first, count(*) AS count FROM ("
    "SELECT entry.position + message.index AS position "
    "FROM {schema}.lanes_log_entries AS entry JOIN {schema}.lanes_log_messages AS message USING (batch) "
    "WHERE entry.log = piece.log AND entry.partition = piece.partition AND entry.position < until.position "
    "AND entry.position >= coalesce((SELECT max(position) FROM {schema}.lanes_log_entries WHERE log = piece.log "
    "AND partition = piece.partition AND position <= piece.floor), 0) "
    "AND entry.position + message.index >= piece.floor AND entry.position + message.index < until.position "
    "AND message.slot <@ piece.slots ORDER BY entry.position, message.index LIMIT 1000) AS counted) "
    "AS found WHERE piece.log = %(log)s AND piece.subscription = %(group)s AND piece.consumer IS NULL "
    "AND piece.slots IS NOT NULL"
)
# An assignment locks the rows in the order of their numbers, so this statement waits for none of them.
_RAISE: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces AS piece SET floor = new.floor, stored = clock_timestamp() "
    "FROM (SELECT id, start.floor FROM {schema}.lanes_ring_pieces AS free "
    "JOIN unnest(%s::bigint[], %s::bigint[]) AS start (id, floor) USING (id) "
    "WHERE free.consumer IS NULL AND free.floor < start.floor FOR UPDATE OF free SKIP LOCKED) AS new "
    "WHERE piece.id = new.id"
)


async def count_unowned(connection: AsyncConnection[Any], schema: str, log: int, group: str) -> int:
    """Return the number of messages in slots that nobody owns, of each partition at most 1,000 of them.

    The call reads each message of the log that the group has not finished in these slots.
    """
    return sum(found for *_, found in await _counted(connection, schema, log, group, look=None, ends=None))


async def look_at_unowned(
    connection: AsyncConnection[Any], schema: str, log: int, group: str, ends: Sequence[int]
) -> int:
    """Count the messages in slots that nobody owns, and pass messages of other slots.

    The call reads at most ``LOOK`` positions of each partition, from the first one that may have such a message. The
    log therefore keeps no messages for slots without an owner that have none, and the next call begins there.

    Args:
        connection: A connection with autocommit.
        schema: Schema of the tables.
        log: Number of the log.
        group: Name of the group.
        ends: The end of each partition. Every message below is visible.

    Returns:
        The number, of each partition at most 1,000.
    """
    found = await _counted(connection, schema, log, group, look=LOOK, ends=list(ends))
    starts = [(piece, floor, until if first is None else first) for piece, floor, until, first, _ in found]
    raised = {piece: start for piece, floor, start in starts if start > floor}
    if raised:
        await connection.execute(compose(_RAISE, schema), (list(raised), list(raised.values())))
    return sum(count for *_, count in found)


async def _counted(
    connection: AsyncConnection[Any],
    schema: str,
    log: int,
    group: str,
    *,
    look: int | None,
    ends: list[int] | None,
) -> list[tuple[int, int, int, int | None, int]]:
    """Return number, position, bound, first message and count of each piece without an owner."""
    parameters = {"log": log, "group": group, "look": look, "ends": ends}
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(compose(_COUNT, schema), parameters)
        return await cursor.fetchall()
