"""The whole demo on a real server: errors that end it early, the files that it leaves, and the outages that it
survives."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client

import lanes
import memsource
from demo import DemoConfig, DemoError, Progress, run
from lanes.clock import monotonic
from tests.components import NatsServer

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.timeout(120),
]


def config(server: NatsServer, **changes: Any) -> DemoConfig:
    settings = {"events": 2_000, "concurrency": 200, "max_in_flight": 400, "serial_seconds": 0.0}
    return DemoConfig(**{"server": server.url, **settings, **changes})


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_server.url)
    yield connected
    await connected.close()


async def streams(client: Client) -> set[str]:
    return {info.config.name or "" for info in await client.jetstream().streams_info()}


def started_in(kept: Path) -> set[str]:
    """The partitions whose messages have started, by the histories of a run."""
    segments = memsource.read([kept / "history"])
    return {row.partition for segment in segments for row in segment.rows if row.event == "started"}


async def test_a_worker_of_a_wide_queue_is_killed_and_nothing_is_stranded(
    nats_server: NatsServer, client: Client, tmp_path: Path
) -> None:
    before = await streams(client)
    report = await run(config(nats_server, name="wide", width=4, serial_seconds=0.2, keep=tmp_path / "kept"))
    assert report.broken == []
    assert (report.done, report.kills, report.workers, report.width, report.stranded) == (2_000, 1, 2, 4, 0)
    queue = lanes.PartitionedQueue("declarations.wide", 4)
    assert started_in(tmp_path / "kept") == {f"{name}/{number}" for number, name in enumerate(queue.names)}
    assert await streams(client) == before


async def test_a_run_removes_its_files_except_those_to_keep(
    nats_server: NatsServer, client: Client, tmp_path: Path
) -> None:
    before = await streams(client)
    report = await run(config(nats_server, keep=tmp_path / "kept", serial_seconds=0.5))
    assert report.broken == []
    assert 0 < report.serial_rate < report.rate
    assert await streams(client) == before
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "history",
        "ledger-one-at-a-time.sqlite",
        "ledger.sqlite",
        "worker.log",
    }
    assert len(list((tmp_path / "kept" / "history").iterdir())) == 3


@pytest.mark.timeout(400)  # eleven starts of a process, which a busy machine makes slow
async def test_a_worker_that_is_killed_at_many_moments_loses_and_reorders_nothing(nats_server: NatsServer) -> None:
    moments = (0.001, 0.05, 0.13, 0.25, 0.33, 0.48, 0.62, 0.77, 0.9, 0.99)
    report = await run(config(nats_server, events=6_000, kill_at=moments))
    assert report.broken == []
    assert (report.events, report.done, report.kills, report.workers) == (6_000, 6_000, 10, 11)
    assert (report.violations, report.lost, report.doubled) == ([], [], [])
    assert report.redelivered["restart"] > 0
    assert report.max_in_flight_seen <= report.max_in_flight


async def test_the_output_of_a_crashed_worker_is_quoted(nats_server: NatsServer) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no luck today')"]
    report = await run(config(nats_server, worker_command=command))
    assert "ended early: worker 1 ended unexpectedly with status 1: no luck today" in report.broken
    assert len(report.lost) + report.dead_letters == 2_000


async def test_an_idle_worker_ends_the_demo(nats_server: NatsServer) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    report = await run(config(nats_server, worker_command=command, stall_timeout=1.0))
    assert report.failure is not None
    assert report.failure.startswith("no progress for 1 s: 2000 of 2000 events are missing")


async def test_an_existing_stream_with_the_name_of_the_demo_is_named(nats_server: NatsServer, client: Client) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="DECLARATIONS_taken", subjects=["taken.by.others"])
    with pytest.raises(DemoError, match=r"stream DECLARATIONS_taken .* exists already.*another --name"):
        await run(config(nats_server, name="taken"))
    # The stream did not belong to the demo, so the demo must not delete it.
    assert "DECLARATIONS_taken" in await streams(client)
    await stream.delete_stream("DECLARATIONS_taken")
    await stream.add_stream(name="TAKEN", subjects=["declarations.taken.>"])
    with pytest.raises(DemoError, match=r"cannot be created: .*another stream captures"):
        await run(config(nats_server, name="taken"))
    await stream.delete_stream("TAKEN")


async def test_a_server_that_cannot_be_reached_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    with pytest.raises(lanes.SourceError, match=r"no NATS server reached at nats://127\.0\.0\.1:1 "):
        await run(DemoConfig(server="nats://127.0.0.1:1", events=10))


async def test_an_invalid_event_log_is_refused_before_a_connection(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no JSON\n")
    with pytest.raises(DemoError, match="log:1: not JSON"):
        await run(DemoConfig(server="nats://127.0.0.1:1", data=tmp_path / "log"))


class Outage:
    """A hook that begins an outage once a condition holds, and ends the outage some seconds later."""

    def __init__(
        self,
        far: Callable[[Progress], bool],
        begin: Callable[[Progress], None],
        end: Callable[[], None],
        seconds: float,
    ) -> None:
        self._far, self._begin, self._end, self._seconds = far, begin, end, seconds
        self._begun = 0.0
        self.over = False
        self.unanswered = False

    async def __call__(self, progress: Progress) -> None:
        self.unanswered = self.unanswered or not progress.answering
        if not self._begun and self._far(progress):
            self._begun = monotonic()
            self._begin(progress)
        elif self._begun and not self.over and monotonic() - self._begun > self._seconds:
            self.over = True
            self._end()


async def test_the_demo_waits_for_a_killed_server(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats()
    outage = Outage(lambda p: p.stored > 700, lambda _: server.kill(), server.start, 2.0)
    report = await run(config(server, on_progress=outage))
    assert report.broken == []
    assert outage.over
    assert outage.unanswered


async def test_a_server_that_dies_while_publishing_keeps_the_order(
    fresh_nats: Callable[..., NatsServer],
) -> None:
    server = fresh_nats()
    outage = Outage(lambda p: p.published > 100, lambda _: server.kill(), server.start, 0.5)
    report = await run(config(server, events=8_000, kill_at=(), on_progress=outage))
    assert report.broken == []
    assert outage.over


async def test_the_demo_waits_for_a_server_killed_with_the_worker(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats()
    outage = Outage(lambda p: p.starts == 2 and not p.status, lambda _: server.kill(), server.start, 1.0)
    report = await run(config(server, on_progress=outage))
    assert report.broken == []
    assert outage.over


_FAILS_AT_ITS_FIRST_START = """
import os, sys, time
try:
    os.close(os.open(sys.argv[1], os.O_CREAT | os.O_EXCL))
except FileExistsError:
    os.execv(sys.executable, [sys.executable, "-m", "demo.workers.worker"])
time.sleep(2.5)
sys.exit(1)
"""


async def test_a_worker_whose_start_fails_while_the_server_is_frozen_starts_again(
    fresh_nats: Callable[..., NatsServer], tmp_path: Path
) -> None:
    """The server answers each question of the demo at last, so the demo sees no outage."""
    server = fresh_nats()
    command = [sys.executable, "-c", _FAILS_AT_ITS_FIRST_START, str(tmp_path / "started")]
    outage = Outage(lambda p: p.starts == 1, lambda _: server.pause(), server.resume, 2.0)
    report = await run(config(server, worker_command=command, kill_at=(), on_progress=outage))
    assert report.broken == []
    assert report.workers == 2


async def test_a_worker_that_was_frozen_breaks_no_promise(nats_server: NatsServer) -> None:
    frozen: list[int] = []

    def freeze(progress: Progress) -> None:
        assert progress.worker_pid is not None
        frozen.append(progress.worker_pid)
        os.kill(progress.worker_pid, signal.SIGSTOP)

    # The freeze exceeds ack_wait, so the server redelivers messages that the worker still has.
    outage = Outage(lambda p: p.stored > 700, freeze, lambda: os.kill(frozen[0], signal.SIGCONT), 3.0)
    report = await run(config(nats_server, ack_wait=1.0, kill_at=(), on_progress=outage))
    assert report.broken == []
    assert outage.over
    assert sum(report.redelivered.values()) > 0
    assert report.repeats == 0


# --- as a command


def command(server: NatsServer, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "run", "--server", server.url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"it ended without saying {words!r}")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("moment", ["publishing", "one at a time", "under lanes"])
async def test_a_signal_stops_all_processes_of_the_demo(
    nats_server: NatsServer, client: Client, tmp_path: Path, number: int, status: int, moment: str
) -> None:
    before = await streams(client)
    with command(nats_server, tmp_path, "--sample", "0.5s", "--events", "20000") as process:
        await asyncio.to_thread(read_until, process, moment)
        process.send_signal(number)
        _, said = await asyncio.to_thread(process.communicate)
    assert process.returncode == status
    assert said == f"lanes: {signal.Signals(number).name}: stopped; nothing is left running\n"
    assert list(tmp_path.iterdir()) == []
    assert await streams(client) == before


async def test_the_demo_prints_a_report_and_its_json_line_through_a_pipe(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    with command(nats_server, tmp_path, "--sample", "0.3s", "--events", "500") as process:
        out, said = await asyncio.to_thread(process.communicate)
    assert (process.returncode, said) == (0, "")
    assert "every promise was kept" in out
    assert out.splitlines()[-1].startswith('{"events": 500, "keys": ')
    assert list(tmp_path.iterdir()) == []


async def test_a_closed_pipe_ends_every_process(nats_server: NatsServer, tmp_path: Path) -> None:
    with command(nats_server, tmp_path, "--sample", "0s", "--events", "500") as process:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        process.stdout.close()
        assert process.stderr is not None
        said = await asyncio.to_thread(process.stderr.read)
        await asyncio.to_thread(process.wait)
    assert "Traceback" not in said
    assert process.returncode == 3
    assert list(tmp_path.iterdir()) == []
