"""Kafka with handlers that wait: throughput compared with the limit that the waiting time sets.

10 ms: the case of `bench.waiting`, on Kafka, on asyncio and on uvloop. The baseline is 1,000 bare tasks over the same
number of messages of the same keys, on the same loop, without a broker.

10 ms, memory: the figure is the peak memory of a process that handles 10 ms messages. The baseline is the peak of a
process that reads the same messages in a plain loop.

Running: the figure is the time-weighted number of running handlers in the 10 ms case, divided by the number of possible
handlers. A handler is possible if it runs or its lane is ready, up to the concurrency.

Publisher: the 10 ms case, in which each handler publishes one output of 100 bytes to another topic. The baseline is
the same handler without an output.

Zipf: the case of `bench.waiting`, with its baseline.

Batch: ten handler calls of 1 ms run at once, with 50 messages in each call. The baseline has one message a call.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Final

import lanes
from bench.alone import alone
from bench.figures import Effort, Figure, Pair, cost, interleaved, middle, rate
from bench.kafka_bounds import peak
from bench.kafka_broker import Backlog, Clocked, broker, consume, create, fill, plainly
from bench.waiting import CONCURRENCY, WAITING_KEYS, loops, one_by_one, shown, tasks_alone, tuned_run, wait
from lanes import Message, Settings
from lanes.core.engine import Engine
from lanes_kafka import KafkaPublisher

WAITING_GOAL: Final = 0.75
RUNNING_GOAL: Final = 0.95
PUBLISHER_GOAL: Final = 0.7
WAITING_MESSAGES: Final = 100_000
WAITING: Final = Settings(concurrency=CONCURRENCY, max_in_flight=4 * CONCURRENCY)

ZIPF_GOAL: Final = 0.85
MEMORY_GOAL: Final = 86.0
ZIPF_KEYS, ZIPF_MESSAGES, ZIPF_WAIT = 10_000, 40_000, 0.001
# The busiest key has 15 % of the traffic of all partitions, and a fetch returns thousands of messages of one
# partition. The bound has to hold some messages of each partition.
ZIPF: Final = Settings(max_in_flight=10_000)

BATCH_GOAL: Final = 5.0
BATCH_KEYS, BATCH_MESSAGES, BATCH_WAIT = 10_000, 100_000, 0.001
CALLS, SIZE = 10, 50


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each with its baseline, on a new broker."""
    with broker() as url:
        count = effort.messages(WAITING_MESSAGES)
        backlog = fill(url, "waiting", count, WAITING_KEYS)
        waiting = []
        for name, loop in loops().items():
            tasks, figure = interleaved(
                [partial(tasks_alone, count, loop), partial(consume, backlog, wait, WAITING, loop)], effort.repeats
            )
            goal = WAITING_GOAL if name == "asyncio" else None
            waiting.append(rate(f"kafka-handlers 10 ms{shown(name)}", "messages/s", figure, tasks, goal))
        create(url, "results")
        most, plain = (alone(_peak, backlog, by=by) for by in ("lanes", "plain"))
        running = middle([_running(backlog) for _ in range(effort.repeats)])
        without, published = interleaved(
            [partial(consume, backlog, wait, WAITING), partial(_publish, backlog)], effort.repeats
        )
        backlog = fill(url, "zipf", effort.messages(ZIPF_MESSAGES), ZIPF_KEYS, "zipf")
        zipf = middle([_zipf(backlog) for _ in range(effort.repeats)])
        backlog = fill(url, "batch", effort.messages(BATCH_MESSAGES), BATCH_KEYS)
        single, batch = interleaved(
            [partial(consume, backlog, _call, Settings(concurrency=CALLS)), partial(_batches, backlog)], effort.repeats
        )
    return [
        *waiting,
        cost("kafka-handlers 10 ms, memory", "MiB peak", most, plain, MEMORY_GOAL),
        rate("kafka-handlers running", "handlers", *running, RUNNING_GOAL),
        rate("kafka-handlers publisher 10 ms", "messages/s", published, without, PUBLISHER_GOAL),
        rate("kafka-handlers zipf", "messages/s", *zipf, ZIPF_GOAL),
        rate(f"kafka-handlers batch of {SIZE}", "messages/s", batch, single, BATCH_GOAL),
    ]


def _publish(backlog: Backlog) -> float:
    async def handler(message: Message) -> None:
        await wait(message)
        await message.publish("results", message.value, key=message.key)

    return consume(backlog, handler, WAITING, publisher=KafkaPublisher({"bootstrap.servers": backlog.url}))


async def _call(message: Message) -> None:
    await asyncio.sleep(BATCH_WAIT)


def _peak(backlog: Backlog, *, by: str) -> float:
    """Return the peak of this process's memory in MiB."""
    if by == "lanes":
        consume(backlog, wait, WAITING)
    else:
        plainly(backlog, None)
    return peak()


def _running(backlog: Backlog) -> Pair:
    """Return the mean number of running handlers, and the mean number of possible handlers."""
    left = backlog.count
    begin = before = 0.0
    ran = could = 0.0
    running = possible = 0
    engine: Engine

    def look() -> None:
        nonlocal begin, before, ran, could, running, possible
        now = time.perf_counter()
        begin = begin or now
        ran += running * (now - (before or now))
        could += possible * (now - (before or now))
        before = now
        running = engine.running_handlers
        possible = min(CONCURRENCY, running + engine.ready)

    async def handler(message: Message) -> None:
        nonlocal left, engine
        if left == backlog.count:
            run = consumer._life.run
            assert run is not None, "a handler runs in a run"
            engine = run.engine
        look()
        await wait(message)
        look()
        left -= 1
        if not left:
            consumer.stop()

    consumer = lanes.Consumer(backlog.source(), handler, settings=WAITING)
    tuned_run(consumer.run())
    return ran / (before - begin), could / (before - begin)


def _zipf(backlog: Backlog) -> Pair:
    """Return messages a second, and the highest rate that the busiest key allows."""
    times: Counter[bytes | None] = Counter()

    async def handler(message: Message) -> None:
        await asyncio.sleep(ZIPF_WAIT)
        times[message.key] += 1

    figure = consume(backlog, handler, ZIPF)
    ((_busiest, most),) = times.most_common(1)
    return figure, backlog.count / one_by_one(most)


def _batches(backlog: Backlog) -> float:
    clocked = Clocked(backlog.count, lambda: consumer.stop())

    async def handler(messages: list[Message]) -> None:
        await asyncio.sleep(BATCH_WAIT)
        for _ in messages:
            clocked.handled()

    settings = Settings(concurrency=CALLS, batch=SIZE, linger=0.005)
    consumer = lanes.Consumer(backlog.source(), handler, settings=settings)
    asyncio.run(consumer.run())
    return clocked.rate
