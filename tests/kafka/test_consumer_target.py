"""On Kafka the broker assigns the partitions, so a target is only reported."""

from __future__ import annotations

import pytest

from lanes_kafka import KafkaSource
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_status_tells_that_the_broker_ignores_the_target(topic: MakeTopic, protocol: str) -> None:
    events = topic(4)
    work = Work(Story())
    async with group(events, protocol, work) as members:
        one = members.start("one", consumer_target=3)
        await until(lambda: len(one.consumer.status().partitions) == 4)
        status = one.consumer.status()
        assert (status.consumer_target, status.target_honoured, status.under_provisioned) == (3, False, True)
        two = members.start("two")
        await until(lambda: len(one.consumer.status().partitions) == len(two.consumer.status().partitions) == 2)
        assert not one.consumer.status().under_provisioned
        assert two.consumer.status().target_honoured is None
        produce(events, 8)
        await until(lambda: len(work.ended) == 8)
    assert work.violations == []


def test_the_target_is_declared_before_the_broker_answers() -> None:
    config = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}
    assert KafkaSource(config, topics="t", consumer_target=3).declared().consumer_target == 3
