"""Lends connections to a source, from a pool or from its own connections. Needs asyncio."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias, runtime_checkable

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import TransactionStatus

from lanes.errors import ConfigError
from lanes_postgres.address import read_address
from lanes_postgres.connecting import connect

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncConnection[Any]]]


def _is_of_another_kind(source: Any) -> bool:
    """Return whether an object with an attribute ``connection`` is a connection, or a pool of blocking connections."""
    if isinstance(source, psycopg.Connection | AsyncConnection):
        return True
    return inspect.isgeneratorfunction(inspect.unwrap(source.connection))


@runtime_checkable
class Pool(Protocol):
    """A pool of asynchronous connections, such as ``psycopg_pool.AsyncConnectionPool``."""

    def connection(self) -> AbstractAsyncContextManager[AsyncConnection[Any]]:
        """Return a context manager that lends a connection."""


class Connections:
    """Lends connections with autocommit. The object keeps its own idle connections open.

    Args:
        source: An address, such as ``postgresql://user@host/database``, or a pool.
        name: Name of the source, for errors.

    Raises:
        ConfigError: ``source`` is neither an address nor a pool.
    """

    def __init__(self, source: object, name: str) -> None:
        self._address = source if isinstance(source, str) else None
        self._pool = source if isinstance(source, Pool) and not _is_of_another_kind(source) else None
        if self._address is None and self._pool is None:
            # Do not show the value, because the value may contain a password.
            raise ConfigError(
                f"{name}: dsn_or_pool is a {type(source).__name__}; pass an address, such as "
                '"postgresql://user@host/database", or a psycopg_pool.AsyncConnectionPool'
            )
        self._name = name
        self._idle: list[AsyncConnection[Any]] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connections of {self._name}, {len(self._idle)} idle>"

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AsyncConnection[Any]]:
        """Lend a connection. An error or a cancellation during the loan closes the connection.

        Raises the errors of psycopg, and ``SourceError`` if the object cannot open a connection.
        """
        if self._pool is not None:
            async with self._pool.connection() as connection:
                before = connection.autocommit
                if not before:
                    await connection.set_autocommit(True)
                try:
                    yield connection
                finally:
                    if not before and not connection.closed and _is_idle(connection):
                        await connection.set_autocommit(False)
            return
        connection = self._idle.pop() if self._idle else await self._open()
        try:
            yield connection
        except BaseException:
            await connection.close()
            raise
        if self._closed or connection.closed or not _is_idle(connection):
            await connection.close()
        else:
            self._idle.append(connection)

    async def aclose(self) -> None:
        """Close the idle connections that the object opened. The connections of a pool stay open. Idempotent."""
        self._closed = True
        while self._idle:
            await self._idle.pop().close()

    async def _open(self) -> AsyncConnection[Any]:
        assert self._address is not None, "a pool lends its own connections"
        return await connect(self._address, self._name)

    def check_address(self) -> None:
        """Raise ``ConfigError`` for an address that psycopg cannot read."""
        if self._address is not None:
            read_address(self._name, self._address)


def _is_idle(connection: AsyncConnection[Any]) -> bool:
    return TransactionStatus(connection.pgconn.transaction_status) == TransactionStatus.IDLE
