"""Consume, transform, produce: an invoice for each order, exactly once, although the process is killed on the way.

Needs a broker: KAFKA_URL=127.0.0.1:9092 python examples/kafka/consume_transform_produce.py
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from typing import Any

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_kafka import KafkaPublisher, KafkaSource, KafkaTransactions

BROKERS: dict[str, Any] = {"bootstrap.servers": os.environ["KAFKA_URL"]}
ORDERS, INVOICES = "example-orders", "example-invoices"
CUSTOMERS, COUNT = 20, 500

kill_after = int(sys.argv[1]) if len(sys.argv) > 1 else COUNT + 1
billed = 0


async def bill(message: lanes.Message) -> None:
    """The handler: its invoice becomes visible together with the position of the order, or not at all."""
    global billed
    order = json.loads(message.value)
    await asyncio.sleep(0.005)
    await message.publish(INVOICES, json.dumps({"order": order["number"]}).encode(), key=message.key)
    billed += 1
    if billed == kill_after:
        os.kill(os.getpid(), signal.SIGKILL)


async def work() -> None:
    # A static member returns at once after a crash. The transactional id is "billing-1".
    config = {**BROKERS, "group.id": "billing", "group.instance.id": "1", "auto.offset.reset": "earliest"}
    source = KafkaSource(config, topics=ORDERS, transactions=KafkaTransactions("billing"))
    async with lanes.Consumer(source, bill, publisher=KafkaPublisher(BROKERS)) as consumer:
        while [one.lag for one in consumer.status().partitions.values()] != [0, 0, 0]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def publish() -> None:
    producer = Producer(BROKERS)
    for number in range(COUNT):
        producer.produce(ORDERS, key=f"customer-{number % CUSTOMERS}", value=json.dumps({"number": number}))
    assert producer.flush(30) == 0


def invoices() -> dict[bytes | None, list[int]]:
    """The numbers of the billed orders of each customer, in the order of the invoices."""
    found: dict[bytes | None, list[int]] = defaultdict(list)
    reader = Consumer({**BROKERS, "group.id": "reader", "auto.offset.reset": "earliest", "enable.partition.eof": True})
    reader.subscribe([INVOICES])
    ended = 0
    while ended < 3:
        message = reader.poll(30)
        assert message is not None
        if message.error():
            ended += 1  # the end of a partition
        else:
            found[message.key()].append(json.loads(message.value() or b"")["order"])
    reader.close()
    return found


def main() -> None:
    publish()
    for after in (100, 200):
        process = subprocess.run([sys.executable, __file__, str(after)], check=False)
        assert process.returncode == -signal.SIGKILL
    subprocess.run([sys.executable, __file__, str(COUNT + 1)], check=True)
    found = invoices()
    for customer in range(CUSTOMERS):
        assert found[b"customer-%d" % customer] == list(range(customer, COUNT, CUSTOMERS))
    print(f"{COUNT} orders, two killed processes, one invoice for each order, in order for each customer")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work())
        sys.exit()
    admin = AdminClient(BROKERS)
    for created in admin.create_topics([NewTopic(name, 3, 1) for name in (ORDERS, INVOICES)]).values():
        created.result()
    try:
        main()
    finally:
        for deleted in admin.delete_topics([ORDERS, INVOICES]).values():
            deleted.result()
