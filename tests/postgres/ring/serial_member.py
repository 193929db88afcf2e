"""A member with serial order, as a process: it adds a row to ``handled`` for the begin and the end of each handler.

``python -m tests.postgres.ring.serial_member URL SCHEMA NAME LEASE``
"""

from __future__ import annotations

import sys

import anyio
import psycopg
from psycopg import sql

import lanes
from lanes_postgres import AdvisoryLocks, Log, PostgresSource


def main(url: str, schema: str, name: str, lease: str) -> None:
    query = sql.SQL("INSERT INTO {}.handled (member, value, what) VALUES (%s, %s, %s)").format(sql.Identifier(schema))

    # One connection that blocks: a freeze cannot come between the begin of a handler and its row.
    connection = psycopg.connect(url, autocommit=True)

    async def handler(message: lanes.Message) -> None:
        connection.execute(query, (name, int(message.value), "begin"))
        await anyio.sleep(0.02)
        connection.execute(query, (name, int(message.value), "end"))

    source = PostgresSource(
        url,
        Log("orders", schema=schema),
        subscription="billing",
        time_budget=600.0,
        poll_interval=0.1,
        locks=AdvisoryLocks(url, lease=float(lease)),
    )
    with connection:
        lanes.main(source, handler, settings=lanes.Settings(order="serial", commit_interval=0.1))


if __name__ == "__main__":
    main(*sys.argv[1:])
