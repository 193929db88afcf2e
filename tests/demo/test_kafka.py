"""The whole demo on a real Kafka: members join, leave, die and freeze."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient

from demo import DemoConfig, run
from demo.brokers.kafka import KafkaBroker
from demo.config import Protocol
from demo.errors import DemoError
from demo.events import Event
from demo.group.members import Members
from lanes.clock import monotonic
from tests.components import KafkaServer, wait_until
from tests.conftest import KafkaFactory, Spawn, first_line, is_gone

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(180),
]


def config(server: KafkaServer, **changes: Any) -> DemoConfig:
    settings = {"events": 3_000, "concurrency": 100, "max_in_flight": 200, "serial_seconds": 0.0}
    return DemoConfig(**{"broker": "kafka", "server": server.url, **settings, **changes})


def topics(server: KafkaServer, name: str) -> list[str]:
    """The topics of the demo with this name; other tests have topics on the same broker."""
    admin = AdminClient({"bootstrap.servers": server.url})
    return [topic for topic in admin.list_topics(timeout=10.0).topics if f"declarations-{name}" in topic]


def groups(server: KafkaServer, name: str) -> list[str]:
    """The groups of the demo with this name."""
    admin = AdminClient({"bootstrap.servers": server.url})
    found = admin.list_consumer_groups(request_timeout=10.0).result().valid
    return [each.group_id for each in found if each.group_id == f"approvals-{name}"]


async def kills_and_stops(group: Members) -> None:
    """Kill a member while the group has messages, stop a joining member, and stop a busy member in order."""
    await group.until(group.settled)
    count = await group.feed(0.6)
    await group.handled(count // 2)
    group.kill(group.busiest())
    await group.handled(count)
    await group.until(group.settled)
    await group.stop(await group.join())
    count = await group.feed(1.0)
    await group.stop(group.running[-1])
    await group.handled(count)


async def test_a_broker_that_does_not_answer_is_named_as_the_cause() -> None:
    broker = KafkaBroker("127.0.0.1:9", "x", 1)
    broker._producer = Producer({"bootstrap.servers": "127.0.0.1:9", "message.timeout.ms": 100, "log_level": 0})
    with pytest.raises(DemoError, match=r"did not confirm case 'a' step 3: _MSG_TIMED_OUT: .*: check that"):
        await asyncio.to_thread(broker._produce, [Event("a", 3, b"{}")])


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (KafkaError.REQUEST_TIMED_OUT, "did not confirm"),
        (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, "did not confirm"),
        (KafkaError.MSG_SIZE_TOO_LARGE, "refused"),
    ],
)
async def test_a_request_that_timed_out_is_not_called_a_refusal(code: int, said: str) -> None:
    broker = KafkaBroker("127.0.0.1:9", "x", 1)

    class FailingProducer:
        def produce(self, topic: str, value: bytes, key: bytes, *, on_delivery: Any) -> None:
            on_delivery(KafkaError(code), None)

        def flush(self, seconds: float) -> int:
            return 0

    failing: Any = FailingProducer()
    broker._producer = failing
    with pytest.raises(DemoError, match=rf"^the broker {said} case 'a' step 3: "):
        broker._produce([Event("a", 3, b"{}")])


async def test_a_kafka_group_repeats_only_messages_of_its_killed_member(kafka: KafkaServer, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def script(group: Members) -> None:
        await kills_and_stops(group)
        seen.append((len(topics(kafka, "kills")), len(groups(kafka, "kills"))))

    report = await run(
        config(kafka, name="kills", latency=0.03, protocol="consumer", script=script, keep=tmp_path / "kept")
    )
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (3_000, 1, 4)
    group = report.group
    assert group is not None
    assert set(group.recovery) == {"kill", "stop"} and group.rebalances >= 2
    assert group.duplicates["kill"] == sum(group.duplicates.values()) > 0
    assert seen == [(2, 1)]
    assert topics(kafka, "kills") == groups(kafka, "kills") == []


async def test_a_kafka_group_over_several_topics_survives_the_kill_of_a_member(kafka: KafkaServer) -> None:
    report = await run(config(kafka, name="width", latency=0.03, width=4, serial_seconds=0.5, script=kills_and_stops))
    assert report.broken == []
    assert (report.done, report.kills, report.width, report.stranded) == (3_000, 1, 4, 0)
    assert report.group is not None and set(report.group.recovery) == {"kill", "stop"}
    assert topics(kafka, "width") == []


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["classic", "cooperative", "consumer"])
async def test_a_group_keeps_every_promise_under_all_faults(kafka: KafkaServer, protocol: Protocol) -> None:
    report = await run(config(kafka, events=10_000, concurrency=300, max_in_flight=600, protocol=protocol))
    assert report.broken == []
    assert (report.done, report.kills, report.workers) == (10_000, 1, 4)
    group = report.group
    assert group is not None
    assert set(group.recovery) == {"kill", "join", "freeze", "stop"}
    assert group.duplicates["clean"] == group.overlaps == 0
    assert group.duplicates["kill"] and group.duplicates["freeze"]


@pytest.mark.slow
async def test_the_demo_waits_for_a_killed_broker(fresh_kafka: KafkaFactory) -> None:
    server = fresh_kafka(warm=True)

    async def outage(group: Members) -> None:
        await group.until(group.settled)
        begun = monotonic()
        await asyncio.to_thread(server.kill)
        late = await group.join()
        await group.until(lambda: late.child.status is not None)
        await asyncio.to_thread(server.start)
        group.note("broker", begun=begun)
        await group.until(group.settled)
        await group.handled(await group.feed(1.0))

    report = await run(config(server, script=outage))
    assert report.broken == []
    # The member that did not find a broker ended, and a replacement joined.
    assert (report.done, report.kills, report.workers) == (3_000, 0, 5)
    assert report.group is not None and set(report.group.recovery) == {"join"}


_FREEZES_ONE = """
import asyncio, sys
from lanes.clock import monotonic
from demo import DemoConfig, run

async def script(group):
    await group.until(group.settled)
    children = [*(one.child.pid for one in group.running), group.broker._coordinator.pid]
    group.freeze(group.busiest())
    print(*children, flush=True)
    await asyncio.Event().wait()

server, name = sys.argv[1:]
asyncio.run(run(DemoConfig(broker="kafka", server=server, events=1_000, serial_seconds=0.0, name=name, script=script)))
"""


async def test_no_process_outlives_a_killed_demo(kafka: KafkaServer, temporary: Path, spawn: Spawn) -> None:
    demo = spawn("-c", _FREEZES_ONE, kafka.url, "killed")
    children = list(map(int, first_line(demo).split()))
    assert len(children) == 4 and not any(map(is_gone, children)), "three members, and the client that reads the group"
    demo.kill()
    wait_until(lambda: all(map(is_gone, children)), f"{children} to end")
    admin = AdminClient({"bootstrap.servers": kafka.url})
    for deleted in admin.delete_topics(["declarations-killed", "dead-declarations-killed"]).values():
        deleted.result(10.0)


async def test_a_signal_stops_a_group(kafka: KafkaServer, tmp_path: Path) -> None:
    arguments = ["--broker", "kafka", "--server", kafka.url, "--name", "ended", "--sample", "0s", "--events", "20000"]
    with subprocess.Popen(
        [sys.executable, "-m", "demo", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        while "one member killed" not in process.stdout.readline():
            assert process.poll() is None
        assert topics(kafka, "ended") != []
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate)
    assert (process.returncode, said) == (130, "lanes: SIGINT: stopped; nothing is left running\n")
    assert list(tmp_path.iterdir()) == []
    # The group ends by its timeout, because its members had no time to leave.
    assert topics(kafka, "ended") == []
