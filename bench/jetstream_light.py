"""JetStream at light load: CPU a message and latency at a paced rate, against the client's plain loop.

As `bench.kafka_light`. The plain loop iterates over the messages of a push consumer and acknowledges each message. Both
consumers alternate on one server, each in a separate process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count as count_from
from multiprocessing import get_context
from typing import Any, Final

from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StorageType, StreamConfig

from bench.alone import alone
from bench.figures import Effort, Figure
from bench.kafka_broker import TIMEOUT
from bench.paced import WARM_UP, Load, Watch, due, paced, pause
from lanes import Consumer, Message
from lanes_jetstream import JetStreamSource, subject_token
from tests.components import running

STREAM: Final = "LIGHT"
KEYS: Final = 1_000


def figures(effort: Effort) -> list[Figure]:
    """Measure every rate, each with the plain loop as its baseline."""
    number = count_from(1)
    with running("nats") as urls:
        url = urls["nats"]
        asyncio.run(_create(url))
        return paced(
            "jetstream-light",
            effort,
            lambda by, settled, seconds: alone(_idle, url, f"idle-{next(number)}", settled, seconds, by=by),
            lambda by, count, rate: alone(_paced, url, f"paced-{next(number)}", count, rate, by=by),
            goals=False,
        )


async def _create(url: str) -> None:
    client = Client()
    await client.connect(url)
    await client.jetstream().add_stream(
        StreamConfig(name=STREAM, subjects=["light.*"], storage=StorageType.MEMORY, max_msgs=100_000)
    )
    await client.close()


def _idle(url: str, durable: str, settled: float, seconds: float, *, by: str) -> float:
    """Return the percent of a core that a consumer of a stream without new messages needs."""
    used = 0.0

    async def look(stop: Callable[[], object]) -> None:
        nonlocal used
        await asyncio.sleep(settled)
        begin = time.process_time()
        await asyncio.sleep(seconds)
        used = time.process_time() - begin
        stop()

    asyncio.run(_consume(url, durable, by, lambda message: None, look))
    return 100 * used / seconds


def _paced(url: str, durable: str, count: int, rate: int, *, by: str) -> Load:
    """Handle messages that another process sends at a steady rate, and return their cost."""
    warm_up = round(rate * WARM_UP)
    spawn = get_context("spawn")
    ready = spawn.Event()
    sender = spawn.Process(target=_send, args=(url, warm_up + count, rate, ready))
    sender.start()
    ended = asyncio.Event()
    watch = Watch(warm_up + count, warm_up, ended.set)

    async def start(stop: Callable[[], object]) -> None:
        ready.set()
        await ended.wait()
        stop()

    try:
        asyncio.run(_consume(url, durable, by, watch.handled, start))
    finally:
        sender.join()
    return watch.load()


async def _consume(
    url: str,
    durable: str,
    by: str,
    handled: Callable[[bytes], None],
    then: Callable[[Callable[[], object]], Awaitable[None]],
) -> None:
    """Handle new messages.

    ``then`` starts when the consumer is ready, and receives the function that stops the consumer.
    """
    client = Client()
    await client.connect(url)
    stream = client.jetstream()
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, deliver_policy=DeliverPolicy.NEW, max_ack_pending=4_000)
    if by == "lanes":

        async def handle(message: Message) -> None:
            handled(message.value)

        config.durable_name = durable
        await stream.add_consumer(STREAM, config)
        source = JetStreamSource(client, stream=STREAM, durable=durable, key=subject_token(1))
        async with Consumer(source, handle) as consumer:
            await consumer.until_ready()
            ending = asyncio.Event()
            await then(ending.set)
            await ending.wait()
    else:
        subscription = await stream.subscribe("light.*", config=config, manual_ack=True)

        async def loop() -> None:
            async for message in subscription.messages:
                handled(message.data)
                await message.ack()

        looping = asyncio.ensure_future(loop())
        await then(looping.cancel)
        await asyncio.wait([looping])
    await client.close()


def _send(url: str, count: int, rate: int, ready: Any) -> None:
    """Send messages at a steady rate as soon as the consumer is ready."""
    asyncio.run(_sending(url, count, rate, ready))


async def _sending(url: str, count: int, rate: int, ready: Any) -> None:
    client = Client()
    await client.connect(url)
    assert await asyncio.to_thread(ready.wait, TIMEOUT), "the consumer was not ready"
    await asyncio.sleep(0.5)
    begin, sent = time.monotonic(), 0
    while sent < count:
        for number in range(sent, due(begin, rate, count)):
            await client.publish(f"light.{number % KEYS}", b"%d" % time.time_ns())
            sent = number + 1
        await client.flush()
        await asyncio.sleep(pause(begin, rate, sent))
    await client.close()
