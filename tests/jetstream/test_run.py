"""`lanes run` over a cohort on a real server: a killed worker and two drains lose no message."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from lanes.process import EXIT_DRAINED
from tests.jetstream.cohort_workload import LEASE, CohortStream
from tests.service.programs import running

pytestmark = [pytest.mark.anyio, pytest.mark.process, pytest.mark.long, pytest.mark.timeout(180)]

APP = """
import os, pathlib
import anyio
import lanes
from lanes_jetstream import Cohort, JetStreamSource, subject_token

pathlib.Path(f"started-{{os.getpid()}}").touch()
handled = open(f"handled-{{os.getpid()}}", "a", buffering=1)


async def handle(message):
    await anyio.sleep(0.01)
    print(message.position, file=handled)


def make():
    cohort = Cohort("orders", member=f"p{{os.getpid()}}", lease={lease!r})
    source = JetStreamSource({url!r}, stream={stream!r}, cohort=cohort, key=subject_token(2))
    return lanes.Consumer(source, handle, settings=lanes.Settings(concurrency=20, max_in_flight=50))
"""

TIMES = 25


async def test_a_kill_and_two_drains_lose_no_message(tmp_path: Path, cohort_stream: CohortStream) -> None:
    stream, keys = cohort_stream, [f"key-{number}" for number in range(12)]
    (tmp_path / "app.py").write_text(APP.format(url=stream.url, stream=stream.name, lease=LEASE))

    def work() -> None:
        with running(tmp_path, "app:make", "--workers", "2") as service:
            service.until_line(": joined", 2)
            anyio.from_thread.run(lambda: stream.publish(*keys, times=TIMES))
            service.until(lambda: len(service.handled()) > 100, "a third of the messages")
            os.kill(min(service.alive()), signal.SIGKILL)
            service.until_line(": joined", 3)
            anyio.from_thread.run(lambda: stream.publish(*keys, times=TIMES))
            sent = set(range(1, stream.published + 1))
            service.until(lambda: service.handled() >= sent, "all messages after the kill")
            anyio.from_thread.run(lambda: stream.publish(*keys, times=TIMES))
            service.until(lambda: service.handled() - sent, "a message before the drain")
            assert service.stop() == EXIT_DRAINED
            assert not service.alive()
        with running(tmp_path, "app:make", "--workers", "2") as service:
            # Before, a signal would end the command without a drain.
            service.until_line(": joined", 2)
            sent = set(range(1, stream.published + 1))
            service.until(lambda: service.handled() >= sent, "all messages after the drain")
            assert service.stop() == EXIT_DRAINED

    await anyio.to_thread.run_sync(work)
