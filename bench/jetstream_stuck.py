"""JetStream on a real server with one stuck key: the delay of the other keys.

The case publishes messages at a fixed rate, and the handler of one key hangs until the handlers of all other keys have
ended. The figure is the p99 of the time from the delivery of a message to the end of its handler, for the other keys.
The baseline is the same run without the hang.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count as count_from
from typing import Final

from nats.aio.client import Client
from nats.js.api import StorageType, StreamConfig

from bench.figures import Effort, Figure, cost, middle, pairs
from bench.jetstream import connected
from lanes import Consumer, Message, Settings
from lanes.clock import monotonic
from lanes_jetstream import JetStreamSource, subject_token
from tests.components import running

GOAL: Final = 1.25
PAIRS_MORE: Final = 2
"""Number of additional pairs, because the tail of a distribution is less steady than its mean."""
# A hundredth of all messages has the stuck key. These messages stay fewer than ``max_in_flight`` to the end.
KEYS, MESSAGES, SIZE, WAIT, BURST, PER_SECOND = 100, 6_000, 100, 0.001, 20, 2_000.0
STUCK: Final = b"0"


def figures(effort: Effort) -> list[Figure]:
    """Measure the case and its baseline alternately, on a new server."""
    count = effort.messages(MESSAGES)
    number = count_from(1)
    with running("nats") as urls:

        def measured(*, hangs: bool) -> float:
            name = f"STUCK{next(number)}"
            return asyncio.run(connected(urls["nats"], lambda client: _p99(client, name, count, hangs=hangs)))

        stuck = middle(
            pairs(partial(measured, hangs=True), partial(measured, hangs=False), effort.repeats + PAIRS_MORE)
        )
    name = f"jetstream-stuck key with {100 / KEYS:g} % of the traffic"
    return [cost(name, "ms to the end, p99 of the others", *stuck).within(GOAL)]


async def _p99(client: Client, name: str, count: int, *, hangs: bool) -> float:
    stream = client.jetstream()
    await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], storage=StorageType.MEMORY))
    others = sum(number % KEYS != int(STUCK) for number in range(count))
    times: list[float] = []
    ended = asyncio.Event()

    async def handler(message: Message) -> None:
        if message.key == STUCK and hangs:
            await ended.wait()
            return
        await asyncio.sleep(WAIT)
        if message.key != STUCK:
            times.append(monotonic() - message.received)
            if len(times) == others:
                ended.set()

    source = JetStreamSource(client, stream=name, durable="stuck", key=subject_token(1), acks="fire-and-forget")
    async with Consumer(source, handler, settings=Settings()):
        await _publish(client, name, count)
        await ended.wait()
    await stream.delete_stream(name)
    return 1_000 * sorted(times)[len(times) * 99 // 100]


async def _publish(client: Client, name: str, count: int) -> None:
    begin = monotonic()
    for number in range(count):
        if number % BURST == 0:
            await asyncio.sleep(max(0.0, begin + number / PER_SECOND - monotonic()))
        await client.publish(f"{name}.{number % KEYS}", bytes(SIZE))
    await client.flush()
