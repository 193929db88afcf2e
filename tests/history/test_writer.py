"""A history writes rows with fixed fields, in order, through a bounded buffer."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3

from lanes.config import Retry, Settings
from lanes.core.types import Message, Partition, PartitionId, Reader
from lanes.errors import ConfigError
from lanes.history.recorder import Recorder
from lanes.history.rules import Rules
from lanes.history.writer import BUFFER_BYTES, BUFFER_ROWS, FORMAT
from lanes.source import SourceTraits
from memsource import read
from tests.memsource.checkers.rows import Fields, Rows, rows_of

NOW = 1234.567891


def partition(source: str = "S", number: int = 0, assignment: int = 3) -> Partition:
    made = Partition(PartitionId(source, number), cast(Reader, None), incarnation="i-1")
    made.assignment = assignment
    return made


def message(position: int = 7, key: bytes | None = b"case-1", **more: Any) -> Message:
    return Message(more.pop("partition", partition()), position, key, more.pop("size", 12), None, None)


def opened(directory: Path, **more: Any) -> Recorder:
    history = Recorder(directory, **{"member": "m-1", **more})
    history.open(source="S/group", concurrency=4, max_in_flight=9, max_in_flight_bytes=99, now=NOW)
    return history


def written(history: Recorder) -> Rows:
    history.flush()
    assert history.path is not None
    return rows_of(history.path)


def test_a_history_has_a_begin_row_and_an_end_row(tmp_path: Path) -> None:
    before = time.time()
    history = opened(tmp_path / "made" / "here")
    history.close("drained", NOW + 1)
    begin, end = written(history)
    boot = Path("/proc/sys/kernel/random/boot_id")
    assert begin == {
        "n": 1,
        "event": "begin",
        "member": "m-1",
        "mono": NOW,
        "wall": begin["wall"],
        "format": FORMAT,
        "version": begin["version"],
        "pid": os.getpid(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "source": "S/group",
        "concurrency": 4,
        "max_in_flight": 9,
        "max_in_flight_bytes": 99,
        "incomplete": 0,
    }
    assert re.fullmatch(r"\d+\.\d+.*", begin["version"])
    assert before - 0.001 <= begin["wall"] <= time.time() + 0.001
    assert end == {
        "n": 2,
        "event": "end",
        "member": "m-1",
        "mono": NOW + 1,
        "wall": end["wall"],
        "reason": "drained",
    }


def test_the_begin_row_has_the_settings_of_the_consumer(tmp_path: Path) -> None:
    history = Recorder(tmp_path, member="m-1")
    rules = Rules.of(Settings(retry=Retry(attempts=4), lanes=7), SourceTraits(name="S", settles="cumulative"), "exit")
    history.open(source="S", concurrency=4, max_in_flight=9, max_in_flight_bytes=99, now=NOW, rules=rules)
    history.close("drained", NOW)
    begin = written(history)[0]
    assert list(begin)[-1] == "incomplete"
    assert {name: begin[name] for name in asdict(rules)} == asdict(rules)
    assert (rules.attempts, rules.lanes, rules.batch, rules.poison, rules.settles) == (4, 7, 0, "exit", "cumulative")
    assert history.path is not None
    (segment,) = read([history.path])
    assert segment.rules == rules


def test_a_message_row_has_everything_but_the_message(tmp_path: Path) -> None:
    history = opened(tmp_path)
    assert history.started(message(), NOW + 2) == 2
    row = written(history)[1]
    assert row == {
        "n": 2,
        "event": "started",
        "member": "m-1",
        "mono": NOW + 2,
        "wall": row["wall"],
        "partition": "S/0",
        "assignment": 3,
        "position": 7,
        "key": blake3(b"case-1").hexdigest()[:16],
        "attempt": 1,
    }


def test_a_commit_under_a_renewed_lease_says_until_when_it_holds(tmp_path: Path) -> None:
    """No message may arrive for longer than a lease, and a commit follows the end of a long handler."""
    history = opened(tmp_path)
    place = message().partition
    place.deadline = NOW + 10
    history.assigned(place, NOW)
    history.commit_sent(place, 9, 0, NOW + 5)
    place.deadline = NOW + 30
    history.commit_sent(place, 10, 0, NOW + 25)
    history.commit_sent(place, 11, 0, NOW + 26)
    rows = written(history)[2:]
    assert [row["event"] for row in rows] == ["leased", "commit_sent", "leased", "commit_sent", "commit_sent"]
    assert [row["deadline"] for row in rows if "deadline" in row] == [
        pytest.approx(NOW + 10, abs=1e-5),
        pytest.approx(NOW + 30, abs=1e-5),
    ]


def test_each_kind_of_row_has_its_own_fields(tmp_path: Path) -> None:
    history = opened(tmp_path)
    one, two = message(7, size=5), message(8, None, size=6)
    one.attempt = 2
    history.produced(PartitionId("S", 0), 7, b"case-1", NOW)
    history.assigned(one.partition, NOW)
    history.delivered([one, two], NOW)
    history.redelivered(one, "held", NOW)
    history.ended(one, "error", NOW, ValueError("secret"))
    history.ended(one, "ok", NOW)
    history.retry(one, 0.25, NOW)
    history.dlq_sent(one, NOW)
    history.dlq_confirmed(one, NOW)
    history.archived(one, NOW)
    history.acks([one, two], NOW)
    history.abandoned([two], NOW)
    history.zombie(one, NOW)
    history.revoking(one.partition, NOW)
    history.drained(one.partition, NOW)
    history.revoked(one.partition, NOW)
    history.lost(one.partition, NOW)
    history.commit_sent(one.partition, 9, 2, NOW)
    history.commit_ok(one.partition, 9, NOW)
    history.commit_failed(one.partition, 10, NOW)
    one.partition.floor, one.partition.fencing_token = 5, 1 << 50
    history.assigned(one.partition, NOW)
    history.paused(9, 90, NOW)
    history.resumed(4, 40, NOW)
    history.retry(one, 1.5, NOW, asked=True)
    history.blocked(one, NOW)
    history.unblocked(b"case-1", 2, NOW)
    history.unblocked(None, 1, NOW)
    other = message(4, partition=partition(number=1))
    mine = [message(position, partition=one.partition) for position in (9, 7, 11, 8)]
    history.extended([mine[0], other, *mine[1:]], NOW)
    history.revoking(one.partition, NOW, 1.25)
    history.hastened(one.partition, NOW, 0.5)
    history.ahead_reached(one.partition, None, NOW)
    history.ahead_reached(one.partition, one, NOW)
    history.ahead_left(one.partition, NOW)

    digest = blake3(b"case-1").hexdigest()[:16]
    of_one = {"partition": "S/0", "assignment": 3, "position": 7, "key": digest, "attempt": 2}
    of_two = {"partition": "S/0", "assignment": 3, "position": 8, "key": None, "attempt": 1}
    owned = {"partition": "S/0", "assignment": 3}
    expected: list[Fields] = [
        {"event": "produced", "partition": "S/0", "position": 7, "key": digest},
        {"event": "assigned", **owned, "epoch": 3, "incarnation": "i-1"},
        {"event": "delivered", **of_one, "size": 5},
        {"event": "delivered", **of_two, "size": 6},
        {"event": "redelivered", **of_one, "cause": "held"},
        {"event": "ended", **of_one, "result": "error", "error": "ValueError"},
        {"event": "ended", **of_one, "result": "ok"},
        {"event": "retry", **of_one, "delay": 0.25},
        {"event": "dlq_sent", **of_one},
        {"event": "dlq_confirmed", **of_one},
        {"event": "archived", **of_one},
        {"event": "ack", **of_one},
        {"event": "ack", **of_two},
        {"event": "abandoned", **of_two},
        {"event": "zombie", **of_one},
        {"event": "revoking", **owned},
        {"event": "drained", **owned},
        {"event": "revoked", **owned},
        {"event": "lost", **owned},
        {"event": "commit_sent", **owned, "floor": 9, "completed": 2},
        {"event": "commit_ok", **owned, "floor": 9},
        {"event": "commit_failed", **owned, "floor": 10},
        {"event": "assigned", **owned, "epoch": 1 << 50, "incarnation": "i-1", "floor": 5},
        {"event": "paused", "in_flight": 9, "bytes": 90},
        {"event": "resumed", "in_flight": 4, "bytes": 40},
        {"event": "retry", **of_one, "delay": 1.5, "asked": 1},
        {"event": "blocked", **of_one},
        {"event": "unblocked", "key": digest, "count": 2},
        {"event": "unblocked", "key": None, "count": 1},
        {"event": "extended", **owned, "runs": [[7, 9], [11, 11]]},
        {"event": "extended", "partition": "S/1", "assignment": 3, "runs": [[4, 4]]},
        {"event": "revoking", **owned, "timeout": 1.25},
        {"event": "hastened", **owned, "timeout": 0.5},
        {"event": "ahead_reached", **owned},
        {"event": "ahead_reached", **of_one},
        {"event": "ahead_left", **owned},
    ]
    rows = written(history)[1:]
    assert [row["n"] for row in rows] == list(range(2, 2 + len(expected)))
    common = {"n", "member", "mono", "wall"}
    assert [{name: row[name] for name in row.keys() - common} for row in rows] == expected
    assert all(row["member"] == "m-1" and row["mono"] == NOW for row in rows)


def test_rows_are_only_buffered_until_they_are_flushed(tmp_path: Path) -> None:
    history = opened(tmp_path)
    n = history.started(message(), NOW)
    assert history.path is not None
    assert (len(rows_of(history.path)), history.written) == (1, 1)
    history.flush()
    assert (len(rows_of(history.path)), history.written) == (2, n)
    size = history.path.stat().st_size
    history.flush()
    assert history.path.stat().st_size == size


def test_a_flush_of_the_history_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = opened(tmp_path)
    calls: list[int] = []
    write = os.write

    def counting(fd: int, data: bytes) -> int:
        calls.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counting)
    history.delivered([message(position) for position in range(100)], NOW)
    history.flush()
    history.flush()
    assert len(calls) == 1


def test_the_buffer_is_bounded_in_rows(tmp_path: Path) -> None:
    history = opened(tmp_path)
    for position in range(BUFFER_ROWS - 1):
        history.started(message(position), NOW)
    assert history.written == 1
    assert history.started(message(), NOW) == history.written


def test_the_rows_of_long_runs_are_numbered_without_a_gap_and_fill_the_buffer_exactly(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.started(message(), NOW)
    run = [message(position, b"case-%d" % (position % 7)) for position in range(BUFFER_ROWS + 70)]
    history.delivered(run, NOW)
    assert history.written == BUFFER_ROWS + 1, "the buffer of 4,096 rows is written as soon as it is full"
    elsewhere = [message(position, None, partition=partition(number=1)) for position in range(3)]
    history.acks([*run, *elsewhere], NOW)
    rows = written(history)
    assert [row["n"] for row in rows] == list(range(1, len(rows) + 1))
    delivered, acked = ([row for row in rows if row["event"] == event] for event in ("delivered", "ack"))
    assert [row["position"] for row in delivered] == [each.position for each in run]
    assert [(row["partition"], row["position"], row["key"]) for row in acked] == [
        *((row["partition"], row["position"], row["key"]) for row in delivered),
        *(("S/1", position, None) for position in range(3)),
    ]


def test_the_rows_of_a_message_name_its_present_attempt(tmp_path: Path) -> None:
    history, one = opened(tmp_path), message()
    history.delivered([one], NOW)
    for one.attempt in (1, 2):
        history.started(one, NOW)
        history.ended(one, "error", NOW, ValueError())
    history.started(one, NOW)
    history.ended(one, "ok", NOW)
    history.acks([one], NOW)
    assert [row["attempt"] for row in written(history)[1:]] == [1, 1, 1, 2, 2, 2, 2, 2]


def test_the_buffer_is_bounded_in_bytes(tmp_path: Path) -> None:
    history = opened(tmp_path)
    huge = message(partition=partition("S" * (BUFFER_BYTES // 10)))
    history.delivered([huge] * 25, NOW)
    assert history.path is not None
    assert history.path.stat().st_size >= 2 * BUFFER_BYTES
    assert len(written(history)) == 26


@pytest.mark.parametrize("key", [b"", b"\n", b'"},{"', b"\xff\x00\xfe", "\u2028é".encode(), b"secret" * 1000])
def test_no_key_gets_into_the_file(tmp_path: Path, key: bytes) -> None:
    history = opened(tmp_path)
    for _ in range(2):
        history.started(message(key=key), NOW)
    rows = written(history)[1:]
    assert [row["key"] for row in rows] == [blake3(key).hexdigest()[:16]] * 2
    assert history.path is not None
    assert b"secret" not in history.path.read_bytes()


def test_neither_payload_nor_error_text_gets_into_the_file(tmp_path: Path) -> None:
    history = opened(tmp_path)
    one = Message(partition(), 1, b"k", 6, b"canary-raw", b"canary-token")
    history.delivered([one], NOW)
    history.ended(one, "error", NOW, ValueError("canary-text"))
    history.flush()
    assert history.path is not None
    assert b"canary" not in history.path.read_bytes()


@pytest.mark.parametrize("name", ['a"b', "a\nb", "\u2028", "\ud800", "", "é" * 300, "\\", "{}{n}"])
def test_hostile_names_stay_within_their_line(tmp_path: Path, name: str) -> None:
    history = opened(tmp_path)
    hostile = message(partition=partition(name))
    history.assigned(hostile.partition, NOW)
    history.produced(PartitionId(name, 0), 1, None, NOW)
    history.started(hostile, NOW)
    history.ended(hostile, "error", NOW, type("E", (Exception,), {})())
    hostile_class = type("E", (Exception,), {})
    if "\ud800" not in name:  # no class can have such a name
        hostile_class.__name__ = name
    history.ended(hostile, "error", NOW, hostile_class())
    rows = written(history)
    assert [row["n"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["partition"] for row in rows[1:]} == {f"{name}/0"}
    assert rows[-1]["error"] == hostile_class.__name__[:200]


def test_an_exception_whose_class_has_no_usable_name_loses_only_the_name(tmp_path: Path) -> None:
    class Liar(type):
        @property
        def __name__(cls) -> str:  # type: ignore[override]
            raise RuntimeError("no name for you")

    class LiarError(Exception, metaclass=Liar):
        pass

    history = opened(tmp_path)
    history.ended(message(), "error", NOW, LiarError())
    assert written(history)[1]["error"] == "?"


@pytest.mark.parametrize("member", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "é", "x" * 65, "-x"])
def test_a_member_that_cannot_name_a_file_is_refused(tmp_path: Path, member: str) -> None:
    with pytest.raises(ConfigError, match="member="):
        Recorder(tmp_path, member=member)


def test_a_member_gets_a_name_and_files_never_collide(tmp_path: Path) -> None:
    assert re.fullmatch(r"m-[0-9a-f]{8}", Recorder(tmp_path).member)
    assert Recorder(tmp_path).member != Recorder(tmp_path).member
    one, two = opened(tmp_path), opened(tmp_path)
    assert one.path is not None
    assert one.path != two.path
    assert re.fullmatch(rf"m-1-{os.getpid()}-\d+\.jsonl", one.path.name)
    assert one.path.stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"history directory .*file"):
        Recorder(blocked / "sub")
    gone = Recorder(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="history file"):
        gone.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=NOW)
    assert gone.path is None


def test_a_second_open_is_refused_and_a_second_close_does_nothing(tmp_path: Path) -> None:
    history = opened(tmp_path)
    with pytest.raises(ConfigError, match="opened before"):
        history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=NOW)
    history.close("stopped", NOW)
    history.close("failed", NOW)
    assert [row["event"] for row in written(history)] == ["begin", "end"]
    with pytest.raises(ConfigError, match="opened before"):
        history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=NOW)


def test_rows_before_open_and_after_close_are_dropped(tmp_path: Path) -> None:
    history = Recorder(tmp_path, member="m-1")
    history.started(message(), NOW)
    history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=NOW)
    history.close("drained", NOW)
    n = history.started(message(), NOW)
    history.flush()
    assert (history.written, history.dropped) == (n, 1)
    assert [row["event"] for row in written(history)] == ["begin", "end"]


def test_a_row_has_the_assignment_that_delivered_its_message(tmp_path: Path) -> None:
    history = opened(tmp_path)
    one, two = message(partition=partition(number=0)), message(partition=partition(number=1))
    history.started(one, NOW)
    history.started(two, NOW)
    one.partition.assignment = 8
    history.started(message(partition=one.partition), NOW)
    rows = written(history)[1:]
    assert [(row["partition"], row["assignment"]) for row in rows] == [("S/0", 3), ("S/1", 3), ("S/0", 8)]


def test_times_are_exact_to_the_microsecond(tmp_path: Path) -> None:
    history = opened(tmp_path)
    times = [0.0, 0.0000004, 0.000999, 0.0009995, 0.0009999996, 5.999999, 5.9999996, 86400.123456, 1e9 + 0.25]
    times += [NOW, NOW - 100.0, 3.000001]  # a clock that goes back is written as it is
    for now in times:
        history.started(message(), now)
    assert [row["mono"] for row in written(history)[1:]] == [pytest.approx(now, abs=6e-7) for now in times]


def test_the_wall_clock_of_a_row_follows_a_clock_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = opened(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    history.flush()
    history.started(message(), NOW)
    history.flush()
    monkeypatch.setattr(time, "time", lambda: 9000.0)
    history.started(message(), NOW)
    assert [row["wall"] for row in written(history)[1:]] == [5000.0, 9000.0]


@pytest.mark.long
def test_the_caches_of_the_writer_are_bounded(tmp_path: Path) -> None:
    history = opened(tmp_path)
    for number in range(70_000):
        history.started(message(key=b"%d" % number), NOW)
    history.started(message(key=None), NOW)
    for number in range(3_000):
        history.started(message(partition=partition(number=number)), NOW)
    rows = written(history)
    assert len(rows) == 1 + 70_000 + 1 + 3_000
    assert rows[70_001]["key"] is None
    assert rows[-1]["partition"] == "S/2999"
    assert len(history._hashes) <= 32_768
    assert len(history._origins) <= 1_024


def test_the_repr_of_a_writer_shows_counts(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.started(message(), NOW)
    assert repr(history) == "<History m-1 open: 2 rows, 1 buffered, 0 dropped>"
    history.close("drained", NOW)
    assert repr(history) == "<History m-1 closed: 3 rows, 0 buffered, 0 dropped>"


def test_every_line_is_one_json_object(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.delivered([message(position) for position in range(50)], NOW)
    history.close("drained", NOW)
    assert history.path is not None
    text = history.path.read_text(encoding="ascii")
    assert text.endswith("\n")
    assert all(json.loads(line)["member"] == "m-1" for line in text.splitlines())
