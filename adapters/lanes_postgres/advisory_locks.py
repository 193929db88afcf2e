"""Holds all advisory locks of a process in one session of the server.

The server ends the session of a frozen or dead process.

The server ends a session that is idle for one lease (``idle_session_timeout``), and frees its locks. A heartbeat after
each third of the lease keeps the session. Each heartbeat verifies that the server's process is the same and still has
the locks. The socket reports the end of a connection at once.

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
from collections.abc import Callable, Coroutine
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from blake3 import blake3

from lanes.arguments import kind_of, names_unknown_options, shown_value
from lanes.clock import monotonic
from lanes.errors import ConfigError, LanesError, SourceError
from lanes.ownership import Held, HeldLock, check_lock_name
from lanes.source import BrokerContact, Outage
from lanes_postgres.errors import lanes_error
from lanes_postgres.lock_session import CLOSING, WHERE, LockSession, SessionMaker, abandon, pooled

log = logging.getLogger("lanes.postgres")

T = TypeVar("T")

_LEAST: Final = 1.0
_MOST: Final = 86_400.0

_MARGIN: Final = 1 / 6
"""Share of the lease, at its end, in which no handler starts. The share allows for late timers and different clocks."""

_SHARE: Final = 3
"""Number of heartbeats that a session sends in one lease."""

_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
_QUIET: Final = 60.0
"""Seconds between two log lines while the server does not accept a connection."""

_TRY: Final[LiteralString] = "SELECT pg_try_advisory_lock(%s::bigint), pg_backend_pid()"
_UNLOCK: Final[LiteralString] = "SELECT pg_advisory_unlock(%s::bigint)"
_UNLOCK_ALL: Final[LiteralString] = "SELECT pg_advisory_unlock_all()"
# The view ``pg_locks`` has one row for each lock, and stores the key in two halves of 32 bits.
_VERIFY: Final[LiteralString] = (
    "SELECT pg_backend_pid(), current_setting('idle_session_timeout'), "
    "(SELECT array_agg((classid::bigint << 32) | objid::bigint) FROM pg_locks AS held "
    "JOIN pg_database AS base ON base.oid = held.database AND base.datname = current_database() "
    "WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = pg_backend_pid())"
)

# Other programs use advisory locks too. A hash with its own domain gives two locks the same key with a probability of
# only 2^-64.
_KEY: Final = blake3(derive_key_context="lanes-runtime postgres v1: key of an advisory lock")


def key_of(name: str) -> int:
    """Return the key of a lock on the server, a signed 64-bit number."""
    hasher = _KEY.copy()
    hasher.update(name.encode())
    return int.from_bytes(hasher.digest(length=8), "big", signed=True)


@names_unknown_options("lanes_postgres.AdvisoryLocks")
class AdvisoryLocks:
    """Advisory locks of PostgreSQL 14 or newer; see ``lanes.ownership.Locks``. Needs asyncio.

    One separate connection holds all locks of the object. The server ends the session of a frozen process, or of a lost
    host, after one lease. ``open`` refuses a transaction-pooling proxy, because such a proxy shares sessions between
    clients and cannot hold locks. With any proxy, a start briefly needs a second session.

    If the connection ends, the object loses all locks, and ``run`` connects again.

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
        self._lease = float(lease)
        self._maker = SessionMaker(dsn, self._lease, self._spawn)
        self._session: LockSession | None = None
        self._why = "not opened"
        self._sessions: dict[HeldLock, tuple[LockSession, int]] = {}
        self._freeing: dict[HeldLock, asyncio.Task[None]] = {}
        self._names: dict[int, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake = asyncio.Event()
        self._closed = False
        self._contact = BrokerContact()

    def __repr__(self) -> str:
        return f"<AdvisoryLocks: {len(self._sessions)} held, lease {self._lease:g} s>"

    # --- lanes.ownership.Locks

    async def open(self) -> None:
        """Connect, and check that the server can hold locks; see ``lanes.ownership.Locks.open``.

        Raises:
            ConfigError: The server is older than version 14, is a standby, or is accessible only through a
                transaction-pooling proxy.
            SourceError: The server does not answer, or refuses the login.
        """
        self._session = await self._maker.connect()

    async def run(self) -> None:
        """Keep the session, and connect again after its end; see ``lanes.ownership.Locks.run``.

        Raises:
            ConfigError: A transaction-pooling proxy precedes the server, or a standby has replaced the server.
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
        """Acquire a free lock; see ``lanes.ownership.Locks.try_acquire``.

        Args:
            name: Name of the lock, 1 to 1,000 characters without zero bytes.
            changed: Function that the locks call after the deadline of the lock has risen, or after the loss of the
                lock.

        Returns:
            The lock; None = this or another process holds the lock.

        Raises:
            ConfigError: The name is invalid, two names have one key, or a transaction-pooling proxy precedes the
                server.
            SourceError: The server does not answer; retryable if a later call may succeed.
        """
        check_lock_name(name)
        key = self._key(name)
        session = self._session
        if session is None:
            raise SourceError(f"{WHERE}: no connection ({self._why})", retryable=not self._closed)
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
                    async with asyncio.timeout(CLOSING):
                        await self._within(session, self._unlock_all(session))
            finally:
                for held in session.held.values():
                    self._sessions.pop(held, None)
                session.held.clear()
                self._end(session, "closed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    def outage(self) -> Outage | None:
        """Return the present outage of the server, by the answers to the session of the locks. Does not block.

        Returns:
            The outage; None = the server answers.
        """
        return self._contact.outage()

    # --- requests: each holds ``turn`` of its session until it has recorded its result

    async def _take(self, session: LockSession, key: int, name: str, changed: Callable[[], None]) -> HeldLock | None:
        async with session.turn:
            if monotonic() >= session.verified_at + self._lease / _SHARE:
                # Send a due heartbeat here, because a heartbeat of ``run`` would wait for all queued acquisitions.
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

    async def _verify(self, session: LockSession) -> None:
        async with session.turn:
            await self._renew(session)

    async def _renew(self, session: LockSession) -> None:
        """Verify and renew all locks. The caller holds ``turn`` of the session."""
        sent = monotonic()
        pid, timeout, keys = await session.ask(_VERIFY)
        self._check_pid(session, pid)
        if timeout != session.timeout:
            raise pooled(f"idle_session_timeout is {timeout}, but {session.timeout} was set")
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

    async def _unlock(self, session: LockSession, key: int) -> None:
        async with session.turn:
            try:
                await session.ask(_UNLOCK, key)
            finally:
                # If the server refuses the request, the next heartbeat finds the lock without an owner.
                session.held.pop(key, None)

    async def _unlock_all(self, session: LockSession) -> None:
        async with session.turn:
            await session.ask(_UNLOCK_ALL)

    async def _within(self, session: LockSession, request: Coroutine[Any, Any, T]) -> T:
        """Perform a request before the earliest deadline. Without an answer by the deadline, the session ends."""
        if session.ended:
            request.close()
            session.check()
        begun = monotonic()
        if self._left(session, begun) <= 0:
            # This process was frozen, so the server may have ended the session.
            request.close()
            self._end(session, "its deadline passed before a heartbeat was sent")
            raise SourceError(f"{WHERE}: {session.ended}", retryable=True)
        task = self._spawn(request)
        session.requests.add(task)
        task.add_done_callback(session.requests.discard)
        # The request continues after a cancellation of its caller, so that it records its result. The deadlines rise
        # while the request waits for its turn.
        while not task.done() and (left := self._left(session, begun)) > 0:
            await asyncio.wait({task}, timeout=left)
        if not task.done():
            # The client cancels the request at the server, which may take seconds. Report the loss of the locks at
            # once.
            self._end(session, "the server did not answer before the deadline")
            task.cancel()
            raise SourceError(f"{WHERE}: {session.ended}", retryable=True)
        if task.cancelled():
            raise SourceError(f"{WHERE}: {session.ended or 'closed'}", retryable=True)
        error = task.exception()
        if error is None:
            self._contact.answered()
            session.watch(self._wake.set)
            return task.result()
        if isinstance(error, psycopg.Error):
            found = lanes_error(WHERE, error)
            if session.connection.closed:
                self._end(session, f"the connection ended: {found}")
            else:
                session.watch(self._wake.set)
            raise found from error
        self._end(session, str(error))
        raise error

    def _left(self, session: LockSession, begun: float) -> float:
        """Return the seconds until the earliest deadline of a lock.

        Without a lock, the end of one lease after the last request applies.
        """
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
        pause, logged, begun = _PAUSE, -math.inf, monotonic()
        while not self._is_closed():
            sent = monotonic()
            try:
                session = await self._maker.connect()
            except SourceError as error:
                self._why = str(error)
                self._contact.unanswered(sent, self._why)
                if monotonic() >= logged + _QUIET:
                    logged = monotonic()
                    # The line of the source has the remedy.
                    log.warning("%s; retrying", self._why.partition("; ")[0])
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            if self._is_closed():
                self._end(session, "closed")
                break
            self._session = session
            self._contact.answered()
            log.info("%s: connected again after %.0f s", WHERE, monotonic() - begun)
            return
        await asyncio.Event().wait()

    def _is_closed(self) -> bool:
        return self._closed

    def _end(self, session: LockSession, reason: str) -> None:
        """Report the locks of a session as lost, and close its connection. Idempotent. Does not block."""
        if session.ended:
            return
        session.end(reason)
        if self._session is session:
            self._session = None
            self._why = reason
            count = len(session.held)
            log.warning("%s: the session and its %d locks are lost (%s); run() connects again", WHERE, count, reason)
        held, session.held = session.held, {}
        for each in held.values():
            self._sessions.pop(each, None)
        self._spawn(self._close(session))
        self._wake.set()
        for each in held.values():
            each.lose(reason)

    async def _close(self, session: LockSession) -> None:
        # The requests end by themselves, unless one waits for the server.
        if session.requests:
            await asyncio.wait(session.requests, timeout=CLOSING)
        await abandon(session.requests, session.connection)

    def _check_pid(self, session: LockSession, pid: int) -> None:
        if pid != session.pid:
            raise pooled(f"the process of the server changed from {session.pid} to {pid}")

    def _deadline(self, sent: float) -> float:
        return sent + self._lease * (1 - _MARGIN)

    def _key(self, name: str) -> int:
        key = key_of(name)
        other = self._names.setdefault(key, name)
        if other != name:
            raise ConfigError(
                f"{WHERE}: the names {shown_value(name)} and {shown_value(other)} have the same key {key} of 64 bits; "
                "rename one of them"
            )
        return key
