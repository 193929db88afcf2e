"""A replay of a topic on a real Kafka broker keeps the order, and ends if the topic is recreated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

import lanes
from lanes_spark import KafkaTopic, Progress, replay
from lanes_spark.tables.table import Spans
from tests.components import KafkaServer, MissingComponent, wait_until
from tests.components.spark_connector import connector_jars
from tests.conftest import KafkaFactory, skip_or_fail
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
    """A session with the connector."""
    try:
        jars = connector_jars()
    except MissingComponent as missing:
        skip_or_fail(missing)
    with session("local[2]", {"spark.jars": ",".join(map(str, jars))}) as found:
        yield found


def publish(kafka: KafkaServer) -> list[tuple[int, int, bytes | None]]:
    """Publish half of a topic with 3 partitions in a transaction, and abort another transaction; return the committed
    messages."""
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


def test_a_topic_is_replayed_in_order_and_missing_positions_are_named(
    connected: Any, kafka: KafkaServer, tmp_path: Path
) -> None:
    sent = publish(kafka)
    topic = KafkaTopic(servers=kafka.url, topic=TOPIC)
    journal = tmp_path / "journal"
    report = replay(connected, topic, noting(journal))
    assert positions(noted(journal)) == positions(sent)
    assert all(sorted(found) == found for found in by_key(noted(journal)).values())
    assert (report.plan.kind, report.finished) == ("aligned", COUNT)
    # The aborted messages, and the transaction markers.
    assert report.skipped >= COUNT // 2 + PARTITIONS

    # With a shuffle, with several tasks for each partition, in batches, and a part of the topic.
    split = KafkaTopic(servers=kafka.url, topic=TOPIC, options={"minPartitions": "7"}, aligned=False)
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 300, "partitions": [0, 2]}
    report = replay(connected, split, noting(tmp_path / "part"), **more, to=150)
    wanted = [one for one in sent if one[0] in (0, 2) and one[1] < 150]
    assert positions(noted(tmp_path / "part")) == positions(wanted)
    assert all(sorted(found) == found for found in by_key(noted(tmp_path / "part")).values())
    assert (report.plan.kind, report.batches) == ("reshard", 1)

    # The first positions are deleted, as by retention.
    admin = AdminClient({"bootstrap.servers": kafka.url})
    [deleted] = admin.delete_records([TopicPartition(TOPIC, 2, 170)]).values()
    deleted.result(SECONDS)
    # A message that was read before its deletion is not lost.
    assert replay(connected, split, noting(tmp_path / "part"), **more, to=150).batches == 0
    more["checkpoint"] = str(tmp_path / "another")
    with pytest.raises(lanes.SourceError, match="replayed/2: positions 100 … 169 are unread, and the source has lost"):
        replay(connected, split, noting(tmp_path / "nothing"), **more, from_={2: 100})
    gone = "replayed/2: positions 100 … 169 are lost in the source, and from_ selects these positions; begin at 170"
    with pytest.raises(lanes.SourceError, match=gone):
        replay(connected, topic, noting(tmp_path / "nothing"), from_={2: 100})
    with pytest.raises(lanes.SourceError, match="replayed/2: positions 160 … 169 are unread, and the source has lost"):
        topic.rows(connected, {2: (160, 200)})
    with pytest.raises(lanes.SourceError, match=r"nowhere: Kafka at .*UnknownTopicOrPartitionException"):
        replay(connected, KafkaTopic(servers=kafka.url, topic="nowhere"), noting(tmp_path / "nothing"))
    # All messages since a replay are deleted before the next replay.
    more = {"checkpoint": str(tmp_path / "third"), "partitions": [1]}
    assert replay(connected, topic, noting(tmp_path / "all"), **more).delivered == len([p for p, *_ in sent if p == 1])
    producer = Producer({"bootstrap.servers": kafka.url, "enable.idempotence": True})
    producer.produce(TOPIC, b"late", b"key", partition=1)
    producer.flush(SECONDS)
    [deleted] = admin.delete_records([TopicPartition(TOPIC, 1, OFFSET_END)]).values()
    deleted.result(SECONDS)
    with pytest.raises(lanes.SourceError, match=r"replayed/1: positions (\d+) … \1 are unread, and the source has"):
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


def make(admin: AdminClient, kafka: KafkaServer, name: str, count: int, key: bytes) -> None:
    """Create a topic of two partitions with ``count`` messages."""
    admin.create_topics([NewTopic(name, 2, 1)])[name].result(SECONDS)
    producer = Producer({"bootstrap.servers": kafka.url})
    for number in range(count):
        producer.produce(name, b"%d" % number, b"%s-%d" % (key, number % 14), partition=number % 2)
    assert producer.flush(SECONDS) == 0


def make_anew(kafka: KafkaServer, name: str, count: int) -> None:
    """Delete the topic, and create a topic of the same name with messages at the same positions."""
    admin = AdminClient({"bootstrap.servers": kafka.url})
    admin.delete_topics([name])[name].result(SECONDS)
    wait_until(lambda: name not in admin.list_topics(timeout=SECONDS).topics, "the topic to be gone", seconds=SECONDS)
    make(admin, kafka, name, count, b"new")


def test_a_topic_recreated_between_two_batches_ends_the_replay(
    connected: Any, kafka: KafkaServer, tmp_path: Path
) -> None:
    name, seen = "anew-between", tmp_path / "seen"
    make(AdminClient({"bootstrap.servers": kafka.url}), kafka, name, 200, b"old")
    topic = KafkaTopic(servers=kafka.url, topic=name)

    made: list[Progress] = []

    def tell(at: Progress) -> None:
        # The function runs again during the next batch, but the topic is deleted once.
        if at.batches == 1 and not made:
            made.append(at)
            make_anew(kafka, name, 600)

    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 100}
    with pytest.raises(
        lanes.SourceError, match=r"^anew-between: the topic was deleted and recreated after this run had begun"
    ) as no:
        replay(connected, topic, noting(seen), progress=tell, **more)
    assert str(no.value).endswith("so its unread messages are gone; begin again with another checkpoint")
    # No message of the new topic was handled.
    assert positions(noted(seen)) == [(partition, at) for partition in range(2) for at in range(50)]
    assert all(key is not None and key.startswith(b"old-") for _, _, key in noted(seen))
    with pytest.raises(lanes.SourceError, match="belongs to another replay"):
        replay(connected, topic, noting(seen), **more)


def test_a_batch_with_a_recreated_topic_is_not_recorded(connected: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    name, begun, go = "anew-within", tmp_path / "begun", tmp_path / "go"
    make(AdminClient({"bootstrap.servers": kafka.url}), kafka, name, 100, b"old")
    topic = KafkaTopic(servers=kafka.url, topic=name)

    def wait(message: Any) -> None:
        import time

        begun.touch()
        while not go.exists():
            time.sleep(0.01)

    def change() -> None:
        wait_until(begun.exists, "a message to be handled", seconds=300)
        try:
            make_anew(kafka, name, 300)
        finally:
            go.touch()

    for checkpoint in (None, str(tmp_path / "checkpoint")):
        changing = threading.Thread(target=change)
        changing.start()
        told: list[Progress] = []
        more: dict[str, Any] = {"checkpoint": checkpoint, "progress": told.append}
        try:
            with pytest.raises(
                lanes.SourceError, match=r"recreated .*, and the last batch may have read messages of the"
            ):
                replay(connected, topic, noting(tmp_path / "seen", wait), **more)
        finally:
            changing.join()
        assert {one.batches for one in told} <= {0}
        begun.unlink()
        go.unlink()
    # The batch is not recorded as done.
    assert not list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))


def read_all(kafka: KafkaServer, topic: str, partitions: int) -> list[tuple[int, int, bytes | None]]:
    """Return the messages that a plain consumer reads from the topic, without aborted ones."""
    settings = {"bootstrap.servers": kafka.url, "group.id": f"read-{topic}", "enable.auto.commit": False}
    consumer = Consumer({**settings, "isolation.level": "read_committed", "enable.partition.eof": True})
    found: list[tuple[int, int, bytes | None]] = []
    ended: set[int | None] = set()
    try:
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions)])
        while len(ended) < partitions:
            message = consumer.poll(SECONDS)
            assert message is not None, "the consumer got neither a message nor the end of a partition"
            partition, offset, error = message.partition(), message.offset(), message.error()
            assert partition is not None
            assert offset is not None
            if error is None:
                found.append((partition, offset, message.key()))
            else:
                assert error.code() == KafkaError._PARTITION_EOF, error
                ended.add(partition)
    finally:
        consumer.close()
    return found


def test_a_compacted_topic_of_transactions_is_replayed_as_a_consumer_reads_it(
    connected: Any, kafka: KafkaServer, tmp_path: Path
) -> None:
    name, partitions = "compacted", 2
    admin = AdminClient({"bootstrap.servers": kafka.url})
    compact = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.001"}
    admin.create_topics([NewTopic(name, partitions, 1, config=compact)])[name].result(SECONDS)
    producer = Producer({"bootstrap.servers": kafka.url, "transactional.id": name})
    producer.init_transactions(SECONDS)
    last: dict[bytes, tuple[int, int]] = {}
    count = 0

    def publish(number: int) -> None:
        """Publish one transaction; every third one is aborted. Each transaction begins a new segment."""
        nonlocal count
        sent: list[tuple[int, int, bytes]] = []

        def note(error: object, message: Any) -> None:
            assert error is None
            sent.append((message.partition(), message.offset(), message.key()))

        producer.begin_transaction()
        for one in range(20):
            # Two of the keys have one message each, and the others have many.
            key = b"key-%d" % (one if one > 1 or number == 1 else one + 2)
            producer.produce(name, b"%d" % number, key, partition=one % partitions, on_delivery=note)
        producer.flush(SECONDS)
        if number % 3 == 0:
            producer.abort_transaction(SECONDS)
            return
        producer.commit_transaction(SECONDS)
        count += len(sent)
        last.update({key: (partition, offset) for partition, offset, key in sent})

    for number in range(12):
        publish(number)

    def cleaned() -> bool:
        # The broker compacts a segment after a new segment has begun.
        publish(13)
        return len(read_all(kafka, name, partitions)) < count - 100

    wait_until(cleaned, "the broker to clean the topic", seconds=180.0)
    # From here on, the topic does not change.
    stay = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    [altered] = admin.incremental_alter_configs([ConfigResource("topic", name, incremental_configs=[stay])]).values()
    altered.result(SECONDS)
    publish(14)
    settled: list[Any] = []

    def still() -> bool:
        settled.append(read_all(kafka, name, partitions))
        return len(settled) > 1 and settled[-1] == settled[-2]

    wait_until(still, "the end of the broker's cleaner", seconds=60.0)
    there = settled[-1]
    assert {(partition, offset) for partition, offset in last.values()} <= {one[:2] for one in there}
    topic = KafkaTopic(servers=kafka.url, topic=name)
    shuffled = KafkaTopic(servers=kafka.url, topic=name, aligned=False)
    spans = topic.spans(connected)
    for source, more in (
        (topic, {}),
        (topic, {"checkpoint": str(tmp_path / "one"), "rows_per_batch": 37}),
        (shuffled, {"checkpoint": str(tmp_path / "two"), "rows_per_batch": 150}),
    ):
        seen = tmp_path / f"seen-{len(list(tmp_path.iterdir()))}"
        report = replay(connected, source, noting(seen), **more)  # type: ignore[call-overload]
        assert positions(noted(seen)) == positions(there)
        assert all(sorted(found) == found for found in by_key(noted(seen)).values())
        assert (report.delivered, report.finished) == (len(there), len(there))
        assert report.skipped == spans.rows - len(there) > 0


@dataclass(frozen=True, kw_only=True)
class Pausing(KafkaTopic):
    """A topic that calls a function before the first, second, … question for its positions."""

    asked: list[int]
    pauses: Mapping[int, Callable[[], None]]

    def spans(self, spark: Any) -> Spans:
        self.asked.append(len(self.asked) + 1)
        self.pauses.get(self.asked[-1], lambda: None)()
        return super().spans(spark)


def test_a_replay_continues_after_an_outage_of_the_broker(
    connected: Any, fresh_kafka: KafkaFactory, tmp_path: Path
) -> None:
    server = fresh_kafka()
    admin = AdminClient({"bootstrap.servers": server.url})
    admin.create_topics([NewTopic("outage", 2, 1)])["outage"].result(SECONDS)
    producer = Producer({"bootstrap.servers": server.url, "enable.idempotence": True})
    for number in range(COUNT):
        producer.produce("outage", b"%d" % number, b"key-%d" % (number % 7 // 2 * 2 + number % 2), partition=number % 2)
    assert producer.flush(SECONDS) == 0
    # The first request ends before the time limit of the whole call.
    quick = {"kafka.default.api.timeout.ms": "3000", "kafka.request.timeout.ms": "1000"}
    topic = KafkaTopic(servers=server.url, topic="outage", options=quick)
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": COUNT // 3}
    killed = False

    def kill(at: Progress) -> None:
        nonlocal killed
        if at.batches == 1 and not killed:
            killed = True
            server.kill()

    journal = tmp_path / "journal"
    for progress in (kill, None):
        # During the run, and before the first message.
        with pytest.raises(lanes.SourceError) as told:
            replay(connected, topic, noting(journal), progress=progress, **more)
        said = str(told.value)
        assert said.startswith(f"outage: Kafka at {server.url}: TimeoutException: ")
        assert said.endswith("; check that the brokers run, and that this machine reaches their advertised addresses")
        assert "\n" not in said
    assert len(noted(journal)) == COUNT // 3
    server.start()
    report = replay(connected, topic, noting(journal), **more)
    assert (report.finished, report.batches) == (COUNT * 2 // 3, 2)
    assert positions(noted(journal)) == [(partition, at) for partition in range(2) for at in range(COUNT // 2)]
    assert all(sorted(found) == found for found in by_key(noted(journal)).values())
    # After a batch, the replay waits for the broker, and handles no message again.
    for number in range(COUNT):
        producer.produce("outage", b"%d" % number, b"key-%d" % (number % 7 // 2 * 2 + number % 2), partition=number % 2)
    assert producer.flush(SECONDS) == 0
    pausing = Pausing(
        servers=server.url, topic="outage", options=quick, asked=[], pauses={2: server.pause, 3: server.resume}
    )
    report = replay(connected, pausing, noting(journal), checkpoint=more["checkpoint"])
    assert (report.finished, report.batches, len(pausing.asked)) == (COUNT, 1, 3)
    assert positions(noted(journal)) == [(partition, at) for partition in range(2) for at in range(COUNT)]
