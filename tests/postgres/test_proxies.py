"""Advisory locks behind a real PgBouncer: transaction pooling is refused, and session pooling keeps the contract.

Needs PgBouncer, which CI does not install, so the tests are slow ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import anyio
import psycopg
import pytest

from lanes import ConfigError, Consumer, Message, SourceError
from lanes_postgres import AdvisoryLocks, PostgresSource, Record, lock_session
from memsource.contract.locks import LOCK_CHECKS, LockCheck
from tests.components import MissingComponent, PostgresServer
from tests.components.pgbouncer import PgBouncer
from tests.conftest import skip_or_fail
from tests.postgres.log.logs import Logs
from tests.postgres.test_advisory_locks import Harness, acquire, running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Mode = Literal["session", "transaction", "statement"]
Proxies = Callable[[Mode], PgBouncer]


@pytest.fixture(scope="module")
def proxies(postgres: PostgresServer) -> Iterator[Proxies]:
    """A factory of proxies, each of which is started once."""
    started: dict[str, PgBouncer] = {}
    with contextlib.ExitStack() as stopping:

        def start(mode: Mode) -> PgBouncer:
            if mode not in started:
                proxy = PgBouncer(postgres, mode)
                stopping.callback(proxy.stop)
                try:
                    proxy.start()
                except MissingComponent as missing:
                    skip_or_fail(missing)
                started[mode] = proxy
            return started[mode]

        yield start


async def test_transaction_pooling_is_refused_at_the_start(proxies: Proxies) -> None:
    for _ in range(3):
        with pytest.raises(ConfigError, match=r"a proxy .* shares sessions between clients .* use session pooling"):
            await AdvisoryLocks(proxies("transaction").url).open()
    # The refused client has changed no session of other clients.
    async with await psycopg.AsyncConnection.connect(proxies("transaction").url, autocommit=True) as connection:
        assert await (await connection.execute("SHOW idle_session_timeout")).fetchone() == ("0",)


async def test_a_consumer_behind_transaction_pooling_ends_at_its_start(
    proxies: Proxies, postgres: PostgresServer, schema: str
) -> None:
    logs = Logs.make(postgres, schema)
    logs.commit("1")
    source = PostgresSource(proxies("transaction").url, logs.log, subscription="billing")

    async def handler(message: Message) -> None:
        raise AssertionError("a message was handled")

    with anyio.fail_after(30), pytest.raises(ConfigError, match=r"a proxy .* use session pooling"):
        await Consumer(source, handler).run()
    # Appends need no session.
    async with await psycopg.AsyncConnection.connect(proxies("transaction").url, prepare_threshold=None) as connection:
        await logs.log.append(connection, [Record("2", "k")])
    assert logs.values() == ["1", "2"]


async def test_statement_pooling_is_refused_at_the_start(proxies: Proxies) -> None:
    with pytest.raises(ConfigError, match="use session pooling"):
        await AdvisoryLocks(proxies("statement").url).open()


async def test_transaction_pooling_that_was_not_seen_is_found_by_a_heartbeat(
    proxies: Proxies, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client takes the session, as a busy pool does at any time."""
    monkeypatch.setattr(lock_session, "_PROBES", 0)
    locks = AdvisoryLocks(proxies("transaction").url, lease=3.0)
    await locks.open()
    try:
        held = await acquire(locks, "pooled")
        async with await psycopg.AsyncConnection.connect(proxies("transaction").url) as other, other.transaction():
            await other.execute("SELECT 1")
            with anyio.fail_after(10.0), pytest.raises(ConfigError, match="the process of the server changed"):
                await locks.run()
        assert held.lost
    finally:
        await locks.aclose()
        # The locks limited the idle time of a session that the proxy would give to the next test.
        async with await psycopg.AsyncConnection.connect(postgres.url, autocommit=True) as connection:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend' AND application_name <> ''"
            )


@pytest.mark.parametrize(
    ("setting", "options", "said"),
    [
        ("query_wait_timeout = 2", "", "query_wait_timeout"),
        ("query_wait_timeout = 60", "?connect_timeout=3", "the PostgreSQL server did not answer within 3 s"),
    ],
)
async def test_a_full_pool_of_sessions_is_an_outage(
    setting: str, options: str, said: str, postgres: PostgresServer
) -> None:
    """Session pooling can hold locks, so a start that finds no free session may be repeated."""
    proxy = PgBouncer(postgres, "session", settings=("default_pool_size = 1", setting))
    try:
        try:
            proxy.start()
        except MissingComponent as missing:
            skip_or_fail(missing)
        locks = AdvisoryLocks(proxy.url + options)
        with anyio.fail_after(20.0), pytest.raises(SourceError, match=said) as refused:
            # The start needs a second session.
            await locks.open()
        assert refused.value.retryable
        with anyio.fail_after(20.0):
            await locks.aclose()
    finally:
        proxy.stop()


@pytest.mark.parametrize("check", LOCK_CHECKS, ids=lambda check: check.__name__)
async def test_session_pooling_keeps_the_contract(check: LockCheck, proxies: Proxies) -> None:
    await check(Harness(proxies("session").url))


async def test_session_pooling_frees_the_locks_of_a_closed_client(proxies: Proxies, postgres: PostgresServer) -> None:
    async with running(postgres.url) as other:
        async with running(proxies("session").url) as locks:
            await acquire(locks, "through the proxy")
            assert await other.try_acquire("through the proxy", lambda: None) is None
        await acquire(other, "through the proxy")
