"""Replays of a topic on a real Kafka broker, by the connector of Spark's JVM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes_spark import KafkaTopic, replay
from tests.components import KafkaServer, MissingComponent
from tests.components.spark_connector import connector_jars
from tests.conftest import skip_or_fail
from tests.spark.conftest import session
from tests.spark.tables import by_key, noted, noting, positions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

TOPIC, PARTITIONS, COUNT = "replayed", 3, 600
SECONDS = 30.0


@pytest.fixture(scope="module")
def connected() -> Iterator[Any]:
    """A session that has the connector."""
    try:
        jars = connector_jars()
    except MissingComponent as missing:
        skip_or_fail(missing)
    with session("local[2]", {"spark.jars": ",".join(map(str, jars))}) as found:
        yield found


def publish(kafka: KafkaServer) -> list[tuple[int, int, bytes | None]]:
    """A topic of some keys in 3 partitions, half of it in a transaction, one more aborted; partitions and offsets."""
    admin = AdminClient({"bootstrap.servers": kafka.url})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(SECONDS)
    sent: list[tuple[int, int, bytes | None]] = []

    def note(error: object, message: Any) -> None:
        assert error is None
        sent.append((message.partition(), message.offset(), message.key()))

    producer = Producer({"bootstrap.servers": kafka.url, "transactional.id": TOPIC})
    producer.init_transactions(SECONDS)
    for part in range(3):
        producer.begin_transaction()
        for number in range(COUNT // 2):
            key = None if number % 10 == 9 else b"key-%d" % (number % 21)
            headers: list[tuple[str, str | bytes | None]] = [("number", str(number)), ("nothing", None)]
            kept = note if part != 1 else None
            producer.produce(
                TOPIC, b"%d" % number, key, partition=number % PARTITIONS, headers=headers, on_delivery=kept
            )
        if part == 1:
            producer.flush(SECONDS)
            producer.abort_transaction(SECONDS)
        else:
            producer.commit_transaction(SECONDS)
    assert len(sent) == COUNT
    return sent


def test_a_topic_is_replayed_in_order_and_what_it_has_lost_is_named(
    connected: Any, kafka: KafkaServer, tmp_path: Path
) -> None:
    sent = publish(kafka)
    topic = KafkaTopic(servers=kafka.url, topic=TOPIC)
    journal = tmp_path / "journal"
    report = replay(connected, topic, noting(journal))
    assert positions(noted(journal)) == positions(sent)
    assert all(sorted(found) == found for found in by_key(noted(journal)).values())
    assert (report.plan.kind, report.finished) == ("aligned", COUNT)
    # The aborted ones, and the markers of transactions.
    assert report.skipped >= COUNT // 2 + PARTITIONS

    # With a shuffle, several tasks a partition, batches, and a part of it.
    split = KafkaTopic(servers=kafka.url, topic=TOPIC, options={"minPartitions": "7"}, aligned=False)
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 300, "partitions": [0, 2]}
    report = replay(connected, split, noting(tmp_path / "part"), **more, to=150)
    wanted = [one for one in sent if one[0] in (0, 2) and one[1] < 150]
    assert positions(noted(tmp_path / "part")) == positions(wanted)
    assert all(sorted(found) == found for found in by_key(noted(tmp_path / "part")).values())
    assert (report.plan.kind, report.batches) == ("reshard", 1)

    # The first positions go, as they do by retention.
    admin = AdminClient({"bootstrap.servers": kafka.url})
    [deleted] = admin.delete_records([TopicPartition(TOPIC, 2, 170)]).values()
    deleted.result(SECONDS)
    # What was read before it went is no loss.
    assert replay(connected, split, noting(tmp_path / "part"), **more, to=150).batches == 0
    more["checkpoint"] = str(tmp_path / "another")
    with pytest.raises(lanes.SourceError, match="replayed/2: positions 100 … 169 are gone from the source and were"):
        replay(connected, split, noting(tmp_path / "nothing"), **more, from_={2: 100})
    with pytest.raises(lanes.SourceError, match="replayed/2: positions 100 … 169 are gone from the source: begin at"):
        replay(connected, topic, noting(tmp_path / "nothing"), from_={2: 100})
    with pytest.raises(lanes.SourceError, match="replayed/2: positions 160 … 169 are gone from the source and were"):
        topic.rows(connected, {2: (160, 200)})
    with pytest.raises(lanes.SourceError, match=r"nowhere: Kafka at .*UnknownTopicOrPartitionException"):
        replay(connected, KafkaTopic(servers=kafka.url, topic="nowhere"), noting(tmp_path / "nothing"))
    # All that has come since a replay is gone before the next one.
    more = {"checkpoint": str(tmp_path / "third"), "partitions": [1]}
    assert replay(connected, topic, noting(tmp_path / "all"), **more).delivered == len([p for p, *_ in sent if p == 1])
    producer = Producer({"bootstrap.servers": kafka.url})
    producer.produce(TOPIC, b"late", b"key", partition=1)
    producer.flush(SECONDS)
    [deleted] = admin.delete_records([TopicPartition(TOPIC, 1, OFFSET_END)]).values()
    deleted.result(SECONDS)
    with pytest.raises(lanes.SourceError, match=r"replayed/1: positions (\d+) … \1 are gone from the source and were"):
        replay(connected, topic, noting(tmp_path / "nothing"), **more)
    login = {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": "canary5e1f",
    }
    with pytest.raises(lanes.SourceError, match=r"replayed: Kafka at .*JAAS") as refused:
        replay(connected, KafkaTopic(servers=kafka.url, topic=TOPIC, options=login), noting(tmp_path / "nothing"))
    assert "canary5e1f" not in str(refused.value)
    assert not (tmp_path / "nothing").exists()
