"""Reads the running processes, the waiting messages and the known names of a group's consumers. Needs asyncio."""

from __future__ import annotations

from typing import Any, Final, LiteralString, NamedTuple

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes_postgres.steps import compose

MOST: Final = 1_000
"""Maximum number of waiting messages to count for each piece."""

_LIVE: Final = 10.0
"""Seconds after its last heartbeat during which a process counts as running. A process sends a heartbeat every
second."""

# A message above the floor of a piece may be finished. The array of finished ranges contains the start of each range at
# an odd index, and its end at the next index.
_OWNERS: Final[LiteralString] = (
    "WITH running AS (SELECT consumer, count(*) AS processes FROM {schema}.lanes_subscription_members "
    "WHERE log = %(log)s AND subscription = %(group)s AND consumer IS NOT NULL "
    "AND seen > clock_timestamp() - %(live)s * interval '1 second' GROUP BY consumer), "
    "owning AS (SELECT piece.consumer, sum(found.count)::bigint AS waiting, bool_or(found.count = %(most)s) AS more "
    "FROM {schema}.lanes_ring_pieces AS piece CROSS JOIN LATERAL (SELECT count(*) FROM (SELECT "
    "FROM {schema}.lanes_log_entries AS entry JOIN {schema}.lanes_log_messages AS message USING (batch) "
    "WHERE entry.log = piece.log AND entry.partition = piece.partition "
    "AND entry.position >= coalesce((SELECT max(position) FROM {schema}.lanes_log_entries WHERE log = piece.log "
    "AND partition = piece.partition AND position <= piece.floor), 0) "
    "AND entry.position + message.index >= piece.floor AND message.slot <@ piece.slots "
    "AND NOT EXISTS (SELECT FROM generate_series(1, cardinality(piece.completed), 2) AS n "
    "WHERE entry.position + message.index >= piece.completed[n] "
    "AND entry.position + message.index < piece.completed[n + 1]) LIMIT %(most)s) AS counted) AS found "
    "WHERE piece.log = %(log)s AND piece.subscription = %(group)s AND piece.consumer IS NOT NULL "
    "AND piece.slots IS NOT NULL GROUP BY piece.consumer) "
    "SELECT consumer, coalesce(processes, 0), coalesce(waiting, 0), coalesce(more, false) "
    "FROM owning FULL JOIN running USING (consumer) ORDER BY 1"
)
_NAMES: Final[LiteralString] = (
    "SELECT consumer FROM {schema}.lanes_ring_consumers WHERE log = %s AND subscription = %s ORDER BY 1"
)


class OwnerView(NamedTuple):
    """A consumer that owns pieces or runs.

    Attributes:
        consumer: Name of the consumer.
        processes: Number of running processes with this name.
        waiting: Number of messages that no process has finished. The number includes at most ``MOST`` messages of each
            piece.
        more: Whether more messages than ``waiting`` may wait.
    """

    consumer: str
    processes: int
    waiting: int
    more: bool


async def owners(connection: AsyncConnection[Any], schema: str, log: int, group: str) -> list[OwnerView]:
    """Return the consumers that own pieces or run, in order of their names. Raises the errors of psycopg.

    The call reads up to ``MOST`` unfinished messages of each piece. A group has no pieces until its first consumer has
    started.
    """
    parameters = {"log": log, "group": group, "live": _LIVE, "most": MOST}
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(compose(_OWNERS, schema), parameters)
        return [OwnerView(*row) for row in await cursor.fetchall()]


async def used_names(connection: AsyncConnection[Any], schema: str, log: int, group: str) -> list[str]:
    """Return the names under which members of a group have run, in order. Raises the errors of psycopg."""
    async with connection.cursor(row_factory=tuple_row) as cursor:
        await cursor.execute(compose(_NAMES, schema), (log, group))
        return [name for (name,) in await cursor.fetchall()]
