"""`lanes run --reload`: a changed file drains and restarts the workers."""

from __future__ import annotations

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


def test_a_folder_that_cannot_be_watched_is_reported_and_the_workers_run_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = str(tmp_path / "gone")

    async def follow() -> None:
        await Supervisor(Service(target="app:consumer", reload=gone))._follow(gone)

    anyio.run(follow)
    [record] = caplog.records
    assert record.getMessage().startswith(f"--reload: cannot watch {gone} (")
