"""A member that is killed at any statement of its transactions leaves each output once, and in the order of its key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.components import KafkaServer
from tests.kafka.transactions.judge import fill, judged
from tests.kafka.workload import Topic

MESSAGES = 600
KEYS = 400
PROTOCOLS: dict[str, dict[str, Any]] = {
    "eager": {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 200, "group.instance.id": "one"},
    "cooperative": {
        "session.timeout.ms": 6_000,
        "heartbeat.interval.ms": 200,
        "group.instance.id": "one",
        "partition.assignment.strategy": "cooperative-sticky",
    },
    "848": {"group.protocol": "consumer"},
}
# The metadata has room for about 20 runs, so the set of the finished messages often overflows it.
PROPERTIES = {
    "offset.metadata.max.bytes": 40,
    "group.consumer.session.timeout.ms": 1_500,
    "group.consumer.min.session.timeout.ms": 1_000,
    "group.consumer.heartbeat.interval.ms": 300,
    "group.consumer.min.heartbeat.interval.ms": 300,
}


@pytest.fixture(scope="module")
def server(kafka_prepared: None) -> Iterator[KafkaServer]:
    with KafkaServer(properties=PROPERTIES) as running:
        yield running


def member(options: dict[str, Any], *, seconds: float = 90.0) -> tuple[int, list[dict[str, Any]]]:
    """Run a member until its end, and return its exit status and its JSON lines."""
    command = [sys.executable, "-m", "tests.kafka.transactions.killed_member", json.dumps(options)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, env=os.environ.copy(), capture_output=True, text=True, timeout=seconds, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode in (0, -9), done.stderr
    return done.returncode, lines


def test_kills(server: KafkaServer, protocol: str, kills: int, broker_kills: int) -> None:
    source, target = Topic(server.admin_url, f"in-{protocol}", 3), Topic(server.admin_url, f"out-{protocol}", 3)
    source.create()
    target.create()
    filled = MESSAGES
    fill(source, filled, KEYS)
    options = {
        "url": server.url,
        "topic": source.name,
        "target": target.name,
        "name": f"t-{protocol}",
        "config": {"group.id": f"g-{protocol}", **PROTOCOLS[protocol]},
    }
    _, (recorded, _) = member({**options, "record": True, "seconds": 1.0})
    places = sorted((file, line, count) for file, line, count in recorded["seen"])
    chosen = [places[len(places) * number // kills] for number in range(kills)]
    killed = 0
    for number, (file, line, count) in enumerate(chosen):
        # Of a statement that runs for each output, a later execution is in the middle of a transaction.
        fill(source, MESSAGES, KEYS, start=filled)
        filled += MESSAGES
        times = 1 if count < 10 else (1, 5, 40)[number % 3]
        status, _ = member({**options, "at": [file, line], "times": times, "seconds": 1.5, "seed": number})
        killed += status == -9
        if status == -9 and number % (kills // broker_kills or kills) == 0:
            server.kill()
            server.start()
    assert killed >= 0.8 * kills, killed
    member({**options, "slow": False, "idle": 8.0}, seconds=180.0)
    verdict = judged(target, range(filled))
    assert verdict == ([], {}, [])


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize(("protocol", "kills", "broker_kills"), [(each, 24, 2) for each in PROTOCOLS], ids=[*PROTOCOLS])
