"""The writer of a journal makes whole files, counts missing rows, and never blocks the run."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.errors import ConfigError
from lanes.history import journal as journal_module
from lanes.history.buffer import RowBuffer
from lanes.history.journal import buffer_of
from lanes.history.parquet import ParquetFile
from memsource import HistoryError, check, read
from tests.history.children import run_child
from tests.memsource.checkers.journals import WAIT, ended, files, handled, held_disk, message, opened, reach, rows
from tests.memsource.checkers.rows import Rows

ROOT = Path(__file__).parents[2]
Break = Callable[[str, int], None]


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Makes the next calls of a file's method fail."""

    def breaks(name: str, times: int) -> None:
        method = getattr(ParquetFile, name)
        left = [times]

        def broken(self: ParquetFile, *args: Any, **options: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return method(self, *args, **options)

        monkeypatch.setattr(ParquetFile, name, broken)

    return breaks


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Blocks the disk until this is set."""
    with held_disk(monkeypatch) as opens:
        yield opens


def assert_counted(made: Rows) -> None:
    """Every row number exists, or is counted by the ``dropped`` row that has the last missing number."""
    expected = 1
    for row in made:
        if row["event"] == "dropped":
            assert row["n"] - row["count"] + 1 == expected
        else:
            assert row["n"] == expected
        expected = row["n"] + 1


def statuses(directory: Path) -> set[str]:
    return {verdict.status for verdict in check(read([directory]))}


def test_files_are_written_during_the_run(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path, rotate_after=0.001)
    # No flush happens, because a handler may run for long.
    recording.started(message(1), 2.0)
    reach(lambda: any(row.get("position") == 1 for path in files(tmp_path)[-1:] for row in rows(tmp_path)))
    recording.started(message(2), 2.0)
    ended(journal, recording)
    made = rows(tmp_path)
    assert [row["event"] for row in made] == ["begin", "started", "started", "end"]
    assert len(files(tmp_path)) == journal.files >= 2
    assert statuses(tmp_path) != {"violated"}


def test_an_unfinished_file_is_hidden(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path, rotate_after=None)
    recording.started(message(1), 2.0)
    (hidden,) = tmp_path.iterdir()
    assert hidden.name.startswith(".") and hidden.name.endswith(".parquet.tmp")
    with pytest.raises(HistoryError, match=r"no \*\.jsonl and no"):
        read([tmp_path])
    ended(journal, recording)
    assert [path.name for path in tmp_path.iterdir()] == [hidden.name[1:].removesuffix(".tmp")]


def test_two_runs_of_one_member_share_no_file(tmp_path: Path) -> None:
    both = [opened(tmp_path), opened(tmp_path)]
    for journal, recording in both:
        ended(journal, recording)
    assert len(files(tmp_path)) == 2
    journal, _ = both[0]
    with pytest.raises(ConfigError, match="one Journal per run"):
        journal._open("m-1", "")


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"journal directory .*file.*: "):
        opened(tmp_path / "file")
    gone = tmp_path / "gone"
    journal = journal_module.Journal(gone)
    recording = journal_module.recorder(None, journal)
    assert recording is not None
    gone.rmdir()
    with pytest.raises(ConfigError, match=r"journal directory .*gone': No such file"):
        recording.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=1.0)
    assert journal.join(0)


@pytest.mark.parametrize("method", ["add", "publish"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_failed_file_is_given_up_and_counted(
    method: str, times: int, tmp_path: Path, break_disk: Break, caplog: pytest.LogCaptureFixture
) -> None:
    journal, recording = opened(tmp_path, rotate_after=0.001)
    reach(lambda: journal.files == 1)
    break_disk(method, times)
    position = 0

    def failed() -> bool:
        nonlocal position
        position += 1
        handled(recording, position)
        return "works again" in caplog.text

    reach(failed)
    ended(journal, recording)
    made = rows(tmp_path)
    assert_counted(made)
    assert [made[0]["event"], made[-1]["event"]] == ["begin", "end"]
    assert sum(row["count"] for row in made if row["event"] == "dropped") == journal.dropped > 0
    assert [record.levelno for record in caplog.records if record.name == "lanes.journal"] == [logging.WARNING] * 2
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.glob(".*"))
    (one,) = read([tmp_path])
    assert [gap.why for gap in one.gaps] and not one.crashed
    assert statuses(tmp_path) >= {"unproven"}
    assert "violated" not in statuses(tmp_path)


def test_the_begin_row_of_a_journal_is_written_again_until_it_is_stored(tmp_path: Path, break_disk: Break) -> None:
    break_disk("publish", 1)
    journal, recording = opened(tmp_path, rotate_after=0.001)
    recording.started(message(1), 2.0)
    ended(journal, recording)
    made = rows(tmp_path)
    assert made[0]["event"] == "begin"
    assert_counted(made)


def test_one_missing_row_of_a_journal_is_a_gap(tmp_path: Path, break_disk: Break) -> None:
    journal, recording = opened(tmp_path, rotate_after=0.001)
    reach(lambda: journal.files == 1)
    break_disk("add", 1)
    recording.started(message(1), 2.0)
    reach(lambda: journal.dropped == 1)
    recording.started(message(2), 2.0)
    ended(journal, recording)
    assert [(row["n"], row["event"], row.get("count")) for row in rows(tmp_path)[1:3]] == [
        (2, "dropped", 1),
        (3, "started", None),
    ]
    (one,) = read([tmp_path])
    assert [gap.why for gap in one.gaps] == ["rows are missing"]


def test_a_missing_directory_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "journal"
    journal, recording = opened(directory, rotate_after=0.001)
    reach(lambda: journal.files == 1)
    shutil.rmtree(directory)
    recording.started(message(1), 2.0)
    reach(lambda: journal.dropped == 1)
    directory.mkdir()
    recording.started(message(2), 2.0)
    ended(journal, recording)
    # The first file was deleted with the directory, and with it the row `begin`.
    assert [row["event"] for row in rows(directory)] == ["dropped", "started", "end"]
    assert len([record for record in caplog.records if record.name == "lanes.journal"]) == 2


def test_a_disk_that_keeps_failing_looks_like_a_crash(tmp_path: Path, break_disk: Break) -> None:
    journal, recording = opened(tmp_path, rotate_after=0.001)
    reach(lambda: journal.files == 1)
    break_disk("publish", 1_000)
    recording.started(message(1), 2.0)
    ended(journal, recording)
    assert journal.dropped == 2
    (one,) = read([tmp_path])
    assert one.crashed
    assert [gap.why for gap in one.gaps] == ["the last rows are missing: the process died, or could not write them"]


def test_a_row_that_does_not_fit_is_dropped_in_its_place(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BUFFER_LIMIT", 5_000)
    journal, recording = opened(tmp_path)
    for position in range(20_000):
        recording.started(message(position), 2.0)
    assert len(buffer_of(journal).rows) <= 5_001
    assert journal.dropped > 5_000
    gate.set()
    reach(lambda: not buffer_of(journal).rows)
    recording.started(message(20_000), 3.0)
    ended(journal, recording)
    made = rows(tmp_path)
    assert_counted(made)
    # The thread may have taken its rows before or after the first one.
    assert 1 <= [row["event"] for row in made].count("dropped") <= 2
    assert sum(row.get("count", 0) for row in made) == journal.dropped
    assert [row["event"] for row in made[-2:]] == ["started", "end"]


def test_a_journal_that_is_full_still_has_its_end_row(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "BUFFER_LIMIT_BYTES", 1_000)
    journal, recording = opened(tmp_path)
    for position in range(10):
        recording.started(message(position), 2.0)
        recording.flush()
    assert journal.dropped > 0
    recording.close("drained", 3.0)
    gate.set()
    assert journal.join(WAIT)
    made = rows(tmp_path)
    assert_counted(made)
    assert made[-1]["event"] == "end"


def test_rows_after_the_end_are_dropped(tmp_path: Path, gate: threading.Event) -> None:
    journal, recording = opened(tmp_path)
    recording.started(message(1), 2.0)
    recording.close("drained", 9.0)
    recording.started(message(2), 2.0)
    recording.flush()
    recording.close("drained", 9.0)
    gate.set()
    assert journal.join(WAIT)
    assert [row["event"] for row in rows(tmp_path)] == ["begin", "started", "end"]


PRELUDE = """
import resource, signal, sys
from pathlib import Path
from lanes.history.journal import buffer_of
from tests.memsource.checkers.journals import handled, held_disk, message, opened, reach
directory = Path(sys.argv[1])
"""


@pytest.mark.process
def test_kill_9_leaves_whole_files_and_no_end(tmp_path: Path) -> None:
    child = run_child(
        PRELUDE,
        """
        journal, recording = opened(directory, rotate_after=0.001)
        for position in range(2_000):
            handled(recording, position)
        reach(lambda: journal.files)
        journal._writer._rotate_after = 1e9
        reach(lambda: not buffer_of(journal).rows)
        handled(recording, 2_000)
        signal.raise_signal(signal.SIGKILL)
        """,
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    (one,) = read([tmp_path])
    assert one.crashed
    assert [gap.why for gap in one.gaps] == ["the last rows are missing: the process died, or could not write them"]
    assert "violated" not in statuses(tmp_path)


@pytest.mark.process
def test_a_journal_beyond_a_file_size_limit_counts_its_dropped_rows(tmp_path: Path) -> None:
    child = run_child(
        PRELUDE,
        """
        import logging
        logging.basicConfig(format="%(message)s")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal, recording = opened(directory, rotate_after=0.001)
        reach(lambda: journal.files == 1)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        for position in range(100):
            recording.started(message(position), 2.0)
        reach(lambda: journal.dropped >= 100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        recording.started(message(100), 2.0)
        recording.close("drained", 9.0)
        assert journal.join(30)
        print(journal.dropped)
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    assert child.stderr.count("writing failed (") == child.stderr.count("works again") == 1
    assert "Traceback" not in child.stderr and "Exception ignored" not in child.stderr
    made = rows(tmp_path)
    assert_counted(made)
    assert [row["event"] for row in made] == ["begin", "dropped", "started", "end"]
    assert int(child.stdout) == made[1]["count"] == 100


def line(number: int) -> str:
    return f'{{"n":{number},"event":"started","member":"m","mono":1.000000,"wall":1.000}}\n'


@given(
    st.integers(1, 6),
    st.integers(60, 2_000),
    st.lists(st.one_of(st.sampled_from(["add", "take", "look"]), st.integers(1, 4)), max_size=40),
)
def test_every_row_number_is_written_or_counted(limit: int, size: int, steps: list[str | int]) -> None:
    buffer = RowBuffer(limit, size)
    number, taken = 0, list[str]()
    for step in steps:
        if step == "take":
            taken += buffer.take()
        elif step == "add":
            number += 1
            buffer.rows.append(line(number))
            buffer.added(len(line(number)))
        elif step == "look":
            buffer.added(0)
        else:
            assert isinstance(step, int)
            buffer.put([line(number + more) for more in range(1, step + 1)])
            number += step
        # A full buffer has a marker at its end, and one put may exceed the limit.
        assert len(buffer.rows) <= limit + 5
    while rest := buffer.take():
        taken += rest
    made = [json.loads(text) for text in taken]
    assert_counted(made)
    assert (made[-1]["n"] if made else 0) == number
    assert sum(row["count"] for row in made if row["event"] == "dropped") == buffer.dropped
