"""A session for locks is checked before its first lock, behind each kind of proxy; fakes, no server.

``test_proxies`` has a real proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any, Self

import anyio
import psycopg
import pytest

from lanes.clock import monotonic
from lanes.errors import ConfigError, SourceError
from lanes_postgres import lock_session
from lanes_postgres.lock_session import LockSession, SessionMaker, abandon

pytestmark = pytest.mark.anyio

DSN = "postgresql://user:secret@h:5432/x"
OPTIONS = {
    "prepare_threshold": None,
    "connect_timeout": 10,
    "tcp_user_timeout": 2_500,
    "fallback_application_name": "lanes locks",
}
PID = "SELECT pg_backend_pid()"


class Connection:
    """A connection of a client whose process is ``pid``. Behind a proxy, the server answers with other processes."""

    def __init__(self, pid: int, answers: Sequence[int], *, version: int = 140_000, standby: bool = False) -> None:
        self.info = SimpleNamespace(server_version=version, backend_pid=pid)
        self.answers = list(answers)
        self.standby = standby
        self.requests: list[tuple[str, Any]] = []
        self.begun = False
        self.closed = False
        self.fails: Exception | None = None
        self.waits = False
        self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def fileno(self) -> int:
        return self._descriptor

    async def execute(self, query: str, parameters: Any = None) -> Self:
        self.requests.append((query, parameters))
        if self.fails is not None:
            raise self.fails
        if self.waits:
            await asyncio.Event().wait()
        return self

    async def fetchone(self) -> tuple[Any, ...] | None:
        query, parameters = self.requests[-1]
        if query == PID:
            return (self.answers.pop(0),)
        return (*parameters, self.standby, self.answers.pop(0))

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        self.begun = True
        yield

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        self.closed = True


class Cursor:
    def __init__(self, connection: Connection, row_factory: Any = None) -> None:
        self._connection = connection

    async def execute(self, query: str, parameters: Any = None) -> Connection:
        return await self._connection.execute(query, parameters)

    async def fetchone(self) -> tuple[Any, ...] | None:
        return await self._connection.fetchone()


class Network:
    """The connections that a maker gets, in order: the first for its locks, and the others for its checks."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.opened: list[tuple[Connection, str, dict[str, Any]]] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def first(self, dsn: str, where: str, **options: Any) -> Connection:
        assert where == "advisory locks"
        return await self.connect(dsn, **options)

    async def connect(self, dsn: str, **options: Any) -> Connection:
        connection = self.connections[len(self.opened)]
        self.opened.append((connection, dsn, options))
        return connection

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def session(self, *connections: Connection, dsn: str = DSN) -> LockSession:
        self.connections += connections
        return await SessionMaker(dsn, 2.5, self.spawn).connect()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(lock_session, "connect", made.first)
    monkeypatch.setattr(lock_session, "AsyncConnection", made)
    monkeypatch.setattr(lock_session, "AsyncCursor", Cursor)
    return made


async def test_a_direct_session_needs_no_second_connection(network: Network) -> None:
    before = monotonic()
    session = await network.session(Connection(7, [7, 7]))
    assert (session.pid, session.timeout, session.held, session.ended) == (7, "2500ms", {}, "")
    assert not session.poked
    assert before <= session.verified_at == session.asked_at <= monotonic()
    ((connection, dsn, options),) = network.opened
    assert (dsn, options) == (DSN, OPTIONS)
    assert [parameters for _, parameters in connection.requests] == [None, ("2500ms",)]
    assert not connection.closed
    session.end("over")


async def test_session_pooling_is_accepted_after_three_checks(network: Network) -> None:
    others = [Connection(70 + number, [8 + number]) for number in range(3)]
    session = await network.session(Connection(70, [7, 7, 7, 7, 7]), *others)
    assert session.pid == 7
    assert [(dsn, options) for _, dsn, options in network.opened] == [(DSN, OPTIONS)] * 4
    assert all(other.begun and other.closed for other in others)
    assert not session.connection.closed
    session.end("over")


@pytest.mark.parametrize(
    ("own", "theirs", "said"),
    [
        ([7], [[7]], "two clients have the session of the server's process 7"),
        ([7, 7], [[8], [7]], "two clients have the session of the server's process 7"),
        ([7, 9], [[8]], "the process of the server changed from 7 to 9"),
        ([7, 7, 7, 8], [[8], [9], [10]], "the process of the server changed from 7 to 8"),
    ],
    ids=["at once", "at the second check", "moved at once", "moved at the third check"],
)
async def test_a_shared_session_is_refused(
    network: Network, own: list[int], theirs: list[list[int]], said: str
) -> None:
    first, others = Connection(70, own), [Connection(71, answers) for answers in theirs]
    with pytest.raises(ConfigError) as refused:
        await network.session(first, *others)
    assert str(refused.value) == (
        f"advisory locks: a proxy between this process and the server shares sessions between clients ({said}), so no "
        "client can hold a lock; connect to the server directly, or use session pooling"
    )
    assert first.closed
    assert all(other.begun and other.closed for other in others)


async def test_statement_pooling_is_refused_with_its_own_words(network: Network) -> None:
    first, other = Connection(70, [7]), Connection(71, [])
    other.fails = psycopg.errors.ProtocolViolation("transaction blocks not allowed in statement pooling mode")
    with pytest.raises(ConfigError) as refused:
        await network.session(first, other)
    found = "(its answer: 08P01 transaction blocks not allowed in statement pooling mode)"
    assert f"shares sessions between clients {found}, so no client" in str(refused.value)
    assert refused.value.__cause__ is other.fails
    assert first.closed and other.closed


async def test_a_proxy_without_a_free_session_is_an_outage(network: Network) -> None:
    first, other = Connection(70, [7]), Connection(71, [])
    other.fails = psycopg.errors.ProtocolViolation("query_wait_timeout")
    with pytest.raises(SourceError, match=r"^advisory locks: 08P01 query_wait_timeout$") as refused:
        await network.session(first, other)
    assert refused.value.retryable
    assert refused.value.__cause__ is other.fails
    assert first.closed


async def test_an_error_of_the_server_is_an_error_of_the_locks(network: Network) -> None:
    first = Connection(7, [])
    first.fails = psycopg.OperationalError("the connection is lost")
    with pytest.raises(SourceError, match=r"^advisory locks: OperationalError the connection is lost$") as refused:
        await network.session(first)
    assert refused.value.__cause__ is first.fails
    assert first.closed


@pytest.mark.parametrize(("version", "refused"), [(139_999, True), (140_000, False)])
async def test_a_server_before_version_14_is_refused(network: Network, version: int, refused: bool) -> None:
    first = Connection(7, [7, 7], version=version)
    if refused:
        with pytest.raises(ConfigError, match=r"^advisory locks: the server has version 13, which cannot limit"):
            await network.session(first)
    else:
        (await network.session(first)).end("over")
    assert first.closed == refused


async def test_a_standby_is_refused_before_its_session_holds_a_lock(network: Network) -> None:
    first = Connection(7, [7, 7], standby=True)
    with pytest.raises(ConfigError, match=r"^advisory locks: the server is a standby, whose locks no other server"):
        await network.session(first)
    assert first.closed


async def test_a_server_that_does_not_answer_is_named_and_left(network: Network) -> None:
    first = Connection(7, [])
    first.waits = True
    with anyio.fail_after(10.0), pytest.raises(SourceError) as refused:
        await network.session(first, dsn=f"{DSN}?connect_timeout=1")
    assert str(refused.value) == (
        "advisory locks at host h, port 5432, database x, user user: the PostgreSQL server did not answer within 1 s; "
        "check the server and the network"
    )
    assert refused.value.retryable
    preparation, leaving = network.tasks
    with anyio.fail_after(10.0):
        await leaving
    assert preparation.cancelled()
    assert first.closed


@pytest.mark.parametrize("ignored", [0, 1, 2], ids=["ends at once", "waits for the server", "never ends"])
async def test_an_abandoned_request_delays_the_end_of_its_connection_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, ignored: int
) -> None:
    monkeypatch.setattr(lock_session, "CLOSING", 0.05)
    cancelled: list[int] = []
    over = asyncio.Event()

    async def request() -> None:
        while not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                cancelled.append(1)
                if len(cancelled) > ignored:
                    raise

    connection: Any = Connection(7, [])
    task = asyncio.create_task(request())
    await asyncio.sleep(0.0)
    with anyio.fail_after(10.0):
        await abandon({task}, connection)
    assert connection.closed
    assert len(cancelled) == min(ignored + 1, 2)
    over.set()
    await asyncio.wait({task})


async def test_an_abandoned_request_that_has_ended_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_session, "CLOSING", 0.0)
    task = asyncio.create_task(asyncio.sleep(0.0))
    await task
    connection: Any = Connection(7, [])
    await abandon({task}, connection)
    assert connection.closed


async def test_an_ended_session_sends_no_request_and_returns_no_answer(network: Network) -> None:
    connection: Any = Connection(7, [7, 7, 7, 7])
    session = await network.session(connection)
    asked = session.asked_at
    assert await session.ask(PID) == (7,)
    assert session.asked_at > asked
    sent = len(connection.requests)

    answer = connection.fetchone

    async def end() -> Any:
        session.end("the server ended the session")
        return await answer()

    connection.fetchone = end
    with pytest.raises(SourceError, match=r"^advisory locks: the server ended the session$") as ended:
        await session.ask(PID)
    assert ended.value.retryable
    assert len(connection.requests) == sent + 1
    with pytest.raises(SourceError, match="the server ended the session"):
        await session.ask(PID)
    assert len(connection.requests) == sent + 1


async def test_an_ended_session_watches_its_socket_no_more(network: Network) -> None:
    woken: list[bool] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection: Any = Connection(7, [7, 7])
        connection.fileno = ours.fileno
        session = await network.session(connection)
        session.watch(lambda: woken.append(session.poked))
        watched = session._socket
        theirs.send(b"x")
        while not woken:
            await asyncio.sleep(0.0)
        session.watch(lambda: woken.append(session.poked))
        session.end("over")
        assert not asyncio.get_running_loop().remove_reader(watched)
        session.watch(lambda: woken.append(session.poked))
        await asyncio.sleep(0.0)
    assert woken == [True]
