"""Simulated connections of psycopg to a server as data, in virtual time: the calls that ``lanes_postgres`` makes.

A connection keeps the order of its statements, as TCP does. While a member is cut off, its statements wait for the end
of the cut, or the connection ends. A killed process ends its sessions at once. A lost machine leaves its sessions open
at the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus

from memsource.adapters.choices import DELIVER, Choice
from memsource.sim.loop.event_loop import GROUP, current
from tests.simulated.postgres.server import Blocked, PostgresServer, RowRefused, Session, UniqueViolation
from tests.simulated.postgres.statements import Rows, call_of, perform, text_of

FIRST_DESCRIPTOR: Final = 1_000
VERSION: Final = 150_000

_LINGERS: Final = (5.0, 25.0)
"""Seconds after which the server notices a lost machine or connection."""

_CANCELLING: Final = 5.0
"""Seconds that the client waits for the end of a cancelled statement."""

_GONE: Final = "server closed the connection unexpectedly"


class Network:
    """The connections of all members to one server. Only one network exists at a time.

    Args:
        server: The server.
        rng: Source of the latencies and of the kinds of cuts.
        latencies: Seconds that bytes take, for successive connections.
        fate: Function that decides the fate of a member's statement by its name.

    Attributes:
        current: The network of the present run.
        lines: All connections of the run.
        context: Context of the callbacks of network and server.
    """

    current: Network

    def __init__(
        self,
        server: PostgresServer,
        rng: Random,
        latencies: Sequence[float],
        fate: Callable[[str, str], Choice] = lambda member, call: DELIVER,
    ) -> None:
        self.server = server
        self.fate = fate
        self._rng = rng
        self._latencies = latencies
        self._cut: dict[str, float] = {}
        self.lines: list[Line] = []
        self._blocked: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        # The context of no member, so that a frozen member freezes neither the network nor the server.
        self.context = copy_context()
        server.changed = self._unblock
        Network.current = self

    def __repr__(self) -> str:
        return f"<Network of {self.server!r}>"

    async def dial(self, timeout: float) -> Line:
        """Connect the member whose task calls. Raises ``psycopg.OperationalError``."""
        member, loop = GROUP.get() or "", current()
        choice = self.fate(member, "connect")
        latency = self._latencies[len(self.lines) % len(self._latencies)]
        await asyncio.sleep(2 * latency + (choice.amount if choice.kind != "deliver" else 0.0))
        if choice.kind in ("drop_request", "drop_reply"):
            raise psycopg.OperationalError("connection failed: timeout expired")
        if (left := self.cut_until(member) - loop.time()) > 0:
            await asyncio.sleep(min(left, timeout))
            if left > timeout:
                raise psycopg.OperationalError("connection failed: timeout expired")
        if not self.server.up or self._over:
            raise psycopg.OperationalError("connection failed: Connection refused")
        line = Line(self, member, latency, FIRST_DESCRIPTOR + len(self.lines))
        self.lines.append(line)
        return line

    def cut_until(self, member: str) -> float:
        """Return the end of the last cut of a member, in seconds; minus infinity = no cut."""
        return self._cut.get(member, -math.inf)

    def cut(self, member: str, until: float) -> bool:
        """Stop all bytes of a member until a time. In half of the cuts, the cut also ends the connections."""
        self._cut[member] = max(until, self.cut_until(member))
        if self._rng.random() < 0.5:
            for line in self.of(member):
                line.lose(until, self.lingers())
        return True

    def kill(self, member: str) -> None:
        """End the process of a member, or in half of the cases its machine."""
        lingers = self.lingers()
        for line in self.of(member):
            line.dead = True
            self.at(current().time() + lingers, lambda line=line: self.server.terminate(line.session))  # type: ignore[misc]

    def lingers(self) -> float:
        """Draw the seconds after which the server notices that a connection is gone."""
        return self._rng.choice(_LINGERS) if self._rng.random() < 0.5 else 0.0

    def of(self, member: str) -> list[Line]:
        """Return the connections of a member whose sessions are open."""
        return [line for line in self.lines if line.member == member and line.session.open]

    def at(self, when: float, act: Callable[[], object]) -> None:
        """Act at a time, on behalf of the server or the network."""

        def acts() -> None:
            try:
                act()
                self.schedule()
            except Exception as error:
                # Otherwise the loop would only log the error.
                current().fail(error)

        current().call_at(max(when, current().time()), acts, context=self.context)

    def block(self, retry: Callable[[], None]) -> None:
        """Repeat a statement after the end of the next transaction."""
        self._blocked.append(retry)

    def _unblock(self) -> None:
        blocked, self._blocked = self._blocked, []
        for retry in blocked:
            self.at(current().time(), retry)

    def end(self) -> None:
        """End all connections, refuse new connections, and stop the timers of the server."""
        self._over = True
        for line in self.lines:
            line.end()
        self._blocked.clear()
        if self._timer is not None:
            self._timer.cancel()

    def schedule(self) -> None:
        """Wake the server at its next timer. Call this method after each change of the server."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = self.server.next_at()
        if at < math.inf:
            self._timer = current().call_at(max(at, current().time()), self._tick, context=self.context)

    def _tick(self) -> None:
        self._timer = None
        try:
            self.server.advance(current().time())
            self.schedule()
        except Exception as error:
            current().fail(error)


class Line:
    """One connection, as its client sees it.

    Attributes:
        member: Name of the member.
        session: The session of the server.
        descriptor: Number of the socket.
        dead: Whether all bytes are lost.
        ended_at: Time at which the client could notice the end of the connection; infinity = not yet.
        notes: The notifications that have arrived, as pid and text.
    """

    def __init__(self, network: Network, member: str, latency: float, descriptor: int) -> None:
        self.member = member
        self.descriptor = descriptor
        self.dead = False
        self.ended_at = math.inf
        self.notes: list[tuple[int, str]] = []
        self._network = network
        self._latency = latency
        self._loop = current()
        self._last = {True: 0.0, False: 0.0}
        self._answer: asyncio.Future[Rows | None] | None = None
        self._reader: tuple[Callable[..., object], tuple[Any, ...], Context] | None = None
        self.session: Session = network.server.connect(member, self._loop.time())
        self.session.on_end = lambda: self._later(False, 0.0, self.end)
        self.session.on_notify = lambda pid, text: self._later(False, 0.0, lambda: self._noted(pid, text))

    # --- the bytes on their way

    def _later(self, out: bool, extra: float, act: Callable[[], None]) -> None:
        """Act when bytes that leave now arrive, in the order of the bytes of this direction."""
        at = max(self._loop.time() + self._latency + extra, self._network.cut_until(self.member), self._last[out])
        self._last[out] = at
        self._network.at(at, lambda: None if self.dead else act())

    def _noted(self, pid: int, text: str) -> None:
        self.notes.append((pid, text))
        self._readable()

    def end(self) -> None:
        """Let the client notice the end of the connection. Idempotent."""
        if self.ended_at == math.inf:
            self.ended_at = self._loop.time()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(psycopg.OperationalError(_GONE))
            self._readable()

    # --- the socket

    def watch(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        """Call a function when bytes have arrived."""
        self._reader = callback, arguments, copy_context()
        if self.notes or self.ended_at < math.inf:
            self._readable()

    def unwatch(self) -> bool:
        """Forget the function of ``watch``."""
        watched, self._reader = self._reader is not None, None
        return watched

    def _readable(self) -> None:
        if self._reader is not None:
            callback, arguments, context = self._reader
            self._loop.call_soon(callback, *arguments, context=context)

    # --- faults

    def lose(self, at: float, lingers: float) -> None:
        """Drop all bytes. The client notices the end at a time, and the server ``lingers`` seconds later."""
        self.dead = True
        self._network.at(at, self.end)
        self._network.at(at + lingers, lambda: self._network.server.terminate(self.session))

    # --- statements

    @property
    def open(self) -> bool:
        """Whether the client has not noticed an end."""
        return self.ended_at == math.inf

    async def ask(self, query: bytes, parameters: Any) -> Rows | None:
        """Perform a statement. Raises the errors of psycopg."""
        if not self.open:
            raise psycopg.OperationalError(_GONE)
        choice = self._network.fate(self.member, call_of(query))
        if not self.open:
            # The process was frozen at the boundary.
            raise psycopg.OperationalError(_GONE)
        answer = self._answer = self._loop.create_future()
        late = choice.amount if choice.kind == "delay" else 0.0
        of_the_reply = bool(choice.target % 2)
        lost_reply = choice.kind == "drop_reply"
        if choice.kind in ("drop_request", "drop_reply"):
            # A connection loses bytes only together with its end.
            sent = self._loop.time() + 2 * self._latency
            if choice.kind == "drop_request":
                self.lose(sent + choice.amount, self._network.lingers())
            else:
                self._network.at(sent + choice.amount, lambda: self.lose(0.0, self._network.lingers()))
        self._later(
            True,
            0.0 if of_the_reply else late,
            lambda: self._received(query, parameters, answer, late if of_the_reply else 0.0, lost_reply),
        )
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._cancelled(answer)
            raise
        finally:
            if answer.done() and not answer.cancelled():
                answer.exception()

    async def _cancelled(self, answer: asyncio.Future[Rows | None]) -> None:
        """Wait for the end of a statement, like the client."""
        with suppress(psycopg.Error, TimeoutError):
            async with asyncio.timeout(_CANCELLING):
                await asyncio.shield(answer)
                return
        self.close()

    def _received(
        self, query: bytes, parameters: Any, answer: asyncio.Future[Rows | None], late: float, lost: bool
    ) -> None:
        session = self.session
        if not session.open:
            return
        session.asked_at = self._loop.time()
        session.blocked = False
        error: psycopg.Error | None = None
        rows: Rows | None = None
        try:
            rows = perform(session, query, parameters, self._loop.time())
            session.statement_ends()
        except Blocked:
            if session.waits:
                session.blocked = True
                self._network.block(lambda: self._received(query, parameters, answer, late, lost))
                return
            error = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
        except UniqueViolation:
            error = psycopg.errors.UniqueViolation("duplicate key value violates unique constraint")
        except RowRefused:
            error = psycopg.errors.RaiseException("refused by a trigger")
        if not lost:
            self._later(False, late, lambda: self._replied(answer, rows, error))

    def _replied(self, answer: asyncio.Future[Rows | None], rows: Rows | None, error: psycopg.Error | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(rows)

    def close(self) -> None:
        """End the connection by the client. Idempotent."""
        if self.open:
            self.ended_at = self._loop.time()
            self._later(True, 0.0, lambda: self._network.server.terminate(self.session))


class SimConnection:
    """A connection with autocommit, in place of ``psycopg.AsyncConnection``."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.autocommit = True
        self._closed = False
        self._turn = asyncio.Lock()
        self._handlers: list[Callable[[Any], object]] = []
        self._in_transaction = False
        self.info = SimpleNamespace(server_version=VERSION, backend_pid=line.session.pid)

    def __repr__(self) -> str:
        return f"<SimConnection of {self.line.session!r}>"

    @classmethod
    async def connect(cls, conninfo: str = "", *, connect_timeout: float = math.inf, **options: Any) -> SimConnection:
        return cls(await Network.current.dial(connect_timeout))

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def pgconn(self) -> Any:
        status = TransactionStatus.UNKNOWN if self._closed else TransactionStatus.IDLE
        if self._in_transaction and not self._closed:
            status = TransactionStatus.INTRANS
        return SimpleNamespace(
            backend_pid=self.line.session.pid,
            transaction_status=status,
            pipeline_status=PipelineStatus.OFF,
            consume_input=self._consume,
            notifies=self._next_note,
        )

    def _consume(self) -> None:
        if not self.line.open:
            self._closed = True
            raise psycopg.OperationalError("consuming input failed: the connection is closed")

    def _next_note(self) -> Any:
        if not self.line.notes:
            return None
        pid, text = self.line.notes.pop(0)
        return SimpleNamespace(be_pid=pid, extra=text.encode())

    async def perform(self, query: object, parameters: Any) -> Rows | None:
        """Perform one statement, one at a time."""
        async with self._turn:
            if self._closed:
                raise psycopg.OperationalError("the connection is closed")
            text = text_of(query)
            try:
                rows = await self.line.ask(text, parameters)
            except psycopg.OperationalError as error:
                # An error with a state is an answer of the server, after which the connection goes on.
                self._closed = error.sqlstate is None
                raise
            finally:
                self._closed = self._closed or not self.line.open
                self._tell()
            self._in_transaction = text == b"BEGIN" or (self._in_transaction and text not in (b"COMMIT", b"ROLLBACK"))
            return rows

    def _tell(self) -> None:
        notes, self.line.notes = self.line.notes, []
        for pid, text in notes:
            for handler in list(self._handlers):
                handler(psycopg.Notify("lanes_log_1", text, pid))

    async def execute(self, query: object, parameters: Any = None) -> SimCursor:
        return await SimCursor(self).execute(query, parameters)

    def cursor(self, **options: Any) -> SimCursor:
        return SimCursor(self)

    def transaction(self) -> SimTransaction:
        return SimTransaction(self)

    def fileno(self) -> int:
        return self.line.descriptor

    def add_notify_handler(self, handler: Callable[[Any], object]) -> None:
        self._handlers.append(handler)

    def remove_notify_handler(self, handler: Callable[[Any], object]) -> None:
        self._handlers.remove(handler)

    async def close(self) -> None:
        self._closed = True
        self.line.close()


class SimCursor:
    """A cursor, in place of ``psycopg.AsyncCursor``."""

    def __init__(self, connection: SimConnection, **options: Any) -> None:
        self._connection = connection
        self._rows: Rows | None = None

    async def execute(self, query: object, parameters: Any = None) -> Self:
        self._rows = await self._connection.perform(query, parameters)
        return self

    @property
    def pgresult(self) -> Any:
        return SimpleNamespace(nfields=0 if self._rows is None else 1)

    async def fetchone(self) -> tuple[Any, ...] | None:
        return next(iter(self._rows or ()), None)

    async def fetchall(self) -> Rows:
        return list(self._rows or ())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SimTransaction:
    """A transaction block, as of ``AsyncConnection.transaction``."""

    def __init__(self, connection: SimConnection) -> None:
        self._connection = connection

    async def __aenter__(self) -> Self:
        await self._connection.perform(b"BEGIN", None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            await self._connection.perform(b"COMMIT", None)
        elif not self._connection.closed:
            with suppress(psycopg.OperationalError):
                await self._connection.perform(b"ROLLBACK", None)
        return False
