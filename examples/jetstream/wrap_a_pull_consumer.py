"""Changes two lines of an existing program with a pull consumer, so that the program uses `lanes`.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/wrap_a_pull_consumer.py
"""

from __future__ import annotations

import asyncio
import os
import random

import nats

import lanes
from lanes_jetstream import JetStreamSource, subject_token

CUSTOMERS, ORDERS = 20, 400


async def charge(message: lanes.Message) -> None:
    """The work for one order: a slow call."""
    await asyncio.sleep(random.uniform(0.005, 0.015))


async def main() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    stream = client.jetstream()
    await stream.add_stream(name="EXAMPLE", subjects=["example.>"])
    for number in range(ORDERS):
        await stream.publish(f"example.customer{number % CUSTOMERS}", str(number).encode())

    # Before: subscription = await stream.pull_subscribe_bind(durable="billing", stream="EXAMPLE"). The loop fetches,
    # handles and acknowledges one message after the other, about 100 a second.
    last: dict[bytes | None, int] = {}

    async def in_order(message: lanes.Message) -> None:
        await charge(message)
        number = int(message.value)
        assert last.get(message.key, -1) < number, "never happens"
        last[message.key] = number
        if len(last) == CUSTOMERS and sum(last.values()) == sum(range(ORDERS - CUSTOMERS, ORDERS)):
            consumer.stop()

    source = JetStreamSource(client, stream="EXAMPLE", durable="billing", key=subject_token(1))
    consumer = lanes.Consumer(source, in_order, settings=lanes.Settings(concurrency=100))
    started = asyncio.get_running_loop().time()
    await consumer.run()
    seconds = asyncio.get_running_loop().time() - started
    print(f"{ORDERS} orders of {CUSTOMERS} customers, each in order: {seconds:.1f} s")

    await stream.delete_stream("EXAMPLE")
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
