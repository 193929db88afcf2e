"""What a source on Kafka cannot keep is refused with the remedy, before anything is handled."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, ShareConsumer

import lanes
from lanes.core.types import Partition, PartitionId
from lanes_kafka import KafkaSource
from lanes_kafka.client.records import READER
from lanes_kafka.config import client_config
from tests.components import wait_until
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic, produce

HERE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}


def of(topic: Topic, **more: Any) -> dict[str, Any]:
    return {**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{topic.name}", **more}


@pytest.mark.anyio
async def test_who_is_opened_and_not_read_joins_nothing(topic: MakeTopic) -> None:
    """A run may be refused behind ``open``: what begins in the group would be decided by it all the same."""
    there = topic(1)
    polled: list[int] = []

    class Counting(Consumer):
        def consume(self, num_messages: int = 1, timeout: float = -1.0) -> list[Any]:
            polled.append(num_messages)
            return super().consume(num_messages, timeout)

    source = KafkaSource(of(there), topics=there.name, client=Counting)
    await source.open()
    foreign = Partition(PartitionId(there.name, 0), READER)
    for _ in range(3):
        # Answered by the client's thread: between two answers it has taken a whole turn.
        await source.release(foreign)
    assert not polled
    with anyio.move_on_after(10.0) as scope:
        await source.receive(lanes.core.types.Room(1, 1_000))
    assert polled and not scope.cancelled_caught
    await source.aclose()


@pytest.mark.anyio
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
            lanes.ConfigError, match=r'order="serial": .* has 2 partitions; use order="partition" or a topic with one'
        ),
        anyio.fail_after(30),
    ):
        await lanes.run(KafkaSource(of(first), topics=topics), handler, settings=settings)
    assert handled == []
    assert first.committed(f"g-{first.name}") == [None] * first.partitions


@pytest.mark.anyio
async def test_serial_order_of_one_partition_is_kept(topic: MakeTopic) -> None:
    orders = topic(1)
    produce(orders, 5)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)
        if len(handled) == 5:
            consumer.stop()

    settings = lanes.Settings(order="serial")
    consumer = lanes.Consumer(KafkaSource(of(orders), topics=orders.name), handler, settings=settings)
    with anyio.fail_after(30):
        await consumer.run()
    assert handled == [0, 1, 2, 3, 4]


def test_a_share_group_is_refused() -> None:
    with pytest.raises(lanes.ConfigError, match="a share group has no order; set 'classic' or 'consumer'"):
        client_config(HERE | {"group.protocol": "share"})
    with pytest.raises(lanes.ConfigError, match=r"share\.acknowledgement\.mode='explicit'.*no order; leave it out"):
        KafkaSource(HERE | {"share.acknowledgement.mode": "explicit"}, topics="orders")
    factory: Any = ShareConsumer
    with pytest.raises(lanes.ConfigError, match=r"client=ShareConsumer: must be confluent_kafka\.Consumer, a subclass"):
        KafkaSource(HERE, topics="orders", client=factory)


class Own(Consumer):
    """A subclass is what ``client`` is there for."""


@pytest.mark.parametrize("client", [Consumer, Own, lambda config: Own(config)])
def test_a_consumer_and_what_makes_one_are_not_refused(client: Any) -> None:
    KafkaSource(HERE, topics="orders", client=client)


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_group_that_is_a_share_group_already_is_refused(protocol: str, topic: MakeTopic) -> None:
    orders = topic(1)
    sharing = ShareConsumer(of(orders))

    async def handler(message: lanes.Message) -> None:
        """Never called."""

    def refused() -> bool:
        sharing.poll(0.1)
        try:
            anyio.run(attempt)
        except lanes.SourceError as error:
            return "is a share group, which has no order; use another group.id" in str(error)
        return False

    async def attempt() -> None:
        with anyio.move_on_after(1):
            await lanes.run(KafkaSource(of(orders, **{"group.protocol": protocol}), topics=orders.name), handler)

    try:
        sharing.subscribe([orders.name])
        # It is one when its first member has joined.
        await run_sync(lambda: wait_until(refused, "the group to be a share group", seconds=30))
    finally:
        await run_sync(sharing.close)
