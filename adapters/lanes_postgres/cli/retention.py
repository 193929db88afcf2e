"""Deletes messages that every subscription of a log has finished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import tuple_row

from lanes.arguments import did_you_mean
from lanes.errors import ConfigError
from lanes_postgres.log.appending import LogFacts, similar_log
from lanes_postgres.log.reading import LogTables
from lanes_postgres.log.sequencer import sequencing
from lanes_postgres.steps import compose, perform_async

BATCHES: Final = 5_000
"""Maximum number of batches that one transaction deletes."""

_FIND: Final[LiteralString] = "SELECT id, partitions, incarnation, relation FROM {schema}.lanes_logs WHERE name = %s"
# A new subscription chooses its start in a transaction that reads this table. If this transaction precedes the
# deletion, the deletion keeps the messages of the subscription. Otherwise the subscription begins after the deleted
# messages.
_LOCK: Final[LiteralString] = "LOCK TABLE {schema}.lanes_subscriptions IN ACCESS EXCLUSIVE MODE"
_SUBSCRIPTIONS: Final[LiteralString] = (
    "SELECT array_agg(name), min(name) FILTER (WHERE own_states AND name <> ALL (%(without)s::text[])) "
    "FROM {schema}.lanes_subscriptions WHERE log = %(log)s"
)
_DELETED: Final[LiteralString] = (
    "messages AS (DELETE FROM {schema}.lanes_log_messages AS message USING doomed "
    "WHERE message.batch = doomed.batch RETURNING 1) "
)
# The statement keeps the last batch of a partition, because the next position follows from this batch. If a batch is
# too young, the statement also keeps all later batches of its partition, so that the positions have no gap.
_TRIM: Final[LiteralString] = (
    "WITH limits AS (SELECT part.number AS partition, CASE WHEN %(force)s THEN 9223372036854775807 ELSE ("
    "SELECT min(coalesce((SELECT min(floor) FROM {schema}.lanes_ring_pieces AS piece WHERE piece.log = of.log "
    "AND piece.subscription = of.name AND piece.partition = part.number), "
    "(SELECT floor FROM {schema}.lanes_states AS state WHERE state.subscription = of.name "
    "AND state.source = %(name)s AND state.partition = part.number AND state.incarnation = %(incarnation)s), "
    "of.starts[part.number + 1], 0)) FROM {schema}.lanes_subscriptions AS of WHERE of.log = %(log)s "
    "AND of.name <> ALL (%(without)s::text[])) END AS below, "
    "(SELECT max(position) FROM {schema}.lanes_log_entries WHERE log = %(log)s AND partition = part.number) AS last, "
    "(SELECT min(entry.position) FROM {schema}.lanes_log_entries AS entry JOIN {schema}.lanes_log_messages AS message "
    "USING (batch) WHERE entry.log = %(log)s AND entry.partition = part.number "
    "AND message.time >= clock_timestamp() - make_interval(secs => %(age)s)) AS young "
    "FROM generate_series(0, %(partitions)s - 1) AS part (number)), "
    "doomed AS (SELECT entry.partition, entry.position, entry.batch FROM {schema}.lanes_log_entries AS entry "
    "JOIN limits USING (partition) WHERE entry.log = %(log)s AND entry.position + entry.run <= limits.below "
    "AND entry.position < limits.last AND entry.position < coalesce(limits.young, limits.last) "
    "ORDER BY entry.partition, entry.position LIMIT %(most)s), "
    "entries AS (DELETE FROM {schema}.lanes_log_entries AS entry USING doomed WHERE entry.log = %(log)s "
    "AND entry.partition = doomed.partition AND entry.position = doomed.position RETURNING 1), "
    + _DELETED
    + "SELECT (SELECT count(*) FROM entries), (SELECT count(*) FROM messages)"
)


async def trim(
    connection: AsyncConnection[Any], schema: str, log: str, *, age: float, force: bool, without: Sequence[str] = ()
) -> int:
    """Delete the messages of a log that are older than ``age`` seconds and that all subscriptions have finished.

    Each transaction deletes at most 5,000 batches, the oldest first. The deletions of committed transactions remain
    after a cancellation. The call keeps the last batch of each partition. With ``force``, the call also deletes
    unfinished messages. The call also deletes messages that only the subscriptions in ``without`` have not finished.

    Returns the number of deleted messages. Raises ``ConfigError`` if the log or a named subscription does not exist.
    Without ``force``, the call also raises ``ConfigError`` if ``without`` contains every subscription of the log. The
    call also refuses another subscription that stores its positions outside the log's schema.
    """
    # Some committed messages may not have a position yet.
    while await perform_async(connection, sequencing(schema), "trim"):
        pass
    cursor = AsyncCursor(connection, row_factory=tuple_row)
    found = await (await cursor.execute(compose(_FIND, schema), (log,))).fetchone()
    if found is None:
        meant = await perform_async(connection, similar_log(schema, log), "trim")
        raise ConfigError(f"the schema {schema!a} has no log {log!a}{meant}; correct --log or --schema")
    facts = LogFacts(*found)
    number, partitions, incarnation = facts[:3]
    query = _TRIM
    if facts.relation is not None:
        # The user deletes the rows of a user's table.
        tables = LogTables(schema, number, partitions, facts.messages)
        query = tables.of_messages(_TRIM.replace(_DELETED, "messages AS (SELECT FROM doomed) "))
    wanted = {
        "log": number,
        "name": log,
        "incarnation": incarnation,
        "partitions": partitions,
        "age": age,
        "force": force,
        "without": list(without),
        "most": BATCHES,
    }
    deleted = 0
    while True:
        async with connection.transaction():
            await cursor.execute(compose(_LOCK, schema))
            row = await (await cursor.execute(compose(_SUBSCRIPTIONS, schema), wanted)).fetchone()
            names, own = row or (None, None)
            others = set(names or ())
            for name in without:
                if name not in others:
                    raise ConfigError(
                        f"log {log!a} has no subscription {name!a}{did_you_mean(name, others)}; run `lanes postgres "
                        "subscriptions list`, and correct --without"
                    )
            if not others.difference(without) and not force:
                other = "other subscription" if without else "subscription"
                raise ConfigError(
                    f"log {log!a} has no {other}, so no message is finished; start a consumer first, or add --force"
                )
            if own is not None and not force:
                raise ConfigError(
                    f"subscription {own!a} of log {log!a} has its positions in a store of its own, so its finished "
                    "messages are unknown. Add --without with its name, and --older-than for the messages to keep"
                )
            batches, messages = await (await cursor.execute(compose(query, schema), wanted)).fetchone() or (0, 0)
        deleted += int(messages)
        if not batches:
            return deleted
