"""A stream over a topic of a real Kafka broker handles new messages in order, until it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import lanes
from lanes_spark import KafkaTopic, ParquetTable, Progress, replay, stream
from tests.components import KafkaServer, MissingComponent, wait_until
from tests.components.environment import ROOT
from tests.components.spark_connector import connector_jars
from tests.conftest import skip_or_fail
from tests.spark.conftest import session
from tests.spark.tables import by_key, noted, noting, positions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
]

SECONDS = 30.0
LONG = 240.0
"""Seconds after which what a busy machine has to do is a failure."""


def jars() -> str:
    try:
        return ",".join(map(str, connector_jars()))
    except MissingComponent as missing:
        skip_or_fail(missing)


@pytest.fixture(scope="module")
def connected() -> Iterator[Any]:
    """A session with the connector."""
    with session("local[2]", {"spark.jars": jars()}) as found:
        yield found


class Topic:
    """A topic whose partitions have different keys."""

    def __init__(self, kafka: KafkaServer, name: str, partitions: int, **config: str) -> None:
        self.name, self.partitions = name, partitions
        self.admin = AdminClient({"bootstrap.servers": kafka.url})
        self.admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(SECONDS)
        self.source = KafkaTopic(servers=kafka.url, topic=name)
        self.sent: list[tuple[int, int, bytes | None]] = []
        self._producer = Producer({"bootstrap.servers": kafka.url, "enable.idempotence": True})

    def publish(self, count: int, *, seconds: list[int] | None = None) -> None:
        for number in range(count):
            self._producer.produce(
                self.name,
                b"%d" % number,
                b"key-%d" % (number % 21),
                partition=number % self.partitions,
                timestamp=0 if seconds is None else seconds[number] * 1_000,
                on_delivery=self.note,
            )
        self._producer.flush(SECONDS)

    def note(self, error: object, message: Any) -> None:
        assert error is None
        self.sent.append((message.partition(), message.offset(), message.key()))

    def lose(self, partition: int, before: int) -> None:
        [deleted] = self.admin.delete_records([TopicPartition(self.name, partition, before)]).values()
        deleted.result(SECONDS)


def in_order(calls: list[tuple[int, int, bytes | None]]) -> bool:
    return all(sorted(found) == found for found in by_key(calls).values())


def test_a_stream_handles_new_messages_until_it_is_stopped(connected: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    topic, seen = Topic(kafka, "streamed", 3), tmp_path / "seen"
    topic.publish(300)
    checkpoint = str(tmp_path / "checkpoint")
    # A stream does not repeat the messages of a finished replay.
    assert replay(connected, topic.source, noting(seen), checkpoint=checkpoint).finished == 300
    told: list[Progress] = []
    more: dict[str, Any] = {"checkpoint": checkpoint, "interval": 0.2}
    with stream(connected, topic.source, noting(seen), **more, progress=told.append) as running:
        topic.publish(200)
        wait_until(lambda: len(noted(seen)) == 500, "the first rows", seconds=LONG)
        topic.publish(100)
        wait_until(lambda: len(noted(seen)) == 600, "the next rows", seconds=LONG)
        wait_until(lambda: bool(told) and told[-1].left == 0, "the lag to be zero", seconds=LONG)
        assert not running.join(0)
        assert running.progress.positions == 600
        # Several batches; the stop takes effect after the current batch.
        wait_until(lambda: running.report.batches >= 2, "the end of the last batch", seconds=LONG)
    report = running.report
    assert (report.finished, report.skipped, report.dead_lettered) == (300, 0, 0)
    assert positions(noted(seen)) == positions(topic.sent)
    assert in_order(noted(seen))
    assert any(one.delivered == 300 for one in told)
    # After a clean stop, no message is handled again.
    assert replay(connected, topic.source, noting(seen), checkpoint=checkpoint).batches == 0
    topic.publish(30)
    running = stream(connected, topic.source, noting(seen), **more)
    wait_until(lambda: len(noted(seen)) >= 630, "the last rows", seconds=LONG)
    topic.admin.create_partitions([NewPartitions("streamed", 4)])["streamed"].result(SECONDS)
    with pytest.raises(lanes.SourceError, match=r"streamed: partition 3 is new since .*aligned=False, from_="):
        running.join(LONG)
    assert positions(noted(seen)) == positions(topic.sent)
    for wrong, named in (
        ({"interval": 0}, "interval=0: must be a number of seconds"),
        ({"checkpoint": ""}, "a stream needs a checkpoint"),
        ({"rows_per_batch": 0}, "rows_per_batch=0"),
    ):
        with pytest.raises(lanes.ConfigError, match=named):
            stream(connected, topic.source, noting(seen), **{**more, **wrong})
    with pytest.raises(lanes.ConfigError, match=r"stream of a ParquetTable: .*use replay"):
        stream(connected, ParquetTable(path="t", topic="t"), noting(seen), **more)  # type: ignore[arg-type]


def test_a_stream_ends_if_its_topic_lost_positions(connected: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    topic, seen = Topic(kafka, "lost", 2), tmp_path / "seen"
    topic.publish(100)
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "interval": 0.2}
    with stream(connected, topic.source, noting(seen), **more) as running:
        wait_until(lambda: len(noted(seen)) == 100, "all rows", seconds=LONG)
    assert running.join(0)
    topic.publish(60)
    topic.lose(1, 70)
    with pytest.raises(lanes.SourceError, match=r"lost/1: positions 50 … 69 are unread, and the source has lost them"):
        stream(connected, topic.source, noting(seen), **more).join(LONG)
    assert len(noted(seen)) == 100
    # A handler that gives up ends the stream too.
    failing = tmp_path / "failing"

    def fail(message: Any) -> None:
        raise ValueError("no such customer")

    once = lanes.Settings(retry=lanes.Retry(attempts=1))
    other = {**more, "checkpoint": str(tmp_path / "other"), "settings": once}
    with pytest.raises(lanes.HandlerHalted, match="no such customer"):
        stream(connected, topic.source, noting(failing, fail), **other).join(LONG)
    # Each caller gets the unchanged error of progress=.
    gone = ConnectionError("the terminal is gone")

    def tell(at: Progress) -> None:
        raise gone

    running = stream(connected, topic.source, noting(failing), **other, progress=tell)
    for _ in range(2):
        with pytest.raises(ConnectionError) as told:
            running.join(LONG)
        assert told.value is gone
    assert not [thread for thread in threading.enumerate() if thread.name in ("lanes-stream", "lanes-live-ends")]


def test_a_checkpoint_of_a_recreated_topic_is_refused(connected: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    topic, seen = Topic(kafka, "anew", 2), tmp_path / "seen"
    topic.publish(40)
    more: dict[str, Any] = {"checkpoint": str(tmp_path / "checkpoint"), "from_": {0: 30}}
    assert replay(connected, topic.source, noting(seen), **more).delivered == 20
    topic.publish(60)
    # The topic ended before position 30 when the checkpoint started.
    assert replay(connected, topic.source, noting(seen), **more).delivered == 20 + 30
    assert positions(noted(seen)) == positions([one for one in topic.sent if one[0] == 1 or one[1] >= 30])
    described = topic.admin.describe_topics(TopicCollection(["anew"]))["anew"].result(SECONDS)
    # The topic id as in a live consumer's journal, but with the other base64 alphabet.
    assert topic.source.spans(connected).incarnation == str(described.topic_id).translate({43: 45, 47: 95})
    topic.admin.delete_topics(["anew"])["anew"].result(SECONDS)
    wait_until(lambda: "anew" not in topic.admin.list_topics(timeout=SECONDS).topics, "the topic to be gone")
    # The new topic has more messages than the former topic.
    again = Topic(kafka, "anew", 2)
    again.publish(200)
    with pytest.raises(lanes.SourceError, match=r"belongs to another replay .* a topic that was recreated since\)"):
        replay(connected, again.source, noting(tmp_path / "nothing"), **more)
    assert not (tmp_path / "nothing").exists()


def test_messages_with_unordered_times_are_all_selected(connected: Any, kafka: KafkaServer, tmp_path: Path) -> None:
    # No message is old enough for retention to delete it.
    topic = Topic(kafka, "timed", 2, **{"retention.ms": "-1"})
    start = 1_700_000_000
    # Producers with different clocks: a message with a later time precedes a message with an earlier time.
    seconds = [start + (number * 37) % 100 for number in range(400)]
    topic.publish(400, seconds=seconds)
    told: list[Progress] = []
    since, until = start + 90, start + 97
    bounds: dict[str, Any] = {"from_": datetime.fromtimestamp(since, UTC), "to": datetime.fromtimestamp(until, UTC)}
    wanted = [
        one
        for number, one in enumerate(sorted(topic.sent, key=lambda sent: (sent[1], sent[0])))
        if since <= seconds[number] < until
    ]
    assert len(wanted) == 28
    for name, more in (("whole", {}), ("batches", {"checkpoint": str(tmp_path / "checkpoint"), "rows_per_batch": 150})):
        arguments: dict[str, Any] = {**bounds, **more, "progress": told.append}
        replay(connected, topic.source, noting(tmp_path / name), **arguments)
        assert positions(noted(tmp_path / name)) == positions(wanted)
    # Positions below the first selected message were not read.
    spans = topic.source.spans(connected).by_partition
    first = topic.source.since(connected, bounds["from_"], spans)
    assert first == {
        number: min(one[1] for one in topic.sent if one[0] == number and seconds[one[1] * 2 + number] >= since)
        for number in (0, 1)
    }
    assert all(first.values())
    assert told[0].positions == sum(200 - one for one in first.values())
    assert topic.source.since(connected, datetime.fromtimestamp(start + 100, UTC), spans) == {0: 200, 1: 200}
    # The same checkpoint continues, in spite of new messages.
    topic.publish(2, seconds=[start, since])
    arguments = {**bounds, "checkpoint": str(tmp_path / "checkpoint")}
    assert replay(connected, topic.source, noting(tmp_path / "more"), **arguments).delivered == 1


MODULE = """
async def look(message):
    with open("seen", "a") as file:
        file.write(f"{message.partition.id.number} {message.position}\\n")
"""


def test_the_command_stops_in_order_by_a_signal(kafka: KafkaServer, tmp_path: Path) -> None:
    topic = Topic(kafka, "commanded", 2)
    topic.publish(50)
    (tmp_path / "shop.py").write_text(MODULE)
    seen = tmp_path / "seen"
    script = "import sys; from lanes.cli.app import main; sys.argv[0] = 'lanes'; main()"
    arguments = ["spark", "stream", "--topic", "commanded", "--server", kafka.url, "--handler", "shop:look"]
    more = [
        "--checkpoint",
        "checkpoint",
        "--interval",
        "0.2",
        "--master",
        "local[2]",
        "--conf",
        "spark.ui.enabled=false",
    ]
    running = subprocess.Popen(
        [sys.executable, "-c", script, *arguments, *more, "--conf", f"spark.jars={jars()}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def arrived() -> bool:
        # If the command ended without a signal, its output is shown below.
        return running.poll() is not None or (seen.exists() and len(seen.read_text().splitlines()) == 50)

    try:
        wait_until(arrived, "the rows", seconds=LONG)
        running.send_signal(signal.SIGTERM)
        out, said = running.communicate(timeout=LONG)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode == 0, out + said
    assert "lanes: SIGTERM: stopping after the current batch; a second signal stops at once" in said
    assert "50 delivered, 50 finished, 0 of them dead-lettered, 0 skipped" in out
