"""Writes batches to a table, with one transaction for up to 100 messages. A redelivered message has no effect.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/batch_upsert.py
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import closing

import nats
from nats.js import JetStreamContext

import lanes
from lanes_jetstream import JetStreamSource, subject_token

STREAM, PARCELS, EVENTS = "EXAMPLE_PARCELS", 200, 2_000
DATABASE = "parcels.db"

TABLE = "CREATE TABLE parcels (id BLOB PRIMARY KEY, place TEXT NOT NULL, position INTEGER NOT NULL)"
# A redelivered or older message changes nothing: its stream sequence is not above the stored position.
UPSERT = """
    INSERT INTO parcels VALUES (?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET place = excluded.place, position = excluded.position
    WHERE excluded.position > parcels.position
"""

calls = 0


def store(messages: list[lanes.Message]) -> None:
    """Store a batch.

    When the handler returns, the consumer acknowledges all messages; after an exception it retries all.
    """
    global calls
    calls += 1
    rows = [(message.key, json.loads(message.value)["place"], message.position) for message in messages]
    with closing(sqlite3.connect(DATABASE)) as database, database:
        database.executemany(UPSERT, rows)


async def main() -> None:
    source = JetStreamSource(os.environ["NATS_URL"], stream=STREAM, durable="tracking", key=subject_token(1))
    # SQLite has one writer. With a database server, set concurrency to the number of its connections.
    settings = lanes.Settings(batch=100, linger=0.01, concurrency=1)
    async with lanes.Consumer(source, store, settings=settings) as consumer:
        while consumer.status().settled < EVENTS:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.02)
    with closing(sqlite3.connect(DATABASE)) as database:
        found = dict(database.execute("SELECT id, place FROM parcels"))
    assert found == {b"%d" % parcel: f"depot {EVENTS - PARCELS + parcel}" for parcel in range(PARCELS)}
    print(f"{EVENTS} events of {PARCELS} parcels in {calls} transactions; each parcel is where it was seen last")


async def publish(stream: JetStreamContext) -> None:
    """Publish the locations of each parcel."""
    await stream.add_stream(name=STREAM, subjects=["parcels.*"])
    for number in range(EVENTS):
        await stream.publish_async(f"parcels.{number % PARCELS}", json.dumps({"place": f"depot {number}"}).encode())
    await stream.publish_async_completed()


async def example() -> None:
    with closing(sqlite3.connect(DATABASE)) as database:
        database.execute(TABLE)
    client = await nats.connect(os.environ["NATS_URL"])
    try:
        await publish(client.jetstream())
        await main()
    finally:
        await client.jetstream().delete_stream(STREAM)
        await client.close()
        os.remove(DATABASE)


if __name__ == "__main__":
    asyncio.run(example())
