"""Rebuilds a table by a replay, which books all past payments again, each exactly once.

The live consumer keeps the balances. The replay computes the balances in a new table, from all past payments. A killed
replay may start again, because the transaction that adds to a balance also stores the position of the message. The
program starts the replay twice, and the second run adds nothing. The handler is an ordinary handler of `lanes`.

Needs pyspark and Java 17 or newer, psycopg with its pool, and a server:
POSTGRES_URL=postgresql://me@127.0.0.1:5432/test python examples/spark/replay_into_postgres.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from psycopg_pool import AsyncConnectionPool
from pyspark.sql import SparkSession

import lanes
from lanes_postgres import Positions, migrate
from lanes_spark import ParquetTable, Report, replay

SERVER = os.environ["POSTGRES_URL"]
ACCOUNTS, PAYMENTS, PARTITIONS = 20, 1_000, 4
SCHEMA = "example_balances"

# The replay needs a new name, because each payment has had its effect under the name of the live consumer.
positions = Positions("balances-2", schema=SCHEMA)
pools: list[AsyncConnectionPool[Any]] = []


async def connect() -> None:
    """Open a task's connections, before its first message and on its event loop. All tasks share the database."""
    pools.append(AsyncConnectionPool(SERVER, min_size=4, open=False))
    await pools[0].open()


async def disconnect() -> None:
    """Close the connections, after the last message of a task or after an error."""
    await pools.pop().close()


async def pay(message: lanes.Message) -> None:
    """Book a payment. The payments of one account run one at a time, in order."""
    async with pools[0].connection() as connection, positions.once(connection, message) as fresh:
        if fresh:
            await connection.execute(
                f"INSERT INTO {SCHEMA}.balances AS old VALUES (%s, %s, 1) "
                "ON CONFLICT (id) DO UPDATE SET amount = old.amount + excluded.amount, payments = old.payments + 1",
                (message.key, int(message.value)),
            )


def payments() -> list[dict[str, Any]]:
    """Return the rows of all past payments."""
    return [
        {
            "key": f"account-{number % ACCOUNTS}".encode(),
            "partition": number % ACCOUNTS % PARTITIONS,
            "offset": number,
            "value": str(number).encode(),
        }
        for number in range(PAYMENTS)
    ]


def run(spark: SparkSession, table: Path, checkpoint: Path) -> Report:
    """Run one replay. On a cluster the paths name an object store, and the handler is in its own module."""
    return replay(
        spark,
        ParquetTable(path=str(table), topic="payments"),
        pay,
        settings=lanes.Settings(concurrency=64),
        setup=connect,
        teardown=disconnect,
        checkpoint=str(checkpoint),
        effects="fenced",
    )


def main(folder: Path) -> None:
    messages = payments()
    table = folder / "payments"
    table.mkdir()
    for number in range(3):
        pq.write_table(pa.Table.from_pylist(messages[number::3]), table / f"{number}.parquet")

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "FATAL").getOrCreate()
    try:
        # With another checkpoint the second run begins at the first payment, as if the first checkpoint were lost.
        handled = [run(spark, table, folder / f"checkpoint-{number}").finished for number in range(2)]
    finally:
        spark.stop()
    assert handled == [PAYMENTS, PAYMENTS]

    expected: Counter[bytes] = Counter()
    for one in messages:
        expected[one["key"]] += int(one["value"])
    with psycopg.connect(SERVER) as connection:
        found = connection.execute(f"SELECT id, amount, payments FROM {SCHEMA}.balances").fetchall()
    assert {account: amount for account, amount, _ in found} == expected
    assert sum(count for _, _, count in found) == PAYMENTS
    print(f"{sum(handled)} payments handled, {PAYMENTS} in the balances: each counted once")


if __name__ == "__main__":
    # Without this setting, the workers run the first python3 of the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with psycopg.connect(SERVER) as connection:
        migrate(connection, schema=SCHEMA)
        connection.execute(
            f"CREATE TABLE {SCHEMA}.balances (id bytea PRIMARY KEY, amount bigint NOT NULL, payments int NOT NULL)"
        )
    try:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
    finally:
        with psycopg.connect(SERVER) as connection:
            connection.execute(f"DROP SCHEMA {SCHEMA} CASCADE")
