"""Advisory locks on a real server keep the contract of locks, through the faults of their session."""

from __future__ import annotations

import asyncio
import os
import signal
import weakref
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psycopg
import pytest

from lanes import ConfigError, SourceError
from lanes.clock import monotonic
from lanes.ownership import Held, Locks
from lanes_postgres import AdvisoryLocks, advisory_locks, lock_session
from memsource.contract.harness import ContractBroken
from memsource.contract.locks import LOCK_CHECKS, LockAbility, LockCheck
from tests.components import PostgresServer
from tests.conftest import Spawn, first_line
from tests.fakes.proxy import TcpProxy

pytestmark = pytest.mark.anyio

LEASE = 1.5


class Harness:
    """Processes over one real server, with names of their own."""

    can: Collection[LockAbility] = ("expire", "lose")
    lease = LEASE

    def __init__(self, url: str) -> None:
        self._url = url

    def locks(self) -> AdvisoryLocks:
        return AdvisoryLocks(self._url, lease=LEASE)

    async def elapse(self, seconds: float) -> None:
        await anyio.sleep(seconds)

    def now(self) -> float:
        return monotonic()

    async def lose(self, locks: Locks) -> None:
        assert isinstance(locks, AdvisoryLocks) and locks._session is not None
        await terminate(self._url, locks._session.pid)


async def terminate(url: str, pid: int) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("SELECT pg_terminate_backend(%s)", (pid,))


@asynccontextmanager
async def running(url: str, lease: float = LEASE) -> AsyncIterator[AdvisoryLocks]:
    locks = AdvisoryLocks(url, lease=lease)
    try:
        await locks.open()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(locks.run)
            yield locks
            tasks.cancel_scope.cancel()
    finally:
        await locks.aclose()


class Changes:
    """Counts the calls of ``changed``, and lets a test wait for one."""

    def __init__(self) -> None:
        self.count = 0
        self.event = anyio.Event()

    def __call__(self) -> None:
        self.count += 1
        self.event.set()


async def acquire(locks: AdvisoryLocks, name: str, changed: Callable[[], None] = lambda: None) -> Held:
    held = await locks.try_acquire(name, changed)
    assert held is not None
    return held


async def acquired(locks: AdvisoryLocks, name: str) -> Held | None:
    """Try once, also without a connection."""
    try:
        return await locks.try_acquire(name, lambda: None)
    except SourceError as error:
        if not error.retryable:
            raise
        return None


async def until_acquired(locks: AdvisoryLocks, name: str, within: float = 15.0) -> Held:
    with anyio.fail_after(within):
        while True:
            if (held := await acquired(locks, name)) is not None:
                return held
            await anyio.sleep(0.02)


async def until_lost(held: Held, within: float = 15.0) -> str:
    with anyio.fail_after(within):
        while not held.lost:
            await anyio.sleep(0.01)
    return held.lost


@pytest.mark.parametrize("check", LOCK_CHECKS, ids=lambda check: check.__name__)
async def test_advisory_locks_keep_the_contract(check: LockCheck, postgres: PostgresServer) -> None:
    await check(Harness(postgres.url))


@pytest.mark.parametrize(
    ("planted", "value"),
    [
        # The server never ends the session of a frozen process.
        ("_PREPARE", "SELECT set_config('idle_session_timeout', left(%s, 0) || '0', false), false, pg_backend_pid()"),
        # The holder relies on its lock after the server has ended the session.
        ("_MARGIN", -0.5),
    ],
)
async def test_the_contract_finds_locks_that_do_not_expire_in_time(
    planted: str, value: object, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = [each for each in LOCK_CHECKS if each.__name__ == "check_a_frozen_process_loses_its_locks"]
    monkeypatch.setattr(lock_session if planted == "_PREPARE" else advisory_locks, planted, value)
    with pytest.raises(ContractBroken):
        await check(Harness(postgres.url))


async def test_each_end_of_the_session_is_noticed_at_once(postgres: PostgresServer) -> None:
    """The socket says so, long before the next heartbeat."""
    async with running(postgres.url, lease=3600.0) as locks:
        held = await acquire(locks, "at once")
        for _ in range(2):
            assert locks._session is not None
            await terminate(postgres.url, locks._session.pid)
            assert "the connection ended: advisory locks: 57P01" in await until_lost(held)
            again = await until_acquired(locks, "at once")
            assert not again.lost and again.deadline > held.deadline
            held = again


async def test_a_killed_server_loses_the_locks_until_it_runs_again(
    fresh_postgres: Callable[..., PostgresServer],
) -> None:
    server = fresh_postgres()
    async with running(server.url) as locks:
        held = await acquire(locks, "killed")
        server.kill()
        await until_lost(held)
        with pytest.raises(SourceError) as refused:
            await locks.try_acquire("killed", lambda: None)
        assert refused.value.retryable
        await anyio.to_thread.run_sync(server.start)
        assert not (await until_acquired(locks, "killed", 30.0)).lost


async def test_a_frozen_session_of_the_server_ends_no_lock_before_its_deadline(postgres: PostgresServer) -> None:
    async with running(postgres.url) as locks, running(postgres.url) as other:
        held = await acquire(locks, "frozen there")
        assert locks._session is not None
        pid = locks._session.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            reason = await until_lost(held)
            assert monotonic() >= held.deadline
            assert reason == "the server did not answer before the deadline"
            assert await acquired(other, "frozen there") is None, "the frozen session has the lock until it wakes"
        finally:
            os.kill(pid, signal.SIGCONT)
        await until_acquired(locks, "frozen there", 30.0)


async def test_a_silent_network_ends_the_lock_at_both_ends(postgres: PostgresServer) -> None:
    async with TcpProxy("127.0.0.1", postgres.port).open() as proxy:
        url = f"postgresql://lanes@127.0.0.1:{proxy.port}/postgres"
        async with running(url) as cut, running(postgres.url) as other:
            held = await acquire(cut, "silent")
            proxy.silence()
            taken = await until_acquired(other, "silent")
            assert monotonic() >= held.deadline
            assert await until_lost(held) == "the server did not answer before the deadline"
            proxy.resume()
            await anyio.sleep(LEASE)
            assert not taken.lost
            assert await acquired(cut, "silent") is None


async def test_a_frozen_process_starts_nothing_after_another_has_its_lock(
    postgres: PostgresServer, spawn: Spawn
) -> None:
    """A process that is stopped for longer than its lease keeps its connection open, and still loses the lock."""
    process = spawn("-m", "tests.postgres.lock_holder", postgres.url, "stopped", str(LEASE))
    assert first_line(process).startswith("works")
    async with running(postgres.url) as other:
        assert await acquired(other, "stopped") is None
        process.send_signal(signal.SIGSTOP)
        stopped = monotonic()
        await until_acquired(other, "stopped")
        taken = monotonic()
        assert taken - stopped < LEASE + 5.0
        process.send_signal(signal.SIGCONT)
        said, errors = await anyio.to_thread.run_sync(process.communicate)
        assert process.returncode == 0, errors
        lines = [line.split(maxsplit=2) for line in said.splitlines()]
        assert lines[-1][0] == "lost" and float(lines[-1][1]) >= taken
        late = [time for what, time in lines[:-1] if what != "works" or float(time) >= taken]
        assert late == []


async def test_a_killed_process_frees_its_lock(postgres: PostgresServer, spawn: Spawn) -> None:
    process = spawn("-m", "tests.postgres.lock_holder", postgres.url, "dead", "3600")
    assert first_line(process).startswith("works")
    async with running(postgres.url) as other:
        assert await acquired(other, "dead") is None
        process.kill()
        await until_acquired(other, "dead")


async def test_closing_while_it_connects_again_leaves_no_session(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = anyio.Event(), anyio.Event()
    connect = lock_session.SessionMaker.connect

    async def slow(self: lock_session.SessionMaker) -> Any:
        session = await connect(self)
        reached.set()
        await go_on.wait()
        return session

    async with running(postgres.url) as locks:
        assert locks._session is not None
        monkeypatch.setattr(lock_session.SessionMaker, "connect", slow)
        await terminate(postgres.url, locks._session.pid)
        await reached.wait()
        await locks.aclose()
        go_on.set()
        await until_no_session(postgres.url)
        assert locks._session is None


async def until_no_session(url: str) -> None:
    """Wait until the server has no session of locks. The tests of this module leave none."""
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lanes locks'"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        with anyio.fail_after(10.0):
            while await (await connection.execute(sessions)).fetchone() != (0,):
                await anyio.sleep(0.02)


async def test_a_cancelled_connection_is_closed_at_once(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close needs neither the garbage collector nor the end of the exception."""

    class Begun:
        """A socket that psycopg has connected."""

    begun: list[weakref.ref[Begun]] = []

    async def connect(dsn: str, **options: Any) -> None:
        socket = Begun()
        begun.append(weakref.ref(socket))
        await anyio.sleep_forever()

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", connect)
    task = asyncio.create_task(lock_session.SessionMaker(postgres.url, 1.0, asyncio.create_task).connect())
    while not begun:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as kept:
        await task
    assert begun[0]() is None, kept


async def test_the_end_of_a_session_closes_both_of_its_descriptors(postgres: PostgresServer) -> None:
    """The descriptor of the connection, and the copy that is watched."""

    def sockets() -> int:
        folder = Path("/proc/self/fd")
        return sum(1 for each in folder.iterdir() if each.is_symlink() and "socket" in str(each.readlink()))

    before = sockets()
    for _ in range(3):
        async with running(postgres.url) as locks:
            held = await acquire(locks, "descriptors")
            assert locks._session is not None and sockets() == before + 2
            locks._end(locks._session, "ended by the test")
            assert held.lost == "ended by the test"
        assert sockets() == before


async def test_a_heartbeat_finds_what_the_session_holds(postgres: PostgresServer) -> None:
    """A lock that the session no longer has is lost, and a lock of no acquisition is given back."""
    async with running(postgres.url, lease=1.0) as locks, running(postgres.url) as other:
        changes = Changes()
        held = await acquire(locks, "unlocked by hand", changes)
        kept = await acquire(locks, "kept")
        session = locks._session
        assert session is not None
        async with session.turn:
            await session.ask("SELECT pg_advisory_unlock(%s::bigint)", advisory_locks.key_of("unlocked by hand"))
            await session.ask("SELECT 1 FROM pg_advisory_lock(%s::bigint)", advisory_locks.key_of("orphan"))
        assert await until_lost(held) == "the session of the server no longer has it"
        assert changes.count == 1
        await until_acquired(other, "orphan")
        assert not kept.lost


@pytest.mark.parametrize("when", ["before its turn", "before its answer"])
async def test_an_acquisition_of_an_ended_session_holds_nothing(when: str, postgres: PostgresServer) -> None:
    """Its lock ends with the session, and no heartbeat would renew it."""
    async with running(postgres.url, lease=3600.0) as locks, running(postgres.url) as other:
        session = locks._session
        assert session is not None
        queued = when == "before its turn"
        os.kill(session.pid, signal.SIGSTOP)
        try:
            if queued:
                await session.turn.acquire()
            task = asyncio.create_task(locks.try_acquire("ended", lambda: None))
            await anyio.sleep(0.05)
            assert not task.done()
            locks._end(session, "ended by the test")
            if queued:
                session.turn.release()
        finally:
            os.kill(session.pid, signal.SIGCONT)
        with pytest.raises(SourceError, match="ended by the test") as refused:
            await task
        assert refused.value.retryable
        assert repr(locks) == "<AdvisoryLocks: 0 held, lease 3600 s>"
        await until_acquired(other, "ended")


async def test_an_acquisition_is_refused_at_once_when_the_session_ends_in_its_tick(postgres: PostgresServer) -> None:
    locks = AdvisoryLocks(postgres.url, lease=3600.0)
    await locks.open()
    try:
        assert locks._session is not None
        task = asyncio.create_task(locks.try_acquire("in its tick", lambda: None))
        await asyncio.sleep(0)
        locks._end(locks._session, "ended by the test")
        with anyio.fail_after(10.0), pytest.raises(SourceError, match="ended by the test"):
            await task
    finally:
        with anyio.fail_after(10.0):
            await locks.aclose()


async def test_a_lock_whose_release_failed_is_given_back_by_a_heartbeat(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server refuses a request, for example after pg_cancel_backend, and the session goes on."""
    async with running(postgres.url) as locks, running(postgres.url) as other:
        kept = await acquire(locks, "kept")
        held = await acquire(locks, "not unlocked")
        session = locks._session
        with monkeypatch.context() as patched:
            patched.setattr(advisory_locks, "_UNLOCK", "SELECT pg_advisory_unlock(%s::bigint / 0)")
            await held.release()
        await until_acquired(other, "not unlocked", 3 * LEASE)
        assert locks._session is session and not kept.lost


async def test_a_heartbeat_that_the_server_refuses_is_repeated_after_a_pause(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    verify = AdvisoryLocks._verify

    async def counted(self: AdvisoryLocks, session: Any) -> None:
        nonlocal count
        count += 1
        await verify(self, session)

    monkeypatch.setattr(AdvisoryLocks, "_verify", counted)
    monkeypatch.setattr(advisory_locks, "_VERIFY", "SELECT 1 / 0, '', NULL")
    async with running(postgres.url, lease=30.0) as locks:
        session = locks._session
        assert session is not None
        session.verified_at -= 30.0
        locks._wake.set()
        await anyio.sleep(1.0)
        assert 2 <= count <= 11
        assert locks._session is session


async def test_a_cancelled_close_ends_the_session(postgres: PostgresServer) -> None:
    locks = AdvisoryLocks(postgres.url)
    await locks.open()
    session = locks._session
    assert session is not None
    with anyio.CancelScope() as scope:
        scope.cancel()
        await locks.aclose()
    assert scope.cancelled_caught
    with anyio.fail_after(10.0):
        while not session.connection.closed:
            await anyio.sleep(0.01)


async def test_many_acquisitions_do_not_delay_the_heartbeat(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue of requests that lasts longer than a lease renews the locks on its way."""
    slow = "SELECT pg_try_advisory_lock(%s::bigint), pg_backend_pid() FROM pg_sleep(0.1)"
    monkeypatch.setattr(advisory_locks, "_TRY", slow)
    async with running(postgres.url) as locks:
        held = await acquire(locks, "queue")
        found = await asyncio.gather(*(acquire(locks, f"queue/{number}") for number in range(40)))
        assert not held.lost and not any(each.lost for each in found)
        assert held.deadline > monotonic()


async def test_a_connection_that_fails_again_and_again_is_logged_once_a_minute(
    fresh_postgres: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lanes.postgres")
    server = fresh_postgres()
    async with running(server.url) as locks:
        server.kill()
        await anyio.sleep(1.5)
        assert locks._session is None
        server.start()
        with anyio.fail_after(30):
            while not any(": connected again after " in each for each in caplog.messages):
                await anyio.sleep(0.02)
    said = [each.getMessage() for each in caplog.records if each.getMessage().endswith("; retrying")]
    assert len(said) == 1 and "Connection refused" in said[0]
    assert said[0].count("; ") == 1, "the line of the source has the remedy"
    (end,) = [each for each in caplog.records if ": connected again after " in each.getMessage()]
    assert end.levelname == "INFO" and end.getMessage().endswith(" s")


async def test_a_refused_login_is_not_retryable(postgres: PostgresServer) -> None:
    for dsn in (f"{postgres.url}x", postgres.url.replace("lanes@", "nobody@")):
        assert dsn != postgres.url
        with pytest.raises(SourceError, match=r"does not exist; correct the connection string") as refused:
            await AdvisoryLocks(dsn).open()
        assert not refused.value.retryable and refused.value.__cause__ is None


async def test_two_names_with_one_key_are_refused(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(postgres.url) as locks:
        monkeypatch.setattr(advisory_locks, "key_of", lambda name: -7)
        await acquire(locks, "orders/billing/1")
        with pytest.raises(ConfigError, match="'orders/billing/2' and 'orders/billing/1' have the same key -7"):
            await locks.try_acquire("orders/billing/2", lambda: None)


def test_keys_have_a_domain_of_their_own() -> None:
    assert advisory_locks.key_of("orders/billing/1") == advisory_locks.key_of("orders/billing/1")
    keys = {advisory_locks.key_of(f"orders/billing/{number}") for number in range(10_000)}
    assert len(keys) == 10_000 and any(key < 0 for key in keys)
    assert all(-(2**63) <= key < 2**63 for key in keys)


async def test_an_old_server_is_refused(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_session, "_OLDEST", 990_000)
    with pytest.raises(ConfigError, match=r"which cannot limit the idle time of a session.*Upgrade the server"):
        await AdvisoryLocks(postgres.url).open()


async def test_a_standby_is_refused(fresh_postgres: Callable[..., PostgresServer]) -> None:
    server = fresh_postgres()
    server.kill()
    (server._process.folder / "data" / "standby.signal").touch()
    server.start()
    with pytest.raises(ConfigError, match="the server is a standby"):
        await AdvisoryLocks(server.url).open()


async def test_a_full_server_is_named(fresh_postgres: Callable[..., PostgresServer]) -> None:
    server = fresh_postgres(settings=("max_connections=4", "superuser_reserved_connections=0"))
    opened: list[AdvisoryLocks] = []
    try:
        for _ in range(4):
            opened.append(AdvisoryLocks(server.url))
            await opened[-1].open()
        with pytest.raises(SourceError, match=r"too many clients.*raise max_connections, or start fewer") as refused:
            await AdvisoryLocks(server.url).open()
        assert refused.value.retryable
    finally:
        for locks in opened:
            await locks.aclose()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dsn": None}, "dsn is None; pass a connection string"),
        ({"dsn": "postgresql://me:canary%zz@host/x"}, "correct the connection string"),
        ({"dsn": "host=h password='canary"}, "correct the connection string"),
        ({"dsn": "127.0.0.1:5432/canary"}, "dsn: the address has no scheme; correct the connection string, such as"),
        ({"dsn": "canary-me@host/x"}, "dsn: the address has no scheme; "),
        ({"dsn": "http://me:canary@host/x"}, "dsn: the scheme http:// is not a scheme of PostgreSQL; "),
        ({"dsn": "postgresql+psycopg://me:canary@host/x"}, "such as postgresql://user@host/database"),
        ({"dsn": "host=h port=canary"}, "dsn: the port is no number from 1 to 65535; correct the connection string"),
        ({"dsn": "host=h port=5432,70000"}, "dsn: the port is no number from 1 to 65535"),
        ({"dsn": "", "lease": 0.5}, "lease=0.5: must be a number of seconds from 1 to 86,400"),
        ({"dsn": "", "lease": True}, "lease=True: must be a number of seconds"),
        ({"dsn": "", "leas": 5}, "leas"),
    ],
)
async def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        AdvisoryLocks(**arguments)
    assert said in str(refused.value) and "canary" not in str(refused.value)


async def test_no_error_shows_the_password() -> None:
    locks = AdvisoryLocks("postgresql://me:canary@127.0.0.1:1/x")
    with pytest.raises(SourceError) as refused:
        await locks.open()
    assert "127.0.0.1" in str(refused.value) and "canary" not in str(refused.value)
    with pytest.raises(SourceError, match=r"no connection \(not opened\)"):
        await locks.try_acquire("a", lambda: None)
    await locks.aclose()
    with pytest.raises(SourceError, match=r"no connection \(closed\)") as closed:
        await locks.try_acquire("a", lambda: None)
    assert not closed.value.retryable


async def test_many_locks_share_one_connection(postgres: PostgresServer) -> None:
    async with running(postgres.url) as locks:
        held = [await acquire(locks, f"many/{number}") for number in range(300)]
        assert repr(locks) == f"<AdvisoryLocks: 300 held, lease {LEASE:g} s>"
        first = held[0].deadline
        with anyio.fail_after(10.0):
            while held[0].deadline == first:
                await anyio.sleep(0.02)
        assert len({each.deadline for each in held}) == 1, "one heartbeat renews all locks"
        async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
            cursor = await connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lanes locks' AND pid = %s",
                (locks._session.pid if locks._session else 0,),
            )
            assert await cursor.fetchone() == (1,)
