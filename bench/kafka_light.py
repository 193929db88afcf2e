"""Kafka at light load: CPU a message and latency at a paced rate, against the client's plain `poll()` loop.

A process sends messages at a steady rate. Each message holds the time at which it was sent, and its latency ends in the
handler, which does nothing else. The plain loop calls `poll()`, and the client commits every 5 s. `lanes` and the plain
loop take turns on one broker. Each runs in a process of its own, whose CPU is measured with all of its threads. The
first second, in which the consumer joins its group, does not count.

Idle: percent of a core while no message arrives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median, quantiles
from typing import Any, Final

from confluent_kafka import Consumer as Client
from confluent_kafka import Producer

import lanes
from bench.figures import Effort, Figure, cost
from bench.kafka_broker import PARTITIONS, TIMEOUT, Backlog, alone, broker, create, until
from lanes import Message

RATES: Final = {10: 10.0, 1_000: 5.0, 5_000: 5.0}
"""Seconds of each rate, in messages a second."""

CPU_GOAL: Final = 1.8
P99_GOAL: Final = 1.3
RATE_OF_GOALS: Final = 1_000
IDLE: Final = 10.0
IDLE_GOAL: Final = 0.5
LEAST: Final = 20
"""Fewest messages of a measurement, because percentiles need several."""

TICK: Final = 0.002
WARM_UP: Final = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The cost of one consumer: percent of a core, microseconds of CPU a message, and seconds of latency."""

    busy: float
    cpu: float
    p50: float
    p95: float
    p99: float


class Watch:
    """A clock of the CPU and the latencies of a process, from the end of the warm-up to the end of the messages.

    Args:
        count: Number of messages that are sent.
        warm_up: Number of messages before the measurement.
        done: Called at the last message.
    """

    def __init__(self, count: int, warm_up: int, done: Callable[[], object]) -> None:
        self._left, self._warm_up, self._done = count, count - warm_up, done
        self._latencies: list[float] = []
        self._cpu = self._begin = 0.0
        self._count = warm_up

    def handled(self, value: bytes | None) -> None:
        """Count one message."""
        now = time.time_ns()
        assert value is not None
        if self._left == self._warm_up:
            self._cpu, self._begin = time.process_time(), time.monotonic()
        elif self._left < self._warm_up:
            self._latencies.append((now - int(value)) / 1e9)
        self._left -= 1
        if not self._left:
            self._cpu = time.process_time() - self._cpu
            self._begin = time.monotonic() - self._begin
            self._done()

    def load(self) -> Load:
        """Return the measurement."""
        cuts = quantiles(self._latencies, n=100)
        return Load(
            100 * self._cpu / self._begin,
            1e6 * self._cpu / len(self._latencies),
            median(self._latencies),
            cuts[94],
            cuts[98],
        )


def figures(effort: Effort) -> list[Figure]:
    """Measure every rate, each with the plain loop as its baseline."""
    made: list[Figure] = []
    with broker() as url:
        create(url, "light")
        backlog = Backlog(url, "light", 0)
        idle = [alone(_idle, backlog, by=by) for _ in range(effort.repeats) for by in ("lanes", "poll")]
        made.append(cost("kafka-light idle", "% of a core", median(idle[::2]), median(idle[1::2]), IDLE_GOAL))
        for rate, seconds in RATES.items():
            count = max(LEAST, effort.messages(round(rate * seconds)))
            ours: list[Load] = []
            plain: list[Load] = []
            for _ in range(effort.repeats):
                for by, loads in (("lanes", ours), ("poll", plain)):
                    loads.append(alone(_paced, backlog, count, rate, by=by))
            made += _rows(rate, ours, plain)
    return made


def _rows(rate: int, ours: list[Load], plain: list[Load]) -> list[Figure]:
    def of(name: str, unit: str, figure: Callable[[Load], float]) -> Figure:
        case = f"kafka-light {rate:,}/s {name}"
        return cost(case, unit, median(map(figure, ours)), median(map(figure, plain)))

    cpu = of("CPU", "µs CPU/message", lambda load: load.cpu)
    p50 = of("p50", "ms", lambda load: 1e3 * load.p50)
    p99 = of("p99", "ms", lambda load: 1e3 * load.p99)
    return [cpu.within(CPU_GOAL), p50, p99.within(P99_GOAL)] if rate == RATE_OF_GOALS else [cpu, p50, p99]


def _idle(backlog: Backlog, *, by: str) -> float:
    """Return the percent of a core that a consumer of an empty topic needs."""
    used = 0.0

    async def look(stop: Callable[[], object]) -> None:
        nonlocal used
        await asyncio.sleep(WARM_UP + 3)
        begin = time.process_time()
        await asyncio.sleep(IDLE)
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
        end = time.monotonic() + WARM_UP + 3
        while time.monotonic() < end:
            client.poll(1.0)
        begin, end = time.process_time(), time.monotonic() + IDLE
        while time.monotonic() < end:
            client.poll(1.0)
        used = time.process_time() - begin
        client.close()
    return 100 * used / IDLE


def _paced(backlog: Backlog, count: int, rate: int, *, by: str) -> Load:
    """Handle messages that another process sends at a steady rate, and return what that took."""
    warm_up = round(rate * WARM_UP)
    ready = get_context("spawn").Event()
    sender = get_context("spawn").Process(target=_send, args=(backlog, warm_up + count, rate, ready))
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


def _send(backlog: Backlog, count: int, rate: int, ready: Any) -> None:
    """Send messages at a steady rate as soon as the consumer is ready."""
    producer = Producer({"bootstrap.servers": backlog.url})
    producer.list_topics(backlog.topic, timeout=TIMEOUT)
    assert ready.wait(TIMEOUT), "the consumer was not ready"
    time.sleep(0.5)
    begin, sent = time.monotonic(), 0
    while sent < count:
        due = min(count, int((time.monotonic() - begin) * rate) + 1)
        for number in range(sent, due):
            producer.produce(backlog.topic, b"%d" % time.time_ns(), b"key-%d" % (number % 1_000))
        sent = due
        producer.poll(0)
        time.sleep(max(TICK, begin + sent / rate - time.monotonic()))
    assert producer.flush(TIMEOUT) == 0
