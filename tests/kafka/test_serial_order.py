"""Serial order is refused for several partitions, and kept for one partition."""

from __future__ import annotations

import anyio
import pytest

import lanes
from lanes_kafka import KafkaSource
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("apart", [True, False], ids=["two topics", "two partitions"])
async def test_serial_order_of_several_partitions_is_refused(apart: bool, topic: MakeTopic) -> None:
    first = topic(1 if apart else 2)
    topics = [first.name, topic(1).name] if apart else first.name
    produce(first, 1, partition=0)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)

    settings = lanes.Settings(order="serial")
    with (
        pytest.raises(
            lanes.ConfigError,
            match=r'order="serial": .* has 2 partitions; use order="partition", or a topic or log',
        ),
        anyio.fail_after(30),
    ):
        await lanes.run(KafkaSource(first.config(), topics=topics), handler, settings=settings)
    assert handled == []
    assert first.committed(f"g-{first.name}") == [None] * first.partitions


async def test_serial_order_of_one_partition_is_kept(topic: MakeTopic) -> None:
    orders = topic(1)
    produce(orders, 5)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)
        if len(handled) == 5:
            consumer.stop()

    settings = lanes.Settings(order="serial")
    consumer = lanes.Consumer(KafkaSource(orders.config(), topics=orders.name), handler, settings=settings)
    with anyio.fail_after(30):
        await consumer.run()
    assert handled == [0, 1, 2, 3, 4]
