"""Consumes orders, and publishes an invoice for each order. The invoices of a customer keep the order of the orders.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/publish_results.py
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict

import nats
from nats.js import JetStreamContext

import lanes
from lanes_jetstream import JetStreamPublisher, JetStreamSource, subject_token

ORDERS, INVOICES = "EXAMPLE_ORDERS", "EXAMPLE_INVOICES"
CUSTOMERS, COUNT = 20, 500

failed: set[int] = set()


async def bill(message: lanes.Message) -> None:
    """Bill an order.

    The consumer publishes the invoice when the handler returns; a failed attempt publishes nothing.
    """
    order = json.loads(message.value)
    invoice = json.dumps({"order": order["number"], "total": order["price"] * order["count"]})
    await message.publish(f"invoices.{order['customer']}", invoice.encode())
    if order["number"] % 50 == 0 and order["number"] not in failed:
        failed.add(order["number"])
        raise ConnectionError("the database did not answer")  # the next attempt publishes the invoice


async def main() -> None:
    url = os.environ["NATS_URL"]
    source = JetStreamSource(url, stream=ORDERS, durable="billing", key=subject_token(1))
    settings = lanes.Settings(retry=lanes.Retry(attempts=3, backoff=0.05))
    # The server drops an invoice that is published again, for example after a crash of this process.
    publisher = JetStreamPublisher(url, "billing")
    async with lanes.Consumer(source, bill, settings=settings, publisher=publisher) as consumer:
        while consumer.status().settled < COUNT:  # noqa: ASYNC110 (a service would not end)
            await asyncio.sleep(0.02)


async def publish(stream: JetStreamContext) -> None:
    await stream.add_stream(name=ORDERS, subjects=["orders.*"])
    await stream.add_stream(name=INVOICES, subjects=["invoices.*"])
    for number in range(COUNT):
        customer = number % CUSTOMERS
        order = {"number": number, "customer": customer, "price": 3, "count": number % 7}
        await stream.publish_async(f"orders.{customer}", json.dumps(order).encode())
    await stream.publish_async_completed()


async def invoices(stream: JetStreamContext) -> dict[str, list[int]]:
    """The numbers of the billed orders of each customer, in the order of the invoices."""
    found: dict[str, list[int]] = defaultdict(list)
    reader = await stream.pull_subscribe("invoices.*", stream=INVOICES)
    for message in await reader.fetch(COUNT, timeout=10):
        found[message.subject].append(json.loads(message.data)["order"])
    return found


async def example() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    stream = client.jetstream()
    try:
        await publish(stream)
        await main()
        found = await invoices(stream)
        for customer in range(CUSTOMERS):
            assert found[f"invoices.{customer}"] == list(range(customer, COUNT, CUSTOMERS))
        print(f"{COUNT} orders, {len(failed)} failed attempts, one invoice for each order, in order for each customer")
    finally:
        await stream.delete_stream(ORDERS)
        await stream.delete_stream(INVOICES)
        await client.close()


if __name__ == "__main__":
    asyncio.run(example())
