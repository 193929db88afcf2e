"""A Kafka broker for the benchmarks, topics with a backlog, and runs by `lanes` and by a plain loop."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any, Final

from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from bench.source import Traffic, keys_of
from bench.waiting import Loop, tuned_run
from lanes import Message, Publisher, Settings
from lanes_kafka import KafkaSource
from tests.components import KafkaServer

PARTITIONS: Final = 4
SIZE: Final = 100
TIMEOUT: Final = 60.0

_RANDOM: Final = random.Random(0).randbytes(1 << 20)
_groups = count_from(1)


@dataclass(frozen=True, slots=True)
class Backlog:
    """A topic with ``count`` messages."""

    url: str
    topic: str
    count: int

    def config(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of a client that reads the whole topic in a new group; ``_`` stands for a dot."""
        given = {name.replace("_", "."): value for name, value in settings.items()}
        # A process of its own must not read on where another process has stopped.
        group = f"group-{os.getpid()}-{next(_groups)}"
        return {"bootstrap.servers": self.url, "group.id": group, "auto.offset.reset": "earliest"} | given

    def source(self, **settings: Any) -> KafkaSource:
        """Return a source of ``lanes`` that reads the topic."""
        return KafkaSource(self.config(**settings), topics=self.topic)


@contextmanager
def kafka_server(properties: Mapping[str, str | int] | None = None) -> Iterator[KafkaServer]:
    """Start a new broker and yield the server.

    The broker's coordinator of groups is ready, so the first group forms at once.
    """
    server = KafkaServer(properties=properties, arguments=["-Xmx1g"])
    server.prepare()
    with server:
        _warm(server.url)
        yield server


@contextmanager
def broker(properties: Mapping[str, str | int] | None = None) -> Iterator[str]:
    """Start a new broker and yield its address; see ``kafka_server``."""
    with kafka_server(properties) as server:
        yield server.url


def _warm(url: str) -> None:
    client = Client({"bootstrap.servers": url, "group.id": "warm-up"})
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            client.committed([TopicPartition("none", 0)], timeout=TIMEOUT)
            break
        except KafkaException as failure:
            # A new broker has no coordinator for groups yet.
            if failure.args[0].code() != KafkaError.NOT_COORDINATOR or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    client.close()


def create(url: str, topic: str, partitions: int = PARTITIONS) -> None:
    """Create a topic; blocks until all its partitions have a leader."""
    admin = AdminClient({"bootstrap.servers": url})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found = admin.list_topics(timeout=TIMEOUT).topics.get(topic)
        if found is not None and sum(each.leader >= 0 for each in found.partitions.values()) == partitions:
            return
        time.sleep(0.05)
    raise TimeoutError(f"topic {topic}: some of its {partitions} partitions have no leader after {TIMEOUT:g} s")


def fill(
    url: str,
    topic: str,
    count: int,
    keys: int,
    traffic: Traffic = "uniform",
    *,
    partition: Callable[[int], int] = lambda number: -1,
    headers: list[tuple[str, str | bytes | None]] | None = None,
) -> Backlog:
    """Create a topic with ``count`` messages of 100 random bytes.

    ``partition`` maps a message's number to its partition.
    """
    create(url, topic)
    producer = Producer(
        {
            "bootstrap.servers": url,
            "compression.type": "lz4",
            "linger.ms": 50,
            "queue.buffering.max.messages": 500_000,
            "queue.buffering.max.kbytes": 262_144,
        }
    )
    room = len(_RANDOM) - SIZE
    for number, key in enumerate(keys_of(count, keys, traffic)):
        begin = number * 7_919 % room
        while True:
            try:
                producer.produce(
                    topic,
                    _RANDOM[begin : begin + SIZE],
                    b"key-%d" % key,
                    partition(number),
                    headers=headers,
                )
                break
            except BufferError:
                producer.poll(0.1)
        if number % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(TIMEOUT) == 0
    return Backlog(url, topic, count)


class Clocked:
    """A counter of handled messages, with the times of the first and the last message.

    The last message calls ``done``.
    """

    def __init__(self, count: int, done: Callable[[], object] = lambda: None) -> None:
        self._left = count
        self._count = count
        self._first = self._last = 0.0
        self._cpu = 0.0
        self._done = done

    def handled(self) -> None:
        """Count one message."""
        if self._left == self._count:
            self._first, self._cpu = time.perf_counter(), time.process_time()
        self._left -= 1
        if not self._left:
            self._last, self._cpu = time.perf_counter(), time.process_time() - self._cpu
            self._done()

    @property
    def rate(self) -> float:
        """Return the handled messages a second."""
        assert not self._left, f"{self._left} of {self._count} were not handled"
        return (self._count - 1) / (self._last - self._first)

    @property
    def cpu(self) -> float:
        """Return the microseconds of CPU a message, of all threads of this process."""
        assert not self._left, f"{self._left} of {self._count} were not handled"
        return 1e6 * self._cpu / (self._count - 1)


def consume(
    backlog: Backlog,
    handler: Callable[[Message], Awaitable[None]] | None,
    settings: Settings,
    loop: Loop = asyncio.new_event_loop,
    publisher: Publisher | None = None,
) -> float:
    """Handle all messages by ``lanes`` and return messages a second; see ``clocked_run``."""
    return clocked_run(backlog, handler, settings, loop, publisher).rate


def clocked_run(
    backlog: Backlog,
    handler: Callable[[Message], Awaitable[None]] | None,
    settings: Settings,
    loop: Loop = asyncio.new_event_loop,
    publisher: Publisher | None = None,
) -> Clocked:
    """Handle all messages by ``lanes``, and return the clock from the first handler's end to the last handler's end.

    The run uses the garbage collector settings of ``lanes.main``. Without a handler the run only counts each message.
    """
    clocked = Clocked(backlog.count, lambda: consumer.stop())

    async def counting(message: Message) -> None:
        clocked.handled()

    async def counted(message: Message) -> None:
        assert handler is not None
        await handler(message)
        clocked.handled()

    counter = counting if handler is None else counted
    consumer = lanes.Consumer(backlog.source(), counter, settings=settings, publisher=publisher)
    tuned_run(consumer.run(), loop)
    return clocked


def plainly(backlog: Backlog, handler: Callable[[Any], object] | None, **settings: Any) -> Clocked:
    """Handle all messages in a plain loop that commits once a second."""
    client = Client(backlog.config(enable_auto_commit=False, **settings))
    clocked = Clocked(backlog.count)
    client.subscribe([backlog.topic])
    committed, left = time.monotonic(), backlog.count
    while left > 0:
        batch = client.consume(1, 1.0)
        if batch:
            batch += client.consume(499, 0.0)
        for raw in batch:
            assert raw.error() is None, raw.error()
            if handler is not None:
                handler(raw)
            clocked.handled()
        left -= len(batch)
        if batch and time.monotonic() - committed >= 1.0:
            committed = time.monotonic()
            client.commit(asynchronous=True)
    client.close()
    return clocked


async def until(condition: Callable[[], bool], what: str) -> None:
    """Check a condition repeatedly until the condition is true."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {TIMEOUT:g} s for {what}")
        await asyncio.sleep(0.01)
