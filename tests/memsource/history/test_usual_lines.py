"""The reader's shortcut for usual lines gives the same rows as its parser of JSON."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.types import Message, Partition, PartitionId, Reader
from memsource import HistoryError, read_bytes
from memsource.history import rows
from memsource.history.rows import RowParser
from memsource.sim.world.worker import MemoryRecorder

_NEVER: Final = re.compile("(?!)")


def written() -> bytes:
    """Every event of a message, with and without a key, as ``lanes.history.recorder`` writes them."""
    history = MemoryRecorder("m-1", 7, lambda: 1e9)
    history.open(source="S", concurrency=1, max_in_flight=10, max_in_flight_bytes=10, now=1.0)
    partition = Partition(PartitionId("orders", 3), cast(Reader, None))
    partition.assignment = 2
    history.assigned(partition, 1.5)
    for position, key in enumerate((b"a", None, b"b")):
        now = 2.000001 + position
        message = Message(partition, position, key, 5 * position, None, None)
        history.delivered([message], now)
        history.redelivered(message, "held", now)
        history.started(message, now)
        history.ended(message, "ok", now)
        history.ended(message, "error", now, KeyError())
        history.retry(message, 0.5, now, asked=True)
        history.acks([message], now)
    history.close("drained", 9.0)
    return history.data


WRITTEN: Final = written()
_PIECES: Final = (
    *(b"0", b"1", b"7", b"00", b"-", b"-0", b".", b"e3", b"123456789012345678", b"18446744073709551616", b" ", b"\n"),
    *(b'"', b",", b"{", b"}", b"null", b"true", b"\\", b"\\u0041", b"\xc3\xa4", b"\xff", b"\x00", b"\r"),
    *(b'"asked":1,', b'"n":3,', b'"position":0', b'"ok"', b'"key":null', b',"size":1', b',"result":"ok"', b"started"),
)


def read_either_way(data: bytes) -> tuple[list[object], list[object]]:
    """The rows that are read with the shortcut, and without it."""
    with pytest.MonkeyPatch.context() as patch:
        short = _read(data)
        patch.setattr(rows, "_USUAL", _NEVER)
        return short, _read(data)


def _read(data: bytes) -> list[object]:
    try:
        return [dataclasses.asdict(segment) for segment in read_bytes(data)]
    except HistoryError as error:
        return [str(error)]


def test_most_lines_of_a_history_take_the_short_way_of_the_parser() -> None:
    parser = RowParser()
    lines = WRITTEN.decode().splitlines(keepends=True)
    short = [
        row.event for n, line in enumerate(lines, 1) if (found := parser.usual(line, n, "m-1")) for row in found[:1]
    ]
    assert short == 3 * ["delivered", "started", "ended", "ack"]
    usual, parsed = read_either_way(WRITTEN)
    assert usual == parsed
    first: Any = usual[0]
    assert (len(usual), len(first["rows"]), first["gaps"]) == (1, len(lines), [])


@given(st.data())
def test_both_ways_of_the_parser_read_damaged_lines_alike(data: st.DataObject) -> None:
    damaged = bytearray(WRITTEN)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from(_PIECES) | st.binary(max_size=2))
    short, parsed = read_either_way(bytes(damaged))
    assert short == parsed


def test_both_ways_of_the_parser_read_lines_after_the_end_alike() -> None:
    lines = WRITTEN.decode().splitlines(keepends=True)
    last, started = len(lines), next(line for line in lines if '"started"' in line)
    behind = re.sub('"n":[0-9]+', f'"n":{last + 1}', started)
    short, parsed = read_either_way(WRITTEN + behind.encode())
    first: Any = short[0]
    assert short == parsed
    assert len(first["gaps"]) == 1


@given(st.lists(st.integers(0, WRITTEN.count(b"\n") - 1), max_size=12))
def test_both_ways_of_the_parser_read_reordered_lines_alike(order: list[int]) -> None:
    lines = WRITTEN.splitlines(keepends=True)
    short, parsed = read_either_way(b"".join(lines[number] for number in order))
    assert short == parsed


_NUMBERS: Final = st.sampled_from(("0", "1", "7", "01", "-1", "1.0", "1e3", "9" * 15, "9" * 19, str(1 << 64), "null"))
_TIMES: Final = st.sampled_from(("0.0", "00.1", "1", "1.", ".5", "1.5e3", "-1.5", "9" * 14 + ".5", "1e999", "NaN"))
_TEXTS: Final = st.sampled_from(("m-1", "", "a b", "\\u0041", "ä", "\\", '\\"', "x" * 300, "\x7f", "\t", "0" * 16))


@pytest.mark.long
@given(_NUMBERS, _TIMES, _TEXTS, _TEXTS, _NUMBERS, st.sampled_from(("started", "ended", "delivered", "ack", "end")))
def test_both_ways_of_the_parser_read_unusual_values_alike(
    number: str, time: str, text: str, key: str, more: str, event: str
) -> None:
    begin = WRITTEN.splitlines(keepends=True)[0].decode()
    for values in (
        {"n": number},
        {"mono": time},
        {"wall": time},
        {"member": f'"{text}"'},
        {"partition": f'"{text}"'},
        {"assignment": number},
        {"position": number},
        {"key": f'"{key}"'},
        {"attempt": number, "size": more},
        {"size": more},
        {"result": f'"{text}"'},
        {"result": '"ok"'},
        {"result": '"ok"', "size": more},
        dict.fromkeys(("result", "size"), ""),
    ):
        usual = {"n": "2", "event": f'"{event}"', "member": '"m-1"', "mono": "1.5", "wall": "1000000000.5"}
        usual |= {"partition": '"S/0"', "assignment": "1", "position": "4", "key": "null", "attempt": "1"}
        usual |= {"size": "3"} if event == "delivered" else {"result": '"ok"'} if event == "ended" else {}
        fields = {**usual, **values}
        line = ",".join(f'"{name}":{value}' for name, value in fields.items() if value)
        short, parsed = read_either_way(f"{begin}{{{line}}}\n".encode())
        assert short == parsed
