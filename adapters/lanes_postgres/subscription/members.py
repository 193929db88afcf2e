"""Exchanges heartbeats between the members of a subscription, in a table. Needs asyncio.

The heartbeats only suggest which locks to try. The lock of a partition decides its owner.
"""

from __future__ import annotations

from typing import Any, Final, LiteralString

from psycopg import AsyncConnection
from psycopg.types.numeric import Int4

from lanes_postgres.log.reading import LogTables
from lanes_postgres.steps import compose
from lanes_postgres.subscription.visits import Member

_STALE: Final = 3.0
"""Seconds after its last heartbeat during which a member counts as live."""

_OTHERS: Final[LiteralString] = (
    "SELECT owned, waits FROM {schema}.lanes_subscription_members WHERE log = %(log)s "
    "AND subscription = %(subscription)s AND member <> %(member)s "
    # If the server's clock is set back, the row of a stopped member may have a time in the future.
    "AND seen BETWEEN clock_timestamp() - %(stale)s * interval '1 second' "
    "AND clock_timestamp() + %(stale)s * interval '1 second'"
)
_MEMBERS: Final[LiteralString] = (
    "WITH mine AS (INSERT INTO {schema}.lanes_subscription_members (log, subscription, member, owned, waits, consumer) "
    "VALUES (%(log)s, %(subscription)s, %(member)s, %(owned)s, %(waits)s, %(consumer)s) "
    "ON CONFLICT (log, subscription, member) "
    "DO UPDATE SET owned = excluded.owned, waits = excluded.waits, seen = clock_timestamp()), "
    "named AS (INSERT INTO {schema}.lanes_ring_consumers (log, subscription, consumer) "
    "SELECT %(log)s, %(subscription)s, %(consumer)s WHERE %(consumer)s::text IS NOT NULL ON CONFLICT DO NOTHING) "
    + _OTHERS
)
_LEAVE: Final[LiteralString] = (
    "DELETE FROM {schema}.lanes_subscription_members WHERE log = %s AND subscription = %s AND member = %s "
    "OR seen < clock_timestamp() - interval '1 day'"
)


async def exchange(
    connection: AsyncConnection[Any],
    tables: LogTables,
    subscription: str,
    name: str,
    me: Member | None,
    consumer: str | None = None,
) -> list[Member]:
    """Write a heartbeat, and return the other members with a recent heartbeat. Raises the errors of psycopg.

    With None for ``me``, the call only returns the other members. ``consumer`` is the name of a member with ranges in
    the map.
    """
    parameters = {"log": tables.log, "subscription": subscription, "member": name, "stale": _STALE}
    if me is None:
        cursor = await connection.execute(compose(_OTHERS, tables.schema), parameters)
    else:
        told = {"owned": Int4(me.owned), "waits": me.waits, "consumer": consumer}
        cursor = await connection.execute(compose(_MEMBERS, tables.schema), parameters | told)
    return [Member(*row) for row in await cursor.fetchall()]


async def leave(connection: AsyncConnection[Any], tables: LogTables, subscription: str, name: str) -> None:
    """Record that a member has left. Raises the errors of psycopg."""
    await connection.execute(compose(_LEAVE, tables.schema), (tables.log, subscription, name))
