"""Decides the first position of each partition. One member decides for all members. Needs asyncio."""

from __future__ import annotations

import asyncio
import logging
from datetime import datetime
from typing import Any, Final, Literal, LiteralString

from psycopg import AsyncConnection

from lanes.arguments import check_aware, shown_value
from lanes.errors import ConfigError
from lanes_postgres.log.reading import LogTables
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.steps import compose, perform_async

log = logging.getLogger("lanes.postgres")

Start = Literal["beginning", "next"] | datetime
"""First message of a new subscription: the first message of the log, the next committed message, or the first message
of each partition at or after a time. A ``datetime`` has a time zone.
"""

_PAUSE: Final = 0.01
"""Seconds until the next attempt while another session gives positions."""

_LOCK: Final[LiteralString] = "SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))"
_FIND: Final[LiteralString] = (
    "SELECT start, starts, own_states, ring FROM {schema}.lanes_subscriptions WHERE log = %s AND name = %s"
)
_ADD: Final[LiteralString] = (
    "INSERT INTO {schema}.lanes_subscriptions (log, name, start, starts, own_states, ring) "
    "VALUES (%s, %s, %s, %s::bigint[], %s, %s)"
)
_MARK: Final[LiteralString] = "UPDATE {schema}.lanes_subscriptions SET own_states = %s WHERE log = %s AND name = %s"


def check_start(start: object) -> None:
    """Raise ``ConfigError`` for an invalid start."""
    if isinstance(start, datetime):
        check_aware("start", start)
    elif start not in ("beginning", "next"):
        named = {"earliest": "beginning", "latest": "next"}.get(start if isinstance(start, str) else "")
        meant = f' (did you mean "{named}"?)' if named else ""
        raise ConfigError(
            f'start={shown_value(start)}: must be "beginning", "next" or a datetime with a time zone{meant}'
        )


async def decide_starts(
    connection: AsyncConnection[Any],
    tables: LogTables,
    subscription: str,
    start: Start,
    name: str,
    *,
    own_states: bool = False,
    ring: bool = False,
) -> list[int]:
    """Return the first position of each partition. For a new subscription, decide these positions.

    The decision includes empty partitions. One member sets the first positions, while other new members wait.
    ``own_states``: whether the positions are in a store of the user, where a trim cannot read them. ``ring``: whether
        the members own ranges of slots. Raises ``ConfigError`` if the subscription began with the other value of
        ``ring``.
    """
    text = start if isinstance(start, str) else start.isoformat()
    row = await (await connection.execute(compose(_FIND, tables.schema), (tables.log, subscription))).fetchone()
    if row is None:
        # Committed messages without a position precede the next message.
        while (done := await perform_async(connection, sequencing(tables.schema), name)) != 0:
            if done is None:
                await asyncio.sleep(_PAUSE)
        async with connection.transaction():
            lock = f"lanes subscription {tables.schema}/{subscription}"
            await connection.execute(_LOCK, (lock, tables.log))
            row = await (await connection.execute(compose(_FIND, tables.schema), (tables.log, subscription))).fetchone()
            if row is None:
                starts = await _starts(connection, tables, start)
                new = (tables.log, subscription, text, starts, own_states, ring)
                await connection.execute(compose(_ADD, tables.schema), new)
                return starts
    begun, found, marked, ranged = row
    if ranged is not ring:
        raise ConfigError(
            f"{name}: the subscription has begun {'with' if ranged else 'without'} ranges, and a key would have two "
            f"owners; {'pass ranges=RangeMap(log, group=…).member(…)' if ranged else 'leave out ranges='}, or use "
            "another subscription"
        )
    if marked is not own_states:
        await connection.execute(compose(_MARK, tables.schema), (own_states, tables.log, subscription))
    if begun != text:
        log.info("%s: the subscription began with start=%s; start=%s has no effect any more", name, begun, text)
    return list(found)


async def _starts(connection: AsyncConnection[Any], tables: LogTables, start: Start) -> list[int]:
    if start == "beginning":
        return await tables.firsts(connection)
    ends = await tables.ends(connection)
    if isinstance(start, datetime):
        since = await tables.since(connection, start)
        return [since.get(partition, end) for partition, end in enumerate(ends)]
    return ends
