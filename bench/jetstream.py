"""JetStream on a real server with a handler that does nothing: messages a second, and the cost of a history.

No-op: the baseline is a program over the same client without `lanes`. The program uses overlapped raw pulls on a
separate inbox, parses the stream sequence, and acknowledges every message by a raw publish. Both programs have the same
number of messages in flight, and do not wait for confirmations. Time runs from the first message until the server has
read the last acknowledgement.

History on: the figure is microseconds of CPU of the event loop's thread a message, from ``run()`` to its return. The
baseline is the same run without a history.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count as count_from
from tempfile import TemporaryDirectory
from typing import Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StorageType, StreamConfig

from bench.figures import Effort, Figure, cost, interleaved, rate
from lanes import Consumer, History, Message, Settings
from lanes_jetstream import JetStreamSource, subject_token
from tests.components import running

GOAL: Final = 0.9
HISTORY_GOAL: Final = 1.5
STREAM: Final = "BENCH"
KEYS, SIZE, MESSAGES, IN_FLIGHT = 1_000, 100, 50_000, 2_000


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each interleaved with its baseline, on a new server."""
    count = effort.messages(MESSAGES)
    number = count_from(1)
    with running("nats") as urls:
        url = urls["nats"]
        asyncio.run(fill(url, count))

        def measured(consume: Callable[[Client, str, int], Awaitable[float]]) -> float:
            durable = f"durable-{next(number)}"
            return asyncio.run(connected(url, lambda client: consume(client, durable, count)))

        baseline, figure, without, history = interleaved(
            [partial(measured, case) for case in (_raw, through_lanes, _without_history, _history)], effort.repeats
        )
    return [
        rate("jetstream no-op", "messages/s", figure, baseline, GOAL),
        cost("jetstream history on", "µs CPU/message", history, without).within(HISTORY_GOAL),
    ]


async def connected(url: str, work: Callable[[Client], Awaitable[float]]) -> float:
    """Return the result of ``work`` with a separate client."""
    client = Client()
    await client.connect(url)
    try:
        return await work(client)
    finally:
        await client.close()


async def fill(url: str, count: int) -> None:
    """Create ``STREAM`` with ``count`` messages."""
    client = Client()
    await client.connect(url)
    try:
        stream = client.jetstream()
        await stream.add_stream(StreamConfig(name=STREAM, subjects=["bench.*"], storage=StorageType.MEMORY))
        for number in range(count):
            await client.publish(f"bench.{number % KEYS}", bytes(SIZE))
        await client.flush()
        # The messages were published without waiting. When the last message is confirmed, all messages are stored.
        while (await stream.stream_info(STREAM)).state.messages < count:
            await client.flush()
    finally:
        await client.close()


async def through_lanes(client: Client, durable: str, count: int) -> float:
    """Return messages a second."""
    begin = await _consume(client, durable, count)
    return count / (time.perf_counter() - begin)


async def _without_history(client: Client, durable: str, count: int) -> float:
    begin = time.thread_time_ns()
    await _consume(client, durable, count)
    return (time.thread_time_ns() - begin) / 1_000 / count


async def _history(client: Client, durable: str, count: int) -> float:
    with TemporaryDirectory() as folder:
        begin = time.thread_time_ns()
        await _consume(client, durable, count, History(folder))
        return (time.thread_time_ns() - begin) / 1_000 / count


async def _consume(client: Client, durable: str, count: int, history: History | None = None) -> float:
    """Handle ``count`` messages and return the time of the first message, in seconds of ``perf_counter``."""
    handled = 0
    first = 0.0

    async def handler(message: Message) -> None:
        nonlocal handled, first
        if not handled:
            first = time.perf_counter()
        handled += 1
        if handled == count:
            consumer.stop()

    source = JetStreamSource(client, stream=STREAM, durable=durable, key=subject_token(1), acks="fire-and-forget")
    consumer = Consumer(source, handler, settings=Settings(max_in_flight=IN_FLIGHT), history=history)
    # Returns after the server has read every acknowledgement.
    await consumer.run()
    return first


async def _raw(client: Client, durable: str, count: int) -> float:
    stream = client.jetstream()
    await stream.add_consumer(
        STREAM, ConsumerConfig(durable_name=durable, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=2 * IN_FLIGHT)
    )
    pulls = _RawPulls(client, f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{durable}", count)
    await pulls.start()
    await pulls.done.wait()
    await client.flush()
    return count / (time.perf_counter() - pulls.first)


class _RawPulls:
    """Keep two pull requests open, and send the next request after half of the requested messages have arrived."""

    def __init__(self, client: Client, next_subject: str, count: int) -> None:
        self._client = client
        self._next_subject = next_subject
        self._count = count
        self._inbox = client.new_inbox()
        self._arrived = 0
        self._highest = 0
        self.first = 0.0
        self.done = asyncio.Event()

    async def start(self) -> None:
        await self._client.subscribe(self._inbox, cb=self._receive, pending_msgs_limit=0, pending_bytes_limit=0)
        await self._pull()
        await self._pull()

    async def _pull(self) -> None:
        request = {"batch": IN_FLIGHT // 2, "expires": 30_000_000_000, "idle_heartbeat": 2_000_000_000}
        await self._client.publish(self._next_subject, json.dumps(request).encode(), reply=self._inbox)

    async def _receive(self, message: Msg) -> None:
        if message.subject == self._inbox:
            return  # a status
        if not self._arrived:
            self.first = time.perf_counter()
        self._arrived += 1
        self._highest = max(self._highest, int(message.reply.split(".")[5]))
        await self._client.publish(message.reply, b"+ACK")
        if self._arrived == self._count:
            assert self._highest == self._count
            self.done.set()
        elif self._arrived % (IN_FLIGHT // 2) == 0:
            await self._pull()
