"""Creates and updates the tables by the numbered SQL files of this package."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from importlib.resources import files
from typing import Any, Final, LiteralString, NamedTuple, overload

from blake3 import blake3
from psycopg import AsyncConnection, Connection

from lanes.errors import ConfigError
from lanes_postgres.names import SCHEMA, check_schema_name
from lanes_postgres.steps import Statement, Steps, compose
from lanes_postgres.transactions import alone

# A snapshot of the whole transaction would miss tables that another transaction created during the wait for the lock.
_READ_COMMITTED: Final[LiteralString] = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_LOCK: Final[LiteralString] = "SELECT pg_advisory_xact_lock(%s::bigint)"
_IS_THERE: Final[LiteralString] = (
    "SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL, "
    "to_regclass(quote_ident(%s) || '.lanes_migrations') IS NOT NULL"
)
_CREATE_SCHEMA: Final[LiteralString] = "CREATE SCHEMA {schema}"
_SEARCH_PATH: Final[LiteralString] = "SET LOCAL search_path TO {schema}"
_CREATE_TABLE: Final[LiteralString] = (
    "CREATE TABLE {schema}.lanes_migrations (version integer PRIMARY KEY, name text NOT NULL, "
    "applied timestamptz NOT NULL DEFAULT now())"
)
_VERSION: Final[LiteralString] = "SELECT max(version) FROM {schema}.lanes_migrations"
# A transaction of a user may lock the tables in any order. Each attempt is shorter than deadlock_timeout (1 s). It
# therefore ends a deadlock before the server aborts the user's transaction, and before other waiting transactions wait
# long. One time limit applies to all tables, because an attempt keeps its first lock until its end.
_LOCK_TABLES: Final[LiteralString] = """DO $do$
DECLARE
    begun CONSTANT timestamptz := clock_timestamp();
    former CONSTANT text := current_setting('lock_timeout');
    tables text[];
    place text;
    try_end timestamptz;
    milliseconds integer;
BEGIN
    SELECT array_agg(format('%I.%I', current_schema(), relname) ORDER BY relname) INTO tables FROM pg_class
        WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r' AND relname LIKE 'lanes\\_%'
        AND relname <> 'lanes_migrations';
    LOOP
        BEGIN
            try_end := clock_timestamp() + interval '300 ms';
            FOREACH place IN ARRAY tables LOOP
                milliseconds := ceil(1000 * extract(epoch FROM try_end - clock_timestamp()));
                IF milliseconds <= 0 THEN
                    RAISE lock_not_available;
                END IF;
                PERFORM set_config('lock_timeout', milliseconds::text, true);
                EXECUTE 'LOCK TABLE ' || place || ' IN ACCESS EXCLUSIVE MODE';
            END LOOP;
            PERFORM set_config('lock_timeout', former, true);
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF clock_timestamp() > begun + interval '60 s' THEN
                RAISE EXCEPTION 'other transactions have used the tables for 60 s; end them, and migrate again'
                    USING ERRCODE = 'lock_not_available';
            END IF;
            PERFORM pg_sleep(0.1 + 0.3 * random());
        END;
    END LOOP;
END
$do$"""
_APPLIED: Final[LiteralString] = "INSERT INTO {schema}.lanes_migrations (version, name) VALUES (%s, %s)"


class Migration(NamedTuple):
    """One SQL file. The file ``0001_positions.sql`` has the version 1 and the name ``positions``."""

    version: int
    name: str
    text: bytes


@overload
def migrate(connection: AsyncConnection[Any], *, schema: str = SCHEMA) -> Awaitable[list[str]]: ...


@overload
def migrate(connection: Connection[Any], *, schema: str = SCHEMA) -> list[str]: ...


def migrate(
    connection: AsyncConnection[Any] | Connection[Any], *, schema: str = SCHEMA
) -> Awaitable[list[str]] | list[str]:
    """Create the tables, or update them to this version of ``lanes``.

    The call runs in one transaction. If several calls run at once, one call migrates and the other calls wait. An
    update of existing tables waits up to 60 s for other transactions on the tables, and never aborts these
    transactions. Idempotent. The user of the connection needs the right to create the tables, and a missing schema.
    ``Positions`` does not need this right.

    Args:
        connection: A psycopg connection, blocking or asynchronous, that is in no transaction.
        schema: Schema of the tables. The call creates a missing schema.

    Returns:
        Names of the applied migrations; awaitable for an asynchronous connection.

    Raises:
        ConfigError: A newer version of ``lanes`` created the tables, or a table or permission is missing.
        SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
    """
    check_schema_name(schema)
    return alone(connection, _migrating(schema, migrations()), f"migrations of the schema {schema!r}", "migrate")


@overload
def check_schema(connection: AsyncConnection[Any], *, schema: str = SCHEMA) -> Awaitable[None]: ...


@overload
def check_schema(connection: Connection[Any], *, schema: str = SCHEMA) -> None: ...


def check_schema(connection: AsyncConnection[Any] | Connection[Any], *, schema: str = SCHEMA) -> Awaitable[None] | None:
    """Raise ``ConfigError`` unless the tables exist and have the version of this ``lanes``. Changes nothing.

    Call this function at the start of a service whose database user has no right to call ``migrate``.

    Args:
        connection: A psycopg connection, blocking or asynchronous, that is in no transaction.
        schema: Schema of the tables.

    Returns:
        Nothing; awaitable for an asynchronous connection.

    Raises:
        ConfigError: The tables are missing, or their version differs from the version that this ``lanes`` needs.
        SourceError: The database did not answer or refused a statement; retryable if a later call may succeed.
    """
    check_schema_name(schema)
    return alone(connection, _checking(schema, migrations()), f"version of the schema {schema!r}", "check_schema")


def migrations() -> Sequence[Migration]:
    """Return all migrations in order of version. The versions begin at 1 and have no gaps."""
    found = []
    for file in files("lanes_postgres").joinpath("migrations").iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        found.append(Migration(int(number), name, file.read_bytes()))
    return sorted(found)


def _migrating(schema: str, known: Sequence[Migration]) -> Steps[list[str]]:
    yield Statement(compose(_READ_COMMITTED, schema), ())
    number = int.from_bytes(blake3(f"lanes_postgres.migrate {schema}".encode()).digest(length=8), "big", signed=True)
    yield Statement(compose(_LOCK, schema), (number,))
    there = yield Statement(compose(_IS_THERE, schema), (schema, schema))
    has_schema, has_table = there or (False, False)
    if not has_schema:
        yield Statement(compose(_CREATE_SCHEMA, schema), ())
    if not has_table:
        yield Statement(compose(_CREATE_TABLE, schema), ())
    version = yield from _version(schema)
    _refuse_newer(schema, version, known)
    yield Statement(compose(_SEARCH_PATH, schema), ())
    missing = known[version:]
    if version and missing:
        yield Statement(_LOCK_TABLES.encode())
    for migration in missing:
        yield Statement(migration.text)
        yield Statement(compose(_APPLIED, schema), (migration.version, migration.name))
    return [migration.name for migration in missing]


def _checking(schema: str, known: Sequence[Migration]) -> Steps[None]:
    there = yield Statement(compose(_IS_THERE, schema), (schema, schema))
    if there is None or not there[1]:
        raise ConfigError(f"the schema {schema!r} has no tables of lanes; run lanes_postgres.migrate for this schema")
    version = yield from _version(schema)
    _refuse_newer(schema, version, known)
    if version < len(known):
        raise ConfigError(
            f"the tables of lanes in the schema {schema!r} have version {version}, and this lanes needs "
            f"{len(known)}; run lanes_postgres.migrate"
        )


def _version(schema: str) -> Steps[int]:
    found = yield Statement(compose(_VERSION, schema), ())
    return 0 if found is None else found[0] or 0


def _refuse_newer(schema: str, version: int, known: Sequence[Migration]) -> None:
    if version > len(known):
        raise ConfigError(
            f"the tables of lanes in the schema {schema!r} have version {version} of a newer lanes, and this lanes "
            f"supports {len(known)}; upgrade lanes-runtime, or use another schema"
        )
