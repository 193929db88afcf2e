"""Publishes to all partitions of a queue in one transaction.

The program kills a producer during its transaction. Consumers receive all messages of the transaction or none.

Needs a broker: KAFKA_URL=127.0.0.1:9092 python examples/kafka/partitioned_queue.py
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaSource

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
QUEUE = lanes.PartitionedQueue("example-bonuses", partitions=4)
CUSTOMERS = [f"customer-{number}" for number in range(40)]


def publish(text: str, *, killed: bool = False) -> None:
    """Send one message to each customer, in one transaction over the topics of all partitions."""
    # The next producer with this id ends the open transaction of a killed producer.
    producer = Producer({**BROKERS, "transactional.id": "example-bonuses"})
    producer.init_transactions()
    producer.begin_transaction()
    for number, customer in enumerate(CUSTOMERS):
        route = QUEUE.route_by_key(customer)
        producer.produce(route.name, value=text, key=route.key)
        if killed and number == len(CUSTOMERS) // 2:
            assert producer.flush(30) == 0  # the broker has these messages
            os.kill(os.getpid(), signal.SIGKILL)
    producer.commit_transaction()


async def consume() -> Counter[tuple[bytes | None, bytes]]:
    seen: Counter[tuple[bytes | None, bytes]] = Counter()

    async def handle(message: lanes.Message) -> None:
        seen[message.key, message.value] += 1

    config = {
        **BROKERS,
        "group.id": "bonuses",
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "partition.assignment.strategy": "cooperative-sticky",
    }
    async with lanes.Consumer(KafkaSource(config, topics=QUEUE), handle) as consumer:
        while consumer.status().settled < len(CUSTOMERS):  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.05)
    return seen


def main() -> None:
    process = subprocess.run([sys.executable, __file__, "killed"], check=False)
    assert process.returncode == -signal.SIGKILL
    publish("second try")
    seen = asyncio.run(consume())
    assert seen == {(customer.encode(), b"second try"): 1 for customer in CUSTOMERS}
    topics = Counter(QUEUE.route_by_key(customer).name for customer in CUSTOMERS)
    print(f"{len(CUSTOMERS)} messages, none of the killed producer: {dict(sorted(topics.items()))}")


if __name__ == "__main__":
    if sys.argv[1:] == ["killed"]:
        publish("first try", killed=True)
    admin = AdminClient(BROKERS)
    for created in admin.create_topics([NewTopic(name, 1, 1) for name in QUEUE.names]).values():
        created.result()
    try:
        main()
    finally:
        for deleted in admin.delete_topics(list(QUEUE.names)).values():
            deleted.result()
