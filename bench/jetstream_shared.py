"""JetStream on a real server: the shares of two processes that compete for the messages of one shared durable.

Each process runs ten handlers at once. The handlers of the first process sleep 5 ms; those of the second process sleep
5 ms or, in a slow process, 50 ms. The case publishes the messages when both processes pull. The figure is the smaller
share, and the baseline is the smaller share of the speed of both processes.

With the default ``max_in_flight`` the slow process takes messages that the fast process could handle sooner. The figure
of the last row is the time until the processes have handled all messages. The baseline of this row is the run with
twice as many messages in flight as handlers.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from itertools import count as count_from
from statistics import median
from typing import Final, NamedTuple

from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, StorageType, StreamConfig

from bench.figures import Effort, Figure, cost, rate
from tests.components import running
from tests.jetstream.sharing_process import CONCURRENCY, DURABLE, SharingProcess

EQUAL_GOAL, SLOW_GOAL = 0.9, 1.5
FAST, SLOW = 0.005, 0.05
SIZE, MESSAGES = 100, 8_000
FEW: Final = 2 * CONCURRENCY
MANY: Final = 2_000
"""The default of ``max_in_flight``."""
SHARE: Final = "% of the messages, smaller share"
CASES: Final = ((FAST, FEW), (SLOW, FEW), (SLOW, MANY))
"""Seconds of the second process's handlers, and ``max_in_flight`` of both processes."""


class Competition(NamedTuple):
    """One run of two processes.

    Attributes:
        share: Percent of the messages that the process with fewer messages has handled.
        seconds: Time from the first publication until the last acknowledgement.
    """

    share: float
    seconds: float


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases alternately, on a new server."""
    with running("nats") as urls:
        return asyncio.run(_figures(urls["nats"], effort))


async def _figures(url: str, effort: Effort) -> list[Figure]:
    count, number = effort.messages(MESSAGES), count_from(1)
    runs: list[list[Competition]] = [[] for _ in CASES]
    client = Client()
    await client.connect(url)
    try:
        for _ in range(effort.repeats):
            for (pause, max_in_flight), measured in zip(CASES, runs, strict=True):
                gc.collect()
                measured.append(await _compete(client, url, f"SHARED{next(number)}", count, pause, max_in_flight))
    finally:
        await client.close()
    equal, slow, many = (median(ran.share for ran in measured) for measured in runs)
    _, soon, late = (median(ran.seconds for ran in measured) for measured in runs)
    part = 100 * FAST / (FAST + SLOW)
    name = "jetstream-shared"
    return [
        rate(f"{name} equal speeds", SHARE, equal, 50.0, EQUAL_GOAL),
        cost(f"{name} slow process", SHARE, slow, part).within(SLOW_GOAL),
        cost(f"{name} slow process, {MANY:,} in flight", SHARE, many, part),
        cost(f"{name} slow process, {MANY:,} in flight, end", "s until all messages are handled", late, soon),
    ]


async def _compete(client: Client, url: str, name: str, count: int, pause: float, max_in_flight: int) -> Competition:
    stream = client.jetstream()
    await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], storage=StorageType.MEMORY))
    processes = [SharingProcess(url, name, one, max_in_flight) for one in (FAST, pause)]
    try:
        for process in processes:
            await process.ready()
        await _until(stream, name, lambda info: info.num_waiting == len(processes))
        begin = time.perf_counter()
        for _ in range(count):
            await client.publish(f"{name}.job", bytes(SIZE))
        await client.flush()
        # Without a pending message, the server may still have to store the first one: count the acknowledged ones.
        await _until(stream, name, lambda info: info.ack_floor is not None and info.ack_floor.stream_seq == count)
        seconds = time.perf_counter() - begin
        handled = [len(await process.stop()) for process in processes]
    finally:
        for process in processes:
            process.kill()
    await stream.delete_stream(name)
    assert sum(handled) == count, handled
    return Competition(100 * min(handled) / count, seconds)


async def _until(stream: JetStreamContext, name: str, condition: Callable[[ConsumerInfo], bool]) -> None:
    while True:
        if condition(await stream.consumer_info(name, DURABLE)):
            return
        await asyncio.sleep(0.02)
