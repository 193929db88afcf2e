"""A partitioned queue on Kafka at a steady rate: CPU, latency and depth with 1, 2, 4 and 8 topics of one partition.

One consumer handles all topics of the queue, with a handler that waits. The baseline of each figure is the queue of
width 1, which is the plain topic. A last run has four topics and four lanes in each, and counts the lanes in use.

The depth is the largest number of sent messages with unfinished handlers, read every 20 ms. The first second, in which
the consumer joins its group, does not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median
from typing import Any, Final

from confluent_kafka import Producer

import lanes
from bench.alone import alone
from bench.figures import Effort, Figure, cost
from bench.kafka_broker import TIMEOUT, Backlog, broker, create, until
from bench.paced import TICK, WARM_UP, Load, Watch
from lanes import Message, PartitionedQueue, Settings
from lanes.core.ring import lane
from lanes_kafka import KafkaSource

WIDTHS: Final = (1, 2, 4, 8)
LANES: Final = 4
WIDTH_OF_GOAL: Final = 4
CPU_GOAL: Final = 1.15
PER_SECOND: Final = 5_000
SECONDS: Final = 5.0
KEYS: Final = 1_000
WAIT: Final = 0.001
"""Seconds that a handler waits."""

LOOK_EVERY: Final = 0.02


@dataclass(frozen=True, slots=True)
class Kind:
    """A queue of a benchmark. ``lanes``: number of lanes in each partition; None = a lane for each key."""

    width: int
    lanes: int | None = None

    @property
    def queue(self) -> PartitionedQueue:
        """The queue."""
        return PartitionedQueue(f"width-{self.width}", self.width)

    @property
    def name(self) -> str:
        """Name in the case of a figure."""
        return f"width {self.width}" if self.lanes is None else f"{self.width} × {self.lanes} lanes"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one run: its load, the largest depth, and the number of lanes in use."""

    load: Load
    depth: int
    lanes: int


def figures(effort: Effort) -> list[Figure]:
    """Measure all widths in turn, and four lanes in each of four topics."""
    kinds = [*map(Kind, WIDTHS), Kind(WIDTH_OF_GOAL, LANES)]
    measured: dict[Kind, list[Measured]] = {kind: [] for kind in kinds}
    count = effort.messages(round(PER_SECOND * SECONDS))
    with broker() as url:
        for width in WIDTHS:
            for name in Kind(width).queue.names:
                create(url, name, partitions=1)
        for _ in range(effort.repeats):
            for kind in kinds:
                measured[kind].append(alone(_measure, url, kind, count))
    made = [figure for kind in kinds for figure in _rows(kind, measured[kind], measured[kinds[0]])]
    used = float(min(each.lanes for each in measured[kinds[-1]]))
    every = float(WIDTH_OF_GOAL * LANES)
    return [*made, cost(f"kafka-widths {kinds[-1].name}, in use", "lanes", used, every).at_least(every)]


def _rows(kind: Kind, measured: Sequence[Measured], plain: Sequence[Measured]) -> list[Figure]:
    def of(name: str, unit: str, figure: Callable[[Measured], float]) -> Figure:
        case = f"kafka-widths {kind.name}, {name}"
        return cost(case, unit, median(map(figure, measured)), median(map(figure, plain)))

    cpu = of("CPU", "µs CPU/message", lambda each: each.load.cpu)
    return [
        cpu.within(CPU_GOAL) if kind == Kind(WIDTH_OF_GOAL) else cpu,
        of("p50", "ms", lambda each: 1e3 * each.load.p50),
        of("p95", "ms", lambda each: 1e3 * each.load.p95),
        of("p99", "ms", lambda each: 1e3 * each.load.p99),
        of("depth", "messages", lambda each: float(each.depth)),
    ]


def _measure(url: str, kind: Kind, count: int) -> Measured:
    """Handle messages that another process sends at a steady rate."""
    warm_up = round(PER_SECOND * WARM_UP)
    context = get_context("spawn")
    ready, sent = context.Event(), context.Value("q", 0)
    sender = context.Process(target=_send, args=(url, kind.queue, warm_up + count, ready, sent))
    sender.start()
    try:
        return asyncio.run(_handled(url, kind, warm_up + count, warm_up, ready, sent))
    finally:
        sender.join()


async def _handled(url: str, kind: Kind, count: int, warm_up: int, ready: Any, sent: Any) -> Measured:
    watch = Watch(count, warm_up, lambda: consumer.stop())
    used: set[tuple[str, int]] = set()
    ended, depth = 0, 1

    async def handle(message: Message) -> None:
        nonlocal ended
        await asyncio.sleep(WAIT)
        ended += 1
        assert message.key is not None
        used.add((message.partition.id.source, lane(message.key, LANES)))
        watch.handled(message.value)

    queue = kind.queue
    config = Backlog(url, queue.name, 0).config(
        auto_offset_reset="latest", partition_assignment_strategy="cooperative-sticky"
    )
    source = KafkaSource(config, topics=queue)
    consumer = lanes.Consumer(source, handle, settings=Settings(lanes=kind.lanes))

    async def look() -> None:
        nonlocal depth
        await until(lambda: len(consumer.status().partitions) == kind.width, "the partitions of the group")
        ready.set()
        while True:
            if ended >= warm_up:
                depth = max(depth, sent.value - ended)
            await asyncio.sleep(LOOK_EVERY)

    looking = asyncio.create_task(look())
    try:
        await consumer.run()
    finally:
        looking.cancel()
    return Measured(watch.load(), depth, len(used))


def _send(url: str, queue: PartitionedQueue, count: int, ready: Any, shared: Any) -> None:
    """Send messages at a steady rate as soon as the consumer is ready, and share the number of sent messages."""
    producer = Producer({"bootstrap.servers": url})
    for name in queue.names:
        producer.list_topics(name, timeout=TIMEOUT)
    routes = [queue.route_by_key(b"key-%d" % number) for number in range(KEYS)]
    assert ready.wait(TIMEOUT), "the consumer was not ready"
    time.sleep(0.5)
    begin, sent = time.monotonic(), 0
    while sent < count:
        due = min(count, int((time.monotonic() - begin) * PER_SECOND) + 1)
        for number in range(sent, due):
            route = routes[number % KEYS]
            producer.produce(route.name, b"%d" % time.time_ns(), route.key)
        shared.value = sent = due
        producer.poll(0)
        time.sleep(max(TICK, begin + sent / PER_SECOND - time.monotonic()))
    assert producer.flush(TIMEOUT) == 0
