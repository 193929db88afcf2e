"""`lanes run` on a real broker: a killed worker, an edited file and a drain lose no message."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lanes.process import EXIT_DRAINED
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce
from tests.service.programs import running

pytestmark = [pytest.mark.process, pytest.mark.long]

APP = """
import os, pathlib
import anyio
import lanes
from lanes_kafka import KafkaSource

pathlib.Path(f"started-{{os.getpid()}}").touch()
handled = open(f"handled-{{os.getpid()}}", "a", buffering=1)


async def handle(message):
    await anyio.sleep(0.005)
    print(message.value.decode(), file=handled)


def make():
    return lanes.Consumer(KafkaSource({config!r}, topics={topic!r}), handle)
"""

COUNT = 300


def test_a_kill_an_edit_and_a_drain_lose_no_message(tmp_path: Path, topic: MakeTopic) -> None:
    orders = topic(partitions=6)
    config = orders.config(**{"session.timeout.ms": 6_000, "auto.offset.reset": "earliest"})
    app = APP.format(config=config, topic=orders.name)
    (tmp_path / "app.py").write_text(app)

    def publish(first: int) -> range:
        produce(orders, COUNT, value=lambda each: b"%d" % (first + each))
        return range(first + COUNT)

    with running(tmp_path, "app:make", "--workers", "3", "--reload") as service:
        service.until_line(": joined", 3)
        publish(0)
        service.until(lambda: len(service.handled()) > COUNT // 3, "a third of the messages")
        killed = min(service.alive())
        os.kill(killed, signal.SIGKILL)
        service.until_line(": joined", 4)
        sent = publish(COUNT)
        service.until(lambda: service.handled() >= set(sent), "all messages after the kill")

        before = service.alive()
        sent = publish(2 * COUNT)
        (tmp_path / "app.py").write_text(f"{app}\n# edited\n")
        service.until(lambda: len(service.alive() - before) == 3, "three new workers")
        service.until(lambda: service.handled() >= set(sent), "all messages after the edit")

        assert service.stop() == EXIT_DRAINED
        assert not service.alive()
        # Only a clean drain commits all of them.
        assert orders.committed(config["group.id"]) == [end or None for end in orders.ends()]
