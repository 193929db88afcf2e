"""Ranges on a log in PostgreSQL: their throughput, and the time of a move, on one server with its disk.

10 ms: three members in a process each handle a full log of 64 partitions by handlers of 10 ms. The figure is for 12
ranges, four for each member in turn. The baseline is the same run without ranges. Every member owns its pieces or its
partitions before the first message.

Move: in each of 64 partitions, one message runs in the former owner, and one more message waits. The map then gives
the range, or a part of it, to another member. The figure is the time from the end of the running handlers until the
next owner has begun the queued messages of all partitions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.sharedctypes import RawArray
from statistics import median
from typing import Any, Final

from psycopg import Connection

from bench.alone import alone
from bench.figures import Effort, Figure, cost, interleaved, rate
from bench.waiting import WAIT, tuned_run
from lanes import Consumer, Message, Settings
from lanes.ring import SLOTS, Range, slot
from lanes_postgres import Log, PostgresSource, RangeMap, Record, migrate
from tests.components import PostgresServer

THROUGHPUT_GOAL, MOVE_GOAL = 0.9, 0.2
MEMBERS: Final = ("a", "b", "c")
PARTITIONS, RANGES = 64, 12
MESSAGES, KEYS, BATCH = 60_000, 10_000, 2_000
CONCURRENCY: Final = 300
"""Maximum number of running handlers of a member."""

GROUP: Final = "billing"
DRAINED_AFTER: Final = 0.5
"""Seconds for which the handlers run after the assignment."""

_POLL: Final = 0.01
_logs = itertools.count()


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases on a new server that writes to its disk before a COMMIT returns."""
    settings = ("fsync=on", "max_connections=100", "max_wal_size=4GB")
    with PostgresServer(settings=settings) as server:
        url = server.url
        with Connection.connect(url) as connection:
            migrate(connection)
        count = effort.messages(MESSAGES)
        ranged, plain = interleaved(
            [partial(_handled, url, count, ranged=True), partial(_handled, url, count, ranged=False)], effort.repeats
        )
        name = f"postgres-ranges {len(MEMBERS)} members, {RANGES} ranges"
        whole, part = [
            median(alone(_moved, url, _log(url).name, part=part) for _ in range(effort.repeats))
            for part in (False, True)
        ]
        unit = f"s to the last of {PARTITIONS} partitions"
        return [
            rate(name, "messages/s", ranged, plain, THROUGHPUT_GOAL),
            cost("postgres-ranges move of a range", unit, whole, MOVE_GOAL, MOVE_GOAL),
            cost("postgres-ranges move of a part", unit, part, MOVE_GOAL, MOVE_GOAL),
        ]


def _log(url: str) -> Log:
    log = Log(f"ranged-{next(_logs)}", partitions=PARTITIONS)
    with Connection.connect(url) as connection:
        log.create(connection)
    return log


# --- throughput


def _handled(url: str, count: int, *, ranged: bool) -> float:
    """Return messages a second of all members together."""
    log = _log(url)
    with Connection.connect(url) as connection:
        if ranged:
            ring, size = RangeMap(log, group=GROUP), SLOTS // RANGES
            for number in range(RANGES):
                last = SLOTS - 1 if number == RANGES - 1 else (number + 1) * size - 1
                ring.assign(connection, number * size, last, MEMBERS[number % len(MEMBERS)])
        for first in range(0, count, BATCH):
            numbers = range(first, min(first + BATCH, count))
            log.append(connection, [Record(b"%d" % number, b"key-%d" % (number % KEYS)) for number in numbers])
            connection.commit()
    with Connection.connect(url, autocommit=True) as connection:
        while connection.execute("SELECT lanes.lanes_log_sequence(5000)").fetchone() != (0,):
            pass
        connection.execute("VACUUM ANALYZE lanes.lanes_log_messages, lanes.lanes_log_entries")
        connection.execute("CHECKPOINT")
    context = get_context("spawn")
    counts = RawArray("q", len(MEMBERS))
    ready = [context.Event() for _ in MEMBERS]
    go, over = context.Event(), context.Event()
    members = [
        context.Process(
            target=_member, args=(url, log.name, name if ranged else None, number, counts, ready[number], go, over)
        )
        for number, name in enumerate(MEMBERS)
    ]
    for member in members:
        member.start()
    try:
        for each in ready:
            assert each.wait(120), "a member does not own its share"
        begin = time.perf_counter()
        go.set()
        while sum(counts) < count:
            time.sleep(_POLL)
            assert all(member.is_alive() for member in members), "a member has ended"
        return count / (time.perf_counter() - begin)
    finally:
        over.set()
        for member in members:
            member.join()


def _member(url: str, log: str, name: str | None, number: int, counts: Any, ready: Any, go: Any, over: Any) -> None:
    async def handler(message: Message) -> None:
        await asyncio.sleep(WAIT)
        counts[number] += 1

    async def main() -> None:
        # A share is even to two partitions.
        source, share = _source(url, Log(log), name), PARTITIONS // len(MEMBERS) - 2
        if name is not None:
            share += PARTITIONS * RANGES // len(MEMBERS)
        settings = Settings(concurrency=CONCURRENCY, max_in_flight=4 * CONCURRENCY)
        consumer = Consumer(source, handler, settings=settings)
        consumer.pause()
        running = asyncio.create_task(consumer.run())
        await _until(lambda: consumer.ready and len(consumer.status().partitions) >= share)
        ready.set()
        await asyncio.to_thread(go.wait)
        consumer.resume()
        await asyncio.to_thread(over.wait)
        consumer.stop()
        await running

    tuned_run(main())


def _source(url: str, log: Log, name: str | None) -> PostgresSource:
    ranges = None if name is None else RangeMap(log, group=GROUP).member(name)
    return PostgresSource(url, log, subscription=GROUP, ranges=ranges)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # no event tells it
        await asyncio.sleep(_POLL)


# --- moves


def _moved(url: str, log: str, *, part: bool) -> float:
    """Return the seconds from the end of the former owner's handlers until the next owner has begun every partition."""
    return asyncio.run(_moving(url, Log(log), part=part))


async def _moving(url: str, log: Log, *, part: bool) -> float:
    half = SLOTS // 2
    moved = Range(half // 2, half - 1) if part else Range(0, half - 1)
    gate, begun = asyncio.Event(), dict[str, dict[int, bytes]](a={}, b={})
    gate.set()

    async def handle(name: str, message: Message) -> None:
        assert message.key is not None, "each message has a key"
        begun[name].setdefault(message.partition.id.number, message.key)
        await gate.wait()

    settings = Settings(concurrency=2 * PARTITIONS)
    with Connection.connect(url, autocommit=True) as connection:
        ring = RangeMap(log, group=GROUP)
        ring.assign(connection, 0, half - 1, "a")
        ring.assign(connection, half, SLOTS - 1, "b")
        consumers = [Consumer(_source(url, log, name), partial(handle, name), settings=settings) for name in "ab"]
        running = [asyncio.create_task(consumer.run()) for consumer in consumers]
        keys = [key for number in range(PARTITIONS * 100) if slot(key := b"key-%d" % number) in moved]
        await asyncio.to_thread(_append, url, log, keys)
        await _until(lambda: len(begun["a"]) == PARTITIONS and not consumers[0].status().in_flight)
        keys = list(begun["a"].values())
        gate.clear()
        begun["a"].clear()
        await asyncio.to_thread(_append, url, log, keys)
        await _until(lambda: len(begun["a"]) == PARTITIONS)
        await asyncio.to_thread(ring.assign, connection, moved.lo, moved.hi, "b")
        await asyncio.to_thread(_append, url, log, keys)
        await asyncio.sleep(DRAINED_AFTER)
        assert not begun["b"], "the next owner has begun beside a running handler"
        gate.set()
        begin = time.perf_counter()
        await _until(lambda: len(begun["b"]) == PARTITIONS)
        seconds = time.perf_counter() - begin
        for consumer in consumers:
            consumer.stop()
        await asyncio.gather(*running)
    return seconds


def _append(url: str, log: Log, keys: list[bytes]) -> None:
    with Connection.connect(url, autocommit=True) as connection, connection.transaction():
        log.append(connection, [Record(key, key) for key in keys])
