"""The worker processes of `lanes run`: signals, restarts, exit statuses and the environment."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from lanes.process import EXIT_AT_ONCE, EXIT_DRAINED, EXIT_USAGE, SAME_REQUEST
from lanes.service.worker import DEFAULT_DRAIN, Job, Link
from tests.components import wait_until
from tests.service.programs import running

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.parametrize("target", ["app:consumer", "app:make", "app:make_later"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_all_workers(tmp_path: Path, target: str, number: int) -> None:
    with running(tmp_path, target, "--workers", "2") as service:
        service.until_line(": joined", 2)
        assert len(service.alive()) == 2
        assert service.stop(number) == EXIT_DRAINED
        assert not service.alive()
        assert service.text().count("drained 1 partition(s)") == 2


def test_a_second_signal_ends_handlers_that_ignore_their_cancellation(tmp_path: Path) -> None:
    with running(tmp_path, "app:stubborn", "--workers", "2") as service:
        service.until(lambda: len(list(tmp_path.glob("handling-*"))) == 2, "two handlers")
        service.process.send_signal(signal.SIGTERM)
        service.until_line("draining, for which", 2)
        time.sleep(SAME_REQUEST)
        assert service.stop() == EXIT_AT_ONCE
        assert not service.alive()


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "app:consumer", "--workers", "2") as service:
        service.until_line(": joined", 2)
        killed = min(service.alive())
        os.kill(killed, signal.SIGKILL)
        service.until_line(": joined", 3)
        assert "was ended by SIGKILL" in service.text()
        assert len(service.alive() - {killed}) == 2
        assert service.stop() == EXIT_DRAINED


def test_the_workers_of_a_killed_supervisor_drain(tmp_path: Path) -> None:
    with running(tmp_path, "app:consumer", "--workers", "2") as service:
        service.until_line(": joined", 2)
        service.process.kill()
        service.until(lambda: not service.alive(), "the end of the workers")
        assert service.text().count("drained 1 partition(s)") == 2


def test_a_worker_without_a_supervisor_ends_although_its_drain_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[float] = []
    monkeypatch.setattr("lanes.service.worker._stop", lambda: stops.append(time.monotonic()))
    monkeypatch.setattr("lanes.service.worker.ENDED_WITHIN", -DEFAULT_DRAIN)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        job = Job(target="app:consumer", number=1, port=port, token="t", backend="asyncio", log="text", web=False)
        Link(job)
        listening.accept()[0].close()
    wait_until(lambda: len(stops) == 2, "the first and the second request to stop")


def test_the_delay_doubles_while_the_start_fails(tmp_path: Path) -> None:
    with running(tmp_path, "app:broken") as service:
        service.until_line("failure 3 in a row; it restarts in 2.0 s")
        text = service.text()
        assert "failure 1 in a row; it restarts in 0.5 s" in text and "RuntimeError: no configuration" in text
        assert service.stop() == EXIT_DRAINED


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("app", "'app' is not of the form module:name"),
        ("app:", "'app:' is not of the form module:name"),
        ("absent:consumer", "no module 'absent'"),
        ("app:absent", "app has no 'absent'"),
        ("app:number", "is an int"),
        ("app:wanting", "needs arguments"),
        ("app:other", "returned an int"),
    ],
)
def test_a_target_without_a_consumer_is_refused(tmp_path: Path, target: str, fault: str) -> None:
    with running(tmp_path, target, "--workers", "2") as service:
        assert service.process.wait(60) == EXIT_USAGE
        last = service.text().splitlines()[-1]
        assert last.startswith("lanes: ") and f"'{target}'" in last and fault in last
        assert service.text().count(fault) == 1


def test_the_service_ends_with_the_sources_of_all_workers(tmp_path: Path) -> None:
    with running(tmp_path, "app:finite", "--workers", "2") as service:
        assert service.process.wait(60) == EXIT_DRAINED
        assert service.text().count("has finished") == 2


def test_the_workers_get_the_variables_of_a_file_and_no_log_shows_them(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("# colours\nCOLOUR=red\nexport SHAPE='round and secret'\n")
    with running(tmp_path, "app:shown", "--env-file", "env") as service:
        service.until_line(": joined")
        # The variable of the command has priority.
        assert (tmp_path / "seen").read_text() == "blueround and secret"
        assert service.stop() == EXIT_DRAINED
        assert "secret" not in service.text()


def test_a_wrong_line_of_an_environment_file_is_refused_without_its_value(tmp_path: Path) -> None:
    (tmp_path / "env").write_text("A=1\na secret\n")
    with running(tmp_path, "app:consumer", "--env-file", "env") as service:
        assert service.process.wait(60) == EXIT_USAGE
        assert service.text() == "lanes: --env-file 'env', line 2: write NAME=VALUE\n"
