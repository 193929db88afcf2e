"""`lanes run` over a subscription on a real server: a killed worker and two drains lose no message."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lanes.process import EXIT_DRAINED
from tests.postgres.log.logs import Logs
from tests.service.programs import running

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(180)]

APP = """
import os, pathlib
import anyio
import lanes
from lanes_postgres import AdvisoryLocks, Log, PostgresSource

pathlib.Path(f"started-{{os.getpid()}}").touch()
handled = open(f"handled-{{os.getpid()}}", "a", buffering=1)


async def handle(message):
    await anyio.sleep(0.01)
    print(message.value.decode(), file=handled)


def make():
    source = PostgresSource(
        {url!r},
        Log("orders", schema={schema!r}),
        subscription="billing",
        time_budget=0.5,
        poll_interval=0.1,
        locks=AdvisoryLocks({url!r}, lease=2.0),
    )
    return lanes.Consumer(source, handle, settings=lanes.Settings(concurrency=20, max_in_flight=50))
"""

COUNT = 300


def test_a_kill_and_two_drains_lose_no_message(tmp_path: Path, four: Logs) -> None:
    (tmp_path / "app.py").write_text(APP.format(url=four.url, schema=four.schema))

    def append(first: int) -> set[int]:
        for key in range(12):
            four.commit(*(str(value) for value in range(first + key, first + COUNT, 12)), key=f"key {key}")
        return set(range(first + COUNT))

    with running(tmp_path, "app:make", "--workers", "2") as service:
        service.until_line(": joined", 2)
        append(0)
        service.until(lambda: len(service.handled()) > COUNT // 3, "a third of the messages")
        os.kill(min(service.alive()), signal.SIGKILL)
        service.until_line(": joined", 3)
        sent = append(COUNT)
        service.until(lambda: service.handled() >= sent, "all messages after the kill")
        append(2 * COUNT)
        service.until(lambda: service.handled() - sent, "a message before the drain")
        assert service.stop() == EXIT_DRAINED
        assert not service.alive()
    with running(tmp_path, "app:make", "--workers", "2") as service:
        # Before, a signal would end the command without a drain.
        service.until_line(": joined", 2)
        service.until(lambda: service.handled() >= set(range(3 * COUNT)), "all messages after the drain")
        assert service.stop() == EXIT_DRAINED
