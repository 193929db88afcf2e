"""Lists and drops the subscriptions of logs, for an operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import tuple_row

from lanes.arguments import did_you_mean
from lanes.errors import ConfigError
from lanes_postgres.log.appending import similar_log
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.steps import compose, perform_async

LIVE: Final = 60.0
"""Seconds after its last heartbeat during which a member counts as running."""

_WHERE: Final = "subscriptions"

# The start is the floor of a partition without a state. The end of a partition follows from its last entry, which a
# trim keeps.
_LIST: Final[LiteralString] = (
    "SELECT log.name, of.name, of.start, log.partitions, CASE WHEN NOT of.own_states THEN "
    "(SELECT sum(greatest(0, coalesce((SELECT position + run FROM {schema}.lanes_log_entries AS entry "
    "WHERE entry.log = log.id AND entry.partition = part.number ORDER BY position DESC LIMIT 1), 0) "
    "- coalesce((SELECT min(floor) FROM {schema}.lanes_ring_pieces AS piece WHERE piece.log = of.log "
    "AND piece.subscription = of.name AND piece.partition = part.number), "
    "(SELECT floor FROM {schema}.lanes_states AS state WHERE state.subscription = of.name "
    "AND state.source = log.name AND state.partition = part.number AND state.incarnation = log.incarnation), "
    "of.starts[part.number + 1], 0)))::bigint FROM generate_series(0, log.partitions - 1) AS part (number)) END, "
    "(SELECT count(*) FROM {schema}.lanes_subscription_members AS member WHERE member.log = log.id "
    "AND member.subscription = of.name AND member.seen > clock_timestamp() - make_interval(secs => %s)) "
    "FROM {schema}.lanes_subscriptions AS of JOIN {schema}.lanes_logs AS log ON log.id = of.log ORDER BY 1, 2"
)
_FIND: Final[LiteralString] = (
    "SELECT of.log FROM {schema}.lanes_subscriptions AS of JOIN {schema}.lanes_logs AS log ON log.id = of.log "
    "WHERE log.name = %s AND of.name = %s FOR UPDATE OF of"
)
_NAMES: Final[LiteralString] = (
    "SELECT of.name FROM {schema}.lanes_subscriptions AS of JOIN {schema}.lanes_logs AS log ON log.id = of.log "
    "WHERE log.name = %s ORDER BY 1"
)
_MEMBERS: Final[LiteralString] = (
    "SELECT member FROM {schema}.lanes_subscription_members WHERE log = %s AND subscription = %s "
    "AND seen > clock_timestamp() - make_interval(secs => %s) ORDER BY 1"
)
_DROP: Final[tuple[LiteralString, ...]] = (
    "DELETE FROM {schema}.lanes_subscription_members WHERE log = %(log)s AND subscription = %(name)s",
    "DELETE FROM {schema}.lanes_states WHERE subscription = %(name)s AND source = %(source)s",
    "DELETE FROM {schema}.lanes_ring_consumers WHERE log = %(log)s AND subscription = %(name)s",
    # Keep the assignments, which record each change of an owner. The next consumers begin with the same owners.
    "DELETE FROM {schema}.lanes_ring_pieces WHERE log = %(log)s AND subscription = %(name)s",
    "DELETE FROM {schema}.lanes_subscriptions WHERE log = %(log)s AND name = %(name)s",
)


@dataclass(frozen=True, slots=True)
class SubscriptionView:
    """A subscription.

    Attributes:
        log: Name of the log.
        name: Name of the subscription.
        start: First message that the subscription reads, as set by its first member.
        partitions: Number of partitions of the log.
        lag: Number of positions at or above the floors of the subscription. ``None`` = the positions are in a store of
            the user.
        members: Number of running members.
    """

    log: str
    name: str
    start: str
    partitions: int
    lag: int | None
    members: int


async def list_subscriptions(connection: AsyncConnection[Any], schema: str) -> list[SubscriptionView]:
    """Return the subscriptions of all logs, in order of their names.

    The call first gives positions to committed messages.
    """
    # If another session gives positions at this moment, it gives positions to nearly all messages.
    while await perform_async(connection, sequencing(schema), _WHERE):
        pass
    cursor = AsyncCursor(connection, row_factory=tuple_row)
    await cursor.execute(compose(_LIST, schema), (LIVE,))
    return [SubscriptionView(*row) for row in await cursor.fetchall()]


async def drop_subscription(connection: AsyncConnection[Any], schema: str, log: str, name: str, *, force: bool) -> None:
    """Delete a subscription with its positions, in one transaction.

    After the call, the members of the subscription can store no position.

    Raises ``ConfigError`` if the subscription does not exist, or if members run and ``force`` is False.
    """
    cursor = AsyncCursor(connection, row_factory=tuple_row)
    async with connection.transaction():
        found = await (await cursor.execute(compose(_FIND, schema), (log, name))).fetchone()
        if found is None:
            await cursor.execute(compose(_NAMES, schema), (log,))
            meant = did_you_mean(name, [each for (each,) in await cursor.fetchall()])
            meant = meant or await perform_async(connection, similar_log(schema, log), _WHERE)
            raise ConfigError(
                f"log {log!a} has no subscription {name!a} in the schema {schema!a}{meant}; run `lanes postgres "
                "subscriptions list`, and correct the names"
            )
        await cursor.execute(compose(_MEMBERS, schema), (found[0], name, LIVE))
        members = [member for (member,) in await cursor.fetchall()]
        if members and not force:
            raise ConfigError(
                f"subscription {name!a} of log {log!a} has running members ({', '.join(map(ascii, members))}); stop "
                f"them and wait {LIVE:g} s, or add --force"
            )
        for statement in _DROP:
            await cursor.execute(compose(statement, schema), {"log": found[0], "name": name, "source": log})
