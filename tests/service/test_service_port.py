"""The HTTP port of `lanes run`: probes over all workers, and merged metrics."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from lanes.process import EXIT_DRAINED, EXIT_FAILED, EXIT_USAGE
from lanes.service.port import merged
from tests.service.programs import get, running

processes = [pytest.mark.process, pytest.mark.long]


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


class TestProbes:
    pytestmark = processes

    def test_the_service_is_ready_when_all_workers_are(self, tmp_path: Path) -> None:
        address = free_address()
        with running(tmp_path, "app:consumer", "--workers", "2", "--http", address) as service:
            service.until(lambda: get(address, "/ready")[0] == 200, "ready")
            # The log lines of a worker take another way than its status.
            service.until(lambda: service.text().count(": joined") == 2, "joined")
            assert get(address, "/live") == (200, {"live": True, "reason": None})
            _, status = get(address, "/status")
            assert {each["pid"] for each in status["workers"]} == service.alive()
            assert [each["status"]["name"] for each in status["workers"]] == ["memory", "memory"]
            _, metrics = get(address, "/metrics")
            for worker in ("1", "2"):
                assert any("lanes" in line and f'worker="{worker}"' in line for line in metrics.splitlines())
            assert service.stop() == EXIT_DRAINED

    def test_a_worker_that_fails_at_its_start_is_not_ready(self, tmp_path: Path) -> None:
        address = free_address()
        with running(tmp_path, "app:broken", "--http", address) as service:
            service.until_line("failure 3 in a row")
            status, answer = get(address, "/ready")
            assert status == 503 and answer["reason"].startswith("worker 1: it restarts in")
            assert service.stop() == EXIT_DRAINED

    def test_a_killed_worker_makes_the_service_not_ready_until_it_is_back(self, tmp_path: Path) -> None:
        address = free_address()
        with running(tmp_path, "app:consumer", "--workers", "2", "--http", address) as service:
            service.until(lambda: get(address, "/ready")[0] == 200, "ready")
            os.kill(max(service.alive()), signal.SIGKILL)
            service.until(lambda: get(address, "/ready")[0] == 503, "not ready")
            service.until(lambda: get(address, "/ready")[0] == 200, "ready again")
            assert sum(each["restarts"] for each in get(address, "/status")[1]["workers"]) == 1
            counted = [line for line in get(address, "/metrics")[1].splitlines() if line.startswith("lanes_worker_re")]
            assert sorted(line.rpartition(" ")[2] for line in counted) == ["0.0", "1.0"]
            assert service.stop() == EXIT_DRAINED

    def test_an_address_in_use_ends_the_command(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as used:
            address = f"127.0.0.1:{used.getsockname()[1]}"
            with running(tmp_path, "app:consumer", "--http", address) as service:
                assert service.process.wait(60) not in (EXIT_DRAINED, EXIT_FAILED)
                assert "cannot listen there" in service.text() and "Traceback" not in service.text()

    def test_a_wrong_address_is_refused(self, tmp_path: Path) -> None:
        with running(tmp_path, "app:consumer", "--http", "8080") as service:
            assert service.process.wait(60) == EXIT_USAGE
            assert "--http '8080'" in service.text()


def test_merged_metrics_have_one_description_and_the_label_of_each_worker() -> None:
    text = '# HELP orders_total Orders.\n# TYPE orders_total counter\norders_total{kind="a"} 3.0\n'
    histogram = (
        "# HELP wait Wait.\n# TYPE wait histogram\n"
        'wait_bucket{le="1.0"} 1.0\nwait_bucket{le="+Inf"} 2.0\nwait_count 2.0\nwait_sum 4.0\n'
    )
    found = merged({"1": text + histogram, "2": text}, {"1": 0, "2": 3}).decode()
    assert found.count("# HELP orders_total Orders.") == found.count("# TYPE orders_total counter") == 1
    assert 'orders_total{kind="a",worker="1"} 3.0' in found and 'orders_total{kind="a",worker="2"} 3.0' in found
    assert 'wait_bucket{le="+Inf",worker="1"} 2.0' in found and 'wait_sum{worker="1"} 4.0' in found
    assert 'lanes_worker_restarts_total{worker="1"} 0.0' in found
    assert 'lanes_worker_restarts_total{worker="2"} 3.0' in found
