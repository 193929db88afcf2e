"""Partition states on a real server keep the contract of state stores, also in the transaction of a handler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from lanes import ConfigError, PartitionId, SourceError
from lanes.errors import is_retryable
from lanes.ownership import Fenced, State, StateChange, StateKey, StateLocked
from lanes_postgres import PostgresStates
from lanes_postgres import states as states_module
from lanes_postgres.errors import lanes_error
from lanes_postgres.steps import perform_async
from memsource.contract.states import (
    KEY,
    STATE_CHECKS,
    TRANSACTION_CHECKS,
    StateCheck,
    TransactionalStates,
    TransactionCheck,
)
from tests.components import PostgresServer
from tests.postgres.tables import Effects, requests

pytestmark = pytest.mark.anyio


@pytest.fixture
async def pool(effects: Effects) -> AsyncIterator[AsyncConnectionPool]:
    async with AsyncConnectionPool(effects.url, min_size=1, max_size=6) as pool:
        yield pool


def name_of(check: object) -> str:
    return getattr(check, "__name__", str(check))


@pytest.mark.parametrize("check", STATE_CHECKS, ids=name_of)
async def test_states_keep_the_contract(check: StateCheck, pool: AsyncConnectionPool, effects: Effects) -> None:
    await check(lambda: PostgresStates(pool.connection, schema=effects.schema))


class _Harness:
    """Handlers with asynchronous connections, or with blocking connections in threads."""

    def __init__(self, pool: AsyncConnectionPool, effects: Effects, blocking: bool) -> None:
        self._pool, self._effects, self._blocking = pool, effects, blocking

    def store(self) -> TransactionalStates:
        return PostgresStates(self._pool.connection, schema=self._effects.schema)

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self._blocking_transaction() if self._blocking else self._async_transaction()

    @asynccontextmanager
    async def _async_transaction(self) -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(self._effects.url) as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def _blocking_transaction(self) -> AsyncIterator[Any]:
        with psycopg.connect(self._effects.url) as connection, connection.transaction():
            yield connection

    async def in_transaction(self, store: TransactionalStates, connection: Any, change: StateChange) -> None:
        if self._blocking:
            await anyio.to_thread.run_sync(store.store_in, connection, change)
        else:
            awaitable = store.store_in(connection, change)
            assert awaitable is not None
            await awaitable


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("check", TRANSACTION_CHECKS, ids=name_of)
async def test_states_in_a_transaction_keep_the_contract(
    check: TransactionCheck, blocking: bool, pool: AsyncConnectionPool, effects: Effects
) -> None:
    await check(_Harness(pool, effects, blocking))


async def test_the_effect_of_a_former_owner_rolls_back(pool: AsyncConnectionPool, effects: Effects) -> None:
    states = PostgresStates(pool.connection, schema=effects.schema)
    former = await states.claim(KEY, 0)
    current = await states.claim(KEY, 0)

    async def handle(state: State, position: int) -> None:
        async with pool.connection() as connection, connection.transaction():
            await effects.add_async(connection, position)
            await states.store_in(connection, StateChange(KEY, state._replace(floor=position + 1)))

    with pytest.raises(
        Fenced, match=f"acquired with epoch {former.epoch}, but its state now has epoch {current.epoch}"
    ):
        await handle(former, 0)
    await handle(current, 0)
    assert effects.all() == [0]
    assert (await states.read([KEY]))[KEY].floor == 1


@pytest.mark.parametrize("autocommit", [False, True])
async def test_a_store_is_one_statement_that_no_freeze_interrupts(
    pool: AsyncConnectionPool, effects: Effects, autocommit: bool
) -> None:
    async with await psycopg.AsyncConnection.connect(effects.url, autocommit=autocommit) as connection:

        @asynccontextmanager
        async def lend() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
            yield connection

        states = PostgresStates(lend, schema=effects.schema)
        begun = await states.claim(KEY, 0)
        with requests(connection) as sent:
            assert await states.store([StateChange(KEY, begun._replace(floor=3))]) == [True]
        assert len(sent) == 1 and connection.autocommit is autocommit
    assert (await PostgresStates(pool.connection, schema=effects.schema).read([KEY]))[KEY].floor == 3


async def test_an_owner_that_is_frozen_in_a_claim_keeps_no_row(
    pool: AsyncConnectionPool, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends its transaction, although its connection is alive."""
    monkeypatch.setattr(states_module, "_CLAIMS", states_module._CLAIMS.replace("'5s'", "'100ms'"))
    states = PostgresStates(pool.connection, schema=effects.schema)
    await states.claim(KEY, 0)
    frozen = PostgresStates(pool.connection, schema=effects.schema)
    async with await psycopg.AsyncConnection.connect(effects.url) as connection:
        await perform_async(connection, frozen._claiming(KEY, 0), "claim")
        with pytest.raises(StateLocked):
            await states.claim(KEY, 0)
        with anyio.fail_after(10):
            while (state := await claimed(states)) is None:
                await anyio.sleep(0.01)
        assert state.floor == 0
        with pytest.raises(psycopg.Error) as ended:
            await connection.commit()
        assert is_retryable(lanes_error("store", ended.value), unknown=False)


async def claimed(states: PostgresStates) -> State | None:
    try:
        return await states.claim(KEY, 0)
    except StateLocked:
        return None


async def test_epochs_never_repeat_after_a_deletion(pool: AsyncConnectionPool, effects: Effects) -> None:
    states = PostgresStates(pool.connection, schema=effects.schema)
    before = await states.claim(KEY, 7)
    with psycopg.connect(effects.url) as blocking:
        blocking.execute(effects.query("DELETE FROM {}", "lanes_states"))
    with pytest.raises(Fenced, match="its state now is deleted"):
        async with pool.connection() as connection, connection.transaction():
            await states.store_in(connection, StateChange(KEY, before))
    after = await states.claim(KEY, 3)
    assert after.epoch > before.epoch and after.floor == 3
    assert await states.store([StateChange(KEY, before._replace(floor=9))]) == [False]


async def test_a_claim_survives_a_crash_of_the_server(
    fresh_postgres: Callable[..., PostgresServer], schema: str
) -> None:
    """The server confirms commits before they are on its disk. A claim is on the disk when the call returns."""
    server = fresh_postgres()
    effects = Effects.make(server, schema)
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET synchronous_commit TO off")
        connection.execute("ALTER SYSTEM SET wal_writer_delay TO '10s'")
        connection.execute("SELECT pg_reload_conf()")

    @asynccontextmanager
    async def connect() -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        async with await psycopg.AsyncConnection.connect(effects.url) as connection:
            yield connection

    states = PostgresStates(connect, schema=schema)
    epochs = [(await states.claim(KEY, 0)).epoch for _ in range(3)]
    server.kill()
    server.start()
    assert (await states.read([KEY]))[KEY].epoch == epochs[-1]
    assert (await states.claim(KEY, 0)).epoch > epochs[-1]


async def test_two_owners_that_have_exchanged_partitions_do_not_wait_for_each_other(
    pool: AsyncConnectionPool, effects: Effects
) -> None:
    """Each owner stores its own partitions and, with former epochs, the partitions of the other owner."""
    states = PostgresStates(pool.connection, schema=effects.schema)
    keys = [StateKey("exchanged", PartitionId("orders", number)) for number in range(40)]
    former = [(await states.claim(key, 0)).epoch for key in keys]
    current = [(await states.claim(key, 0)).epoch for key in keys]

    async def own(rest: int) -> None:
        for floor in range(1, 40):
            epochs = [(current if index % 2 == rest else former)[index] for index in range(len(keys))]
            changes = [StateChange(key, State(epoch, floor)) for key, epoch in zip(keys, epochs, strict=True)]
            # The owners store in opposite orders.
            answers = await states.store(changes if rest else changes[::-1])
            assert (answers if rest else answers[::-1]) == [index % 2 == rest for index in range(len(keys))]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(own, 0)
        tasks.start_soon(own, 1)
    assert {state.floor for state in (await states.read(keys)).values()} == {39}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (StateKey("", PartitionId("orders", 0)), "subscription=''"),
        (StateKey("a\0", PartitionId("orders", 0)), "subscription="),
        (StateKey("a", PartitionId("or\0ders", 0)), "the source 'or.x00ders' of a state has a zero byte"),
        (StateKey("a", PartitionId("orders", 0), "\0"), "the incarnation '.x00' of a state has a zero byte"),
        (StateKey("a", PartitionId("orders", 2**63)), f"the partition number {2**63} of a state is beyond 64 bits"),
    ],
)
async def test_an_invalid_key_is_refused(key: StateKey, text: str, pool: AsyncConnectionPool, effects: Effects) -> None:
    states = PostgresStates(pool.connection, schema=effects.schema)
    for call in (
        lambda: states.claim(key, 0),
        lambda: states.read([key]),
        lambda: states.store([StateChange(key, State(1, 0))]),
    ):
        with pytest.raises(ConfigError, match=text):
            await call()


async def test_the_state_is_stored_in_an_open_transaction_only(pool: AsyncConnectionPool, effects: Effects) -> None:
    states = PostgresStates(pool.connection, schema=effects.schema)
    change = StateChange(KEY, await states.claim(KEY, 0))
    async with await psycopg.AsyncConnection.connect(effects.url, autocommit=True) as connection:
        with pytest.raises(ConfigError, match="has autocommit and is in no transaction"):
            await states.store_in(connection, change)
    with pytest.raises(ConfigError, match="a str is no connection"):
        states.store_in("postgresql://me:canary@db/x", change)  # type: ignore[call-overload]


async def test_faults_of_the_setup_have_a_remedy(pool: AsyncConnectionPool, effects: Effects) -> None:
    with pytest.raises(ConfigError, match="connect is a str; pass a function"):
        PostgresStates("postgresql://me:canary@db/x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="schema=''"):
        PostgresStates(pool.connection, schema="")
    missing = PostgresStates(pool.connection, schema=f"{effects.schema}none")
    calls: list[Callable[[], Any]] = [lambda: missing.read([KEY]), lambda: missing.claim(KEY, 0)]
    for call in calls:
        with pytest.raises(ConfigError, match=r"run lanes_postgres\.migrate with the same schema="):
            await call()
    closed = PostgresStates(pool.connection, schema=effects.schema)
    await pool.close()
    with pytest.raises(SourceError, match="states in the schema") as failed:
        await closed.read([KEY])
    assert failed.value.retryable
    assert repr(closed) == f"<PostgresStates in the schema {effects.schema!r}>"
