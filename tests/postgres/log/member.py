"""A member of the subscription ``billing``, as a process: it adds a row to ``handled`` for each message.

``python -m tests.postgres.log.member URL SCHEMA NAME LEASE``
"""

from __future__ import annotations

import sys

import anyio
import psycopg
from psycopg import sql

import lanes
from lanes_postgres import AdvisoryLocks, Log, PostgresSource


def main(url: str, schema: str, name: str, lease: str) -> None:
    query = sql.SQL("INSERT INTO {}.handled (member, key, value, epoch) VALUES (%s, %s, %s, %s)").format(
        sql.Identifier(schema)
    )

    async def handler(message: lanes.Message) -> None:
        assert message.key is not None
        await anyio.sleep(0.005)
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            row = (name, message.key.decode(), int(message.value), message.epoch)
            await connection.execute(query, row)

    source = PostgresSource(
        url,
        Log("orders", schema=schema),
        subscription="billing",
        time_budget=0.5,
        poll_interval=0.1,
        locks=AdvisoryLocks(url, lease=float(lease)),
    )
    lanes.main(source, handler, settings=lanes.Settings(concurrency=4))


if __name__ == "__main__":
    main(*sys.argv[1:])
