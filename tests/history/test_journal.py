"""A history and its journal have the same rows, so checkers find the same in both."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.history import lines, real_lines
from lanes.core.ring import slot
from lanes.errors import ConfigError
from lanes.history.columns import RUN, SCHEMA_VERSION, VERSION, row_tables
from lanes.history.journal import Journal, buffer_of
from lanes.history.recorder import History, recorder_of
from memsource import HistoryError, Segment, check, check_files, read
from memsource.history.journal import JournalError, convert
from tests.effort import runs
from tests.memsource.checkers.journals import ended, files, message, opened, reach, rows, table
from tests.memsource.checkers.journals import handled as handled_now
from tests.memsource.checkers.rows import delivered, encoded, handled, segment, started
from tests.memsource.checkers.worlds import history_of

KEYS = [b"", b"a", b"customer-42", "ä".encode(), b"\xff" * 300, None]


def told(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """A segment without its file names. A torn line at the end may not be counted among the broken lines."""
    result = []
    for one in segments:
        fields = {**dataclasses.asdict(one), "file": ""}
        fields["gaps"] = [re.sub("no rows: .*", "no rows", gap.why) for gap in one.gaps]
        result.append(fields)
    return result


def found(segments: Sequence[Segment]) -> list[tuple[object, ...]]:
    """The findings with their texts, without the names of files."""
    return [(one.name, one.status, one.checked, one.violations, one.note) for one in check(segments)]


def both_ways(data: bytes, folder: Path) -> tuple[list[Segment] | None, list[Segment] | None]:
    """The segments of these bytes read as a history and as a journal; None for no segment."""
    history = folder / "h.jsonl"
    history.write_bytes(data)
    try:
        first = read([history])
    except HistoryError:
        with pytest.raises((HistoryError, JournalError), match="no history"):
            read(convert([history], folder / "journal"))
        return None, None
    return first, read(convert([history], folder / "journal"))


@pytest.mark.parametrize("data", [b"".join(real_lines()), history_of(1)[:300_000]], ids=["every row", "a world"])
def test_a_history_that_becomes_a_journal_and_back_is_equal_byte_for_byte(data: bytes) -> None:
    given = data.decode().splitlines(keepends=True)
    whole = [line for line in given if line.endswith("}\n")]
    tables = row_tables()
    assert list(tables.lines(tables.table(whole, "r"))) == whole


_WRITES = """
import sys
from lanes.history.columns import row_tables
tables = row_tables()
table = tables.table([line + "\\n" for line in sys.stdin.read().splitlines()], "run")
print(table.num_rows, "pyarrow" in sys.modules, "pandas" in sys.modules)
"""


@pytest.mark.process
def test_a_journal_does_not_import_pandas() -> None:
    """The import would take a third of a second and many megabytes in each process with a journal."""
    rows = [line for line in b"".join(real_lines()).decode().splitlines() if line.endswith("}")]
    done = subprocess.run(
        [sys.executable, "-c", _WRITES], input="\n".join(rows), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{len(rows)} True False\n"


@pytest.mark.long
@settings(max_examples=runs(50))
@given(
    st.one_of(
        st.lists(lines(), max_size=30).map(b"".join),
        st.builds(
            lambda place, line: b"".join((*real_lines()[:place], line, *real_lines()[place:])),
            st.integers(0, len(real_lines())),
            lines(),
        ),
    )
)
def test_a_history_and_its_journal_have_the_same_rows(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    first, second = both_ways(data, tmp_path_factory.mktemp("both"))
    if first is not None and second is not None:
        assert told(first) == told(second)
        assert found(first) == found(second)


@pytest.mark.parametrize("seed", range(3))
def test_histories_and_journals_of_crashed_runs_have_the_same_rows(seed: int, tmp_path: Path) -> None:
    first, second = both_ways(history_of(seed), tmp_path)
    assert first is not None and second is not None
    assert told(first) == told(second)
    assert found(first) == found(second)


def test_checkers_find_the_same_in_a_history_and_its_journal(tmp_path: Path) -> None:
    wrong = segment(delivered(1), delivered(2), started(2), started(1), handled(3))
    first, second = both_ways(encoded(wrong), tmp_path)
    assert first is not None and second is not None
    assert "violated" in {status for _, status, *_ in found(first)}
    assert found(first) == found(second)
    assert check_files([tmp_path / "journal"]).status == check_files([tmp_path / "h.jsonl"]).status == 1


def test_a_history_converted_twice_is_read_once(tmp_path: Path) -> None:
    data = encoded(segment(handled(1)), segment(handled(2), pid=2))
    first, _ = both_ways(data, tmp_path)
    (made,) = files(tmp_path / "journal")
    assert convert([tmp_path / "h.jsonl"], tmp_path / "journal") == [made]
    assert first is not None
    # Also if the history is in the same folder.
    assert told(read([tmp_path / "journal", tmp_path / "h.jsonl"])) == told(first)
    assert len(set(table(made).column("run").to_pylist())) == 2


def test_every_field_has_its_column(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path)
    for position, key in enumerate(KEYS):
        recording.delivered([message(position, key)], 2.0)
        recording.started(message(position, key), 2.5)
        recording.ended(message(position, key), "error", 3.0, KeyError("secret"))
        recording.retry(message(position, key), 0.25, 3.0)
    ended(journal, recording)
    (path,) = files(tmp_path)
    assert re.fullmatch(rf"m-1-{journal.run}-\d{{6}}\.parquet", path.name)
    assert path.stat().st_mode & 0o777 == 0o600
    whole = table(path)
    metadata = whole.schema.metadata
    assert (metadata[VERSION], metadata[RUN]) == (str(SCHEMA_VERSION).encode(), journal.run.encode())
    made = whole.to_pylist()
    assert [row["n"] for row in made] == list(range(1, len(made) + 1))
    assert {(row["run"], row["member"]) for row in made} == {(journal.run, "m-1")}
    begin, *between, end = made
    assert json.loads(begin["detail"])["max_in_flight"] == 9
    assert (end["event"], end["reason"]) == ("end", "drained")
    assert [row["event"] for row in between[:4]] == ["delivered", "started", "ended", "retry"]
    assert [row["slot"] for row in between[::4]] == [None if key is None else slot(key) for key in KEYS]
    assert [row["position"] for row in between[::4]] == list(range(len(KEYS)))
    first, start, failed, retry = between[:4]
    assert (first["partition"], first["assignment"], first["size"], first["attempt"]) == ("S/0", 0, 10, 1)
    assert (start["mono"], failed["result"], failed["error"], retry["delay"]) == (2.5, "error", "KeyError", 0.25)
    assert all(row["detail"] is None for row in between)


def test_a_journal_has_no_keys_and_no_error_texts(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path)
    recording.delivered([message(1, b"the-key-itself")], 2.0)
    recording.ended(message(1, b"the-key-itself"), "error", 3.0, ValueError("the-text-itself"))
    recording.unblocked(b"the-key-itself", 1, 3.0)
    ended(journal, recording)
    said = str(table(files(tmp_path)[0]).to_pylist())
    assert "ValueError" in said
    assert "itself" not in said


def test_a_journal_beside_a_history_has_its_rows(tmp_path: Path) -> None:
    history = History(tmp_path, member="m-9")
    journal, recording = opened(tmp_path, history=history)
    assert recording is recorder_of(history)
    for position in range(100):
        recording.delivered([message(position)], 2.0)
        recording.started(message(position), 2.5)
        recording.flush()
    ended(journal, recording)
    assert history.path is not None
    written = [json.loads(line) for line in history.path.read_text().splitlines()]
    assert rows(tmp_path) == [{**written[0], "incomplete": 1}, *written[1:]]
    (one,) = read([tmp_path])
    assert (one.member, len(one.rows), one.gaps) == ("m-9", len(written), [])


def test_of_a_history_and_a_journal_of_one_run_the_more_complete_one_counts(tmp_path: Path) -> None:
    history = History(tmp_path / "history", member="m-9")
    journal, recording = opened(tmp_path / "journal", history=history, rotate_after=0.001)
    handled_now(recording, 1)
    recording.flush()
    reach(lambda: journal.files and any(row["event"] == "ack" for row in rows(tmp_path / "journal")))
    # The run continues, and the journal may never get the remaining rows.
    (late,) = read([tmp_path / "journal"])
    assert (late.crashed, len(late.gaps)) == (True, 1)
    (one,) = read([tmp_path / "journal", tmp_path / "history"])
    assert (one.file, one.gaps) == (str(history.path), [])
    ended(journal, recording)


def test_rows_that_only_the_journal_has_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(tmp_path / "history", member="m-9")
    journal, recording = opened(tmp_path / "journal", history=history)
    write, left = os.write, [2]

    def full(fd: int, data: bytes) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr("lanes.history.writer.os.write", full)
    for position in range(4):
        handled_now(recording, position)
        recording.flush()
    ended(journal, recording)
    assert history.dropped > 0
    (one,) = read([tmp_path / "journal"])
    assert (one.crashed, one.gaps) == (False, [])
    assert sum(row.event == "ack" for row in one.rows) == 4
    (lacking,) = read([tmp_path / "history"])
    assert lacking.gaps
    (best,) = read([tmp_path / "history", tmp_path / "journal"])
    assert best.gaps == []


def damaged(directory: Path, how: str) -> Path:
    (path,) = convert([directory / "h.jsonl"], directory / "journal")
    parquet = import_module("pyarrow.parquet")
    whole = parquet.read_table(path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "no parquet":
        path.write_bytes(b"PAR1 but not really")
    elif how == "of nobody":
        parquet.write_table(whole.replace_schema_metadata(None), path)
    elif how == "of tomorrow":
        parquet.write_table(whole.replace_schema_metadata({VERSION: str(SCHEMA_VERSION + 1).encode(), RUN: b"r"}), path)
    elif how == "of yesterday":
        parquet.write_table(whole.replace_schema_metadata({VERSION: str(SCHEMA_VERSION - 1).encode(), RUN: b"r"}), path)
    elif how == "without a column":
        parquet.write_table(whole.drop_columns(["position"]), path)
    elif how == "of another type":
        index = whole.column_names.index("position")
        changed = whole.set_column(index, "position", whole.column("position").cast("string"))
        parquet.write_table(changed, path)
    return path


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "cannot be read as Parquet: .*damaged or copied in part"),
        ("no parquet", "cannot be read as Parquet"),
        ("of nobody", "not a journal of lanes"),
        ("of tomorrow", f"its schema is {SCHEMA_VERSION + 1}, .* reads schemas up to {SCHEMA_VERSION}; upgrade"),
        ("of yesterday", f"its schema {SCHEMA_VERSION - 1} is too old for this version of lanes; check"),
        ("without a column", "no column position of type int64"),
        ("of another type", "no column position of type int64"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_with_one_error(how: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "h.jsonl").write_bytes(encoded(segment(handled(1))))
    path = damaged(tmp_path, how)
    with pytest.raises(HistoryError, match=rf"^{re.escape(str(path))}: .*{said}"):
        read([path])
    checked = check_files([tmp_path / "journal"])
    assert (checked.status, checked.verdicts) == (3, [])


@settings(max_examples=runs(30))
@given(st.data())
def test_changed_bytes_are_noticed_or_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, journal_bytes: tuple[bytes, list[Any]], data: st.DataObject
) -> None:
    whole, said = journal_bytes
    changed = bytearray(whole)
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
        changed[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "j.parquet"
    path.write_bytes(bytes(changed))
    try:
        found = [one.rows for one in read([path])]
    except HistoryError:
        return
    assert found == said


@pytest.fixture(scope="module")
def journal_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """A journal with every kind of row, and its rows as they are read."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "h.jsonl").write_bytes(b"".join(real_lines()))
    (path,) = convert([folder / "h.jsonl"], folder)
    return path.read_bytes(), [one.rows for one in read([path])]


def test_a_repr_shows_counts(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path)
    recording.started(message(1, b"the-key-itself"), 2.0)
    recording.flush()
    assert repr(journal) == "<Journal m-1 opened: 0 files, 0 rows dropped>"
    ended(journal, recording)
    assert repr(journal) == "<Journal m-1 opened: 1 files, 0 rows dropped>"
    assert re.fullmatch(r"<RowBuffer: 0 rows, 0 bytes, 0 dropped>", repr(buffer_of(journal)))
    assert repr(row_tables()) == "<RowTables of 29 columns>"


def test_a_missing_file_is_a_gap(tmp_path: Path) -> None:
    journal, recording = opened(tmp_path, rotate_bytes=1)
    for position in range(9_000):
        recording.started(message(position), 2.0)
    ended(journal, recording)
    first, *_, last = files(tmp_path)
    assert first != last
    (whole,) = read([tmp_path])
    assert (whole.crashed, whole.gaps) == (False, [])
    first.unlink()
    (one,) = read([tmp_path])
    assert "no begin row" in one.gaps[0].why


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"member": "../m"}, "member='../m'"),
        ({"rotate_after": 0}, "rotate_after=0"),
        ({"rotate_after": float("inf")}, "rotate_after=inf"),
        ({"rotate_after": True}, "rotate_after=True"),
        ({"rotate_bytes": 0}, "rotate_bytes=0"),
        ({"rotate_bytes": 1.5}, "rotate_bytes=1.5"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Journal(tmp_path, **options)


def test_two_names_of_one_process_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Journal\.member='a' is not History\.member='b'"):
        opened(tmp_path, history=History(tmp_path, member="b"), member="a")


@pytest.mark.process
def test_a_journal_without_pyarrow_names_the_package(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pyarrow"] = None
from lanes.errors import ConfigError
from lanes.history.journal import Journal
from memsource import check_files
try:
    Journal(sys.argv[1])
except ConfigError as error:
    print(error)
open(sys.argv[1] + "/a.parquet", "wb").close()
print(check_files([sys.argv[1]]).text)
"""
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert child.stdout.count("pip install '.[journal]' in the checkout of lanes, or leave journal=… out") == 2


@pytest.mark.process
def test_pyarrow_is_imported_for_a_journal_only() -> None:
    code = (
        "import sys, lanes, lanes.history.journal; assert 'importlib.metadata' not in sys.modules, 'it takes long'\n"
        "import memsource.checkers.report; assert 'pyarrow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
