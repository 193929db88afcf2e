"""A run logs the same lines about its partitions on Kafka, on a durable and in a cohort."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
import pytest
from confluent_kafka import Producer
from nats.js.api import StreamConfig, SubjectTransform

import lanes
from lanes.source import Source
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_kafka import KafkaSource
from tests.components import KafkaServer, NatsServer
from tests.kafka.workload import Topic

PARTITIONS = 3
_numbers = itertools.count(1)


@asynccontextmanager
async def on_kafka(server: KafkaServer) -> AsyncIterator[Source]:
    topic = Topic(server.admin_url, f"lines{os.getpid()}x{next(_numbers)}", PARTITIONS)
    await asyncio.to_thread(topic.create)
    try:
        producer = Producer({"bootstrap.servers": server.url})
        producer.produce(topic.name, b"1", key="a")
        assert await asyncio.to_thread(producer.flush, 20) == 0
        config = {"bootstrap.servers": server.url, "group.id": topic.name, "auto.offset.reset": "earliest"}
        yield KafkaSource(config, topics=topic.name)
    finally:
        await asyncio.to_thread(topic.delete)


@asynccontextmanager
async def on_jetstream(server: NatsServer, *, cohort: bool) -> AsyncIterator[Source]:
    name = f"LINES{os.getpid()}x{next(_numbers)}"
    divided = SubjectTransform(src=f"{name}.*", dest=f"{name}.{{{{partition({PARTITIONS},1)}}}}.{{{{wildcard(1)}}}}")
    client = await nats.connect(server.url)
    stream = client.jetstream()
    try:
        transform = divided if cohort else None
        await stream.add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], subject_transform=transform))
        await stream.publish(f"{name}.a", b"1")
        if cohort:
            yield JetStreamSource(server.url, stream=name, cohort=Cohort(name, lease=3), key=subject_token(2))
        else:
            yield JetStreamSource(server.url, stream=name, durable="lines", key=subject_token(1))
    finally:
        await stream.delete_stream(name)
        if cohort:
            await stream.delete_key_value(f"lanes_{name}_lanes")
        await client.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("backend", "partitions"), [("kafka", PARTITIONS), ("durable", 1), ("cohort", PARTITIONS)])
async def test_a_run_logs_the_partitions_that_it_gets_and_loses(
    backend: str, partitions: int, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes")
    # The only message of each source runs when the consumer stops.
    running = asyncio.Event()

    async def charge(message: lanes.Message) -> None:
        running.set()
        await asyncio.sleep(3600)

    server = request.getfixturevalue("kafka" if backend == "kafka" else "nats_server")
    place = on_kafka(server) if backend == "kafka" else on_jetstream(server, cohort=backend == "cohort")
    settings = lanes.Settings(drain_timeout=0.1, grace=1.0)
    async with place as source, asyncio.timeout(40), lanes.Consumer(source, charge, settings=settings) as consumer:
        await running.wait()
        while len(consumer.status().partitions) < partitions:  # noqa: ASYNC110 (the status has no event)
            await asyncio.sleep(0.01)
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records if record.name == "lanes"]
    lines = [re.sub(r"\d+\.\d\d s", "… s", line) for line in lines if not line.startswith("the group has plan")]
    assigned = [line for line in lines if line.startswith("assigned ")]
    assert lines[:2] == ['joining with order="key", concurrency=100, max_in_flight=2000', "joined"]
    assert f" {partitions} in all: " in assigned[-1]
    stopping, cut_off, drained = lines[-3:]
    assert stopping.startswith(f"stopping with {partitions} partition(s), 1 running handler(s) may end within 0.1 s: ")
    assert cut_off.startswith("charge did not end within drain_timeout=0.1 s and was cancelled for 1 message(s), ")
    assert drained.startswith(f"drained {partitions} partition(s) in … s, 1 message(s) run again, 0 did not start: ")
