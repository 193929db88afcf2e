"""The journals of tasks: ``lanes check`` accepts the journals of concurrent, failed and killed attempts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

import lanes
import lanes.history.journal
from lanes.errors import ConfigError
from lanes.history.journal import buffer_of
from lanes_spark import run_task
from lanes_spark.task.journal import Pace, check_reached, shared
from memsource import check_files
from tests.spark.rows import ONCE, batches, job, rows

COUNT = 300


def share(number: int) -> list[dict[str, Any]]:
    """Return the rows of one of two tasks: every partition, but different keys for each task."""
    return [one for one in rows(COUNT) if one["key"][-1] % 2 == number]


def stored(folder: Path) -> list[dict[str, Any]]:
    return [row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file).to_pylist()]


def passed(folder: Path) -> bool:
    checked = check_files([folder])
    assert checked.status == 0, checked.text
    return True


def test_tasks_side_by_side_share_partitions_and_keep_every_promise(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def attempt(number: int) -> None:
        begun = False

        def handler(message: lanes.Message) -> None:
            nonlocal begun
            if not begun:
                # Both tasks have their partitions before either task continues.
                begun = True
                both.wait(20)

        task = job(handler, settings=lanes.Settings(sync_handlers="inline"), journal=tmp_path)
        list(run_task(batches(share(number)), task, member=f"worker-{number}"))

    tasks = [threading.Thread(target=attempt, args=[number]) for number in range(2)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    assert {row["member"] for row in stored(tmp_path)} == {"worker-0", "worker-1"}
    assert len([row for row in stored(tmp_path) if row["event"] == "ack"]) == COUNT
    assert passed(tmp_path)


def test_an_attempt_that_failed_and_the_next_one_keep_every_promise_together(tmp_path: Path) -> None:
    def failing(message: lanes.Message) -> None:
        if message.position == 90:
            raise ValueError("the database is away")

    with pytest.raises(lanes.HandlerHalted):
        list(run_task(batches(rows(COUNT)), job(failing, settings=ONCE, journal=tmp_path)))
    first = stored(tmp_path)
    assert [row["reason"] for row in first if row["event"] == "end"] == ["failed"]
    assert 0 < len([row for row in first if row["event"] == "ack"]) < COUNT
    list(run_task(batches(rows(COUNT)), job(lambda message: None, journal=tmp_path)))
    assert passed(tmp_path)
    assert "restart" in check_files([tmp_path]).text


def test_a_killed_attempt_leaves_no_row_and_no_violation(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from lanes_spark import run_task\n"
        "from tests.spark.rows import batches, job, rows\n"
        "handler = lambda message: message.position == 90 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"list(run_task(batches(rows({COUNT})), job(handler, journal=sys.argv[1])))\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "adapters")])}
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False, timeout=30)
    assert killed.returncode == -9
    assert [file.suffix for file in tmp_path.iterdir()] == [".tmp"]
    list(run_task(batches(rows(COUNT)), job(lambda message: None, journal=tmp_path)))
    assert passed(tmp_path)


def test_a_task_waits_for_its_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Twice the number of messages in flight; forty times as many rows arrive.
    monkeypatch.setattr(lanes.history.journal, "BUFFER_LIMIT", 800)
    settings = lanes.Settings(sync_handlers="inline", max_in_flight=80, concurrency=10)
    list(run_task(batches(rows(8_000), size=1_000), job(lambda message: None, settings=settings, journal=tmp_path)))
    assert {row["event"] for row in stored(tmp_path)} >= {"begin", "end"}
    assert not [row for row in stored(tmp_path) if row["event"] == "dropped"]
    assert passed(tmp_path)


def test_a_journal_that_is_never_written_delays_its_task_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import anyio

    monkeypatch.setattr("lanes_spark.task.journal.PATIENCE", 0.01)
    monkeypatch.setattr(lanes.history.journal, "BUFFER_LIMIT", 2)
    journal = lanes.Journal(tmp_path)
    buffer_of(journal).rows.extend(["{}", "{}"])
    pace = Pace(journal)

    async def wait() -> None:
        await pace.wait()
        monkeypatch.setattr("lanes_spark.task.journal.PATIENCE", 3_600.0)
        await pace.wait()

    anyio.run(wait)
    assert [record.message for record in caplog.records if "the task continues, and rows may be lost" in record.message]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            "s3a://lake/journal",
            "journal='s3a://lake/journal': tasks cannot write a journal by s3a:.* mounted under the same path",
        ),
        ("file:///lake/journal", "cannot write a journal by file:"),
        ("", "journal is empty"),
        (7, "journal=int on Spark: pass the path of a folder"),
    ],
)
def test_a_journal_path_without_a_folder_is_refused(wrong: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        job(lambda message: None, journal=wrong)


def test_a_journal_object_serves_one_run_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every attempt of a task writes its own journal"):
        job(lambda message: None, journal=lanes.Journal(tmp_path))


def test_a_folder_that_the_worker_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "journal")
    with shared(folder, "one"):
        check_reached(folder, "one")
        with pytest.raises(ConfigError, match="does not see the driver's folder"):
            check_reached(folder, "another")
    assert os.listdir(folder) == []
    with pytest.raises(ConfigError, match="does not see"):
        check_reached(folder, "one")
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match="choose a folder that the driver and all workers can write to"),
        shared(str(tmp_path / "file"), "one"),
    ):
        pass
