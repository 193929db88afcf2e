"""The processes of an exclusive cohort share a stream. One process handles each customer, and the program kills one
process.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/exclusive_cohort.py
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import nats
from nats.js import JetStreamContext
from nats.js.api import StreamConfig, SubjectTransform

import lanes
from lanes_jetstream import Cohort, JetStreamSource, subject_token

STREAM, CUSTOMERS, PARTITIONS = "EXAMPLE_COHORT", 20, 16
DATABASE = "accounts.db"

TABLE = "CREATE TABLE accounts (customer BLOB PRIMARY KEY, orders INT, position INT, epoch INT, members INT, last TEXT)"
# A former owner of a customer has a lower epoch than the present owner. After the first update of the present owner,
# updates of a former owner change nothing. If the server redelivers an order after its update, the table already has
# the position of the order.
APPLY = """
    UPDATE accounts
    SET orders = orders + 1, members = members + (last != :member), last = :member, position = :position, epoch = :epoch
    WHERE customer = :customer AND epoch <= :epoch AND position < :position
"""


def member(name: str) -> None:
    """The program of one member. The program may run in any number of processes, each with another name."""

    def book(message: lanes.Message) -> None:
        time.sleep(0.02)  # slow work; then the effect, fenced by position and epoch
        row = {"customer": message.key, "position": message.position, "epoch": message.epoch, "member": name}
        with closing(sqlite3.connect(DATABASE, timeout=30)) as database, database:
            database.execute("PRAGMA synchronous = OFF")
            database.execute(APPLY, row)

    # A service uses the default lease of 10 s and a stable name for each process, such as the name of its pod.
    cohort = Cohort("billing", member=name, lease=3)
    source = JetStreamSource(os.environ["NATS_URL"], stream=STREAM, cohort=cohort, key=subject_token(2))
    lanes.main(source, book, settings=lanes.Settings(concurrency=20))


def start(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, name])


def ask(question: str, *values: str) -> int:
    with closing(sqlite3.connect(DATABASE, timeout=30)) as database:
        return int(database.execute(question, values).fetchone()[0])


async def sell(stream: JetStreamContext, each: int = 1) -> int:
    for number in range(each * CUSTOMERS):
        await stream.publish(f"shop.customer{number % CUSTOMERS}", str(number).encode())
    await asyncio.sleep(0.2)
    return each


async def main(stream: JetStreamContext) -> None:
    """Start three members in sequence, and kill the first member.

    A member works without the names of the other members.
    """
    members, sold, until = [], 0, time.monotonic() + 40
    try:
        for name in ("a", "b", "c"):
            members.append(start(name))
            while not ask("SELECT count(*) FROM accounts WHERE last = ?", name):
                assert time.monotonic() < until, f"{name} gets no orders: read its output"
                sold += await sell(stream)
        members[0].kill()
        sold += await sell(stream, each=5)
        while ask("SELECT min(orders) FROM accounts") < sold:
            assert time.monotonic() < until, "the members do not progress: read their output"
            await asyncio.sleep(0.05)
    finally:
        for process in members:
            process.terminate()  # SIGTERM: drain, hand over, leave
        for process in members:
            await asyncio.to_thread(process.wait)
    assert ask("SELECT max(orders) FROM accounts") == sold, "every order once"
    assert [process.returncode for process in members] == [-9, 0, 0]
    moved = ask("SELECT sum(members > 1) FROM accounts")
    print(f"{sold} orders of each of {CUSTOMERS} customers, each booked once, by three members of which one was killed")
    print(f"{moved} customers had more than one member, one after the other")


async def set_up(stream: JetStreamContext) -> None:
    """Create a stream that the server divides by customer, and an account for each customer."""
    divide = SubjectTransform(src="shop.*", dest=f"shop.{{{{partition({PARTITIONS},1)}}}}.{{{{wildcard(1)}}}}")
    await stream.add_stream(StreamConfig(STREAM, subjects=["shop.*"], subject_transform=divide))
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.execute(TABLE)
        rows = [(b"customer%d" % customer,) for customer in range(CUSTOMERS)]
        database.executemany("INSERT INTO accounts VALUES (?, 0, 0, 0, 0, '')", rows)


async def clean_up(stream: JetStreamContext) -> None:
    """Delete the stream, the bucket of the cohort, and the database."""
    await stream.delete_stream(STREAM)
    await stream.delete_key_value(f"lanes_{STREAM}_lanes")
    os.remove(DATABASE)


async def example() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    await set_up(client.jetstream())
    try:
        await main(client.jetstream())
    finally:
        await clean_up(client.jetstream())
        await client.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        member(sys.argv[1])
    else:
        asyncio.run(example())
