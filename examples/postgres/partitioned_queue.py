"""Writes to all partitions of a queue in a table in one transaction.

The program kills a producer during its transaction. The database has all rows of the transaction or none.

A physical queue consists of the rows with the name of the queue. The same transaction changes the accounts in the
messages.

Needs a server: POSTGRES_URL=postgresql://me@127.0.0.1:5432/test python examples/postgres/partitioned_queue.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psycopg

import lanes

SERVER = os.environ["POSTGRES_URL"]
QUEUE = lanes.PartitionedQueue("bonuses", partitions=4)
CUSTOMERS = [f"customer-{number}" for number in range(40)]

TABLES = """
    CREATE TABLE example_accounts (customer text PRIMARY KEY, amount bigint NOT NULL);
    CREATE TABLE example_queue (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, queue text NOT NULL, key bytea, value text NOT NULL
    );
    CREATE INDEX ON example_queue (queue, id);
"""


def grant(*, killed: bool = False) -> None:
    """Give each customer a bonus, and send a message about the bonus, in one transaction."""
    with psycopg.connect(SERVER) as connection:
        for number, customer in enumerate(CUSTOMERS):
            connection.execute("UPDATE example_accounts SET amount = amount + 10 WHERE customer = %s", (customer,))
            route = QUEUE.route_by_key(customer)
            connection.execute(
                "INSERT INTO example_queue (queue, key, value) VALUES (%s, %s, %s)", (route.name, route.key, "10")
            )
            if killed and number == len(CUSTOMERS) // 2:
                os.kill(os.getpid(), signal.SIGKILL)


def found() -> tuple[int, dict[str, int]]:
    """The sum of the accounts, and the number of messages of each physical queue."""
    with psycopg.connect(SERVER) as connection:
        (amount,) = connection.execute("SELECT sum(amount)::bigint FROM example_accounts").fetchone() or (0,)
        rows = connection.execute("SELECT queue, count(*) FROM example_queue GROUP BY queue ORDER BY queue")
        return int(amount), {str(queue): int(count) for queue, count in rows.fetchall()}


def main() -> None:
    process = subprocess.run([sys.executable, __file__, "killed"], check=False)
    assert process.returncode == -signal.SIGKILL
    assert found() == (0, {}), "neither a bonus nor a message"
    grant()
    amount, messages = found()
    assert amount == 10 * len(CUSTOMERS)
    assert sum(messages.values()) == len(CUSTOMERS)
    assert set(messages) == set(QUEUE.names)
    print(f"{amount} in the accounts; messages of each physical queue: {messages}")


if __name__ == "__main__":
    if sys.argv[1:] == ["killed"]:
        grant(killed=True)
    with psycopg.connect(SERVER) as connection:
        connection.execute(TABLES)
        connection.cursor().executemany(
            "INSERT INTO example_accounts VALUES (%s, 0)", [(customer,) for customer in CUSTOMERS]
        )
    try:
        main()
    finally:
        with psycopg.connect(SERVER) as connection:
            connection.execute("DROP TABLE example_accounts, example_queue")
