"""Defines database steps as generators without I/O, and performs the steps on a connection.

A generator yields a ``Statement``, and receives the first row of the result or None.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, LiteralString, NamedTuple, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, sql
from psycopg.rows import tuple_row

from lanes_postgres.errors import lanes_error

Result = TypeVar("Result")

Found = tuple[Any, ...] | None
"""The first row of a result; None = the result has no row."""


class Statement(NamedTuple):
    """A query and its parameters. A query without parameters may contain several statements."""

    query: bytes
    parameters: Sequence[object] | None = None


Steps = Generator[Statement, Found, Result]


def compose(text: LiteralString, schema: str) -> bytes:
    """Replace ``{schema}`` in a query by the quoted schema name. The result is for an execution with parameters."""
    # A doubled % is a literal % of the name. A single % would begin a placeholder.
    return sql.SQL(text).format(schema=sql.Identifier(schema.replace("%", "%%"))).as_bytes(None)


def compose_names(text: LiteralString, schema: str) -> bytes:
    """Replace ``{schema}`` like ``compose``, also inside literals that contain a name, such as ``'{schema}.table'``."""
    quoted = compose("{schema}", schema)
    # A doubled quote in a literal is a single quote.
    return compose(text, schema).replace(b"'" + quoted, b"'" + quoted.replace(b"'", b"''"))


def perform(connection: Connection[Any], steps: Steps[Result], where: str) -> Result:
    """Perform the steps in the open transaction. Blocks. Raises errors of ``lanes`` instead of psycopg errors."""
    try:
        # Use a plain cursor, because the user's cursor class may return other rows or need other placeholders.
        cursor = Cursor(connection, row_factory=tuple_row)
        statement = next(steps)
        while True:
            cursor.execute(*statement)
            statement = steps.send(cursor.fetchone() if _has_rows(cursor) else None)
    except StopIteration as end:
        result: Result = end.value
        return result
    except psycopg.Error as error:
        raise lanes_error(where, error) from error


async def perform_async(connection: AsyncConnection[Any], steps: Steps[Result], where: str) -> Result:
    """Perform the steps like ``perform``, without blocking. After a cancellation the caller must roll back."""
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
        raise lanes_error(where, error) from error


def _has_rows(cursor: Cursor[tuple[Any, ...]] | AsyncCursor[tuple[Any, ...]]) -> bool:
    # The attribute `cursor.description` would create an object for every column.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0
