"""Kafka at light load: CPU a message and latency at a paced rate, against the client's plain `poll()` loop.

A process sends messages at a steady rate. Each message contains its send time. The latency of a message ends in the
handler, which does no other work. The plain loop calls `poll()`, and the client commits every 5 s. `lanes` and the
plain loop take turns on one broker. Each consumer runs in a separate process, and its CPU includes all threads of this
process. The first second, in which the consumer joins its group, does not count.

Idle: the figure is the percent of a core without messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from confluent_kafka import Consumer as Client
from confluent_kafka import Producer

import lanes
from bench.alone import alone
from bench.figures import Effort, Figure
from bench.kafka_broker import PARTITIONS, TIMEOUT, Backlog, broker, create, until
from bench.paced import WARM_UP, Load, Watch, due, paced, pause
from lanes import Message


def figures(effort: Effort) -> list[Figure]:
    """Measure every rate, each with the plain loop as its baseline."""
    with broker() as url:
        create(url, "light")
        backlog = Backlog(url, "light", 0)
        return paced(
            "kafka-light",
            effort,
            lambda by, settled, seconds: alone(_idle, backlog, settled, seconds, by=by),
            lambda by, count, rate: alone(_paced, backlog, count, rate, by=by),
            goals=True,
        )


def _idle(backlog: Backlog, settled: float, seconds: float, *, by: str) -> float:
    """Return the percent of a core that a consumer of an empty topic needs."""
    used = 0.0

    async def look(stop: Callable[[], object]) -> None:
        nonlocal used
        await asyncio.sleep(settled)
        begin = time.process_time()
        await asyncio.sleep(seconds)
        used = time.process_time() - begin
        stop()

    if by == "lanes":

        async def nothing(message: Message) -> None:
            pass

        async def run() -> None:
            consumer = lanes.Consumer(backlog.source(auto_offset_reset="latest"), nothing)
            looking = asyncio.ensure_future(look(consumer.stop))
            await consumer.run()
            await looking

        asyncio.run(run())
    else:
        client = Client(backlog.config(auto_offset_reset="latest"))
        client.subscribe([backlog.topic])
        end = time.monotonic() + settled
        while time.monotonic() < end:
            client.poll(min(1.0, settled))
        begin, end = time.process_time(), time.monotonic() + seconds
        while time.monotonic() < end:
            client.poll(min(1.0, seconds))
        used = time.process_time() - begin
        client.close()
    return 100 * used / seconds


def _paced(backlog: Backlog, count: int, rate: int, *, by: str) -> Load:
    """Handle messages that another process sends at a steady rate, and return their cost."""
    warm_up = round(rate * WARM_UP)
    ready = get_context("spawn").Event()
    sender = get_context("spawn").Process(target=send, args=(backlog, warm_up + count, rate, ready))
    sender.start()
    try:
        return (_by_lanes if by == "lanes" else _by_poll)(backlog, warm_up + count, warm_up, ready)
    finally:
        sender.join()


def _by_lanes(backlog: Backlog, count: int, warm_up: int, ready: Any) -> Load:
    async def run() -> Load:
        watch = Watch(count, warm_up, lambda: consumer.stop())

        async def handle(message: Message) -> None:
            watch.handled(message.value)

        consumer = lanes.Consumer(backlog.source(auto_offset_reset="latest"), handle)

        async def start() -> None:
            await until(lambda: len(consumer.status().partitions) == PARTITIONS, "the partitions of the group")
            ready.set()

        starting = asyncio.ensure_future(start())
        await consumer.run()
        await starting
        return watch.load()

    return asyncio.run(run())


def _by_poll(backlog: Backlog, count: int, warm_up: int, ready: Any) -> Load:
    left = [True]
    watch = Watch(count, warm_up, lambda: left.clear())
    client = Client(backlog.config(auto_offset_reset="latest"))
    client.subscribe([backlog.topic], on_assign=lambda *_: ready.set())
    while left:
        raw = client.poll(1.0)
        if raw is not None:
            assert raw.error() is None, raw.error()
            watch.handled(raw.value())
    client.close()
    return watch.load()


def send(backlog: Backlog, count: int, rate: int, ready: Any) -> None:
    """Send messages at a steady rate as soon as the consumer is ready."""
    producer = Producer({"bootstrap.servers": backlog.url})
    producer.list_topics(backlog.topic, timeout=TIMEOUT)
    assert ready.wait(TIMEOUT), "the consumer was not ready"
    time.sleep(0.5)
    begin, sent = time.monotonic(), 0
    while sent < count:
        for number in range(sent, due(begin, rate, count)):
            producer.produce(backlog.topic, b"%d" % time.time_ns(), b"key-%d" % (number % 1_000))
            sent = number + 1
        producer.poll(0)
        time.sleep(pause(begin, rate, sent))
    assert producer.flush(TIMEOUT) == 0
