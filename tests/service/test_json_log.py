"""`lanes run --log json`: each line on stderr is a JSON object, also the lines from outside of the log."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lanes.process import EXIT_AT_ONCE, EXIT_DRAINED, EXIT_FAILED, EXIT_HALTED, EXIT_UNUSABLE, EXIT_USAGE, SAME_REQUEST
from tests.service.programs import ROOT, Running, get, running
from tests.service.test_service_port import free_address

pytestmark = [pytest.mark.process, pytest.mark.long]

FIELDS = {"time", "level", "process", "logger", "message"}


def lines(service: Running) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in service.text().splitlines()]
    assert found and all(line.keys() >= FIELDS for line in found)
    return found


def messages(service: Running, process: str) -> list[str]:
    return [line["message"] for line in lines(service) if line["process"] == process]


def test_the_lines_of_a_run_name_their_process(tmp_path: Path) -> None:
    with running(tmp_path, "app:finite", "--log", "json") as service:
        assert service.process.wait(60) == EXIT_DRAINED
        assert {line["process"] for line in lines(service)} == {"supervisor", "worker 1"}
        assert any("drained" in line["message"] and line["level"] == "INFO" for line in lines(service))


def test_the_lines_about_signals_are_objects(tmp_path: Path) -> None:
    with running(tmp_path, "app:stubborn", "--log", "json") as service:
        service.until(lambda: list(tmp_path.glob("handling-*")), "a handler")
        service.process.send_signal(signal.SIGTERM)
        service.until_line("draining, for which")
        time.sleep(SAME_REQUEST)
        assert service.stop() == EXIT_AT_ONCE
        for process in ("supervisor", "worker 1"):
            assert [
                text.partition(":")[2][:9] for text in messages(service, process) if text.startswith("SIGTERM")
            ] == [
                " draining",
                " stopping",
            ]


def test_the_error_that_ends_a_worker_is_an_object_with_its_traceback(tmp_path: Path) -> None:
    with running(tmp_path, "app:broken", "--log", "json") as service:
        service.until_line("it restarts in")
        (line,) = [line for line in lines(service) if line["message"] == "the worker ends after an error"]
        assert line["exception"].startswith("Traceback") and line["exception"].endswith("no configuration")
        assert service.stop() == EXIT_DRAINED


@pytest.mark.parametrize(("target", "text"), [("app:leaving", "no configuration"), ("app:halting", "HandlerHalted: ")])
def test_the_line_that_explains_the_end_of_a_worker_is_an_object(tmp_path: Path, target: str, text: str) -> None:
    with running(tmp_path, target, "--log", "json") as service:
        service.until_line("it restarts in")
        assert any(message.startswith(text) for message in messages(service, "worker 1"))
        assert service.stop() in (EXIT_DRAINED, EXIT_HALTED)


def test_warnings_threads_and_errors_of_the_log_are_objects(tmp_path: Path) -> None:
    # Text in the encoding of stderr would break the JSON.
    with running(tmp_path, "app:noisy", "--log", "json", variables={"PYTHONIOENCODING": "latin-1"}) as service:
        service.until_line(": joined")
        assert service.stop() == EXIT_DRAINED
        found = {line["message"]: line for line in lines(service) if line["process"] == "worker 1"}
        assert any("an old name, für später" in text for text in found)
        assert any("a line of the logger shop cannot be written (TypeError): %d orders" in text for text in found)
        (thread,) = [line for text, line in found.items() if text.startswith("an error ends the thread")]
        (ignored,) = [line for text, line in found.items() if text.startswith("an error in a")]
        assert thread["exception"].endswith("no thread") and ignored["exception"].endswith("no end")


def test_a_warning_of_the_web_server_is_an_object(tmp_path: Path) -> None:
    address = free_address()
    with running(tmp_path, "app:consumer", "--log", "json", "--http", address) as service:
        service.until(lambda: get(address, "/ready")[0] == 200, "ready")
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"\x00 no request\r\n\r\n")
            connection.recv(1)
        assert service.stop() == EXIT_DRAINED
        assert any(line["logger"].startswith("uvicorn") for line in lines(service))


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["app:absent"], EXIT_USAGE, "app has no 'absent'"),
        (["app"], EXIT_USAGE, "is not of the form module:name"),
        (["app:consumer", "--env-file", "env"], EXIT_USAGE, "write NAME=VALUE"),
        (["app:consumer", "--backend", "other"], EXIT_USAGE, "--backend 'other': must be"),
        (["app:consumer", "--http", "{used}"], EXIT_UNUSABLE, "cannot listen there"),
    ],
)
def test_a_refusal_is_an_object(tmp_path: Path, arguments: list[str], status: int, text: str) -> None:
    (tmp_path / "env").write_text("a secret\n")
    with socket.create_server(("127.0.0.1", 0)) as used:
        given = [each.replace("{used}", f"127.0.0.1:{used.getsockname()[1]}") for each in arguments]
        with running(tmp_path, *given, "--log", "json") as service:
            assert service.process.wait(60) == status
            assert text in messages(service, "supervisor")[-1]


def test_a_worker_whose_supervisor_has_died_at_its_start_ends_without_a_traceback() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "lanes.service.worker"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (EXIT_FAILED, b"", b"")
