"""A cancelled scope ends a running statement of the stores without a warning of psycopg."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

from lanes import PartitionId
from lanes.attempts import Attempt
from lanes.ownership import State, StateChange, StateKey
from lanes_postgres import PostgresAttempts, PostgresDeadLetters, PostgresStates
from tests.fakes.dead_letters import dead_letter
from tests.postgres.tables import Effects, message, partition

pytestmark = pytest.mark.anyio

KEY = StateKey("billing", PartitionId("orders", 0), "one")


def states(pool: AsyncConnectionPool, effects: Effects) -> Callable[[], Coroutine[Any, Any, object]]:
    store = PostgresStates(pool.connection, schema=effects.schema)
    return lambda: store.store([StateChange(KEY, State(1, 5))])


def attempts(pool: AsyncConnectionPool, effects: Effects) -> Callable[[], Coroutine[Any, Any, object]]:
    store = PostgresAttempts(pool.connection, "billing", schema=effects.schema)
    return lambda: store.keep(message(5, b"k", partition()), Attempt(1, "held", "ValueError"))


def dead_letters(pool: AsyncConnectionPool, effects: Effects) -> Callable[[], Coroutine[Any, Any, object]]:
    box = PostgresDeadLetters(effects.url, "billing", schema=effects.schema)
    return lambda: box.put(dead_letter())


@pytest.mark.parametrize(
    ("make", "table"), [(states, "lanes_states"), (attempts, "lanes_attempts"), (dead_letters, "lanes_dead_letters")]
)
async def test_a_cancelled_statement_logs_nothing(
    make: Callable[[AsyncConnectionPool, Effects], Callable[[], Coroutine[Any, Any, object]]],
    table: str,
    effects: Effects,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "psycopg")
    async with (
        AsyncConnectionPool(effects.url, min_size=1, max_size=2) as pool,
        await psycopg.AsyncConnection.connect(effects.url) as other,
    ):
        call = make(pool, effects)
        await other.execute(f"LOCK TABLE {effects.schema}.{table} IN ACCESS EXCLUSIVE MODE")

        async def is_waiting() -> bool:
            cursor = await other.execute("SELECT count(*) FROM pg_locks WHERE NOT granted")
            row = await cursor.fetchone()
            return row is not None and row[0] > 0

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                while not await is_waiting():
                    await anyio.sleep(0.01)
                # A cancelled scope cancels its tasks in each turn of the loop.
                tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("psycopg")] == []
