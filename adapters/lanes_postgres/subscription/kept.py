"""Raises an alarm if a log keeps too many messages for its slowest subscription. Needs asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from psycopg import AsyncConnection
from psycopg.rows import tuple_row

from lanes.clock import monotonic
from lanes.dead_letter import described, printable
from lanes.source import KeptLog
from lanes_postgres.log.reading import LogTables
from lanes_postgres.steps import compose, compose_names

log = logging.getLogger("lanes.postgres")

LIMIT: Final = 1 << 30
"""Default number of kept bytes above which the source raises the alarm."""

_EVERY: Final = 10.0
"""Seconds between two checks of the kept bytes."""

_READ_FOR: Final = 5.0
"""Seconds allowed for a read of the positions from the store of the user."""

# A partition without a state begins at its start. The log does not keep messages that a trim has deleted. Only the
# members of a subscription know its positions in a store of the user, so the members pass these positions.
_LAGS: Final[LiteralString] = (
    "WITH parts AS MATERIALIZED (SELECT number, coalesce((SELECT position FROM {schema}.lanes_log_entries "
    "WHERE log = %(log)s AND partition = number ORDER BY position LIMIT 1), 0) AS first, "
    "coalesce((SELECT position + run FROM {schema}.lanes_log_entries WHERE log = %(log)s AND partition = number "
    "ORDER BY position DESC LIMIT 1), 0) AS next FROM generate_series(0, %(partitions)s - 1) AS number) "
    "SELECT of.name, sum(greatest(0, next - greatest(first, coalesce(CASE WHEN of.own_states "
    "THEN (%(floors)s::bigint[])[number + 1] ELSE coalesce((SELECT min(piece.floor) "
    "FROM {schema}.lanes_ring_pieces AS piece WHERE piece.log = of.log AND piece.subscription = of.name "
    "AND piece.partition = number), state.floor) END, of.starts[number + 1], 0))))::bigint "
    "FROM {schema}.lanes_subscriptions AS of CROSS JOIN parts LEFT JOIN {schema}.lanes_states AS state "
    "ON state.subscription = of.name AND state.source = %(name)s AND state.partition = number "
    "AND state.incarnation = %(incarnation)s WHERE of.log = %(log)s "
    "AND (NOT of.own_states OR of.name = %(subscription)s) GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1"
)
# A sample of 64 pages has the same cost for any size of the table. The server finds the size of a value without reading
# it.
_SIZE: Final[LiteralString] = (
    "WITH sizes AS (SELECT log, 64 + pg_column_size(value) + coalesce(pg_column_size(key), 0) "
    "+ coalesce(pg_column_size(headers), 0) + pg_column_size(subject) AS bytes "
    "FROM {schema}.lanes_log_messages TABLESAMPLE SYSTEM "
    "(least(100, 100.0 * 64 * 8192 / greatest(1, pg_relation_size('{schema}.lanes_log_messages'))))) "
    "SELECT coalesce(avg(bytes) FILTER (WHERE log = %(log)s), avg(bytes), 0)::float FROM sizes"
)


# PostgreSQL cannot sample a view.
_SIZE_OVER: Final[LiteralString] = (
    "SELECT coalesce(avg(64 + length(value)), 0)::float FROM (SELECT value FROM {schema}.lanes_log_messages LIMIT 100) "
    "AS found"
)


@dataclass(eq=False, kw_only=True)
class KeptWatch:
    """Reads the kept bytes of a log every 10 s, and raises an alarm each time the bytes rise above the limit.

    Attributes:
        tables: Object that reads the log.
        log_name: Name of the log.
        incarnation: Identity of the log.
        name: Name of the source, for log lines.
        limit: Number of bytes above which the watch raises the alarm.
        subscription: Name of the subscription of this member.
        floors: Function that reads the position of each partition in the store of the user; None = the positions are in
            the schema of the log.
        kept: Result of the last check; ``None`` = no check yet.
    """

    tables: LogTables
    log_name: str
    incarnation: str
    name: str
    limit: int
    subscription: str
    floors: Callable[[], Awaitable[Sequence[int]]] | None = None
    kept: KeptLog | None = None

    def __post_init__(self) -> None:
        self._looked_at = -math.inf
        self._raised = False
        self._reading: asyncio.Task[Sequence[int] | None] | None = None
        self._failed = False

    async def look(self, connection: AsyncConnection[Any]) -> None:
        """Check the kept bytes if the next check is due.

        Never waits for the store of the user. Raises the errors of psycopg.
        """
        positions: Sequence[int] | None = []
        if self._reading is not None:
            if not self._reading.done():
                return
            positions = None if self._reading.cancelled() else self._reading.result()
            self._reading = None
        else:
            now = monotonic()
            if now < self._looked_at + _EVERY:
                return
            self._looked_at = now
            if self.floors is not None:
                # A later check uses the positions, so that a slow store does not delay messages.
                self._reading = asyncio.create_task(self._read(self.floors))
                return
        if positions is not None:
            await self._count(connection, positions)

    async def aclose(self) -> None:
        """End a read of the store of the user. Idempotent."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    async def _read(self, floors: Callable[[], Awaitable[Sequence[int]]]) -> Sequence[int] | None:
        """Return the positions in the store of the user; None = the read failed. Logs only the first failure."""
        try:
            async with asyncio.timeout(_READ_FOR):
                positions = await floors()
        except Exception as error:
            if not self._failed:
                log.warning(
                    "%s: a read of the store states= failed, so the source does not count the kept bytes of log %s; "
                    "check the store: %s",
                    self.name,
                    self.log_name,
                    described(error),
                )
            self._failed = True
            return None
        self._failed = False
        return positions

    async def _count(self, connection: AsyncConnection[Any], positions: Sequence[int]) -> None:
        wanted = {
            "log": self.tables.log,
            "partitions": self.tables.partitions,
            "name": self.log_name,
            "incarnation": self.incarnation,
            "subscription": self.subscription,
            "floors": list(positions),
        }
        async with connection.cursor(row_factory=tuple_row) as cursor:
            slowest = await (await cursor.execute(compose(_LAGS, self.tables.schema), wanted)).fetchone()
            if slowest is None:
                # An operator has dropped the subscription, and the log has no other subscription with known positions.
                return
            subscription, messages = slowest
            query = _SIZE if self.tables.own else self.tables.of_messages(_SIZE_OVER)
            size = await (await cursor.execute(compose_names(query, self.tables.schema), wanted)).fetchone()
        assert size is not None, "an aggregate returns a row"
        self.kept = KeptLog(self.log_name, subscription, messages, round(messages * size[0]), self.limit)
        passed = self.kept.bytes > self.limit
        if passed and not self._raised:
            log.error("%s: %s", self.name, self.finding())
        elif self._raised and not passed:
            log.info("%s: log %s keeps less than %d bytes again", self.name, self.log_name, self.limit)
        self._raised = passed

    def finding(self) -> str:
        """Return the text of the alarm; "" = the kept bytes are below the limit."""
        kept = self.kept
        if kept is None or kept.bytes <= kept.limit:
            return ""
        words = [kept.subscription, "--log", kept.log]
        if kept.subscription.startswith("-"):
            words = ["--log", kept.log, "--", kept.subscription]
        return (
            f"log {kept.log!a} keeps about {kept.bytes:,} bytes ({kept.messages:,} messages) for its slowest "
            f"subscription {kept.subscription!a}, above kept_limit={kept.limit:,}; start more of its consumers. If "
            f"the subscription is unused, run `lanes postgres subscriptions drop {printable(shlex.join(words))}`"
        )
