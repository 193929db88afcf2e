"""A member with ranges, as a process: it adds a row to ``handled`` for the begin and the end of each handler.

A handler of the value ``stuck`` never ends. ``python -m tests.postgres.ring.ranged_member URL SCHEMA NAME LEASE``
"""

from __future__ import annotations

import sys

import anyio
import psycopg
from psycopg import sql

import lanes
from lanes_postgres import AdvisoryLocks, Log, PostgresSource, RangeMap


def main(url: str, schema: str, name: str, lease: str) -> None:
    query = sql.SQL("INSERT INTO {}.handled (member, value, what) VALUES (%s, %s, %s)").format(sql.Identifier(schema))

    async def handler(message: lanes.Message) -> None:
        value = message.value.decode()
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            await connection.execute(query, (name, value, "begin"))
            if value == "stuck":
                await anyio.sleep_forever()
            await connection.execute(query, (name, value, "end"))

    log = Log("orders", schema=schema)
    source = PostgresSource(
        url,
        log,
        subscription="billing",
        poll_interval=0.1,
        locks=AdvisoryLocks(url, lease=float(lease)),
        ranges=RangeMap(log, group="billing").member(name),
    )
    lanes.main(source, handler, settings=lanes.Settings(commit_interval=0.1))


if __name__ == "__main__":
    main(*sys.argv[1:])
