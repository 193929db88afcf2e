"""Runs a blocking handler, for a driver without asyncio. The handler is a plain function that runs in threads.

Needs a broker: KAFKA_URL=127.0.0.1:9092 python examples/kafka/sync_handler.py
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaSource

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
TOPIC, CUSTOMERS, ORDERS = "example-sync", 50, 1_000

of_this_thread = threading.local()
opened: list[Connection] = []
booked: dict[bytes, list[int]] = {}


class Connection:
    """Stand-in for a connection of a blocking driver, which one thread at a time may use."""

    def insert(self, customer: bytes, order: int) -> None:
        time.sleep(0.005)
        # One order of a customer runs at a time, in any thread, so no lock is needed.
        booked.setdefault(customer, []).append(order)


def book(message: lanes.Message) -> None:
    """The handler. Each thread keeps one connection, because the threads of handlers live as long as the consumer."""
    if not hasattr(of_this_thread, "connection"):
        of_this_thread.connection = Connection()
        opened.append(of_this_thread.connection)
    of_this_thread.connection.insert(message.key or b"", int(message.value))


async def main() -> None:
    source = KafkaSource({**BROKERS, "group.id": "books", "auto.offset.reset": "earliest"}, topics=TOPIC)
    # A service calls lanes.main(source, book, settings=lanes.Settings(concurrency=50))
    async with lanes.Consumer(source, book, settings=lanes.Settings(concurrency=50)) as consumer:
        while consumer.status().settled < ORDERS:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.05)
    assert all(orders == sorted(orders) for orders in booked.values()), "never happens"
    print(f"{ORDERS} orders of {CUSTOMERS} customers, each in order, over {len(opened)} connections")


def publish() -> None:
    """Publish the orders."""
    producer = Producer({**BROKERS, "enable.idempotence": True})
    for number in range(ORDERS):
        producer.produce(TOPIC, value=str(number), key=f"customer-{number % CUSTOMERS}")
    producer.flush()


if __name__ == "__main__":
    admin = AdminClient(BROKERS)
    admin.create_topics([NewTopic(TOPIC, 4, 1)])[TOPIC].result()
    try:
        publish()
        asyncio.run(main())
    finally:
        admin.delete_topics([TOPIC])[TOPIC].result()
