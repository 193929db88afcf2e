"""On a full disk, a history raises no error, counts the missing rows, and keeps its lines whole."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.history.recorder import Recorder
from memsource import read
from tests.history.children import run_child
from tests.history.test_writer import NOW, message, opened
from tests.memsource.checkers.rows import rows_of

ROOT = Path(__file__).parents[2]

Write = Callable[[int, bytes], int]
Plan = Callable[[list[int | None]], None]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Limits the bytes of the next writes; None: a write fails. Later writes succeed."""
    return lambda limits: break_writes(monkeypatch, limits)


def break_writes(monkeypatch: pytest.MonkeyPatch, limits: list[int | None]) -> None:
    write: Write = os.write
    left = list(limits)

    def limited(fd: int, data: bytes) -> int:
        if not left:
            return write(fd, data)
        limit = left.pop(0)
        if limit is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:limit])

    monkeypatch.setattr(os, "write", limited)


def test_a_failed_write_drops_and_counts_its_rows(tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture) -> None:
    history = opened(tmp_path)
    history.started(message(1), NOW)
    history.flush()
    plan([None])
    numbers = [history.started(message(position), NOW) for position in (2, 3, 4)]
    history.flush()
    assert (history.dropped, history.written) == (3, numbers[-1])
    after = history.started(message(5), NOW)
    history.flush()
    assert (history.dropped, history.written) == (3, after)
    history.close("drained", NOW)
    assert history.path is not None
    rows = rows_of(history.path)
    assert [(row["n"], row["event"]) for row in rows] == [
        (1, "begin"),
        (2, "started"),
        (6, "dropped"),
        (7, "started"),
        (8, "end"),
    ]
    assert rows[2]["count"] == 3
    warnings = [record for record in caplog.records if record.name == "lanes.history"]
    assert [record.levelno for record in warnings] == [logging.WARNING] * 2
    assert "No space left on device" in warnings[0].getMessage()
    assert "works again" in warnings[1].getMessage()


def test_a_line_that_was_written_in_part_is_completed_by_the_next_write(tmp_path: Path, plan: Plan) -> None:
    history = opened(tmp_path)
    first, second = history.started(message(1), NOW), history.started(message(2), NOW)
    plan([-30])  # the second line lacks its last 30 bytes
    history.flush()
    assert history.written == second
    assert history.dropped == 0
    assert history.path is not None
    assert not history.path.read_bytes().endswith(b"\n")
    third = history.started(message(3), NOW)
    history.flush()
    rows = rows_of(history.path)
    assert [row["n"] for row in rows] == [1, first, second, third]
    assert [row["position"] for row in rows[1:]] == [1, 2, 3]
    assert rows[0]["incomplete"] == 0


def test_a_torn_line_comes_before_the_count_and_new_rows(tmp_path: Path, plan: Plan) -> None:
    history = opened(tmp_path)
    for position in (1, 2, 3):
        history.started(message(position), NOW)
    plan([50])
    history.flush()
    history.started(message(4), NOW)
    history.flush()
    assert history.path is not None
    rows = rows_of(history.path)
    assert [(row["n"], row["event"]) for row in rows] == [
        (1, "begin"),
        (2, "started"),
        (5, "dropped"),
        (6, "started"),
    ]
    assert rows[2]["count"] == 2


def test_a_lasting_failure_is_one_warning_and_one_row(
    tmp_path: Path, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    history = opened(tmp_path)
    plan([None] * 20)
    for position in range(10):
        history.started(message(position), NOW)
        history.flush()
        history.flush()
    assert len(caplog.records) == 1
    history.close("drained", NOW)
    assert history.path is not None
    rows = rows_of(history.path)
    assert [row["event"] for row in rows] == ["begin", "dropped", "end"]
    assert rows[1]["count"] == history.dropped == rows[1]["n"] - 2
    assert len(caplog.records) == 2


def test_a_begin_row_is_never_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for taken in (None, 0, 40, -1, -2, -3, -4):
        with monkeypatch.context() as patch:
            break_writes(patch, [taken, None])
            history = opened(tmp_path)
            history.started(message(1), NOW)
            history.flush()
            assert history.dropped == 1
            history.started(message(2), NOW)
            history.close("drained", NOW)
        assert history.path is not None
        rows = rows_of(history.path)
        assert [row["event"] for row in rows] == ["begin", "dropped", "started", "end"]
        assert rows[0]["incomplete"] == 0


@pytest.mark.parametrize("windows", [False, True])
def test_a_process_that_dies_with_a_full_disk_leaves_an_incomplete_history(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    if windows:
        monkeypatch.setattr("lanes.history.writer._IS_POSIX", False)
    history = opened(tmp_path)
    history.started(message(1), NOW)
    history.flush()
    plan([None])
    history.started(message(2), NOW)
    history.flush()
    (segment,) = read([tmp_path])
    assert segment.crashed
    (gap,) = segment.gaps
    assert "the process died, or could not write them" in gap.why
    # After the row that counts the missing rows, a crash looks like any other crash.
    history.started(message(3), NOW)
    history.flush()
    (segment,) = read([tmp_path])
    assert [gap.why for gap in segment.gaps] == ["rows 3…3 are missing"]


def test_a_disk_that_stays_full_leaves_an_incomplete_history(tmp_path: Path, plan: Plan) -> None:
    history = opened(tmp_path)
    plan([None] * 9)
    history.started(message(1), NOW)
    history.close("drained", NOW)
    (segment,) = read([tmp_path])
    assert segment.crashed
    assert segment.gaps


# Small enough to fall into the middle of lines, and of the begin row.
_LIMITS = st.lists(st.one_of(st.none(), st.integers(0, 900)), max_size=12)
_BATCHES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(_LIMITS, _BATCHES)
def test_lines_stay_whole_and_rows_are_counted_under_any_failure(
    tmp_path_factory: pytest.TempPathFactory, limits: list[int | None], batches: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        break_writes(patch, limits)
        history = opened(tmp_path_factory.mktemp("history"))
        last = 1
        for batch in batches:
            for position in range(batch):
                last = history.started(message(position), NOW)
            history.flush()
            assert history.written >= last
    history.close("drained", NOW)
    assert history.path is not None
    rows = rows_of(history.path)
    numbers = [row["n"] for row in rows]
    assert [row["event"] for row in (rows[0], rows[-1])] == ["begin", "end"]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == len(numbers) + history.dropped
    assert sum(row["count"] for row in rows if row["event"] == "dropped") == history.dropped
    missing = 0
    for before, row in pairwise(rows):
        missing += row["n"] - before["n"] - 1
        if row["event"] == "dropped":
            assert row["count"] == missing
            missing = 0
    assert missing == 0
    (segment,) = read([history.path])
    assert bool(segment.gaps) == bool(history.dropped)


PRELUDE = """
import resource, signal, sys, time
from lanes.core.types import Message, Partition, PartitionId
from lanes.history.recorder import Recorder

partition = Partition(PartitionId("S", 0), None)
history = Recorder(sys.argv[1], member="child")
history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=1.0)

def started(position):
    return history.started(Message(partition, position, b"k", 1, None, None), 2.0)
"""


@pytest.mark.process
def test_rows_beyond_a_file_size_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    """The kernel writes up to the limit, then fails with EFBIG until the limit is lifted."""
    child = run_child(
        PRELUDE,
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        for position in range(200):
            started(position)
            history.flush()
        size = history.path.stat().st_size
        dropped = history.dropped
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        n = started(200)
        history.flush()
        assert history.written == n
        history.close("drained", 3.0)
        print(size, dropped, history.dropped)
        """,
        tmp_path,
    )
    assert child.returncode == 0, child.stderr
    size, dropped, dropped_in_all = map(int, child.stdout.split())
    assert size == 10_000
    assert dropped == dropped_in_all > 0
    assert child.stderr.count("File too large") + child.stderr.count("short write") == 1
    (path,) = tmp_path.glob("*.jsonl")
    rows = rows_of(path)
    assert [row["event"] for row in rows[-3:]] == ["dropped", "started", "end"]
    assert rows[-3]["count"] == dropped == rows[-1]["n"] - len(rows)
    (segment,) = read([tmp_path])
    assert (segment.reason, len(segment.gaps)) == ("drained", 1)


@pytest.mark.process
def test_a_disk_that_is_full_until_the_process_dies_leaves_whole_lines(tmp_path: Path) -> None:
    child = run_child(
        PRELUDE,
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))
        for position in range(100):
            started(position)
            history.flush()
        signal.raise_signal(signal.SIGKILL)
        """,
        tmp_path,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    (segment,) = read([tmp_path])
    assert segment.crashed
    assert [gap.why for gap in segment.gaps] == ["the last rows are missing: the process died, or could not write them"]


@pytest.mark.process
def test_flushed_rows_survive_kill_9_and_buffered_ones_do_not(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PRELUDE
            + textwrap.dedent(
                """
                for position in range(1000):
                    started(position)
                history.flush()
                for position in range(1000, 1100):
                    started(position)
                print("ready", flush=True)
                sys.stdin.read()
                """
            ),
            str(tmp_path),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
    (segment,) = read([tmp_path])
    assert segment.crashed
    assert not segment.gaps
    assert [row.position for row in segment.rows if row.event == "started"] == list(range(1000))


def test_a_closed_descriptor_is_a_failure_like_any_other(tmp_path: Path) -> None:
    history: Recorder = opened(tmp_path)
    assert history._file is not None
    os.close(history._file._fd)
    history.started(message(1), NOW)
    history.flush()
    assert history.dropped == 1
    history.close("drained", NOW)
