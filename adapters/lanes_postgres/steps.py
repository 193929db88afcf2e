"""Steps: what is asked of the database, as generators without I/O, and what performs them over a connection.

A generator yields a ``Statement`` and gets the first row that came back, or None.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, LiteralString, NamedTuple, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, sql
from psycopg.rows import tuple_row

from lanes_postgres.errors import mapped

Result = TypeVar("Result")

Found = tuple[Any, ...] | None
"""The first row that came back, or None."""


class Statement(NamedTuple):
    """A query and what to run it with. Without parameters it is run as it is, and may be several statements."""

    query: bytes
    parameters: Sequence[object] | None = None


Steps = Generator[Statement, Found, Result]


def compose(text: LiteralString, schema: str) -> bytes:
    """The query with the quoted name of the schema in the place of ``{schema}``; to be run with parameters."""
    # Doubled, a sign that begins placeholders is one of the name.
    return sql.SQL(text).format(schema=sql.Identifier(schema.replace("%", "%%"))).as_bytes(None)


def perform(connection: Connection[Any], steps: Steps[Result], where: str) -> Result:
    """Perform them in the transaction that is open. Blocks. Raises errors of ``lanes`` in the place of the client's."""
    try:
        # A cursor of its own: the user's may return other rows, or want other placeholders.
        cursor = Cursor(connection, row_factory=tuple_row)
        statement = next(steps)
        while True:
            cursor.execute(*statement)
            statement = steps.send(cursor.fetchone() if _has_rows(cursor) else None)
    except StopIteration as end:
        result: Result = end.value
        return result
    except psycopg.Error as error:
        raise mapped(where, error) from error


async def perform_async(connection: AsyncConnection[Any], steps: Steps[Result], where: str) -> Result:
    """The same without blocking. Cancelled, it leaves the transaction to be rolled back."""
    try:
        cursor = AsyncCursor(connection, row_factory=tuple_row)
        statement = next(steps)
        while True:
            await cursor.execute(*statement)
            statement = steps.send(await cursor.fetchone() if _has_rows(cursor) else None)
    except StopIteration as end:
        result: Result = end.value
        return result
    except psycopg.Error as error:
        raise mapped(where, error) from error


def _has_rows(cursor: Cursor[tuple[Any, ...]] | AsyncCursor[tuple[Any, ...]]) -> bool:
    # `cursor.description` would say it too, and make an object of every column.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0
