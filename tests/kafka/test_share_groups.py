"""Share groups have no order and are refused, as settings, as a client and as an existing group."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, ShareConsumer

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.config import client_config
from tests.components import wait_until
from tests.kafka.conftest import MakeTopic

pytestmark = pytest.mark.anyio

HERE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}


def test_a_share_group_is_refused() -> None:
    with pytest.raises(lanes.ConfigError, match="a share group has no order; set 'classic' or 'consumer'"):
        client_config(HERE | {"group.protocol": "share"})
    with pytest.raises(lanes.ConfigError, match=r"share\.acknowledgement\.mode='explicit'.*no order; leave it out"):
        KafkaSource(HERE | {"share.acknowledgement.mode": "explicit"}, topics="orders")
    factory: Any = ShareConsumer
    with pytest.raises(lanes.ConfigError, match=r"client=ShareConsumer: must be confluent_kafka\.Consumer, a subclass"):
        KafkaSource(HERE, topics="orders", client=factory)


class Own(Consumer):
    """A subclass of the client, as a user may pass it."""


@pytest.mark.parametrize("client", [Consumer, Own, lambda config: Own(config)])
def test_consumer_classes_and_factories_are_accepted(client: Any) -> None:
    KafkaSource(HERE, topics="orders", client=client)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_an_existing_share_group_is_refused(protocol: str, topic: MakeTopic) -> None:
    orders = topic(1)
    sharing = ShareConsumer(orders.config())

    async def handler(message: lanes.Message) -> None:
        """Not called."""

    def refused() -> bool:
        sharing.poll(0.1)
        try:
            anyio.run(attempt)
        except lanes.SourceError as error:
            return "is a share group, which has no order; use another group.id" in str(error)
        return False

    async def attempt() -> None:
        with anyio.move_on_after(1):
            await lanes.run(KafkaSource(orders.config(**{"group.protocol": protocol}), topics=orders.name), handler)

    try:
        sharing.subscribe([orders.name])
        # The group becomes a share group when its first member joins.
        await run_sync(lambda: wait_until(refused, "the group to be a share group", seconds=30))
    finally:
        await run_sync(sharing.close)
