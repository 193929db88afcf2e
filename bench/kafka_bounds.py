"""Kafka with a stuck key, a stuck partition or many messages in flight: delay of other keys, throughput and memory.

Backlog: the figure is the handled messages of the fastest of four equal partitions, divided by the handled messages of
the slowest partition. The case reads both numbers when the fastest partition is nearly done.

Stuck key: messages arrive at a fixed rate, and the handler of one key hangs until 98 % of the handlers of the other
keys have ended. The figure is the p99 of the time from ``produce`` to the end of the handler, for the other keys. The
baseline is the same run without the hang.

Stuck partition: a key of one of four partitions hangs while the consumer handles a long backlog of the other
partitions. The figures are the peak of the process's memory at the end, and the messages a second after the first
fifth. The baselines are the peak after the first fifth, and the messages a second during the first fifth.

Held: the figure is the memory of a message in flight, without its key, value and headers. The baseline is the size of
key, value and headers.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import lanes
from bench.alone import alone
from bench.figures import Effort, Figure, Pair, cost, middle, pairs, rate
from bench.kafka_broker import PARTITIONS, Backlog, broker, consume, create, fill, until
from bench.kafka_feed import feeding, stamp
from lanes import Message, Settings
from lanes_kafka import KafkaSource

BACKLOG_GOAL: Final = 2.0
BACKLOG_KEYS, BACKLOG_MESSAGES = 10_000, 400_000

STUCK_GOAL: Final = 1.25
STUCK_PAIRS_MORE: Final = 2
STUCK_KEYS, STUCK_MESSAGES, STUCK_WAIT, PER_SECOND = 100, 10_000, 0.001, 5_000.0
STUCK_KEY: Final = b"key-0"

MEMORY_GOAL, RATE_GOAL = 1.1, 0.8
PASSING_KEYS, PASSING = 10_000, 5_000_000

HELD_FEW, HELD_MANY, HELD_KEYS = 20_000, 220_000, 10_000
HELD_BACKLOG: Final = 350_000
HEADERS: Final[list[tuple[str, str | bytes | None]]] = [("trace", b"0" * 20), ("kind", b"order")]


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases on a new broker."""
    with broker() as url:
        backlog = fill(url, "backlog", effort.messages(BACKLOG_MESSAGES), BACKLOG_KEYS)
        fairness = median([_fairness(backlog) for _ in range(effort.repeats)])
        count = effort.messages(STUCK_MESSAGES)
        stuck = middle(
            pairs(
                partial(_p99, url, count, hangs=True),
                partial(_p99, url, count, hangs=False),
                effort.repeats + STUCK_PAIRS_MORE,
            )
        )
        memory, rates = _stuck_partition(url, effort.messages(PASSING))
        held = _held(fill(url, "held", HELD_BACKLOG, HELD_KEYS))
        headed = _held(fill(url, "headed", HELD_BACKLOG, HELD_KEYS, headers=HEADERS))
    return [
        cost("kafka-bounds backlog", "times the least served", fairness, 1.0).within(BACKLOG_GOAL),
        cost("kafka-bounds stuck key with 1 % of the traffic", "ms to the end, p99 of the others", *stuck).within(
            STUCK_GOAL
        ),
        cost("kafka-bounds stuck partition", "MiB peak", *memory).within(MEMORY_GOAL),
        rate("kafka-bounds stuck partition, the others", "messages/s", *rates, RATE_GOAL),
        cost("kafka-bounds held", "bytes of overhead/message", *held),
        cost(f"kafka-bounds held, {len(HEADERS)} headers", "bytes of overhead/message", *headed),
    ]


# --- a backlog


def _fairness(backlog: Backlog) -> float:
    served: Counter[int] = Counter()
    # Keys are spread evenly, within a hundredth.
    nearly_all = max(1, round(0.95 * backlog.count / PARTITIONS))
    ratios: list[float] = []

    async def handler(message: Message) -> None:
        number = message.partition.id.number
        served[number] += 1
        if not ratios and served[number] >= nearly_all:
            ratios.append(served[number] / max(1, min(served[each] for each in range(PARTITIONS))))

    consume(backlog, handler, Settings())
    return ratios[0]


# --- one stuck key


def _p99(url: str, count: int, *, hangs: bool) -> float:
    """Return the p99 of the milliseconds from ``produce`` to the handler's end, for the keys that are not stuck."""
    topic = f"stuck-{time.monotonic_ns()}"
    create(url, topic)
    times: list[int] = []
    seen = 0

    async def main() -> None:
        ended = asyncio.Event()

        async def handler(message: Message) -> None:
            nonlocal seen
            seen += 1
            if message.key == STUCK_KEY and hangs:
                if seen == count:
                    ended.set()
                await ended.wait()
                return
            await asyncio.sleep(STUCK_WAIT)
            if message.key != STUCK_KEY:
                times.append(time.monotonic_ns() - stamp(message.value))

        source = Backlog(url, topic, count).source()
        async with lanes.Consumer(source, handler, settings=Settings()) as consumer:
            await until(lambda: consumer.active, "an assignment")
            with feeding(url, topic, count, STUCK_KEYS, PER_SECOND):
                others = round(count * (1 - 1 / STUCK_KEYS) * 0.98)
                await until(lambda: len(times) >= others, "the other keys")
            ended.set()

    asyncio.run(main())
    return sorted(times)[len(times) * 99 // 100] / 1e6


# --- one stuck partition


class Passed(NamedTuple):
    """The result of ``pass_by``.

    Attributes:
        memory: Peaks of memory in MiB at the end and after a fifth of the messages.
        rates: Messages a second after and during that fifth.
        reasons: Reasons of the health at the end.
    """

    memory: Pair
    rates: Pair
    reasons: tuple[str, ...]


def _stuck_partition(url: str, count: int) -> tuple[Pair, Pair]:
    # Partition 0 gets more than ``max_ahead`` messages, and far fewer than each other partition.
    step = max(PARTITIONS, count // 50_000)
    backlog = fill(
        url,
        "stuck-partition",
        count,
        PASSING_KEYS,
        partition=lambda number: 0 if number % step == 0 else 1 + number % (PARTITIONS - 1),
    )
    others = count - len(range(0, count, step))
    passed = alone(pass_by, backlog, others)
    assert others < 1_000_000 or any("/0 has reached max_ahead" in reason for reason in passed.reasons), passed.reasons
    return passed.memory, passed.rates


def pass_by(backlog: Backlog, others: int) -> Passed:
    """Handle all messages of the other partitions while the first message of partition 0 hangs."""
    return asyncio.run(_pass_by(backlog, others))


async def _pass_by(backlog: Backlog, others: int) -> Passed:
    ended, passed = asyncio.Event(), 0
    fifth = max(1, others // 5)
    peaks: list[float] = []
    times: list[float] = []

    async def handler(message: Message) -> None:
        nonlocal passed
        if message.partition.id.number == 0:
            if message.position == 0:
                await ended.wait()
            return
        passed += 1
        if passed in (1, fifth, others):
            peaks.append(peak())
            times.append(time.perf_counter())
            if passed == others:
                ended.set()

    async with lanes.Consumer(backlog.source(), handler) as consumer:
        await ended.wait()
        reasons = tuple(consumer.health().reasons)
    rates = (others - fifth) / (times[2] - times[1]), max(1, fifth - 1) / (times[1] - times[0])
    return Passed((peaks[2], peaks[1]), rates, reasons)


def peak() -> float:
    """Return the peak of this process's memory in MiB."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    # On Linux, ``ru_maxrss`` may include the memory of the parent process.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**10


# --- held


def _held(backlog: Backlog) -> Pair:
    """Return the additional memory of a message, and the size of its key, value and headers, in bytes."""
    few, many = (alone(hold, backlog, count) for count in (HELD_FEW, HELD_MANY))
    own = (many[1] - few[1]) / (HELD_MANY - HELD_FEW)
    return 2**20 * (many[0] - few[0]) / (HELD_MANY - HELD_FEW) - own, own


def hold(backlog: Backlog, count: int) -> tuple[float, int]:
    """Return the memory in MiB with ``count`` messages in flight, and the bytes of their keys, values and headers."""
    return asyncio.run(_hold(backlog, count))


async def _hold(backlog: Backlog, count: int) -> tuple[float, int]:
    over = asyncio.Event()

    async def handler(message: Message) -> None:
        await over.wait()

    settings = Settings(
        concurrency=1, max_in_flight=count, max_in_flight_bytes=1 << 40, max_ahead=count, unhealthy_after=1e9
    )
    source = KafkaSource(backlog.config(), topics=backlog.topic)
    async with lanes.Consumer(source, handler, settings=settings) as consumer:
        await until(lambda: consumer.ready and consumer.status().in_flight == count, f"{count} messages")
        found = peak(), consumer.status().in_flight_bytes
        over.set()
    return found
