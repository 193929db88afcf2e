"""Changes two lines of an existing program with a consumer, so that the program uses `lanes`.

Needs a broker: KAFKA_URL=127.0.0.1:9092 python examples/kafka/wrap_a_consumer.py
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaSource

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
TOPIC, CUSTOMERS, ORDERS = "example-wrap", 20, 400


async def charge(message: lanes.Message) -> None:
    """The work for one order: a slow call."""
    await asyncio.sleep(random.uniform(0.005, 0.015))


async def main() -> None:
    config = {**BROKERS, "group.id": "billing", "auto.offset.reset": "earliest"}

    # Before: consumer = Consumer(config); consumer.subscribe([TOPIC]). The loop polls, handles and commits one message
    # after the other, about 100 a second.
    last: dict[bytes | None, int] = {}

    async def in_order(message: lanes.Message) -> None:
        await charge(message)
        number = int(message.value)
        assert last.get(message.key, -1) < number, "never happens"
        last[message.key] = number
        if len(last) == CUSTOMERS and sum(last.values()) == sum(range(ORDERS - CUSTOMERS, ORDERS)):
            consumer.stop()

    source = KafkaSource(config, topics=TOPIC)
    consumer = lanes.Consumer(source, in_order, settings=lanes.Settings(concurrency=100))
    started = asyncio.get_running_loop().time()
    await consumer.run()
    seconds = asyncio.get_running_loop().time() - started
    print(f"{ORDERS} orders of {CUSTOMERS} customers, each in order: {seconds:.1f} s, joining the group included")


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
