"""Writes batches to a table, with one transaction for up to 100 messages. A redelivered message has no effect.

Needs a broker: KAFKA_URL=127.0.0.1:9092 python examples/kafka/batch_upsert.py
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import closing
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaSource

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
TOPIC, PARCELS, EVENTS = "example-upsert", 300, 3_000
DATABASE = "parcels.db"

TABLE = "CREATE TABLE parcels (id BLOB PRIMARY KEY, place TEXT NOT NULL, position INTEGER NOT NULL)"
# A redelivered or older message changes nothing: its position is not above the stored position. Positions of one key
# can be compared, because one key is in one partition.
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
    source = KafkaSource({**BROKERS, "group.id": "tracking", "auto.offset.reset": "earliest"}, topics=TOPIC)
    # SQLite has one writer. With a database server, set concurrency to the number of its connections.
    settings = lanes.Settings(batch=100, linger=0.01, concurrency=1)
    async with lanes.Consumer(source, store, settings=settings) as consumer:
        while consumer.status().settled < EVENTS:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.05)
    with closing(sqlite3.connect(DATABASE)) as database:
        found = dict(database.execute("SELECT id, place FROM parcels"))
    assert found == {b"%d" % parcel: f"depot {EVENTS - PARCELS + parcel}" for parcel in range(PARCELS)}
    print(f"{EVENTS} events of {PARCELS} parcels in {calls} transactions; each parcel is where it was seen last")


def publish() -> None:
    """Publish the locations of each parcel."""
    producer = Producer({**BROKERS, "enable.idempotence": True})
    for number in range(EVENTS):
        producer.produce(TOPIC, value=json.dumps({"place": f"depot {number}"}), key=str(number % PARCELS))
    producer.flush()


if __name__ == "__main__":
    with closing(sqlite3.connect(DATABASE)) as database:
        database.execute(TABLE)
    admin = AdminClient(BROKERS)
    admin.create_topics([NewTopic(TOPIC, 4, 1)])[TOPIC].result()
    try:
        publish()
        asyncio.run(main())
    finally:
        admin.delete_topics([TOPIC])[TOPIC].result()
        os.remove(DATABASE)
