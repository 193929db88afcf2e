"""Books payments exactly once. One transaction moves the money and stores the position of the message.

The broker delivers each message three times, and some handlers fail. The broker runs in the process of the program.

Needs a server: POSTGRES_URL=postgresql://me@127.0.0.1:5432/test python examples/postgres/exactly_once.py
"""

from __future__ import annotations

import asyncio
import os
import random

import psycopg
from psycopg_pool import AsyncConnectionPool

import lanes
from lanes_postgres import Positions, migrate
from memsource import MemoryBroker, MemorySource

SERVER = os.environ["POSTGRES_URL"]
ACCOUNTS, PAYMENTS, DELIVERIES = 20, 300, 3
SCHEMA = "example_accounts"

positions = Positions("accounts", schema=SCHEMA)
chance = random.Random(1)
calls = 0


async def main() -> None:
    async with AsyncConnectionPool(SERVER, min_size=8) as pool:

        async def pay(message: lanes.Message) -> None:
            """Book a payment. The payments of one account run one at a time, in order."""
            global calls
            calls += 1
            async with pool.connection() as connection, positions.once(connection, message) as fresh:
                if fresh:
                    await connection.execute(
                        f"UPDATE {SCHEMA}.accounts SET amount = amount + %s WHERE id = %s",
                        (int(message.value), message.key),
                    )
                    if chance.random() < 0.1:
                        raise lanes.Nak(delay=0.001)  # the transaction rolls back amount and position

        # Restart the broker twice without its acknowledgements. Each restart redelivers every payment, from the first
        # one on.
        for _ in range(DELIVERIES):
            settings = lanes.Settings(concurrency=8, retry=lanes.Retry(attempts=50))
            await lanes.run(published(), pay, settings=settings)
        async with pool.connection() as connection:
            found = await (await connection.execute(f"SELECT sum(amount) FROM {SCHEMA}.accounts")).fetchone()
    expected = sum(range(PAYMENTS))
    assert found == (expected,)
    print(f"{PAYMENTS} payments, {calls} calls of the handler, {expected} in the accounts: each counted once")


def published() -> MemorySource:
    """Return a source of the payments, which ends after the last payment."""
    broker = MemoryBroker()
    for number in range(PAYMENTS):
        broker.publish(str(number), key=f"account-{number % ACCOUNTS}")
    source = MemorySource(broker)
    source.finish()
    return source


if __name__ == "__main__":
    with psycopg.connect(SERVER) as connection:
        migrate(connection, schema=SCHEMA)
        connection.execute(f"CREATE TABLE {SCHEMA}.accounts (id bytea PRIMARY KEY, amount bigint NOT NULL)")
        connection.cursor().executemany(
            f"INSERT INTO {SCHEMA}.accounts VALUES (%s, 0)", [(b"account-%d" % number,) for number in range(ACCOUNTS)]
        )
    try:
        asyncio.run(main())
    finally:
        with psycopg.connect(SERVER) as connection:
            connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
