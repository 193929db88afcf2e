"""The reader reads complete files, torn files and files with gaps, and refuses other formats."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes.history.recorder import Recorder
from lanes.history.rules import Rules
from lanes.history.writer import FORMAT
from memsource import HistoryError, Row, Segment, check, check_files, counts, read, read_bytes
from memsource.history.reader import LINE_LIMIT
from tests.memsource.checkers.rows import (
    RULES,
    Fields,
    delivered,
    encoded,
    ended,
    handled,
    key_hash,
    message,
    owned,
    parsed,
    segment,
    started,
)

SEGMENT = segment(delivered(1), started(1), ended(1))


def events(segment: Segment) -> list[str]:
    return [row.event for row in segment.rows]


def test_a_segment_takes_its_settings_from_the_begin_row() -> None:
    (one,) = parsed(segment(delivered(3, size=7), boot="b", member="m-9", pid=4, max_in_flight=5, end="stopped"))
    assert (one.member, one.pid, one.boot, one.source, one.concurrency) == ("m-9", 4, "b", "S", 10)
    assert (one.max_in_flight, one.max_in_flight_bytes, one.reason, one.crashed) == (5, 1000, "stopped", False)
    row = one.rows[1]
    assert (row.partition, row.assignment, row.position, row.attempt, row.number) == ("S/0", 1, 3, 1, 7)
    assert (one.wall_first, one.wall_last) == (1e9 + 100.0, 1e9 + 100.002)


def test_settings_missing_from_the_begin_row_are_unknown() -> None:
    (old,) = parsed(segment(delivered(1), rules=None))
    assert old.rules == Rules()
    (one,) = parsed(segment(delivered(1), rules={"grace": 0.5}))
    assert asdict(one.rules) == {**RULES, "grace": 0.5}


@pytest.mark.parametrize(
    "wrong", [{"order": 1}, {"order": "x" * 300}, {"lanes": True}, {"grace": -1}, {"grace": "1"}, {"hands_over": 1}]
)
def test_a_begin_row_with_impossible_settings_is_a_gap(wrong: dict[str, object]) -> None:
    (one,) = parsed(segment(delivered(1), rules=wrong))
    assert (one.rules, one.max_in_flight) == (Rules(), None)
    assert len(one.gaps) == 1


def test_rows_of_rare_events_are_read() -> None:
    key = key_hash("k")
    (one,) = parsed(
        segment(
            {"event": "unblocked", "key": key, "count": 2},
            owned("extended", runs=[[1, 3], [7, 7]]),
            owned("ahead_reached"),
            message("ahead_reached", 4),
            message("retry", 4, delay=1.5, asked=1),
            owned("revoking", timeout=2.5),
            owned("hastened", timeout=0),
            owned("revoking"),
            {"event": "paused", "in_flight": 3, "bytes": 77},
        )
    )
    unblocked, extended, nobody, reached, retry, revoking, hastened, unsaid, paused = one.rows[1:-1]
    assert (unblocked.key, unblocked.number) == (key, 2)
    assert extended.runs == ((1, 3), (7, 7))
    assert (nobody.position, reached.position, reached.key) == (-1, 4, key)
    assert (retry.number, retry.text) == (1.5, "asked")
    assert (revoking.number, hastened.number, unsaid.number) == (2.5, 0, -1)
    assert (paused.number, paused.bytes) == (3, 77)


@pytest.mark.parametrize(
    "wrong",
    [
        owned("extended"),
        owned("extended", runs={}),
        owned("extended", runs=[1]),
        owned("extended", runs=[[2, 1]]),
        owned("extended", runs=[[1, 2], [2, 3]]),
        owned("extended", runs=[[-1, 2]]),
        owned("ahead_reached", position=-1, key=None),
        owned("ahead_reached", position=1, key="no hash"),
        owned("revoking", timeout=-1),
        {"event": "unblocked", "key": None, "count": -1},
        {"event": "unblocked", "count": 1},
        {"event": "paused", "in_flight": 1, "bytes": "1"},
    ],
)
def test_an_impossible_rare_row_is_a_gap(wrong: Fields) -> None:
    (one,) = parsed(segment(wrong, delivered(1)))
    assert events(one) == ["begin", "gap", "delivered", "end"]


def test_a_segment_without_an_end_is_a_crash_and_no_gap() -> None:
    (one,) = parsed(segment(delivered(1), end=None))
    assert one.crashed
    assert not one.gaps
    assert repr(one) == "<Segment m-1 pid 1: 2 rows, 0 gaps, crashed>"


def test_every_prefix_of_a_file_is_a_crash_and_no_gap() -> None:
    data = encoded(SEGMENT)
    whole = parsed(SEGMENT)[0].rows
    first = data.index(b"\n")
    for length in range(first, len(data)):
        (one,) = read_bytes(data[:length])
        assert not one.gaps
        assert one.rows == whole[: len(one.rows)]
        # A line that lacks only its newline is whole.
        assert len(one.rows) == (data[: length + 1] + b"x").count(b"\n")


def test_a_file_holds_several_segments_and_torn_lines_between_them() -> None:
    torn = encoded(segment(delivered(1), end=None, pid=1))[:-20]
    whole = encoded(segment(delivered(2), pid=2))
    other = encoded(segment(delivered(3), end=None, pid=3))[:-20]
    for joined in (torn + whole, torn + b"\n" + whole, whole + torn, torn + whole + other):
        found = read_bytes(joined)
        assert not any(one.gaps for one in found)
        assert len(found) == joined.count(b'"event":"begin"')


@pytest.mark.parametrize("garbage", [b"\n", b"  \r\n"])
def test_blank_lines_mean_nothing(garbage: bytes) -> None:
    assert not read_bytes(encoded(SEGMENT).replace(b"\n", b"\n" + garbage))[0].gaps


ROW = json.dumps(started(1) | {"n": 3, "member": "m-1", "mono": 1, "wall": 1}).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00\xff\xfe",
        b"{",
        b"null",
        b"3",
        b'"n"',
        b"[]",
        b"{}",
        b"[" * 100_000,
        b"9" * 10_000,
        b"{" + b" " * (2 * LINE_LIMIT) + b"}",
        ROW.replace(b'"n": 3', b'"n": true'),
        ROW.replace(b'"n": 3', b'"n": 0'),
        ROW.replace(b'"n": 3', b'"n": 1'),
        ROW.replace(b'"n": 3', b'"n": 3.0'),
        ROW.replace(b'"n": 3', b'"n": 1' + b"0" * 30),
        ROW.replace(b'"m-1"', b'"m-2"'),
        ROW.replace(b'"m-1"', b"[]"),
        ROW.replace(b'"mono": 1', b'"mono": NaN'),
        ROW.replace(b'"mono": 1', b'"mono": Infinity'),
        ROW.replace(b'"mono": 1', b'"mono": -1'),
        ROW.replace(b'"mono": 1', b'"mono": "1"'),
        ROW.replace(b'"mono": 1, ', b""),
        ROW.replace(b'"wall": 1', b'"wall": null'),
        ROW.replace(b'"started"', b"{}"),
        ROW.replace(b'"position": 1', b'"position": -1'),
        ROW.replace(b'"position": 1', b'"position": 1e3'),
        ROW.replace(b'"position": 1, ', b""),
        ROW.replace(b'"assignment": 1', b'"assignment": null'),
        ROW.replace(b'"S/0"', b'""'),
        ROW.replace(b'"S/0"', b"7"),
        ROW.replace(b'"attempt": 1', b'"attempt": []'),
        ROW.replace(b'"key": "', b'"key": "\\u001b'),
        ROW.replace(b'"key": "', b'"k": "'),
        ROW.replace(b'"started"', b'"ended"'),
        ROW.replace(b'"started"', b'"delivered"'),
        ROW.replace(b'"started"', b'"begin"'),
    ],
)
def test_garbage_in_the_middle_is_a_gap_at_its_line(garbage: bytes) -> None:
    lines = encoded(SEGMENT).splitlines(keepends=True)
    lines.insert(2, garbage + b"\n")
    (one,) = read_bytes(b"".join(lines), "file")
    assert events(one) == ["begin", "delivered", "gap", "started", "ended", "end"]
    assert [str(gap) for gap in one.gaps] == ["file:3: lines that are no rows: 1"]


def test_garbage_is_one_gap_however_much_of_it_there_is() -> None:
    lines = encoded(SEGMENT).splitlines(keepends=True)
    lines[2:2] = [b"garbage\n"] * 1000
    (one,) = read_bytes(b"".join(lines), "file")
    assert [str(gap) for gap in one.gaps] == ["file:3: lines that are no rows: 1000"]


@pytest.mark.parametrize("line", range(5))
def test_a_missing_line_is_a_gap(line: int) -> None:
    lines = encoded(SEGMENT).splitlines(keepends=True)
    del lines[line]
    found = read_bytes(b"".join(lines))
    if line == 4:
        assert found[0].crashed
        assert not found[0].gaps
        return
    (gap,) = found[0].gaps
    assert gap.line == line + 1
    assert gap.why == ("no begin row before row 2" if line == 0 else f"rows {line + 1}…{line + 1} are missing")
    assert found[0].max_in_flight == (None if line == 0 else 100)


def test_bad_rows_between_segments_count_for_both() -> None:
    first, second = segment(delivered(1), pid=1), segment(delivered(2), pid=2)
    found = read_bytes(encoded(first) + b"garbage\nmore\n" + encoded(second))
    assert [len(one.gaps) for one in found] == [1, 1]
    assert [events(one) for one in found] == [
        ["gap", "begin", "delivered", "end", "gap"],
        ["gap", "begin", "delivered", "end"],
    ]


def test_rows_after_the_end_are_a_gap() -> None:
    late = segment(delivered(1), end="drained")
    late.append({**delivered(2), "n": 4, "member": "m-1", "mono": 101.0, "wall": 1.0})
    (one,) = parsed(late)
    assert (one.reason, len(one.gaps)) == ("drained", 1)


def test_fields_of_later_versions_are_ignored() -> None:
    extended = segment(delivered(1), {"event": "teleported", "to": [1]}, started(1, colour="red"))
    (one,) = parsed(extended)
    assert not one.gaps
    assert events(one) == ["begin", "delivered", "started", "end"]


def test_a_newer_format_is_refused() -> None:
    newer = segment(delivered(1))
    newer[0]["format"] = FORMAT + 1
    with pytest.raises(HistoryError, match=rf"its format is {FORMAT + 1}.*upgrade"):
        parsed(newer)


@pytest.mark.parametrize("number", range(FORMAT))
def test_an_earlier_format_is_refused(number: int) -> None:
    """Rows of an earlier format have other fields, which would be ignored or taken for damage."""
    earlier = segment(delivered(1))
    earlier[0]["format"] = number
    with pytest.raises(HistoryError, match=rf"its format {number} is too old for this version of lanes"):
        parsed(segment(delivered(1)) + earlier)


@pytest.mark.parametrize("data", [b"", b"\n", b"no history", b"\x00" * 100, b"{}\n{}\n", b'{"n":1'])
def test_a_file_without_rows_is_an_error(data: bytes) -> None:
    with pytest.raises(HistoryError, match="no history"):
        read_bytes(data)


@given(st.binary())
@example(b"[" * 200_000)
@example(b'{"n":1,"event":"begin"' * 3)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        found = read_bytes(data)
    except HistoryError:
        return
    check(found)


@pytest.mark.long
@given(st.data())
def test_any_damage_is_read_or_refused(data: st.DataObject) -> None:
    damaged = bytearray(encoded(SEGMENT, segment(handled(1), handled(2, None), pid=2)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    try:
        found = read_bytes(bytes(damaged))
    except HistoryError:
        return
    check(found)
    counts(found)


def test_a_history_is_read_from_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(encoded(segment(delivered(2), pid=2)))
    (tmp_path / "a.jsonl").write_bytes(encoded(segment(delivered(1), pid=1)))
    (tmp_path / "ignored.txt").write_bytes(b"no history")
    assert [one.pid for one in read([tmp_path])] == [1, 2]
    assert [one.pid for one in read([tmp_path, tmp_path / "a.jsonl", os.fspath(tmp_path / "b.jsonl")])] == [1, 2]
    assert [one.file for one in read([tmp_path / "a.jsonl"])] == [str(tmp_path / "a.jsonl")]


def test_a_copy_of_a_segment_is_read_once(tmp_path: Path) -> None:
    one, two = encoded(segment(delivered(1), pid=1)), encoded(segment(delivered(2), pid=2))
    (tmp_path / "1.jsonl").write_bytes(one)
    (tmp_path / "2.jsonl").write_bytes(two)
    (tmp_path / "all.jsonl").write_bytes(one + two)
    (tmp_path / "begun.jsonl").write_bytes(one[: len(one) // 2])
    assert [segment.pid for segment in read([tmp_path])] == [1, 2]
    # Two segments of one process at the same virtual time with different rows are no copies.
    (tmp_path / "other.jsonl").write_bytes(encoded(segment(delivered(3), pid=1)))
    assert sorted(segment.pid for segment in read([tmp_path])) == [1, 1, 2]


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"nowhere: cannot be opened: No such file"):
        read([tmp_path / "nowhere"])
    with pytest.raises(HistoryError, match=r"no \*\.jsonl and no"):
        read([tmp_path])
    with pytest.raises(HistoryError, match="cannot be opened"):
        read(["\0"])
    with pytest.raises(HistoryError, match="no file: no history"):
        read([])
    (tmp_path / "empty.jsonl").write_bytes(b"")
    with pytest.raises(HistoryError, match="no history found"):
        read([tmp_path])
    with pytest.raises(TypeError, match="several paths"):
        read("file.jsonl")


def test_an_unreadable_history_is_status_3(tmp_path: Path) -> None:
    verdicts, text, status = check_files([tmp_path / "nowhere\n\x1b[2J"])
    assert (verdicts, status) == ([], 3)
    assert "cannot be opened" in text
    assert text.isprintable()


# Every row that the writer can write, in any order.
_NAMES = st.text(max_size=20)
_TIMES = st.floats(0, 1e9)
_KEYS = st.one_of(st.none(), st.binary(max_size=8))
_POSITIONS = st.integers(0, 2**63 - 1)
_OF_A_PARTITION = ["assigned", "revoking", "drained", "revoked", "lost"]
_OF_A_COMMIT = ["commit_sent", "commit_ok", "commit_failed"]
_OF_THE_FLOW = ["paused", "resumed"]
_OF_MANY = ["delivered", "acks", "abandoned"]
_OF_ONE = ["redelivered", "started", "ended", "retry", "dlq_sent", "dlq_confirmed", "archived", "zombie", "produced"]
_EVENTS = st.sampled_from(_OF_A_PARTITION + _OF_A_COMMIT + _OF_THE_FLOW + _OF_MANY + _OF_ONE)


@pytest.mark.long
@given(st.lists(st.tuples(_EVENTS, _TIMES, _KEYS, _POSITIONS, _NAMES, st.booleans()), max_size=30))
def test_written_rows_are_read(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, float, bytes | None, int, str, bool]]
) -> None:
    history = Recorder(tmp_path_factory.mktemp("history"), member="m-1")
    history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=0.0)
    expected: list[tuple[object, ...]] = []
    for event, now, key, position, name, flush in calls:
        begun = position if event == "assigned" and position % 2 else None
        token = None if position % 3 else position
        partition = Partition(
            PartitionId(name, 0), cast(Reader, None), incarnation=name, floor=begun, fencing_token=token
        )
        partition.assignment = position % 5
        message = Message(partition, position, key, 7, None, None)
        text, number = "", 0.0
        if event in _OF_MANY:
            getattr(history, event)([message], now)
            number = 7 if event == "delivered" else 0
        elif event == "redelivered":
            history.redelivered(message, text := "late", now)
        elif event == "ended":
            history.ended(message, text := "cancelled", now, KeyError())
        elif event == "retry":
            history.retry(message, number := 1.5, now)
        elif event == "produced":
            history.produced(partition.id, position, key, now)
        elif event in _OF_THE_FLOW:
            getattr(history, event)(number := 3, 4, now)
        elif event == "commit_sent":
            history.commit_sent(partition, position, number := 4, now)
        elif event in _OF_A_COMMIT:
            getattr(history, event)(partition, position, now)
        elif event in _OF_A_PARTITION:
            getattr(history, event)(partition, now)
            text = name if event == "assigned" else ""
            number = partition.epoch if event == "assigned" else -1 if event == "revoking" else 0
        else:
            getattr(history, event)(message, now)
        if flush:
            history.flush()
        of_partition = event not in _OF_THE_FLOW
        of_message = of_partition and event not in _OF_A_PARTITION + _OF_A_COMMIT
        expected.append(
            (
                "ack" if event == "acks" else event,
                f"{name}/0" if of_partition else "",
                partition.assignment if of_partition and event != "produced" else 0,
                position if of_message else -1,
                of_message and key is not None,
                text,
                number,
                position if event in _OF_A_COMMIT or begun is not None else -1,
            )
        )
    history.close("drained", 1e9)
    assert history.path is not None
    (segment,) = read([history.path])
    rows = segment.rows[1:-1]
    assert [view(row) for row in rows] == expected
    assert [row.n for row in segment.rows] == list(range(1, len(calls) + 3))
    assert all(abs(row.mono - call[1]) <= 1e-6 for row, call in zip(rows, calls, strict=True))
    assert (segment.reason, segment.gaps) == ("drained", [])


def view(row: Row) -> tuple[object, ...]:
    return row.event, row.partition, row.assignment, row.position, row.key is not None, row.text, row.number, row.floor
