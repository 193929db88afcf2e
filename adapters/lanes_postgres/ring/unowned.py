"""Counts messages in slots without an owner, and finds the first position of such a message. Needs asyncio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes.errors import LanesError
from lanes_postgres.errors import is_about_statement
from lanes_postgres.ring.pieces import TRIES
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import alone_async

LOOK: Final = 10_000
"""Maximum number of positions of each partition that one call of ``look_at_unowned`` reads."""

# No message of the slots is below a new position. The read begins at the entry that contains the piece's position.
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
# Skip locked rows, because an assignment locks the rows in the order of their numbers, and a wait could be a deadlock.
_RAISE: Final[LiteralString] = (
    "UPDATE {schema}.lanes_ring_pieces AS piece SET floor = new.floor, stored = clock_timestamp() "
    "FROM (SELECT id, start.floor FROM {schema}.lanes_ring_pieces AS free "
    "JOIN unnest(%s::bigint[], %s::bigint[]) AS start (id, floor) USING (id) "
    "WHERE free.consumer IS NULL AND free.floor < start.floor FOR UPDATE OF free SKIP LOCKED) AS new "
    "WHERE piece.id = new.id"
)


async def count_unowned(connection: AsyncConnection[Any], schema: str, log: int, group: str) -> int:
    """Return the number of messages in slots without an owner, with at most 1,000 messages of each partition.

    The call may read every unfinished message of these slots.
    """
    return sum(found for *_, found in await _counted(connection, schema, log, group, look=None, ends=None))


async def look_at_unowned(
    connection: AsyncConnection[Any], schema: str, log: int, group: str, ends: Sequence[int]
) -> tuple[int, str]:
    """Count the messages in slots without an owner, and skip messages of other slots.

    The call reads at most ``LOOK`` positions of each partition, from the first position that may have such a message.
    The next call begins after the skipped messages. A trim of the log may delete skipped messages.

    Args:
        connection: A connection with autocommit.
        schema: Schema of the tables.
        log: Number of the log.
        group: Name of the group.
        ends: End of each partition. Every message below this position is visible.

    Returns:
        The number of messages, with at most 1,000 messages of each partition. Also the error if the server refuses the
        position of a piece; "" = no error.
    """
    found = await _counted(connection, schema, log, group, look=LOOK, ends=list(ends))
    starts = [(piece, floor, until if first is None else first) for piece, floor, until, first, _ in found]
    raised = {piece: start for piece, floor, start in starts if start > floor}
    return sum(count for *_, count in found), await _raise(connection, schema, raised)


async def _raise(connection: AsyncConnection[Any], schema: str, floors: Mapping[int, int]) -> str:
    """Raise the given positions together. After a refusal, raise each position alone, and return the last error."""
    if not floors:
        return ""
    try:
        await alone_async(connection, _raising(schema, floors), "slots without an owner")
    except LanesError as error:
        if not is_about_statement(error):
            raise
        if len(floors) == 1:
            return f"piece {next(iter(floors))}: {error}"
    else:
        return ""
    errors = [await _raise(connection, schema, {piece: floor}) for piece, floor in floors.items()]
    return next((error for error in reversed(errors) if error), "")


def _raising(schema: str, floors: Mapping[int, int]) -> Steps[None]:
    # Do not wait for a lock on the table of the pieces, because the wait would delay messages.
    yield Statement(TRIES.encode())
    yield Statement(compose(_RAISE, schema), (list(floors), list(floors.values())))


async def _counted(
    connection: AsyncConnection[Any],
    schema: str,
    log: int,
    group: str,
    *,
    look: int | None,
    ends: list[int] | None,
) -> list[tuple[int, int, int, int | None, int]]:
    """Return facts of each piece without an owner: number, position, bound, first message and count."""
    parameters = {"log": log, "group": group, "look": look, "ends": ends}
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(compose(_COUNT, schema), parameters)
        return await cursor.fetchall()
