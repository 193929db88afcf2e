"""Runs one handler on five sources: Kafka, JetStream and PostgreSQL, a broker in memory, and stored messages on Spark.

The handler books the steps of expense declarations, in order within a declaration. The handler takes a connection from
a pool in a variable of this module. `begin` opens the pool and `end` closes it, around a consumer, or as `setup` and
`teardown` of each Spark task. The handler stores the position of a message in the transaction of its effect, so each
effect happens once.

The program runs the handler on a broker in this process: POSTGRES_URL=postgresql://me@127.0.0.1:5432/test python
examples/everywhere/declarations.py

The same `book` elsewhere:
    lanes.main(KafkaSource(config, topics="declarations"), book)
    lanes.main(JetStreamSource(url, stream="DECLARATIONS", durable="books", key=subject_token(1)), book)
    lanes.main(PostgresSource(url, Log("declarations"), subscription="books"), book)
    replay(spark, KafkaTopic(servers=servers, topic="declarations"), book,
           setup=partial(begin, url), teardown=end, effects="fenced")
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import psycopg
from psycopg_pool import AsyncConnectionPool

import lanes
from lanes_postgres import Positions, migrate

SCHEMA = "example_declarations"
TABLE = f"""
    CREATE TABLE IF NOT EXISTS {SCHEMA}.declarations (
        id text PRIMARY KEY, steps integer[] NOT NULL, last text NOT NULL, amount numeric NOT NULL
    )
"""
BOOK = f"""
    INSERT INTO {SCHEMA}.declarations AS d VALUES (%(case)s, ARRAY[%(step)s::integer], %(activity)s, %(amount)s)
    ON CONFLICT (id) DO UPDATE SET steps = d.steps || excluded.steps, last = excluded.last,
        amount = d.amount + excluded.amount
"""

positions = Positions("books", schema=SCHEMA)
_pools: list[AsyncConnectionPool[psycopg.AsyncConnection[Any]]] = []


async def begin(url: str) -> None:
    """Open the pool. Call this function on the event loop that runs the handler."""
    pool = AsyncConnectionPool(url, min_size=2, max_size=8, open=False)
    _pools.append(pool)
    await pool.open()


async def end() -> None:
    """Close the pool."""
    await _pools.pop().close()


async def book(message: lanes.Message) -> None:
    """Book one step of a declaration, after the earlier steps. This function is the handler."""
    event = json.loads(message.value)
    async with _pools[-1].connection() as connection, positions.once(connection, message) as fresh:
        if fresh:
            await connection.execute(BOOK, event)


def make_tables(url: str) -> None:
    with psycopg.connect(url) as connection:
        migrate(connection, schema=SCHEMA)
        connection.execute(TABLE)


async def main(url: str) -> None:
    from memsource import MemoryBroker, MemorySource

    broker = MemoryBroker()
    for number in range(300):
        case, step = number % 30, number // 30
        name = f"declaration{case}"
        event = {"case": name, "step": step, "activity": f"step {step}", "amount": 10}
        broker.publish(json.dumps(event), key=name)
    source = MemorySource(broker)
    source.finish()
    await begin(url)
    try:
        await lanes.run(source, book, settings=lanes.Settings(concurrency=8))
    finally:
        await end()
    with psycopg.connect(url) as connection:
        booked = connection.execute(f"SELECT id, steps, amount FROM {SCHEMA}.declarations").fetchall()
    assert len(booked) == 30
    assert all(steps == list(range(10)) and amount == 100 for _, steps, amount in booked)
    print(f"{len(booked)} declarations with 10 steps each, in order, booked once")


if __name__ == "__main__":
    server = os.environ["POSTGRES_URL"]
    make_tables(server)
    try:
        asyncio.run(main(server))
    finally:
        with psycopg.connect(server) as tables:
            tables.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
