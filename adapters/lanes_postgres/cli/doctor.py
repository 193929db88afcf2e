"""Checks of a PostgreSQL server before a consumer uses it. No call changes the server."""

from __future__ import annotations

import secrets
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from lanes.arguments import did_you_mean
from lanes.cli.doctor import Check
from lanes.errors import ConfigError, LanesError
from lanes_postgres.address import place_of
from lanes_postgres.advisory_locks import AdvisoryLocks
from lanes_postgres.cli.subscriptions import LIVE
from lanes_postgres.errors import lanes_error, not_connected
from lanes_postgres.log.appending import LogFacts
from lanes_postgres.log.trigger import TRIGGER, Fault, checking, upkeep
from lanes_postgres.migrations import check_schema
from lanes_postgres.steps import compose, perform_async

_TIMEOUT: Final = 5
"""Seconds allowed for a connection, unless the connection string sets another time."""

_LEASE: Final = 10.0

_FEW: Final = 10
"""Number of free connections below which the doctor reports a shortage."""

_READ: Final = ("lanes_logs", "lanes_subscriptions", "lanes_subscription_members")
"""Tables that the checks of a log and a subscription read."""

_RIGHTS: Final = ("SELECT", "INSERT", "UPDATE", "DELETE")

_SERVER: Final[LiteralString] = (
    "SELECT current_setting('server_version'), current_user::text, current_database()::text, pg_is_in_recovery(), "
    "current_setting('transaction_read_only') = 'on', current_setting('synchronous_commit'), "
    "current_setting('idle_session_timeout', true)"
)
_CONNECTIONS: Final[LiteralString] = (
    "SELECT current_setting('max_connections')::int, current_setting('superuser_reserved_connections')::int "
    "+ coalesce(current_setting('reserved_connections', true), '0')::int, "
    # The server hides the type of a process from other users, but shows its database.
    "(SELECT count(*) FROM pg_stat_activity WHERE datid IS NOT NULL)::int"
)
# The query returns the missing rights of each table, of the sequence of the batches, of the views of ``Log.over`` and
# of the functions.
_OBJECTS: Final[LiteralString] = (
    "WITH found AS (SELECT class.oid, relname::text AS name, relkind FROM pg_class AS class "
    "JOIN pg_namespace AS schema ON schema.oid = relnamespace "
    "WHERE nspname = %(schema)s AND relname LIKE 'lanes\\_%%' AND relname <> 'lanes_migrations') "
    "SELECT 1 AS turn, name, ARRAY(SELECT each FROM unnest(%(rights)s::text[]) AS each "
    "WHERE NOT has_table_privilege(oid, each)) FROM found WHERE relkind = 'r' "
    "UNION ALL SELECT 2, name, CASE WHEN has_sequence_privilege(oid, 'USAGE') THEN '{}' ELSE '{USAGE}' END::text[] "
    "FROM found WHERE relkind = 'S' AND name = 'lanes_log_batches' "
    "UNION ALL SELECT 3, name, CASE WHEN has_table_privilege(oid, 'SELECT') THEN '{}' ELSE '{SELECT}' END::text[] "
    "FROM found WHERE relkind = 'v' "
    "UNION ALL SELECT 4, proname::text, CASE WHEN has_function_privilege(function.oid, 'EXECUTE') THEN '{}' "
    "ELSE '{EXECUTE}' END::text[] FROM pg_proc AS function JOIN pg_namespace AS schema ON schema.oid = pronamespace "
    "WHERE nspname = %(schema)s AND proname IN ('lanes_log_look', 'lanes_log_sequence', 'lanes_log_visit') "
    "ORDER BY 1, 2"
)
_OVER: Final[LiteralString] = (
    "SELECT id, partitions, incarnation, relation FROM {schema}.lanes_logs WHERE relation IS NOT NULL ORDER BY name"
)
_LOGS: Final[LiteralString] = "SELECT id, name, partitions FROM {schema}.lanes_logs ORDER BY name"
_SUBSCRIPTIONS: Final[LiteralString] = (
    "SELECT name, start, (SELECT count(*) FROM {schema}.lanes_subscription_members AS member WHERE member.log = of.log "
    "AND member.subscription = of.name AND seen > clock_timestamp() - make_interval(secs => %s)) "
    "FROM {schema}.lanes_subscriptions AS of WHERE log = %s ORDER BY name"
)
_USAGE: Final[LiteralString] = "SELECT has_schema_privilege(%s, 'USAGE')"


_SHOWN: Final = 5
"""Maximum number of logs or subscriptions to show."""


async def examine(dsn: str, schema: str, log: str = "", subscription: str = "") -> list[Check]:
    """Check the server, the tables, the logs and the locks. If no connection is possible, no later check runs.

    Args:
        dsn: Connection string.
        schema: Schema of the tables.
        log: Name of the log to check; "" = list the logs.
        subscription: Name of a subscription of the log to check; "" = list the subscriptions of the log.

    Returns:
        The results.
    """
    options: dict[str, Any] = {} if "connect_timeout" in conninfo_to_dict(dsn) else {"connect_timeout": _TIMEOUT}
    try:
        connection = await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None, **options)
    except psycopg.Error as error:
        text, _, remedy = str(not_connected(error, f"connection at {place_of(dsn)}")).partition("; ")
        return [Check("server", False, text, remedy or "start the server, or correct --dsn")]
    async with connection:
        doctor = _Doctor(connection, schema, log, subscription)
        try:
            checks = await doctor.server()
            checks.append(await doctor.connections())
            checks += await doctor.tables()
        except psycopg.Error as error:
            return [Check("server", False, str(lanes_error("questions", error)), "see the log of the server")]
    checks.append(await _locks(dsn))
    return checks


class _Doctor:
    def __init__(self, connection: AsyncConnection[Any], schema: str, log: str, subscription: str) -> None:
        self._connection = connection
        self._schema = schema
        self._log = log
        self._subscription = subscription

    async def server(self) -> list[Check]:
        version, user, database, standby, read_only, commit, idle = await self._row(_SERVER)
        where = f"PostgreSQL {version}, database {database}, user {user}"
        checks = [Check("server", True, where)]
        if standby:
            checks.append(
                Check(
                    "writes",
                    False,
                    "the server is a standby, which accepts no writes",
                    "connect to the primary (target_session_attrs=read-write)",
                )
            )
        elif read_only:
            checks.append(
                Check("writes", False, "transactions are read-only", "set default_transaction_read_only to off")
            )
        else:
            checks.append(Check("writes", True, "the server is a primary, and transactions may write"))
        if commit == "off":
            checks.append(
                Check(
                    "synchronous_commit",
                    None,
                    "off: the server loses the last commits in a crash",
                    "expect repeated messages after a crash, or set synchronous_commit to on",
                )
            )
        if idle not in (None, "0"):
            checks.append(
                Check(
                    "idle_session_timeout",
                    None,
                    f"{idle} by default: the server ends the idle connections of a pool",
                    "let the pool check its connections, or set idle_session_timeout to 0 for this user",
                )
            )
        return checks

    async def connections(self) -> Check:
        most, reserved, used = await self._row(_CONNECTIONS)
        free = most - reserved - used
        found = f"max_connections={most}, {used} used, {max(0, free)} free for ordinary users"
        if free < _FEW:
            return Check(
                "connections",
                None,
                found,
                ("raise max_connections, because each process needs a pool and one connection for its locks"),
            )
        return Check("connections", True, found)

    async def tables(self) -> list[Check]:
        try:
            await check_schema(self._connection, schema=self._schema)
        except LanesError as error:
            text, _, remedy = str(error).partition("; ")
            return [Check("tables", False, text, remedy)]
        (usage,) = await self._row(_USAGE, self._schema)
        cursor = await self._cursor().execute(_OBJECTS, {"rights": list(_RIGHTS), "schema": self._schema})
        rows = await cursor.fetchall()
        lacking = {name: missing for _, name, missing in rows if missing}
        count = sum(turn == 1 for turn, _, _ in rows)
        checks = [Check("tables", True, f"{count} tables of this version in the schema {self._schema}")]
        if not usage or lacking:
            shown = [f"{name} ({', '.join(missing)})" for name, missing in list(lacking.items())[:4]]
            checks.append(
                Check(
                    "permissions",
                    False,
                    f"missing on {', '.join(shown)}" if usage else f"missing USAGE on the schema {self._schema}",
                    self._grant(),
                )
            )
        else:
            checks.append(Check("permissions", True, f"{', '.join(_RIGHTS)} on every table, and the other rights"))
        if any(name == "lanes_log_messages" for _, name, _ in rows):
            readable = [name for name in _READ if "SELECT" not in lacking.get(name, ())]
            checks.append(await self._trigger(knows_logs="lanes_logs" in readable))
            if usage and len(readable) == len(_READ):
                checks += await self._logs()
        return checks

    async def _logs(self) -> list[Check]:
        """Check the named log and subscription, or list those that exist."""
        cursor = await self._cursor().execute(compose(_LOGS, self._schema))
        logs = {name: (number, partitions) for number, name, partitions in await cursor.fetchall()}
        if not self._log:
            found = _listed([f"{name} ({partitions} partitions)" for name, (_, partitions) in logs.items()])
            hint = "--log NAME and --subscription NAME check one log and its subscription" if logs else ""
            return [Check("logs", True, found or f"no log in the schema {self._schema}", hint)]
        if self._log not in logs:
            return [
                Check(
                    f"log {self._log}",
                    False,
                    f"the schema {self._schema} has no such log{did_you_mean(self._log, logs)}",
                    f"correct --log or --schema, or create the log with lanes_postgres.Log({self._log!r}).create(…)",
                )
            ]
        number, partitions = logs[self._log]
        checks = [Check(f"log {self._log}", True, f"{partitions} partitions")]
        cursor = await self._cursor().execute(compose(_SUBSCRIPTIONS, self._schema), (LIVE, number))
        known = {name: (start, members) for name, start, members in await cursor.fetchall()}
        if not self._subscription:
            hint = "--subscription NAME checks one of them" if known else ""
            checks.append(
                Check("subscriptions", True, _listed(list(known)) or "no consumer has read the log yet", hint)
            )
        elif self._subscription in known:
            start, members = known[self._subscription]
            found = f"began at {start!r}, {members} running members"
            checks.append(Check(f"subscription {self._subscription}", True, found))
        else:
            checks.append(
                Check(
                    f"subscription {self._subscription}",
                    None,
                    f"no consumer has used it yet{did_you_mean(self._subscription, known)}",
                    "correct --subscription, or start the first consumer, which creates the subscription",
                )
            )
        return checks

    async def _trigger(self, *, knows_logs: bool) -> Check:
        facts: list[LogFacts | None] = [None]
        if knows_logs:
            rows = await (await self._cursor().execute(compose(_OVER, self._schema))).fetchall()
            facts += [LogFacts(*row) for row in rows]
        left: list[Fault] = []
        for each in facts:
            try:
                fault = await perform_async(self._connection, checking(self._schema, each), "trigger")
                if fault is None and each is not None:
                    todo = await perform_async(self._connection, upkeep(self._schema, each), "trigger")
                    left += [todo] if todo is not None else []
            except LanesError as error:
                text, _, remedy = str(error).partition("; ")
                return Check("trigger", False, text, remedy or "see the log of the server")
            if fault is not None:
                return Check("trigger", False, fault.text, fault.remedy)
        if left:
            return Check("trigger", None, left[0].text, left[0].remedy)
        if not knows_logs:
            return Check(
                "trigger",
                None,
                "the tables of Log.over are unknown, because this user may not read lanes_logs",
                "grant the missing permissions, and check again",
            )
        return Check("trigger", True, f"{TRIGGER} orders the messages at each COMMIT")

    def _grant(self) -> str:
        schema = sql.Identifier(self._schema).as_string(None)
        return (
            f"GRANT USAGE ON SCHEMA {schema} TO …; GRANT {', '.join(_RIGHTS)} ON ALL TABLES IN SCHEMA {schema} TO …; "
            f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO …; GRANT EXECUTE ON FUNCTION "
            f"{schema}.lanes_log_look, {schema}.lanes_log_sequence, {schema}.lanes_log_visit TO …"
        )

    async def _row(self, query: LiteralString, *parameters: object) -> tuple[Any, ...]:
        cursor = await self._cursor().execute(query, parameters)
        return cast(tuple[Any, ...], await cursor.fetchone())

    def _cursor(self) -> AsyncCursor[tuple[Any, ...]]:
        return AsyncCursor(self._connection, row_factory=tuple_row)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


async def _locks(dsn: str) -> Check:
    """Check that the server grants an advisory lock, and release the lock."""
    locks = AdvisoryLocks(dsn, lease=_LEASE)
    try:
        await locks.open()
        held = await locks.try_acquire(f"lanes doctor {secrets.token_hex(8)}", lambda: None)
        if held is None:
            text = "another session holds the lock of this check"
            return Check("locks", False, text, "look for a program that takes all locks")
        await held.release()
    except LanesError as error:
        text, _, remedy = str(error).partition("; ")
        known = isinstance(error, ConfigError) or bool(remedy)
        return Check("locks", False, text, remedy if known else "see the log of the server")
    finally:
        await locks.aclose()
    return Check("locks", True, "a session of the server can hold advisory locks, and ends when it is idle")
