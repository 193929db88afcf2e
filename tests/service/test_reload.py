"""`lanes run --reload`: a changed file drains and restarts the workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from lanes.process import EXIT_DRAINED
from lanes.service.supervisor import Service, Supervisor
from tests.service.programs import APP, running

pytestmark = [pytest.mark.process, pytest.mark.long]


def test_a_changed_file_drains_and_restarts_all_workers(tmp_path: Path) -> None:
    with running(tmp_path, "app:consumer", "--workers", "2", "--reload") as service:
        service.until_line(": joined", 2)
        before = service.alive()
        (tmp_path / "app.py").write_text(f"{APP}\n# changed\n")
        service.until_line(": joined", 4)
        assert service.text().count("drained 1 partition(s)") == 2
        assert "app.py changed" in service.text()
        assert len(service.alive()) == 2 and not service.alive() & before
        assert service.stop() == EXIT_DRAINED


def test_the_supervisor_outlives_a_syntax_error(tmp_path: Path) -> None:
    with running(tmp_path, "app:consumer", "--reload") as service:
        service.until_line(": joined")
        (tmp_path / "app.py").write_text(f"{APP}\ndef broken(:\n")
        service.until_line("syntax error in")
        (tmp_path / "app.py").write_text(APP)
        service.until_line(": joined", 2)
        assert service.stop() == EXIT_DRAINED


def test_a_signal_after_a_syntax_error_ends_the_service(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def broken(:\n")
    with running(tmp_path, "app:consumer", "--workers", "2", "--reload") as service:
        service.until_line("a change of a file restarts it", 2)
        assert service.stop() == EXIT_DRAINED


SOON = """
import lanes.service.supervisor
from lanes.cli.app import main

# Without the time that the settings allow for the last settlement and the release.
lanes.service.supervisor.ENDED_WITHIN = -15.0
main()
"""


def test_a_worker_that_never_ends_its_drain_is_ended(tmp_path: Path) -> None:
    with running(tmp_path, "app:blocking", "--workers", "2", "--reload", program=("-c", SOON)) as service:
        service.until(lambda: len(list(tmp_path.glob("handling-*"))) == 2, "two handlers")
        before = service.alive()
        (tmp_path / "app.py").write_text(f"{APP}\n# changed\n")
        service.until_line("still drains after 0.2 s, so the restart ends it at once", 2)
        service.until(lambda: len(list(tmp_path.glob("handling-*"))) == 4, "two new handlers")
        assert len(service.alive()) == 2 and not service.alive() & before
        service.process.kill()
        # These workers have lost their supervisor, and their event loops are blocked.
        for pid in service.alive():
            os.kill(pid, signal.SIGKILL)


def test_a_folder_that_cannot_be_watched_is_reported_and_the_workers_run_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = str(tmp_path / "gone")

    async def follow() -> None:
        await Supervisor(Service(target="app:consumer", reload=gone))._follow(gone)

    anyio.run(follow)
    [record] = caplog.records
    assert record.getMessage().startswith(f"--reload: cannot watch {gone} (")
