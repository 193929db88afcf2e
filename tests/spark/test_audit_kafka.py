"""``lanes spark audit`` compares the journal of a live consumer with the topic on a real broker."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from confluent_kafka import Producer

import lanes
from lanes_kafka import KafkaSource
from tests.components import KafkaServer, MissingComponent
from tests.components.spark_connector import connector_jars
from tests.conftest import skip_or_fail
from tests.kafka.workload import Topic
from tests.spark.conftest import need_java

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS, COUNT = 2, 120
SECONDS = 30.0


def publish(kafka: KafkaServer, topic: str) -> int:
    """Publish three transactions, one of them aborted; return the number of messages that must be handled."""
    producer = Producer({"bootstrap.servers": kafka.url, "transactional.id": topic})
    producer.init_transactions(SECONDS)
    for part in range(3):
        producer.begin_transaction()
        for number in range(COUNT // 3):
            key = None if number % 10 == 9 else b"key-%d" % (number % 7)
            producer.produce(topic, b"%d" % number, key, partition=number % PARTITIONS)
        assert producer.flush(SECONDS) == 0
        if part == 1:
            producer.abort_transaction(SECONDS)
        else:
            producer.commit_transaction(SECONDS)
    return COUNT * 2 // 3


async def handle(kafka: KafkaServer, topic: str, count: int, journal: Path) -> None:
    """Run a consumer until it has settled ``count`` messages."""
    config = {"bootstrap.servers": kafka.url, "group.id": topic, "auto.offset.reset": "earliest"}

    async def handler(message: lanes.Message) -> None: ...

    async with lanes.Consumer(KafkaSource(config, topics=topic), handler, journal=journal) as consumer:
        async with asyncio.timeout(SECONDS):
            while consumer.status().settled < count:  # noqa: ASYNC110 (a service would not end)
                await anyio.sleep(0.02)


def audit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = "import sys; from lanes.cli.app import main; sys.argv[0] = 'lanes'; main()"
    jars = ",".join(map(str, connector_jars()))
    more = ["--master", "local[2]", "--conf", f"spark.jars={jars}", "--conf", "spark.ui.enabled=false"]
    return subprocess.run(
        [sys.executable, "-c", script, "spark", "audit", "journal", *arguments, *more],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "adapters")]), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Return the other cells of each row of the table, by promise."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    return {name: more for name, *more in cells}


def test_a_topic_says_what_had_to_be_handled(kafka: KafkaServer, tmp_path: Path) -> None:
    need_java()
    try:
        connector_jars()
    except MissingComponent as missing:
        skip_or_fail(missing)
    topic, empty = (Topic(kafka.url, f"audited{os.getpid()}{kind}", PARTITIONS) for kind in ("", "empty"))
    topic.create()
    count = publish(kafka, topic.name)
    anyio.run(handle, kafka, topic.name, count, tmp_path / "journal")
    source = ["--server", kafka.url, "--topic", topic.name]

    # Transaction markers and aborted messages do not count as messages.
    done = audit(tmp_path, *source)
    assert done.returncode == 0, done.stdout + done.stderr
    found = verdicts(done)
    assert found["AtLeastOnce"] == ["held", str(count), "0"]
    assert {status for status, *_ in found.values()} == {"held"}

    # One more message, which no run has handled.
    sent: list[Any] = []
    producer = Producer({"bootstrap.servers": kafka.url})
    producer.produce(topic.name, b"late", b"key-1", partition=1, on_delivery=lambda error, one: sent.append(one))
    assert producer.flush(SECONDS) == 0
    done = audit(tmp_path, *source, "--findings", "findings")
    assert done.returncode == 1, done.stdout + done.stderr
    found = verdicts(done)
    assert found.pop("AtLeastOnce") == ["violated", str(count + 1), "1"]
    assert {status for status, *_ in found.values()} == {"held"}
    place = f"{topic.name}/1 position {sent[0].offset()} key none, no row"
    assert f"! AtLeastOnce: {place}: in the source, and never handled\n" in done.stdout
    (row,) = pq.read_table(tmp_path / "findings").to_pylist()
    assert (row["checker"], row["partition"], row["position"]) == ("AtLeastOnce", f"{topic.name}/1", sent[0].offset())

    # An empty topic proves nothing.
    empty.create()
    done = audit(tmp_path, "--server", kafka.url, "--topic", empty.name)
    assert done.returncode == 2, done.stdout + done.stderr
    assert verdicts(done)["AtLeastOnce"] == ["unproven", "0", "0"]
    said = "? AtLeastOnce: 0 messages are in the source, so no message had to be handled\n"
    assert said in done.stdout
