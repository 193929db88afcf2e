"""Checks of a PostgreSQL server before a consumer uses it. No call changes the server."""

from __future__ import annotations

import secrets
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from lanes.cli.doctor import Check
from lanes.errors import ConfigError, LanesError
from lanes_postgres.address import place_of
from lanes_postgres.advisory_locks import AdvisoryLocks
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
_USAGE: Final[LiteralString] = "SELECT has_schema_privilege(%s, 'USAGE')"


async def examine(dsn: str, schema: str) -> list[Check]:
    """Check the server, the tables and the locks. If no connection is possible, no later check runs."""
    options: dict[str, Any] = {} if "connect_timeout" in conninfo_to_dict(dsn) else {"connect_timeout": _TIMEOUT}
    try:
        connection = await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None, **options)
    except psycopg.Error as error:
        text, _, remedy = str(not_connected(error, f"connection at {place_of(dsn)}")).partition("; ")
        return [Check("server", False, text, remedy or "start the server, or correct --dsn")]
    async with connection:
        doctor = _Doctor(connection, schema)
        try:
            checks = await doctor.server()
            checks.append(await doctor.connections())
            checks += await doctor.tables()
        except psycopg.Error as error:
            return [Check("server", False, str(lanes_error("questions", error)), "see the log of the server")]
    checks.append(await _locks(dsn))
    return checks


class _Doctor:
    def __init__(self, connection: AsyncConnection[Any], schema: str) -> None:
        self._connection = connection
        self._schema = schema

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
                    "off: a crash of the server forgets the last commits",
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
            checks.append(await self._trigger(knows_logs="SELECT" not in lacking.get("lanes_logs", ())))
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


async def _locks(dsn: str) -> Check:
    """Check that the server grants an advisory lock, and release the lock."""
    locks = AdvisoryLocks(dsn, lease=_LEASE)
    try:
        await locks.open()
        held = await locks.try_acquire(f"lanes doctor {secrets.token_hex(8)}", lambda: None)
        if held is None:
            return Check("locks", False, "a new lock is held already", "look for a program that takes all locks")
        await held.release()
    except LanesError as error:
        text, _, remedy = str(error).partition("; ")
        known = isinstance(error, ConfigError) or bool(remedy)
        return Check("locks", False, text, remedy if known else "see the log of the server")
    finally:
        await locks.aclose()
    return Check("locks", True, "a session of the server can hold advisory locks, and ends when it is idle")
