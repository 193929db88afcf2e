"""The delay until a Kafka client pauses, and until the other member continues after a member has left the group.

Pause: the figure is the time from the call that pauses a partition to the pause of the client, in the client's own
thread. The case measures this time with a backlog and with an empty topic. The baseline is the longest call of the
client.

Recovery: two members share four partitions of a topic while a producer writes to the topic. One member leaves, after a
drain or by ``kill -9``. The figure is the time from the signal until the other member has handled a message of each
partition of the leaver. The baselines are the heartbeat interval of 0.5 s and the session timeout of 3 s. The goals are
1 s for a leave after a drain, and the session timeout plus 1 s for ``kill -9``.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, Final

import anyio
from confluent_kafka import Consumer as Client
from confluent_kafka import TopicPartition

import lanes
from bench.figures import Effort, Figure, cost
from bench.kafka_broker import PARTITIONS, Backlog, broker, create, fill, until
from bench.kafka_feed import feeding
from lanes import Message
from lanes.core.types import Partition, Room
from lanes.source import Assigned
from lanes_kafka import KafkaSource
from lanes_kafka.client.thread import POLL

PAUSES: Final = 50
BACKLOG: Final = 300_000

HEARTBEAT, SESSION = 0.5, 3.0
LEAVE_GOAL, KILL_GOAL = 1.0, SESSION + 1.0
PER_SECOND, KEYS = 1_000.0, 1_000
# Way of leaving → signal, shortest time until the group notices, goal.
WAYS: Final = {"leave": (signal.SIGTERM, HEARTBEAT, LEAVE_GOAL), "kill -9": (signal.SIGKILL, SESSION, KILL_GOAL)}

_CLASSIC: Final = {"session.timeout.ms": round(1e3 * SESSION), "heartbeat.interval.ms": round(1e3 * HEARTBEAT)}
PROTOCOLS: Final[dict[str, dict[str, Any]]] = {
    "eager": _CLASSIC,
    "cooperative": {**_CLASSIC, "partition.assignment.strategy": "cooperative-sticky"},
    "KIP-848": {"group.protocol": "consumer"},
}
_BROKER: Final = {
    "group.consumer.session.timeout.ms": round(1e3 * SESSION),
    "group.consumer.heartbeat.interval.ms": round(1e3 * HEARTBEAT),
}


def figures(effort: Effort) -> list[Figure]:
    """Start a broker, and measure pause and recovery on it."""
    with broker(_BROKER) as url:
        create(url, "idle")
        busy, idle = fill(url, "busy", BACKLOG, KEYS), Backlog(url, "idle", 0)
        made = [
            cost(f"kafka-recovery pause, {name}", "ms, p99", _pauses(backlog, effort), POLL * 1e3)
            for name, backlog in (("busy", busy), ("idle", idle))
        ]
        for protocol, settings in PROTOCOLS.items():
            times = asyncio.run(_recoveries(url, protocol, settings, effort.repeats))
            made += [
                cost(f"kafka-recovery {way}, {protocol}", "s", median(times[way]), least, goal)
                for way, (_, least, goal) in WAYS.items()
            ]
    return made


# --- the pause command


class _Noting(Client):
    """A client that reports each call of ``pause``."""

    def __init__(self, config: dict[str, Any], told: Callable[[], None]) -> None:
        super().__init__(config)
        self._told = told

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._told()
        super().pause(list(partitions))


def _pauses(backlog: Backlog, effort: Effort) -> float:
    """Return the 99th percentile of the delay, in milliseconds."""
    times = asyncio.run(_ask_for_pauses(backlog, max(2, effort.messages(PAUSES * effort.repeats))))
    return 1e3 * quantiles(times, n=100, method="inclusive")[-1]


async def _ask_for_pauses(backlog: Backlog, count: int) -> list[float]:
    told_at: list[float] = []
    source = KafkaSource(
        backlog.config(),
        topics=backlog.topic,
        client=partial(_Noting, told=lambda: told_at.append(time.perf_counter())),
    )
    await source.open()
    owned: set[Partition] = set()
    while len(owned) < PARTITIONS:
        owned |= {event.partition for event in await source.receive(Room(100, 1 << 20)) if isinstance(event, Assigned)}
    times = []
    for number in range(count):
        # Each pause is requested at another moment of the call that waits for messages.
        with anyio.move_on_after((number % 10) * POLL / 10 + POLL):
            while True:
                await source.receive(Room(100, 1 << 20))
                await asyncio.sleep(0)
        told_at.clear()
        asked_at = time.perf_counter()
        with anyio.move_on_after(10 * POLL):
            while not told_at:
                with anyio.move_on_after(POLL):
                    # With room for messages, prefetched messages would be delivered first.
                    await source.receive(Room(0, 0, frozenset(owned)))
        # A partition that is still paused, because its messages wait for room, is not reported again.
        times += [at - asked_at for at in told_at[:1]]
    await source.aclose()
    assert len(times) >= 2, "the client was never told to pause"
    return times


# --- a member leaves


async def _recoveries(url: str, protocol: str, settings: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Return the seconds until each recovery, for a leave after a drain and for ``kill -9``."""
    topic = f"recovery-{protocol.lower()}"
    create(url, topic)
    backlog = Backlog(url, topic, 0)
    config = backlog.config() | settings
    first: dict[int, float] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}

    async def handler(message: Message) -> None:
        first.setdefault(message.partition.id.number, time.perf_counter())

    minutes = 60 * 10
    consumer = lanes.Consumer(KafkaSource(config, topics=topic), handler)
    with feeding(url, topic, round(PER_SECOND * minutes), KEYS, PER_SECOND):
        async with consumer:
            await until(lambda: consumer.active, "an assignment")
            for way, (number, _, _) in WAYS.items():
                for _ in range(repeats):
                    await until(lambda: len(consumer.status().partitions) == PARTITIONS, "all partitions")
                    times[way].append(await _recovery(config, topic, number, consumer, first))
    return times


async def _recovery(
    config: dict[str, Any], topic: str, number: signal.Signals, consumer: lanes.Consumer, first: dict[int, float]
) -> float:
    with _started(topic, config) as member:
        assert member.stdout is not None
        try:
            # The member reports when it has handled messages of two partitions.
            await asyncio.to_thread(member.stdout.readline)
            await until(lambda: len(consumer.status().partitions) == PARTITIONS // 2, "half of the partitions")
            mine = {int(name.rpartition("/")[2]) for name in consumer.status().partitions}
            others = set(range(PARTITIONS)) - mine
            first.clear()
            begin = time.perf_counter()
            member.send_signal(number)
            await until(lambda: others <= first.keys(), "the partitions of the other member")
            return max(first[each] for each in others) - begin
        finally:
            member.kill()


def _started(topic: str, config: dict[str, Any]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.kafka_recovery", topic, json.dumps(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def member(topic: str, config: str) -> None:
    """Run the member that leaves the group."""
    seen: set[int] = set()

    async def handler(message: Message) -> None:
        if message.partition.id.number not in seen:
            seen.add(message.partition.id.number)
            if len(seen) == PARTITIONS // 2:
                print(flush=True)

    lanes.main(KafkaSource(json.loads(config), topics=topic), handler)


if __name__ == "__main__":
    member(*sys.argv[1:])
