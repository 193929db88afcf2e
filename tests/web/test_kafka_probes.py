"""The probes and the metrics of a consumer on Kafka, beside a thousand handlers and while the broker is silent."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections import Counter
from typing import NamedTuple

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import KafkaFactory, Spawn

pytestmark = [pytest.mark.process, pytest.mark.timeout(180)]

PROGRAM = """
import asyncio, logging
import lanes
from lanes_kafka import KafkaSource

logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
logging.getLogger("lanes.kafka.client").setLevel(logging.CRITICAL)


async def handler(message):
    await asyncio.sleep(0.01)


config = {{"bootstrap.servers": {url!r}, "group.id": "probed", "auto.offset.reset": "earliest"}}
settings = lanes.Settings(concurrency=1_000, max_in_flight=4_000)
lanes.main(KafkaSource(config, topics="probed"), handler, settings=settings, http="127.0.0.1:0")
"""

MESSAGES = 100_000


class Answered(NamedTuple):
    """The answer of a port."""

    status: int
    body: str


def ask(address: str, path: str) -> Answered:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n".encode())
        whole = b""
        while chunk := connection.recv(65_536):
            whole += chunk
    head, _, body = whole.partition(b"\r\n\r\n")
    return Answered(int(head.split()[1]), body.decode())


def metrics(address: str) -> Counter[str]:
    """The metrics, as the official client reads them, each summed over its labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(ask(address, "/metrics").body):
        for sample in family.samples:
            found[sample.name] += int(sample.value)
    return found


def test_probes_and_metrics_answer_beside_a_thousand_handlers_and_a_silent_broker(
    spawn: Spawn, fresh_kafka: KafkaFactory
) -> None:
    server = fresh_kafka(warm=True)
    admin = AdminClient(server.config())
    admin.create_topics([NewTopic("probed", 4, 1)])["probed"].result(20)
    producer = Producer(server.config())
    for number in range(MESSAGES):
        producer.produce("probed", b"x", key=b"%d" % number)
        producer.poll(0)
    assert producer.flush(30) == 0
    job = spawn("-W", "error", "-c", PROGRAM.format(url=server.url))
    assert job.stderr is not None
    address = next(found[1] for line in job.stderr if (found := re.search(r"serving http://(\S+)", line)))
    seen: set[int] = set()
    while (settled := metrics(address)["lanes_settled_total"]) < MESSAGES:
        assert ask(address, "/live").status == 200
        ready = ask(address, "/ready")
        assert ready.status == 200 or not settled
        seen.add(json.loads(ask(address, "/status").body)["status"]["running"])
    assert max(seen) > 500, "the probes were asked while hundreds of handlers ran"
    server.pause()
    try:
        for _ in range(100):
            assert ask(address, "/live").status == 200
            assert ask(address, "/ready").status in (200, 503)
            assert metrics(address)["lanes_settled_total"] == MESSAGES
    finally:
        server.resume()
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0
