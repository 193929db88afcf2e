"""An exclusive cohort on a real server: throughput, the time of a move and of a failover, and the cost of idling.

64 partitions: the figure is messages a second with a handler that does nothing, after the assignment of every
partition. The baseline is one consumer of the whole stream.

Move: a member with all partitions of an idle stream runs in a separate process, and a second member joins. The figure
is the time from the start of the second member, connection included, until it has handled a message of each of its
partitions. The case publishes each message after the assignment of its partition. The baseline is the same measurement
for one consumer that reads the whole stream.

Failover: two members share the partitions of a stream during a steady publication, and one member ends by ``kill -9``.
The figure is the time until the other member has handled a message of each partition of the killed member. The baseline
is the length of the lease.

Idle: the figure is the CPU time of a member with 64 partitions and the default lease on an idle stream. The baseline is
the CPU time of one consumer that waits at the same time.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count as count_from
from statistics import median
from typing import Final

from nats.aio.client import Client

import lanes
from bench.cohort_members import DividedStream, holding, until
from bench.figures import Effort, Figure, Pair, cost, rate
from lanes import GroupEvent, Message, Settings
from lanes_jetstream import JetStreamSource
from tests.components import running

PARTITIONS: Final = 64
GOAL: Final = 0.6
KEYS, MESSAGES, IN_FLIGHT = 1_000, 100_000, 2_000

MOVES: Final = {1: 0.6, 20: 2.0}
"""Number of partitions that move together, and the maximum time of the move in seconds."""

LEASE: Final = 3.0
FAILOVER_GOAL: Final = LEASE + 1.0
FAILOVER_PARTITIONS: Final = 8

IDLE_GOAL, IDLE_SECONDS, IDLE_LEASE = 5.0, 10.0, 10.0

_numbers = count_from(1)


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases on a new server."""
    with running("nats") as urls:
        return asyncio.run(_figures(urls["nats"], effort))


async def _figures(url: str, effort: Effort) -> list[Figure]:
    client = Client()
    await client.connect(url)
    try:
        speed = await _speeds(url, client, effort)
        moves = {count: await _moves(url, client, count, effort.repeats) for count in MOVES}
        failover = await _failovers(url, client, effort.repeats)
        idle = await _idle(url, client, effort)
    finally:
        await client.close()
    return [
        rate(f"cohort {PARTITIONS} partitions", "messages/s", *speed, GOAL),
        *(
            cost(f"cohort move, {count} at once" if count > 1 else "cohort move", "s", *moves[count], goal)
            for count, goal in MOVES.items()
        ),
        cost("cohort failover", "s", failover, LEASE, FAILOVER_GOAL),
        cost(f"cohort idle, {PARTITIONS} partitions", "% of a core", *idle, IDLE_GOAL),
    ]


async def _in_turns(figure: Callable[[], Awaitable[float]], baseline: Callable[[], Awaitable[float]], n: int) -> Pair:
    """Return the medians of ``n`` measurements of the figure and of the baseline."""
    measured: list[Pair] = []
    for _ in range(n):
        gc.collect()
        before = await baseline()
        gc.collect()
        measured.append((await figure(), before))
    return median(pair[0] for pair in measured), median(pair[1] for pair in measured)


def _name(what: str) -> str:
    return f"{what}-{next(_numbers)}"


# --- messages a second


async def _speeds(url: str, client: Client, effort: Effort) -> Pair:
    count = effort.messages(MESSAGES)
    stream = DividedStream(url, "speed", PARTITIONS)
    await stream.create(client, storage="memory")
    await stream.fill(client, count, KEYS)
    measured = await _in_turns(
        lambda: _speed(stream.member("alone", namespace=_name("speed")), PARTITIONS, count),
        lambda: _speed(stream.durable(_name("speed")), 1, count),
        effort.repeats,
    )
    await stream.delete(client)
    return measured


async def _speed(source: JetStreamSource, partitions: int, count: int) -> float:
    """Return messages a second after the assignment of all partitions.

    In both measurements, some messages are in flight before the last assignment.
    """
    handled = assigned = 0
    begin = end = 0.0
    ready = asyncio.Event()

    def tell(event: GroupEvent) -> None:
        nonlocal assigned, begin
        assigned += event.name == "assigned"
        if assigned == partitions and not begin:
            begin = time.perf_counter()
            ready.set()

    async def handler(message: Message) -> None:
        nonlocal handled, end
        if not begin:
            await ready.wait()
        handled += 1
        if handled == count:
            end = time.perf_counter()
            consumer.stop()

    consumer = lanes.Consumer(source, handler, settings=Settings(max_in_flight=IN_FLIGHT), on_event=tell)
    await consumer.run()
    return count / (end - begin)


# --- a member joins


async def _moves(url: str, client: Client, count: int, repeats: int) -> Pair:
    """Return the seconds of a move, and of the same measurement for one consumer."""
    stream = DividedStream(url, f"move-{count}", 2 * count)
    await stream.create(client)
    with holding(stream, "holder") as holder:

        async def joined() -> float:
            await until(lambda: holder.held == 2 * count, "all partitions at one member")
            return await _until_served(stream.member(_name("joins")), stream, client, count)

        measured = await _in_turns(
            joined,
            lambda: _until_served(stream.durable(_name("alone"), start="next"), stream, client, 1),
            repeats,
        )
    await stream.delete(client)
    return measured


async def _until_served(source: JetStreamSource, stream: DividedStream, client: Client, count: int) -> float:
    """Return the seconds until each of ``count`` partitions has an owner and a handled message."""
    subjects = stream.subjects()
    served: dict[int, float] = {}
    publishing: set[asyncio.Task[None]] = set()

    def tell(event: GroupEvent) -> None:
        if event.name == "assigned" and event.partition is not None:
            publishing.add(asyncio.create_task(client.publish(subjects[event.partition.number], b"")))

    async def handler(message: Message) -> None:
        served.setdefault(message.partition.id.number, time.perf_counter())

    begin = time.perf_counter()
    async with lanes.Consumer(source, handler, on_event=tell):
        await until(lambda: len(served) == count, f"{count} partitions to be served")
    return max(served.values()) - begin


# --- a member dies


async def _failovers(url: str, client: Client, repeats: int) -> float:
    stream = DividedStream(url, "failover", FAILOVER_PARTITIONS)
    await stream.create(client)
    first: dict[int, float] = {}

    async def handler(message: Message) -> None:
        first.setdefault(message.partition.id.number, time.perf_counter())

    feeding = asyncio.create_task(_feed(stream, client))
    consumer = lanes.Consumer(stream.member("survivor", lease=LEASE), handler)
    try:
        async with consumer:
            times = [await _failover(stream, consumer, first) for _ in range(repeats)]
    finally:
        feeding.cancel()
        with suppress(asyncio.CancelledError):
            await feeding
    await stream.delete(client)
    return median(times)


async def _feed(stream: DividedStream, client: Client) -> None:
    """Publish messages for each partition until a cancellation."""
    while True:
        for subject in stream.subjects():
            await client.publish(subject, b"")
        await asyncio.sleep(0.02)


async def _failover(stream: DividedStream, consumer: lanes.Consumer, first: dict[int, float]) -> float:
    half = FAILOVER_PARTITIONS // 2
    with holding(stream, _name("dies"), lease=LEASE) as member:
        await until(lambda: member.held == half == len(_owned(consumer)), "a half of the partitions each")
        others = set(range(FAILOVER_PARTITIONS)) - _owned(consumer)
        # The kill may come at any point between two renewals.
        await asyncio.sleep(LEASE / 3 * (next(_numbers) % 5) / 5)
        begin = time.perf_counter()
        member.kill()
        first.clear()
        await until(lambda: others <= first.keys(), "the partitions of the other member")
        return max(first[each] for each in others) - begin


def _owned(consumer: lanes.Consumer) -> set[int]:
    return {int(name.rpartition("/")[2]) for name in consumer.status().partitions}


# --- nothing to do


async def _idle(url: str, client: Client, effort: Effort) -> Pair:
    """Return the CPU use of a member and of one consumer, in percent of a core."""
    seconds = max(1.0, IDLE_SECONDS * effort.scale)
    stream = DividedStream(url, "idle", PARTITIONS)
    await stream.create(client)
    measured: list[Pair] = []
    with holding(stream, "idle", lease=IDLE_LEASE) as member, holding(stream, "alone", lease=0) as alone:
        await until(lambda: (member.held, alone.held) == (PARTITIONS, 1), "everything to be assigned")
        # The first renewals of all partitions happen at the same time.
        await asyncio.sleep(seconds / 2)
        for _ in range(effort.repeats):
            begin, before = time.perf_counter(), (await member.used(), await alone.used())
            await asyncio.sleep(seconds)
            after, passed = (await member.used(), await alone.used()), time.perf_counter() - begin
            measured.append((100 * (after[0] - before[0]) / passed, 100 * (after[1] - before[1]) / passed))
    await stream.delete(client)
    return median(pair[0] for pair in measured), median(pair[1] for pair in measured)
