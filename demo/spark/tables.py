"""The tables of a run, in their own schema: the effects of the handler, and the log.

``effects`` has a row for each effect. Case and step are not a unique key, so an effect that the fence admits twice has
two rows. ``cases`` has the state of each case. ``refused`` has the refusals of the fence. A refusal is a *repeat* if
the step already has its effect. A repeat is harmless, because delivery is at least once. Any other refusal is an *order
violation*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, LiteralString

import psycopg
from psycopg import AsyncConnection, Connection, sql

from demo.errors import DemoError
from demo.ledger import Step
from lanes.core.types import Message
from lanes_postgres import Positions, migrate

_TABLES: Final[LiteralString] = """
CREATE TABLE {schema}.effects (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    case_id text NOT NULL, step int NOT NULL, partition int NOT NULL, position bigint NOT NULL
);
CREATE INDEX effects_by_step ON {schema}.effects (case_id, step);
CREATE TABLE {schema}.cases (case_id text PRIMARY KEY, step int NOT NULL, steps int NOT NULL);
CREATE TABLE {schema}.refused (case_id text NOT NULL, step int NOT NULL, verdict text NOT NULL);
CREATE TABLE {schema}.published (case_id text NOT NULL, step int NOT NULL, PRIMARY KEY (case_id, step));
CREATE TABLE {schema}.dead_letters (case_id text NOT NULL, step int NOT NULL);
"""
_APPLY: Final[LiteralString] = (
    "WITH effect AS (INSERT INTO {schema}.effects (case_id, step, partition, position) VALUES (%s, %s, %s, %s) "
    "RETURNING case_id, step) INSERT INTO {schema}.cases AS old SELECT case_id, step, 1 FROM effect "
    "ON CONFLICT (case_id) DO UPDATE SET step = excluded.step, steps = old.steps + 1"
)
_REFUSE: Final[LiteralString] = (
    "INSERT INTO {schema}.refused SELECT %s, %s, CASE WHEN EXISTS "
    "(SELECT 1 FROM {schema}.effects WHERE case_id = %s AND step = %s) THEN 'repeat' ELSE 'violation' END"
)
_STORED: Final[LiteralString] = "SELECT coalesce(max(id), 0) FROM {schema}.effects"
_DROP: Final[LiteralString] = "DROP SCHEMA {schema} CASCADE"

_CONNECT_SECONDS: Final = 10
_DROP_SECONDS: Final = 10
"""Maximum seconds to wait for the transaction of a killed worker before the call drops the tables."""


class Tables:
    """The tables in the schema ``schema``, on the server at ``url``.

    The methods ``make``, ``add_letters``, ``drop`` and ``connected`` block. All methods except ``query``, ``drop`` and
    ``put`` raise ``DemoError`` if the server is unreachable or refuses a request.
    """

    def __init__(self, url: str, schema: str) -> None:
        self.schema = schema
        self._url = url
        self._positions = Positions(schema, schema=schema)
        self.put_query, self._refuse = self.query(_APPLY), self.query(_REFUSE)

    def __repr__(self) -> str:
        return f"<Tables in {self.schema!r}>"

    def query(self, text: LiteralString) -> sql.Composed:
        """Return the SQL text with the schema's name filled in."""
        return sql.SQL(text).format(schema=sql.Identifier(self.schema))

    def make(self, published: Iterable[Step]) -> None:
        """Create the schema and its tables, and store the log."""
        with self.connected() as connection:
            migrate(connection, schema=self.schema)
            connection.execute(self.query(_TABLES))
            self._copy(connection, "published", published)

    def add_letters(self, letters: Iterable[Step]) -> None:
        """Store the steps of the dead letters."""
        with self.connected() as connection:
            self._copy(connection, "dead_letters", letters)

    def drop(self) -> bool:
        """Remove the schema, and return whether the removal succeeded. Idempotent."""
        try:
            with psycopg.connect(self._url, connect_timeout=_CONNECT_SECONDS) as connection:
                connection.execute("SELECT set_config('lock_timeout', %s, false)", (f"{_DROP_SECONDS}s",))
                connection.execute(self.query(_DROP))
        except psycopg.errors.InvalidSchemaName:
            return True
        except psycopg.Error:
            return False
        return True

    @contextmanager
    def connected(self) -> Iterator[Connection[tuple[Any, ...]]]:
        """Yield a connection, which commits at the end of the block."""
        with _mapped(), psycopg.connect(self._url, connect_timeout=_CONNECT_SECONDS) as connection:
            yield connection

    async def connect(self) -> AsyncConnection[tuple[Any, ...]]:
        """Open a connection for ``stored``. The caller closes the connection."""
        with _mapped():
            return await AsyncConnection.connect(self._url, autocommit=True, connect_timeout=_CONNECT_SECONDS)

    def _copy(self, connection: Connection[Any], table: str, steps: Iterable[Step]) -> None:
        text = sql.SQL("COPY {} (case_id, step) FROM STDIN").format(sql.Identifier(self.schema, table))
        with connection.cursor().copy(text) as rows:
            for step in steps:
                rows.write_row(step)

    async def stored(self, connection: AsyncConnection[Any]) -> int:
        """Return the number of effects, or slightly more, because a rolled-back transaction also takes a number."""
        with _mapped():
            found = await (await connection.execute(self.query(_STORED))).fetchone()
        return int(found[0]) if found is not None else 0

    async def put(self, connection: AsyncConnection[Any], message: Message, step: Step) -> bool:
        """Store the effect and the position of a message in one transaction. Return False for a refused position."""
        async with self._positions.once(connection, message) as fresh:
            if fresh:
                place = (message.partition.id.number, message.position)
                await connection.execute(self.put_query, (*step, *place))
            else:
                await connection.execute(self._refuse, (*step, *step))
        return fresh


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        # The first line of the client's error names host and port, but no password.
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DemoError(f"PostgreSQL: {first}: start the server, see its log, or correct --postgres") from None
