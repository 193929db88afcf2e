"""Opens and checks the database session that holds the advisory locks of a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, LiteralString

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import tuple_row

from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes.ownership import HeldLock
from lanes_postgres.address import place_of, read_address
from lanes_postgres.connecting import connect
from lanes_postgres.errors import lanes_error

WHERE: Final = "advisory locks"
_OLDEST: Final = 140_000
"""The first PostgreSQL version with the setting ``idle_session_timeout``."""


_CONNECT: Final = 10
"""Seconds allowed for a connection, unless the connection string sets another time."""

_PROBES: Final = 3
CLOSING: Final = 2.0
"""Seconds that ``aclose`` waits for the server. The server ends the session even without this wait."""

_PREPARE: Final[LiteralString] = (
    "SELECT set_config('idle_session_timeout', %s, false), pg_is_in_recovery(), pg_backend_pid()"
)
_PID: Final[LiteralString] = "SELECT pg_backend_pid()"


class LockSession:
    """One database session with its advisory locks. The lock ``turn`` makes requests run one at a time."""

    def __init__(self, connection: AsyncConnection[Any], pid: int, timeout: str, verified_at: float) -> None:
        self.connection = connection
        self.pid = pid
        self.timeout = timeout
        self.verified_at = verified_at
        self.held: dict[int, HeldLock] = {}
        self.taking: set[int] = set()
        self.requests: set[asyncio.Task[Any]] = set()
        self.turn = asyncio.Lock()
        self.ended = ""
        self.poked = False
        self.asked_at = verified_at
        # Use a copy of the socket's descriptor, because the client removes its own reader after each request.
        self._socket = os.dup(connection.fileno())

    async def ask(self, query: LiteralString, *parameters: object) -> tuple[Any, ...]:
        """Return the only row of a query. The caller holds ``turn``.

        If the answer arrives after the end of the session, the call raises an error, because the session has lost its
        locks.
        """
        self.check()
        self.asked_at = monotonic()
        cursor = AsyncCursor(self.connection, row_factory=tuple_row)
        await cursor.execute(query, parameters)
        row = await cursor.fetchone()
        self.check()
        assert row is not None, "a SELECT of values returns a row"
        return row

    def check(self) -> None:
        """Raise ``SourceError`` if the session has ended."""
        if self.ended:
            raise SourceError(f"{WHERE}: {self.ended}", retryable=True)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the server sends a message without a request, such as the end of the session.

        Idempotent.
        """
        if not self.ended:
            asyncio.get_running_loop().add_reader(self._socket, self._readable, wake)

    def _readable(self, wake: Callable[[], None]) -> None:
        # Each request begins to watch again at its end.
        asyncio.get_running_loop().remove_reader(self._socket)
        if not self.turn.locked():
            self.poked = True
            wake()

    def end(self, reason: str) -> None:
        self.ended = reason
        asyncio.get_running_loop().remove_reader(self._socket)
        os.close(self._socket)


class SessionMaker:
    """Opens sessions for the locks of one process.

    Args:
        dsn: Connection string.
        lease: Seconds without a request after which the server ends a session.
        spawn: Function that runs a coroutine as a task. The owner of the sessions awaits the task.

    Raises:
        ConfigError: The connection string is invalid.
    """

    def __init__(self, dsn: str, lease: float, spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]) -> None:
        given = read_address("dsn", dsn)
        if not all(_is_port(port) for port in str(given.get("port", "")).split(",")):
            # Do not show the value, because it may be a part of the password.
            raise ConfigError("dsn: the port is no number from 1 to 65535; correct the connection string")
        timeout = str(given.get("connect_timeout", ""))
        self._patience = float(timeout) if timeout.isdecimal() and int(timeout) > 0 else float(_CONNECT)
        self._dsn = dsn
        self._lease = float(lease)
        self._options: Mapping[str, Any] = {
            name: value
            for name, value in {
                "connect_timeout": _CONNECT,
                "tcp_user_timeout": int(lease * 1000),
                "fallback_application_name": "lanes locks",
            }.items()
            if name not in given
        }
        self._spawn = spawn

    async def connect(self) -> LockSession:
        """Connect, check that the server can hold locks, and limit the idle time of the session. Cancel-safe.

        Raises ``ConfigError`` if the server cannot hold locks, and ``SourceError`` if it does not answer in time, or
        refuses the login.
        """
        connection = await connect(self._dsn, WHERE, prepare_threshold=None, **self._options)
        task: asyncio.Task[LockSession] = self._spawn(self._prepare(connection))
        try:
            await asyncio.wait({task}, timeout=self._patience)
            if not task.done():
                raise SourceError(
                    f"{WHERE} at {place_of(self._dsn)}: the PostgreSQL server did not answer within "
                    f"{self._patience:g} s; check the server and the network",
                    retryable=True,
                )
            return task.result()
        except BaseException as error:
            if task.done():
                await connection.close()
            else:
                self._spawn(abandon({task}, connection))
            if isinstance(error, psycopg.Error):
                raise lanes_error(WHERE, error) from error
            raise

    async def _prepare(self, connection: AsyncConnection[Any]) -> LockSession:
        """Check that the server can hold locks, and limit the idle time of the session."""
        version = connection.info.server_version
        if version < _OLDEST:
            raise ConfigError(
                f"{WHERE}: the server has version {version // 10_000}, which cannot limit the idle time of a session, "
                "so a frozen process would keep its locks. Upgrade the server to PostgreSQL 14 or newer, or use "
                "other locks"
            )
        cursor = AsyncCursor(connection, row_factory=tuple_row)
        (pid,) = await (await cursor.execute(_PID)).fetchone() or (0,)
        if pid != connection.info.backend_pid:
            try:
                await self._refuse_shared_sessions(cursor, pid)
            except psycopg.errors.ProtocolViolation as error:
                # A proxy that pools by statement refuses transactions. A proxy without a free session may refuse the
                # connection.
                if "statement pooling" not in str(error):
                    raise
                raise pooled(str(lanes_error("its answer", error))) from error
        sent = monotonic()
        timeout = f"{round(self._lease * 1000)}ms"
        row = await (await cursor.execute(_PREPARE, (timeout,))).fetchone()
        assert row is not None, "a SELECT of values returns a row"
        shown, standby, pid = row
        if standby:
            raise ConfigError(
                f"{WHERE}: the server is a standby, whose locks no other server sees; connect to the primary "
                "(target_session_attrs=read-write)"
            )
        return LockSession(connection, pid, shown, sent)

    async def _refuse_shared_sessions(self, cursor: AsyncCursor[Any], pid: int) -> None:
        """Raise ``ConfigError`` if a proxy gives the session of this connection to another client between statements.

        The proxy hides the process of the server. The check opens a transaction on a second connection. A proxy gives
        this transaction the session that it used last. Unless a third client has used the proxy meanwhile, this session
        also serves the first connection.
        """
        for _ in range(_PROBES):
            async with (
                await AsyncConnection.connect(self._dsn, prepare_threshold=None, **self._options) as other,
                other.transaction(),
            ):
                (theirs,) = await (await other.execute(_PID)).fetchone() or (0,)
                if theirs == pid:
                    raise pooled(f"two clients have the session of the server's process {pid}")
                (now,) = await (await cursor.execute(_PID)).fetchone() or (0,)
                if now != pid:
                    raise pooled(f"the process of the server changed from {pid} to {now}")


async def abandon(requests: set[asyncio.Task[Any]], connection: AsyncConnection[Any]) -> None:
    """Cancel requests, and close their connection.

    The first cancellation of a request waits for the server, and a second cancellation ends this wait.
    """
    for _ in range(2):
        if running := {request for request in requests if not request.done()}:
            for request in running:
                request.cancel()
            await asyncio.wait(running, timeout=CLOSING)
    await connection.close()


def pooled(finding: str) -> ConfigError:
    """Return the error for a proxy that shares sessions between clients."""
    return ConfigError(
        f"{WHERE}: a proxy between this process and the server shares sessions between clients ({finding}), so no "
        "client can hold a lock; connect to the server directly, or use session pooling"
    )


def _is_port(text: str) -> bool:
    return not text or (text.isdecimal() and 0 < int(text) < 65_536)
