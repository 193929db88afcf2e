"""Attempts in a store on real brokers: messages that wait for them are not lost, and attempts continue."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio
import nats
import pytest
from confluent_kafka import Producer

import lanes
from lanes import Attempt, Message, Partition, Settings
from lanes.core.types import Room
from lanes.source import Delivered, Source, SourceEvent
from lanes_jetstream import JetStreamSource, subject_token
from lanes_kafka import KafkaSource
from memsource import MemoryAttempts
from tests.components import KafkaServer, NatsServer
from tests.fakes.support import until
from tests.kafka.workload import Topic

COUNT, KEYS = 60, 6
_numbers = itertools.count(1)
Make = Callable[[], Source]


class Late(MemoryAttempts):
    """A store that answers only after the source has done its first steps."""

    def __init__(self) -> None:
        super().__init__()
        self._answer = anyio.Event()

    async def load(self, partition: Partition) -> Mapping[int, Attempt]:
        await self._answer.wait()
        return await super().load(partition)

    def after(self, source: Source) -> Source:
        """Answer only after the source has delivered messages, or was called with paused partitions."""
        self._answer = answer = anyio.Event()
        receive = source.receive

        async def noted(room: Room) -> Sequence[SourceEvent]:
            if room.paused:
                answer.set()
            events = await receive(room)
            if any(isinstance(event, Delivered) for event in events):
                answer.set()
            return events

        source.receive = noted  # type: ignore[method-assign]
        return source


@asynccontextmanager
async def on_jetstream(server: NatsServer) -> AsyncIterator[Make]:
    name = f"KEPT{os.getpid()}x{next(_numbers)}"
    client = await nats.connect(server.url)
    stream = client.jetstream()
    try:
        await stream.add_stream(name=name, subjects=[f"{name}.*"])
        for number in range(COUNT):
            await stream.publish_async(f"{name}.{number % KEYS}", str(number).encode())
        await stream.publish_async_completed()
        yield lambda: JetStreamSource(server.url, stream=name, durable="worker", key=subject_token(1))
    finally:
        await stream.delete_stream(name)
        await client.close()


@asynccontextmanager
async def on_kafka(server: KafkaServer) -> AsyncIterator[Make]:
    topic = Topic(server.admin_url, f"kept{os.getpid()}x{next(_numbers)}", 2)
    await anyio.to_thread.run_sync(topic.create)
    try:
        producer = Producer({"bootstrap.servers": server.url, "enable.idempotence": True})
        for number in range(COUNT):
            producer.produce(topic.name, key=str(number % KEYS), value=str(number))
        assert await anyio.to_thread.run_sync(producer.flush, 20) == 0
        config = {"bootstrap.servers": server.url, "group.id": topic.name, "auto.offset.reset": "earliest"}
        yield lambda: KafkaSource(config, topics=topic.name)
    finally:
        await anyio.to_thread.run_sync(topic.delete)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("broker", ["jetstream", "kafka"])
async def test_the_next_run_continues_the_stored_attempts(broker: str, request: pytest.FixtureRequest) -> None:
    store = Late()
    calls: list[tuple[int, int]] = []
    done: list[int] = []

    async def handler(message: Message) -> None:
        number = int(message.value)
        if number == KEYS:
            calls.append((number, message.attempt))
            raise lanes.Nak(delay=3600)
        done.append(number)

    place = on_jetstream if broker == "jetstream" else on_kafka
    server = request.getfixturevalue("nats_server" if broker == "jetstream" else "kafka")
    settings = Settings(retry=lanes.Retry(attempts=2), poison="block")
    async with place(server) as source:
        for number in (1, 2, 3):
            async with lanes.Consumer(store.after(source()), handler, settings=settings, attempts=store) as consumer:
                await until(lambda c=consumer: c.ready and c.status().held + c.status().blocked == 1)  # type: ignore[misc]
                await until(lambda: len(done) == COUNT - COUNT // KEYS + 1)
                assert consumer.status().blocked == (number > 1)
    assert calls == [(KEYS, 1), (KEYS, 2)]
    # Each other message ran once, and the messages of the failing key did not run.
    assert sorted(done) == sorted({0} | {number for number in range(COUNT) if number % KEYS})
    for key in range(1, KEYS):
        of_key = [number for number in done if number % KEYS == key]
        assert of_key == sorted(of_key)
