"""Deletes stored attempts of messages that the owners of a group's pieces have finished. Needs asyncio."""

from __future__ import annotations

from typing import Any, Final, LiteralString, NamedTuple

from psycopg import AsyncConnection

from lanes_postgres.ring.pieces import TRIES
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import alone_async

LOOK: Final = 500
"""Maximum number of attempts that one call of ``drop_finished`` reads."""

# A trim has deleted each message below the first entry of its partition. The last entry at or below a position contains
# the message of this position. The statement skips a row that another transaction locks, for a later call.
_DROP: Final[LiteralString] = (
    "WITH seen AS MATERIALIZED (SELECT attempt.topic, attempt.partition, attempt.position "
    "FROM {schema}.lanes_topics AS of JOIN {schema}.lanes_attempts AS attempt ON attempt.topic = of.id "
    "WHERE of.subscription = %(group)s AND of.topic = %(name)s AND of.incarnation = %(incarnation)s "
    "AND (attempt.partition, attempt.position) > (%(partition)s::bigint, %(position)s::bigint) "
    "ORDER BY attempt.partition, attempt.position LIMIT %(look)s), "
    "finished AS (SELECT topic, partition, position FROM {schema}.lanes_attempts "
    "WHERE (topic, partition, position) IN (SELECT seen.topic, seen.partition, seen.position FROM seen "
    "LEFT JOIN LATERAL (SELECT position, batch FROM {schema}.lanes_log_entries WHERE log = %(log)s "
    "AND partition = seen.partition AND position <= seen.position ORDER BY position DESC LIMIT 1) AS entry ON true "
    "LEFT JOIN {schema}.lanes_log_messages AS message "
    "ON message.batch = entry.batch AND message.index = seen.position - entry.position "
    "WHERE entry.batch IS NULL OR EXISTS (SELECT FROM {schema}.lanes_ring_pieces AS piece WHERE piece.log = %(log)s "
    "AND piece.subscription = %(group)s AND piece.partition = seen.partition AND piece.floor > seen.position "
    "AND message.batch IS NOT NULL "
    "AND CASE WHEN message.slot IS NULL THEN piece.slots IS NULL ELSE message.slot <@ piece.slots END)) "
    "FOR UPDATE SKIP LOCKED), "
    "dropped AS (DELETE FROM {schema}.lanes_attempts AS attempt USING finished WHERE attempt.topic = finished.topic "
    "AND attempt.partition = finished.partition AND attempt.position = finished.position) "
    "SELECT partition, position FROM seen ORDER BY partition DESC, position DESC LIMIT 1"
)


class Place(NamedTuple):
    """The last attempt that a call has read.

    Attributes:
        partition: Number of the attempt's partition.
        position: Position of the attempt's message.
    """

    partition: int
    position: int


BEGINNING: Final = Place(-1, -1)


async def drop_finished(
    connection: AsyncConnection[Any], schema: str, log: int, name: str, incarnation: str, group: str, after: Place
) -> Place:
    """Delete attempts of messages below the floor of their piece, and of trimmed messages.

    If an owner is killed between a settlement and its call of ``PostgresAttempts.drop``, such attempts remain. No later
    owner of the piece receives their messages. The call reads at most ``LOOK`` attempts.

    Args:
        connection: A connection with autocommit.
        schema: Schema of the tables.
        log: Number of the log.
        name: Name of the log.
        incarnation: Identity of the log.
        group: Name of the group.
        after: Result of the last call; ``BEGINNING`` for the first call.

    Returns:
        The last attempt that the call has read; ``BEGINNING`` = no attempt follows.

    Raises:
        SourceError: The database does not answer, refuses the statement, or another transaction locks the table.
        ConfigError: The role lacks a permission.
    """
    parameters = {
        "log": log,
        "name": name,
        "incarnation": incarnation,
        "group": group,
        "partition": after.partition,
        "position": after.position,
        "look": LOOK,
    }
    return await alone_async(connection, _dropping(schema, parameters), name)


def _dropping(schema: str, parameters: Any) -> Steps[Place]:
    # Do not wait for a lock on the table of attempts, because the wait would delay messages.
    yield Statement(TRIES.encode())
    found = yield Statement(compose(_DROP, schema), parameters)
    return BEGINNING if found is None else Place(*found)
