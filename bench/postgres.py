"""Effects in PostgreSQL: messages a second. A message is a payment, and its transaction claims the position.

A payment is two statements: an `INSERT` into the ledger and an `UPDATE` of the account. The baseline is the same
transaction without the claim, on the same connections and server.

- One connection: the case handles the messages sequentially, without an event loop.
- 16 connections: each task of one event loop has a connection.
- Batch: one connection handles 100 messages in each transaction.
- The smallest effect uses one connection, and an `INSERT` into a table without an index. With the claim, the
  transaction has two statements.

By its default setting, the server writes to its disk before it answers a COMMIT.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from zlib import crc32

from psycopg import AsyncConnection, Connection

from bench.figures import Effort, Figure, interleaved, rate
from bench.source import messages_of, new_partition
from lanes.core.types import Message
from lanes_postgres import Positions, migrate
from tests.components import PostgresServer

GOAL: Final = 0.7
KEYS, MESSAGES, TASKS, BATCH = 1_000, 1_000, 16, 100
LEDGER: Final = "INSERT INTO payments (account, amount) VALUES (%s, %s)"
ACCOUNT: Final = "UPDATE accounts SET amount = amount + %s WHERE id = %s"
SMALLEST: Final = "INSERT INTO effects VALUES (%s, %s)"
TABLES: Final = """
    CREATE TABLE payments (id bigserial PRIMARY KEY, account bytea NOT NULL, amount bigint NOT NULL);
    CREATE TABLE accounts (id bytea PRIMARY KEY, amount bigint NOT NULL);
    CREATE TABLE effects (account bytea, amount bigint)
"""


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baseline."""
    count = effort.messages(MESSAGES)
    with PostgresServer(settings=("fsync=on",)) as server:
        with Connection.connect(server.url) as connection:
            migrate(connection)
            connection.execute(TABLES)
            keys = [b"key-%d" % number for number in range(KEYS)]
            connection.cursor().executemany("INSERT INTO accounts VALUES (%s, 0)", [(key,) for key in keys])
        sync, sync_bare, tasks, tasks_bare, batch, batch_bare, small, small_bare = interleaved(
            [
                partial(_measured, server, run, count, fenced=fenced)
                for run in (_sync, _async, _batch, partial(_sync, effects=(SMALLEST,)))
                for fenced in (True, False)
            ],
            effort.repeats,
        )
    return [
        rate("postgres fenced effect, one connection", "messages/s", sync, sync_bare, GOAL),
        rate(f"postgres fenced effect, {TASKS} connections", "messages/s", tasks, tasks_bare, GOAL),
        rate(f"postgres fenced effects, {BATCH} a transaction", "messages/s", batch, batch_bare),
        rate("postgres fenced effect, the smallest", "messages/s", small, small_bare),
    ]


EFFECTS: Final = (LEDGER, ACCOUNT)

Run = Callable[[PostgresServer, Sequence[Message], Positions | None], float]


def _measured(server: PostgresServer, run: Run, count: int, *, fenced: bool) -> float:
    """Return messages a second. Most keys of the messages have a row already."""
    messages = messages_of(new_partition(), count + KEYS, KEYS)
    positions = Positions("bench") if fenced else None
    with Connection.connect(server.url, autocommit=True) as connection:
        connection.execute("TRUNCATE payments, effects, lanes.lanes_positions")
        if positions is not None:
            with positions.once_all(connection, messages[:KEYS]):
                pass
        connection.execute("CHECKPOINT")
    seconds = run(server, messages[KEYS:], positions)
    with Connection.connect(server.url) as connection:
        done = connection.execute("SELECT (SELECT count(*) FROM payments) + (SELECT count(*) FROM effects)").fetchone()
    assert done == (count,)
    return count / seconds


def _values(statement: str, message: Message) -> tuple[object, object]:
    return (1, message.key) if statement == ACCOUNT else (message.key, 1)


def _sync(
    server: PostgresServer,
    messages: Sequence[Message],
    positions: Positions | None,
    *,
    effects: Sequence[str] = EFFECTS,
) -> float:
    with Connection.connect(server.url) as connection:
        begin = time.perf_counter()
        for message in messages:
            with connection.transaction() if positions is None else positions.once(connection, message) as fresh:
                if fresh:
                    for statement in effects:
                        connection.execute(statement, _values(statement, message))
        return time.perf_counter() - begin


def _batch(server: PostgresServer, messages: Sequence[Message], positions: Positions | None) -> float:
    with Connection.connect(server.url) as connection:
        begin = time.perf_counter()
        for first in range(0, len(messages), BATCH):
            batch = messages[first : first + BATCH]
            with connection.transaction() if positions is None else positions.once_all(connection, batch) as fresh:
                left = fresh if isinstance(fresh, list) else batch
                for statement in EFFECTS:
                    values = [_values(statement, message) for message in left]
                    connection.cursor().executemany(statement, values)
        return time.perf_counter() - begin


def _async(server: PostgresServer, messages: Sequence[Message], positions: Positions | None) -> float:
    return asyncio.run(_tasks(server, messages, positions))


async def _tasks(server: PostgresServer, messages: Sequence[Message], positions: Positions | None) -> float:
    connections = [await AsyncConnection.connect(server.url) for _ in range(TASKS)]
    lanes: list[list[Message]] = [[] for _ in connections]
    for message in messages:
        # In order within a key, as a consumer delivers them.
        lanes[crc32(message.key or b"") % TASKS].append(message)
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for connection, lane in zip(connections, lanes, strict=True):
            tasks.create_task(_handle(connection, lane, positions))
    seconds = time.perf_counter() - begin
    for connection in connections:
        await connection.close()
    return seconds


async def _handle(connection: AsyncConnection[Any], lane: Sequence[Message], positions: Positions | None) -> None:
    for message in lane:
        async with connection.transaction() if positions is None else positions.once(connection, message) as fresh:
            if fresh:
                for statement in EFFECTS:
                    await connection.execute(statement, _values(statement, message))
