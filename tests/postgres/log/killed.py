"""A process that is killed by -9 at each statement: ``python -m tests.postgres.log.killed URL SCHEMA KIND EVERY``.

KIND is ``append`` (a producer whose change and message share a transaction, with a notification after it), ``shared``
(a member whose effect and position share a transaction) or ``apart`` (a member whose effects have transactions of their
own). For each wait for the server, of any connection, one process dies just before the wait, and another one just
after. The next process continues. EVERY takes one point of so many. Each point has a subscription of its own. Prints
one line of JSON: the subscriptions, and the number of points.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psycopg
from psycopg import sql

import lanes
from lanes_postgres import Log, Positions, PostgresSource, Record, connecting

MESSAGES = 4
"""Messages of a log, in one partition."""

WHOLE = 3
"""Number of processes that nothing kills. The one with the fewest waits determines the points."""


class _Doom:
    """Kills this process before or after its n-th wait for the server."""

    def __init__(self, at: int | None, after: bool) -> None:
        self.at, self.after, self.waits = at, after, 0

    def before(self) -> None:
        self.waits += 1
        if self.waits == self.at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)

    def done(self, number: int) -> None:
        if number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


doom = _Doom(None, False)


class Doomed(psycopg.AsyncConnection[Any]):
    async def wait(self, *arguments: Any, **named: Any) -> Any:
        doom.before()
        number = doom.waits
        answer = await super().wait(*arguments, **named)
        doom.done(number)
        return answer


class DoomedProducer(psycopg.Connection[Any]):
    def wait(self, *arguments: Any, **named: Any) -> Any:
        doom.before()
        number = doom.waits
        answer = super().wait(*arguments, **named)
        doom.done(number)
        return answer


def query(schema: str, text: str) -> sql.Composed:
    return sql.SQL(text).format(sql.Identifier(schema))


def append(url: str, schema: str, name: str) -> None:
    """Make the orders that do not exist yet, each with its message. Each point has a log of its own."""
    log = Log(name, partitions=1, schema=schema)
    with DoomedProducer.connect(url) as connection:
        log.create(connection)
        for number in range(MESSAGES):
            with connection.transaction():
                made = connection.execute(
                    query(schema, "INSERT INTO {}.made VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1"),
                    (name, number),
                ).fetchone()
                if made is not None:
                    log.append(connection, [Record(str(number), "k"), Record(f"{number} again", "k")])
            log.notify(connection)


def consume(url: str, schema: str, name: str, *, shared: bool) -> None:
    """Handle the messages of the log until all effects are there."""
    positions = Positions(name, schema=schema, by="partition")
    effect = query(schema, "INSERT INTO {}.effects (name, position, epoch) VALUES (%s, %s, %s)")

    async def handler(message: lanes.Message) -> None:
        row = name, message.position, message.epoch
        async with await Doomed.connect(url, autocommit=True) as connection:
            if shared:
                async with positions.once(connection, message) as fresh:
                    if fresh:
                        await connection.execute(effect, row)
            else:
                await connection.execute(effect, row)
        if message.position == MESSAGES - 1:
            consumer.stop()

    async def stop_without_work() -> None:
        """A former process may have had all effects."""
        async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
            floor = query(schema, "SELECT floor FROM {}.lanes_states WHERE subscription = %s")
            while await (await connection.execute(floor, (name,))).fetchone() != (MESSAGES,):
                await asyncio.sleep(0.02)
        consumer.stop()

    async def run() -> None:
        waiting = asyncio.create_task(stop_without_work())
        await consumer.run()
        waiting.cancel()

    source = PostgresSource(url, Log("orders", schema=schema), subscription=name, poll_interval=0.05)
    consumer = lanes.Consumer(source, handler, settings=lanes.Settings(order="serial", commit_interval=0.05))
    asyncio.run(asyncio.wait_for(run(), 60))


def in_child(work: Callable[[], None], at: int | None, after: bool) -> tuple[int, int]:
    """Run ``work`` in a child that dies at this point; returns its exit status and number of waits."""
    global doom
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        doom = _Doom(at, after)
        work()
        os.write(write, str(doom.waits).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(said or 0)


def main(url: str, schema: str, kind: str, every: str) -> None:
    vars(connecting)["AsyncConnection"] = Doomed

    def work(name: str) -> Callable[[], None]:
        if kind == "append":
            return lambda: append(url, schema, name)
        return lambda: consume(url, schema, name, shared=kind == "shared")

    # A member polls, so on a busy machine it waits more often than the members that die later.
    points = min(in_child(work(f"{kind} whole {number}"), None, False)[1] for number in range(WHOLE))
    names, killed = [], 0
    for number in range(0, 2 * points, int(every)):
        at, after = number // 2 + 1, number % 2 == 1
        name = f"{kind} {at} {'after' if after else 'before'}"
        names.append(name)
        status, _ = in_child(work(name), at, after)
        # A member may have fewer waits than the first one.
        assert status == -signal.SIGKILL or (status == 0 and kind != "append"), f"{name}: ended with {status}"
        killed += status != 0
        status, _ = in_child(work(name), None, False)
        assert status == 0, f"{name}: the next process ended with {status}"
    print(json.dumps({"names": names, "points": points, "killed": killed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
