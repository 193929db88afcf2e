"""A topic that gets more partitions while it is read causes a warning or the end of the source."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from confluent_kafka.admin import NewPartitions

from lanes import ConfigError, Consumer, Message, SourceError
from lanes_kafka import KafkaSource
from lanes_kafka.client.growth import GrowthWatch
from lanes_kafka.client.topics import Topic
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import until

TEXT = "topic 't' has 4 partitions now, and had 2 at the start; keys move to other partitions, so their order may break"


def of(partitions: int) -> dict[str, Topic]:
    return {"t": Topic("id", partitions)}


def test_a_growth_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[SourceError] = []
    watch = GrowthWatch("kafka g/t", "alarm", failures.append)
    for known in (of(2), {}, of(2), of(4), of(4), of(3)):
        watch.look(known)
    assert [record.getMessage() for record in caplog.records] == [
        f"kafka g/t: {TEXT}. To stop at such a change, set on_growth='stop'"
    ]
    assert watch.grown == {"t": TEXT} and failures == []
    watch.look(of(5))
    assert len(caplog.records) == 2 and list(watch.grown) == ["t"]


def test_a_growth_may_end_the_source() -> None:
    failures: list[SourceError] = []
    watch = GrowthWatch("kafka g/t", "stop", failures.append)
    watch.look(of(2))
    assert failures == []
    watch.look(of(4))
    (failure,) = failures
    assert str(failure) == (
        f"kafka g/t: {TEXT}. The source stops because of on_growth='stop'; start again to read all partitions"
    )
    assert not failure.retryable


def test_an_unknown_value_of_on_growth_is_refused() -> None:
    unknown: Any = "ignore"
    with pytest.raises(ConfigError, match='on_growth=\'ignore\': must be "stop" or "alarm"'):
        KafkaSource({"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}, topics="t", on_growth=unknown)


@pytest.mark.anyio
async def test_a_source_notices_the_growth_of_its_topic(topic: MakeTopic) -> None:
    grown = topic(2)

    async def ignore(message: Message) -> None: ...

    async def grow(consumer: Consumer, partitions: int) -> None:
        await until(lambda: consumer.active)
        grown.admin.create_partitions([NewPartitions(grown.name, partitions)])[grown.name].result(30)
        grown.partitions = partitions

    with anyio.fail_after(60):
        async with Consumer(KafkaSource(grown.config(), topics=grown.name), ignore) as consumer:
            await grow(consumer, 3)
            await until(lambda: bool(consumer.health().findings))
            health = consumer.health()
        assert health.ok
        assert health.findings[0].startswith(f"topic {grown.name!r} has 3 partitions now, and had 2 at the start")
        stopped = Consumer(KafkaSource(grown.config(), topics=grown.name, on_growth="stop"), ignore)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(grow, stopped, 4)
            with pytest.raises(SourceError, match="has 4 partitions now, and had 3 at the start"):
                await stopped.run()
