"""Checks the transaction of a blocking or asynchronous connection, and makes blocks that commit at their end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, TypeAlias

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import PipelineStatus, TransactionStatus

from lanes.arguments import without_own_frames
from lanes.errors import ConfigError
from lanes_postgres.errors import lanes_error
from lanes_postgres.steps import Result, Steps, perform, perform_async

Either: TypeAlias = AsyncConnection[Any] | Connection[Any]
Block: TypeAlias = AbstractAsyncContextManager[Result] | AbstractContextManager[Result]

_IDLE: Final = TransactionStatus.IDLE


def inside(
    connection: Either, steps: Steps[Result], where: str, call: str, otherwise: str = ""
) -> Awaitable[Result] | Result:
    """Perform the steps in the caller's transaction.

    Args:
        connection: The connection of the caller.
        steps: The steps, which yield the statements.
        where: Subject of error texts.
        call: Public name of the method, such as ``Log.append``.
        otherwise: Name of the method that begins its own transaction, for errors; "" = no such method.

    Returns:
        The result of the steps; awaitable for an asynchronous connection.

    Raises:
        ConfigError: The steps and the caller's statements would not be one transaction.
    """
    if isinstance(connection, AsyncConnection):
        return _named(_inside_async(connection, steps, where, call, otherwise), call)
    try:
        blocking = _blocking(connection)
        _check_open(blocking, where, call, otherwise)
        return perform(blocking, steps, where)
    except ConfigError as error:
        refusal = without_own_frames(error)
    raise refusal


async def _inside_async(
    connection: AsyncConnection[Any], steps: Steps[Result], where: str, call: str, otherwise: str
) -> Result:
    try:
        _check_open(connection, where, call, otherwise)
        return await perform_async(connection, steps, where)
    except ConfigError as error:
        refusal = without_own_frames(error)
    raise refusal


def _named(coroutine: Coroutine[Any, Any, Result], call: str) -> Coroutine[Any, Any, Result]:
    """Name a coroutine after its call. Python's warning about a missing ``await`` shows this name."""
    setattr(coroutine, "__qualname__", call)  # noqa: B010 - the type of coroutines declares no name
    return coroutine


def block(connection: Either, steps: Steps[Result], where: str, otherwise: str) -> Block[Result]:
    """Return a separate transaction that begins with the steps and commits at the end of the block.

    ``otherwise`` names the method for the caller's own transaction, for errors.

    Raises ``ConfigError`` if the connection is in a transaction or a pipeline, or if the caller uses the block as a
    condition. Raises ``ConfigError`` also if the transaction failed, or ended before the end of the block.
    """
    if isinstance(connection, AsyncConnection):
        return _AsyncBlock(_block_async(connection, steps, where, otherwise), where)
    return _BlockingBlock(_block(_blocking(connection), steps, where, otherwise), where)


class _AsyncBlock(AbstractAsyncContextManager[Result]):
    """A block for ``async with``. The block refuses its use as a condition, which would always be true."""

    def __init__(self, block: AbstractAsyncContextManager[Result], where: str) -> None:
        self._block = block
        self._where = where

    def __bool__(self) -> bool:
        raise ConfigError(
            f"{self._where}: used as a condition before its transaction has begun; write "
            "`async with … as fresh:`, and test `fresh`"
        )

    async def __aenter__(self) -> Result:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, traceback)


class _BlockingBlock(AbstractContextManager[Result]):
    """A block for ``with``. The block refuses its use as a condition, which would always be true and store nothing."""

    def __init__(self, block: AbstractContextManager[Result], where: str) -> None:
        self._block = block
        self._where = where

    def __bool__(self) -> bool:
        raise ConfigError(
            f"{self._where}: used as a condition before its transaction has begun; write "
            "`with … as fresh:`, and test `fresh`"
        )

    def __enter__(self) -> Result:
        return self._block.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._block.__exit__(kind, error, traceback)


def alone(connection: Either, steps: Steps[Result], where: str, call: str) -> Awaitable[Result] | Result:
    """Perform the steps in a separate transaction. Raises the errors of ``block``."""
    if isinstance(connection, AsyncConnection):
        return _named(alone_async(connection, steps, where), call)
    with _block(_blocking(connection), steps, where) as result:
        return result


async def alone_async(connection: AsyncConnection[Any], steps: Steps[Result], where: str) -> Result:
    """Perform the steps like ``alone``, without blocking. A cancelled call has its whole effect or no effect."""
    async with _block_async(connection, steps, where) as result:
        return result


def outside(connection: Either, steps: Steps[Result], where: str, call: str) -> Awaitable[Result] | Result:
    """Perform one statement, in one request, on a connection that is in no transaction.

    Raises ``ConfigError`` for a connection in a transaction.
    """
    _check_outside(connection, where)
    if isinstance(connection, AsyncConnection):
        return _named(each_async(connection, steps, where), call)
    blocking = _blocking(connection)
    if blocking.autocommit:
        return perform(blocking, steps, where)
    blocking.autocommit = True
    try:
        return perform(blocking, steps, where)
    finally:
        if _is_idle(blocking):
            blocking.autocommit = False


async def each_async(connection: AsyncConnection[Any], steps: Steps[Result], where: str) -> Result:
    """Perform each statement in a separate transaction and a single request.

    After a cancellation, each statement has its whole effect or no effect. Raises ``ConfigError`` for a connection in a
    transaction or a pipeline.
    """
    _check_idle(connection, where, "")
    if connection.autocommit:
        return await perform_async(connection, steps, where)
    # The setting belongs to the client, so this call sends no request.
    await connection.set_autocommit(True)
    try:
        return await perform_async(connection, steps, where)
    finally:
        if _is_idle(connection):
            await connection.set_autocommit(False)


@contextmanager
def _block(connection: Connection[Any], steps: Steps[Result], where: str, otherwise: str = "") -> Iterator[Result]:
    _check_idle(connection, where, otherwise)
    transaction = connection.transaction()
    try:
        transaction.__enter__()
    except psycopg.Error as error:
        raise lanes_error(where, error) from error
    try:
        yield perform(connection, steps, where)
        _check_whole(connection, where)
    except BaseException as error:
        if not transaction.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        try:
            transaction.__exit__(None, None, None)
        except psycopg.OperationalError as error:
            raise lanes_error(f"{where}, at the COMMIT", error) from error


@asynccontextmanager
async def _block_async(
    connection: AsyncConnection[Any], steps: Steps[Result], where: str, otherwise: str = ""
) -> AsyncIterator[Result]:
    _check_idle(connection, where, otherwise)
    transaction = connection.transaction()
    try:
        await transaction.__aenter__()
    except psycopg.Error as error:
        raise lanes_error(where, error) from error
    try:
        yield await perform_async(connection, steps, where)
        _check_whole(connection, where)
    except BaseException as error:
        if not await transaction.__aexit__(type(error), error, error.__traceback__):
            raise
    else:
        try:
            await transaction.__aexit__(None, None, None)
        except psycopg.OperationalError as error:
            raise lanes_error(f"{where}, at the COMMIT", error) from error


def _is_idle(connection: Either) -> bool:
    return TransactionStatus(connection.pgconn.transaction_status) == _IDLE


def _check_idle(connection: Either, where: str, otherwise: str) -> None:
    # If the caller already has a transaction, only the caller decides whether it commits.
    status = TransactionStatus(connection.pgconn.transaction_status)
    if status not in (_IDLE, TransactionStatus.UNKNOWN) or _pipelined(connection):
        raise ConfigError(
            f"{where}: the connection is in a transaction or a pipeline already ({status.name}); end it first"
            + (f", or call {otherwise} in your own transaction" if otherwise else "")
        )


def _check_outside(connection: Either, where: str) -> None:
    status = TransactionStatus(connection.pgconn.transaction_status)
    if status not in (_IDLE, TransactionStatus.UNKNOWN) or _pipelined(connection):
        raise ConfigError(
            f"{where}: the connection is in a transaction or a pipeline ({status.name}), whose COMMIT would take a "
            "lock of the whole server; call notify() after the COMMIT"
        )


def _check_open(connection: Either, where: str, call: str, otherwise: str) -> None:
    if _pipelined(connection):
        raise ConfigError(f"{where}: the connection is in a pipeline; leave the pipeline first")
    if connection.autocommit and TransactionStatus(connection.pgconn.transaction_status) == _IDLE:
        block = "async with" if isinstance(connection, AsyncConnection) else "with"
        raise ConfigError(
            f"{where}: the connection has autocommit and is in no transaction, so {call} would be committed apart "
            f"from your own statements. Make the call inside `{block} connection.transaction():`"
            + (f", or use {otherwise}" if otherwise else "")
        )


def _check_whole(connection: Either, where: str) -> None:
    # At the COMMIT of a failed transaction, the server rolls back and reports no error, so the effect would be lost.
    status = TransactionStatus(connection.pgconn.transaction_status)
    if status == TransactionStatus.INERROR:
        raise ConfigError(
            f"{where}: a statement failed and its exception did not leave the block, so nothing can be committed. Let "
            "the exception leave the block, or put a statement that may fail into an inner `with "
            "connection.transaction():`"
        )
    if status == _IDLE:
        raise ConfigError(f"{where}: a COMMIT or ROLLBACK ended the transaction inside its block; let the block end it")


def _pipelined(connection: Either) -> bool:
    # Compare by value, because the client returns a plain number.
    return connection.pgconn.pipeline_status != PipelineStatus.OFF


def _blocking(connection: object) -> Connection[Any]:
    if isinstance(connection, Connection):
        return connection
    # Do not show the value, because the value may contain a password.
    raise ConfigError(
        f"a {type(connection).__name__} is no connection; pass a psycopg.Connection or AsyncConnection, for example "
        "from `with pool.connection() as connection:`"
    )
