"""Messages that a group on Kafka handles twice after `kill -9`, at 300 messages a second.

A process handles the messages of four partitions until its kill, and the next process takes over. The figure is the
median number of messages that the next process repeats. The baseline is a loop of the client that commits each message
without waiting for the answer.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from confluent_kafka import Consumer as Client

import lanes
from bench.figures import Effort, Figure, cost
from bench.kafka_broker import TIMEOUT, Backlog, broker, create
from bench.kafka_feed import feeding
from lanes import Message
from lanes_kafka import KafkaSource

GOAL: Final = 20.0
KILLS: Final = 10
PER_SECOND, KEYS = 300.0, 1_000
RUNS_FOR: Final = 2.0
"""Seconds from the first message of a process to its kill, which is up to a second later."""

_SESSION: Final = {"session.timeout.ms": 3_000, "heartbeat.interval.ms": 500}
_MINUTES: Final = 10


def figures(effort: Effort) -> list[Figure]:
    """Kill the processes of `lanes` and the processes of the loop, on a new broker."""
    kills = max(1, effort.messages(KILLS))
    with broker() as url, TemporaryDirectory() as folder:
        create(url, "repeats")
        backlog = Backlog(url, "repeats", 0)
        with feeding(url, "repeats", round(PER_SECOND * 60 * _MINUTES), KEYS, PER_SECOND):
            found = [_repeats(backlog.config() | _SESSION, by, kills, Path(folder)) for by in ("lanes", "plain")]
    ours, plain = (float(median(each)) for each in found)
    # A kill may repeat no message at all, and a ratio needs a baseline.
    return [cost("kafka-repeats kill -9", "messages, at least 1", max(1.0, ours), max(1.0, plain), GOAL)]


def _repeats(config: dict[str, Any], by: str, kills: int, folder: Path) -> list[int]:
    """Return the number of repeated messages after each kill."""
    chance = random.Random(0)
    repeats: list[int] = []
    seen: set[str] = set()
    for number in range(kills + 1):
        file = folder / f"{by}-{number}"
        file.touch()
        process = subprocess.Popen([sys.executable, "-m", "bench.kafka_repeats", by, json.dumps(config), str(file)])
        try:
            end = time.monotonic() + TIMEOUT
            while not file.stat().st_size:
                assert time.monotonic() < end, "the process has handled no message"
                time.sleep(0.01)
            time.sleep(RUNS_FOR + chance.random())
        finally:
            process.kill()
            process.wait()
        handled = file.read_text().splitlines()
        if number:
            repeats.append(len(seen.intersection(handled)))
        seen.update(handled)
    return repeats


def by_lanes(config: dict[str, Any], file: int) -> None:
    """Handle messages by `lanes`, and write the position of each."""

    async def handler(message: Message) -> None:
        os.write(file, b"%d %d\n" % (message.partition.id.number, message.position))

    lanes.main(KafkaSource(config, topics="repeats"), handler)


def by_loop(config: dict[str, Any], file: int) -> None:
    """Handle messages in a loop, write the position of each, and commit each."""
    client = Client(config | {"enable.auto.commit": False})
    client.subscribe(["repeats"])
    while True:
        raw = client.poll(1.0)
        if raw is not None:
            assert raw.error() is None, raw.error()
            os.write(file, f"{raw.partition()} {raw.offset()}\n".encode())
            client.commit(message=raw, asynchronous=True)


if __name__ == "__main__":
    (by_lanes if sys.argv[1] == "lanes" else by_loop)(
        json.loads(sys.argv[2]), os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)
    )
