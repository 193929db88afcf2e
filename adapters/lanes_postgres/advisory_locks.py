"""Advisory locks: one session of the server holds all locks of a process, and ends when the process is frozen or gone.

The server ends a session that is idle for one lease (``idle_session_timeout``), with its locks. A heartbeat, every
third of the lease, keeps the session. It also verifies that the server's process is still the same and still has the
locks. A connection that ends is noticed at once, by its socket.

```
heartbeat sent          deadline       the server ends the session
|------ lease - margin -----|-- margin --|
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from blake3 import blake3
from psycopg import AsyncConnection, AsyncCursor
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import tuple_row

from lanes.arguments import kind_of, names_unknown_options, shown_value
from lanes.clock import monotonic
from lanes.errors import ConfigError, LanesError, SourceError
from lanes.ownership import Held, HeldLock, check_lock_name
from lanes_postgres.errors import lanes_error

log = logging.getLogger("lanes.postgres")

T = TypeVar("T")

_REFUSED: Final = re.compile(
    "password authentication failed|no password supplied|no pg_hba.conf entry|is not permitted to log in"
    '|(database|role) ".*" does not exist'
)
"""Answers of a server that a repetition does not change."""

_WHERE: Final = "advisory locks"
_OLDEST: Final = 140_000
"""The first version of the server with ``idle_session_timeout``."""

_LEAST: Final = 1.0
_MOST: Final = 86_400.0

_MARGIN: Final = 1 / 6
"""Share of the lease in which no handler starts, for clocks of different speed and late timers."""

_SHARE: Final = 3
"""Number of heartbeats in a lease."""

_CONNECT: Final = 10
"""Seconds that a connection may take, unless the connection string says otherwise."""

_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_QUIET: Final = 60.0
"""Seconds without a further log line while the server does not accept a connection."""

_PROBES: Final = 3
_CLOSING: Final = 2.0
"""Seconds that ``aclose`` waits for the server. The server ends the session in any case."""

_PREPARE: Final[LiteralString] = (
    "SELECT set_config('idle_session_timeout', %s, false), pg_is_in_recovery(), pg_backend_pid()"
)
_PID: Final[LiteralString] = "SELECT pg_backend_pid()"
_TRY: Final[LiteralString] = "SELECT pg_try_advisory_lock(%s::bigint), pg_backend_pid()"
_UNLOCK: Final[LiteralString] = "SELECT pg_advisory_unlock(%s::bigint)"
_UNLOCK_ALL: Final[LiteralString] = "SELECT pg_advisory_unlock_all()"
# The view has one row for each lock, whose key is in two halves of 32 bits.
_VERIFY: Final[LiteralString] = (
    "SELECT pg_backend_pid(), current_setting('idle_session_timeout'), "
    "(SELECT array_agg((classid::bigint << 32) | objid::bigint) FROM pg_locks AS held "
    "JOIN pg_database AS base ON base.oid = held.database AND base.datname = current_database() "
    "WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = pg_backend_pid())"
)

# Other programs use advisory locks too. A hash with its own domain makes an equal key unlikely: 2^-64 for each pair.
_KEY: Final = blake3(derive_key_context="lanes-runtime postgres v1: key of an advisory lock")


def key_of(name: str) -> int:
    """Return the key of a lock on the server: 64 bits, with a sign."""
    hasher = _KEY.copy()
    hasher.update(name.encode())
    return int.from_bytes(hasher.digest(length=8), "big", signed=True)


class _Session:
    """One session of the server, and the locks that it holds. ``turn`` orders requests and their bookkeeping."""

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
        # A copy of the socket's descriptor, because the client removes its own reader after each request.
        self._socket = os.dup(connection.fileno())

    async def ask(self, query: LiteralString, *parameters: object) -> tuple[Any, ...]:
        """Return the one row of a query. The caller has the turn.

        An answer that comes after the end of the session is an error, because its locks are lost by then.
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
            raise SourceError(f"{_WHERE}: {self.ended}", retryable=True)

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when the server sends something unasked, such as the end of the session. Idempotent."""
        if not self.ended:
            asyncio.get_running_loop().add_reader(self._socket, self._readable, wake)

    def _readable(self, wake: Callable[[], None]) -> None:
        # The end of each request watches again.
        asyncio.get_running_loop().remove_reader(self._socket)
        if not self.turn.locked():
            self.poked = True
            wake()

    def end(self, reason: str) -> None:
        self.ended = reason
        asyncio.get_running_loop().remove_reader(self._socket)
        os.close(self._socket)


@names_unknown_options("lanes_postgres.AdvisoryLocks")
class AdvisoryLocks:
    """Advisory locks of PostgreSQL 14 or newer; see ``lanes.ownership.Locks``. Needs asyncio.

    One connection of its own holds all locks of the object. The server ends the session of a process that is frozen, or
    whose host is gone, after one lease. A transaction-pooling proxy shares sessions between clients, so its connections
    cannot hold locks, and it is refused. Behind a proxy, a start needs a second session for a moment.

    If the connection ends, all locks of the object are lost, and ``run`` connects again.

    Args:
        dsn: Connection string of the primary server, as a URL or as ``key=value`` words.
        lease: Seconds without a heartbeat after which the server ends the session, 1 … 86,400. A frozen process blocks
            its partitions for at most this time.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, dsn: str, *, lease: float = 10.0) -> None:
        if not isinstance(dsn, str):
            # Do not show the value, because it may contain a password.
            raise ConfigError(f"dsn is {kind_of(dsn)}; pass a connection string, such as 'postgresql://host/database'")
        if not isinstance(lease, int | float) or isinstance(lease, bool) or not _LEAST <= lease <= _MOST:
            raise ConfigError(
                f"lease={shown_value(lease)}: must be a number of seconds from {_LEAST:g} to {_MOST:,.0f}"
            )
        try:
            given = conninfo_to_dict(dsn)
        except psycopg.Error as error:
            raise ConfigError(f"dsn: {lanes_error(_WHERE, error)}; correct the connection string") from None
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
        self._session: _Session | None = None
        self._why = "not opened"
        self._sessions: dict[HeldLock, tuple[_Session, int]] = {}
        self._freeing: dict[HeldLock, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<AdvisoryLocks: {len(self._sessions)} held, lease {self._lease:g} s>"

    # --- lanes.ownership.Locks

    async def open(self) -> None:
        """Connect, and check that the server can hold locks; see ``lanes.ownership.Locks.open``.

        Raises:
            ConfigError: The server is too old or a standby, or a transaction-pooling proxy is in between.
            SourceError: The server does not answer, or refuses the login.
        """
        self._session = await self._connect()

    async def run(self) -> None:
        """Keep the session, and connect again after its end; see ``lanes.ownership.Locks.run``.

        Raises:
            ConfigError: A transaction-pooling proxy is in between, or a standby has replaced the server.
        """
        while True:
            session = self._session
            if session is None:
                await self._connect_again()
                continue
            self._wake.clear()
            due = session.verified_at + self._lease / _SHARE
            if session.poked or monotonic() >= due:
                session.poked = False
                try:
                    await self._within(session, self._verify(session))
                except SourceError:
                    if not session.ended:
                        await asyncio.sleep(_PAUSE)
                continue
            session.watch(self._wake.set)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - monotonic()):
                    await self._wake.wait()

    async def try_acquire(self, name: str, changed: Callable[[], None]) -> Held | None:
        """Acquire a lock if no one holds it; see ``lanes.ownership.Locks.try_acquire``.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function that is called when the deadline has risen or the lock is lost.

        Returns:
            The lock; None = this or another process holds it.

        Raises:
            ConfigError: The name is invalid, two names have one key, or a proxy is in between.
            SourceError: The server does not answer; retryable if a later call may succeed.
        """
        check_lock_name(name)
        key = self._key(name)
        session = self._session
        if session is None:
            raise SourceError(f"{_WHERE}: no connection ({self._why})", retryable=not self._closed)
        if key in session.held or key in session.taking:
            return None
        session.taking.add(key)
        task = self._spawn(self._within(session, self._take(session, key, name, changed)))
        task.add_done_callback(lambda _: session.taking.discard(key))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._give_back)
            raise

    async def aclose(self) -> None:
        """Release every lock and close the connection; see ``lanes.ownership.Locks.aclose``."""
        self._closed = True
        session, self._session = self._session, None
        self._why = "closed"
        if session is not None:
            try:
                with contextlib.suppress(LanesError, TimeoutError):
                    async with asyncio.timeout(_CLOSING):
                        await self._within(session, self._unlock_all(session))
            finally:
                for held in session.held.values():
                    self._sessions.pop(held, None)
                session.held.clear()
                self._end(session, "closed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- requests: each has the turn of its session until its bookkeeping is done

    async def _take(self, session: _Session, key: int, name: str, changed: Callable[[], None]) -> HeldLock | None:
        async with session.turn:
            if monotonic() >= session.verified_at + self._lease / _SHARE:
                # A heartbeat would wait for all acquisitions that were queued before it.
                await self._renew(session)
            sent = monotonic()
            taken, pid = await session.ask(_TRY, key)
            self._check_pid(session, pid)
            if not taken:
                return None
            held = HeldLock(name, changed, self._free, deadline=self._deadline(sent))
            session.held[key] = held
            self._sessions[held] = session, key
            return held

    async def _verify(self, session: _Session) -> None:
        async with session.turn:
            await self._renew(session)

    async def _renew(self, session: _Session) -> None:
        """Verify and renew all locks. The caller has the turn."""
        sent = monotonic()
        pid, timeout, keys = await session.ask(_VERIFY)
        self._check_pid(session, pid)
        if timeout != session.timeout:
            raise _pooled(f"idle_session_timeout is {timeout}, but {session.timeout} was set")
        there = set(keys or ())
        for key, held in list(session.held.items()):
            if held.active and key not in there:
                del session.held[key]
                self._sessions.pop(held, None)
                held.lose("the session of the server no longer has it")
            elif held.active and not held.renewed(self._deadline(sent)):
                self._end(session, held.lost)
                return
        session.verified_at = sent
        for key in there - session.held.keys():
            await session.ask(_UNLOCK, key)

    async def _unlock(self, session: _Session, key: int) -> None:
        async with session.turn:
            try:
                await session.ask(_UNLOCK, key)
            finally:
                # If the server refused the request, the next heartbeat finds the lock without a holder.
                session.held.pop(key, None)

    async def _unlock_all(self, session: _Session) -> None:
        async with session.turn:
            await session.ask(_UNLOCK_ALL)

    async def _within(self, session: _Session, request: Coroutine[Any, Any, T]) -> T:
        """Perform a request before the earliest deadline. The session ends if it has no answer by then."""
        if session.ended:
            request.close()
            session.check()
        begun = monotonic()
        if self._left(session, begun) <= 0:
            # This process was frozen, and the server may have ended the session.
            request.close()
            self._end(session, "its deadline passed before a heartbeat was sent")
            raise SourceError(f"{_WHERE}: {session.ended}", retryable=True)
        task = self._spawn(request)
        session.requests.add(task)
        task.add_done_callback(session.requests.discard)
        # A cancelled caller leaves the request to its end, so that its bookkeeping is done.
        # The deadlines rise while the request waits for its turn.
        while not task.done() and (left := self._left(session, begun)) > 0:
            await asyncio.wait({task}, timeout=left)
        if not task.done():
            # The client cancels the request at the server, which may take seconds. The locks are lost now.
            self._end(session, "the server did not answer before the deadline")
            task.cancel()
            raise SourceError(f"{_WHERE}: {session.ended}", retryable=True)
        if task.cancelled():
            raise SourceError(f"{_WHERE}: {session.ended or 'closed'}", retryable=True)
        error = task.exception()
        if error is None:
            session.watch(self._wake.set)
            return task.result()
        if isinstance(error, psycopg.Error):
            found = lanes_error(_WHERE, error)
            if session.connection.closed:
                self._end(session, f"the connection ended: {found}")
            else:
                session.watch(self._wake.set)
            raise found from error
        self._end(session, str(error))
        raise error

    def _left(self, session: _Session, begun: float) -> float:
        """Return the seconds until the earliest deadline; without a lock, until a lease after the last request."""
        held = [each.deadline for each in session.held.values() if each.active]
        return min(held, default=max(begun, session.asked_at) + self._lease) - monotonic()

    async def _free(self, held: HeldLock) -> None:
        task = self._freeing.get(held)
        if task is None:
            found = self._sessions.pop(held, None)
            if found is None or found[0].ended:
                return
            session, key = found
            task = self._freeing[held] = self._spawn(self._within(session, self._unlock(session, key)))
            task.add_done_callback(lambda _: self._freeing.pop(held, None))
        # If the server refuses the request, the next heartbeat unlocks. Without an answer, the session ends.
        with contextlib.suppress(LanesError):
            await asyncio.shield(task)

    def _give_back(self, task: asyncio.Task[HeldLock | None]) -> None:
        """Release the lock of a cancelled ``try_acquire``."""
        if not task.cancelled() and task.exception() is None and (held := task.result()) is not None:
            self._spawn(held.release())

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that was cancelled does not read it

    # --- the session

    async def _connect_again(self) -> None:
        pause, logged = _PAUSE, -math.inf
        while not self._is_closed():
            try:
                session = await self._connect()
            except SourceError as error:
                self._why = str(error)
                if monotonic() >= logged + _QUIET:
                    logged = monotonic()
                    log.warning("%s; the locks keep trying to connect", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            if self._is_closed():
                self._end(session, "closed")
                break
            self._session = session
            log.warning("%s: connected again", _WHERE)
            return
        await asyncio.Event().wait()

    def _is_closed(self) -> bool:
        return self._closed

    async def _connect(self) -> _Session:
        try:
            connection = await AsyncConnection.connect(
                self._dsn, autocommit=True, prepare_threshold=None, **self._options
            )
        except psycopg.Error as error:
            # The client's own text may show a part of the password.
            raise not_connected(error) from None
        task = self._spawn(self._prepare(connection))
        try:
            await asyncio.wait({task}, timeout=self._patience)
            if not task.done():
                raise SourceError(f"{_WHERE}: no answer within {self._patience:g} s", retryable=True)
            return task.result()
        except BaseException as error:
            if task.done():
                await connection.close()
            else:
                self._spawn(_abandon({task}, connection))
            if isinstance(error, psycopg.Error):
                raise lanes_error(_WHERE, error) from error
            raise

    async def _prepare(self, connection: AsyncConnection[Any]) -> _Session:
        """Check that the server can hold locks, and limit the idle time of the session."""
        version = connection.info.server_version
        if version < _OLDEST:
            raise ConfigError(
                f"{_WHERE}: the server has version {version // 10_000}, which cannot limit the idle time of a session, "
                "so a frozen process would keep its locks; upgrade the server to PostgreSQL 14 or newer, or use other "
                "locks"
            )
        cursor = AsyncCursor(connection, row_factory=tuple_row)
        (pid,) = await (await cursor.execute(_PID)).fetchone() or (0,)
        if pid != connection.info.backend_pid:
            try:
                await self._refuse_shared_sessions(cursor, pid)
            except psycopg.errors.ProtocolViolation as error:
                # A proxy that pools by statement refuses transactions. One without a free session refuses to wait.
                if "statement pooling" not in str(error):
                    raise
                raise _pooled(str(lanes_error("its answer", error))) from error
        sent = monotonic()
        timeout = f"{round(self._lease * 1000)}ms"
        row = await (await cursor.execute(_PREPARE, (timeout,))).fetchone()
        assert row is not None, "a SELECT of values returns a row"
        shown, standby, pid = row
        if standby:
            raise ConfigError(
                f"{_WHERE}: the server is a standby, whose locks no other server sees; connect to the primary "
                "(target_session_attrs=read-write)"
            )
        return _Session(connection, pid, shown, sent)

    async def _refuse_shared_sessions(self, cursor: AsyncCursor[Any], pid: int) -> None:
        """Raise ``ConfigError`` if a proxy gives the session of this connection to another client between statements.

        The proxy hides the process of the server. A second client in a transaction then gets the session that was used
        last, which is that of this connection, unless a third client was faster.
        """
        for _ in range(_PROBES):
            async with (
                await AsyncConnection.connect(self._dsn, prepare_threshold=None, **self._options) as other,
                other.transaction(),
            ):
                (theirs,) = await (await other.execute(_PID)).fetchone() or (0,)
                if theirs == pid:
                    raise _pooled(f"two clients have the session of the server's process {pid}")
                (now,) = await (await cursor.execute(_PID)).fetchone() or (0,)
                if now != pid:
                    raise _pooled(f"the process of the server changed from {pid} to {now}")

    def _end(self, session: _Session, reason: str) -> None:
        """Lose the locks of a session, and close its connection. Idempotent. Does not block."""
        if session.ended:
            return
        session.end(reason)
        if self._session is session:
            self._session = None
            self._why = reason
            count = len(session.held)
            log.warning("%s: the session ended with %d locks, which are lost: %s", _WHERE, count, reason)
        held, session.held = session.held, {}
        for each in held.values():
            self._sessions.pop(each, None)
        self._spawn(self._close(session))
        self._wake.set()
        for each in held.values():
            each.lose(reason)

    async def _close(self, session: _Session) -> None:
        # The requests end by themselves, unless one waits for the server.
        if session.requests:
            await asyncio.wait(session.requests, timeout=_CLOSING)
        await _abandon(session.requests, session.connection)

    def _check_pid(self, session: _Session, pid: int) -> None:
        if pid != session.pid:
            raise _pooled(f"the process of the server changed from {session.pid} to {pid}")

    def _deadline(self, sent: float) -> float:
        return sent + self._lease * (1 - _MARGIN)

    def _key(self, name: str) -> int:
        key = key_of(name)
        other = self._names.setdefault(key, name)
        if other != name:
            raise ConfigError(
                f"{_WHERE}: the names {shown_value(name)} and {shown_value(other)} have the same key {key} of 64 bits; "
                "rename one of them"
            )
        return key


async def _abandon(requests: set[asyncio.Task[Any]], connection: AsyncConnection[Any]) -> None:
    """Cancel requests, and close their connection. The first cancellation waits for the server, and the second not."""
    for _ in range(2):
        if running := {request for request in requests if not request.done()}:
            for request in running:
                request.cancel()
            await asyncio.wait(running, timeout=_CLOSING)
    await connection.close()


def _is_port(text: str) -> bool:
    return not text or (text.isdecimal() and 0 < int(text) < 65_536)


def _pooled(finding: str) -> ConfigError:
    return ConfigError(
        f"{_WHERE}: a proxy between this process and the server shares sessions between clients ({finding}), so no "
        "client can hold a lock; connect to the server directly, or use session pooling"
    )


def not_connected(error: psycopg.Error, where: str = _WHERE) -> LanesError:
    """Return the error of a connection that could not be opened. Names the remedy if the server has none left."""
    found = lanes_error(where, error)
    text = str(error)
    if "too many clients" in text or "connection slots" in text or "too many connections" in text:
        return SourceError(f"{found}; raise max_connections, or start fewer processes", retryable=True)
    # A connection that fails has no SQLSTATE. The text has one line for each host.
    hosts = text.splitlines()[2:] if "Multiple connection attempts failed" in text else [text]
    if hosts and all(_REFUSED.search(host) for host in hosts):
        return SourceError(
            f"{found}; correct the connection string, or the users and rights of the server", retryable=False
        )
    return found
