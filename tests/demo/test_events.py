"""The demo reads a log, names each mistake by file and line, and generates a log in the shape of the real one."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from demo import DemoError
from demo.events import FIELDS, GENERATED_EVENTS, LENGTHS, Event, generate, load, read


def row(case: str = "a", step: object = 0, **changes: Any) -> dict[str, Any]:
    fields = {
        "time": "2017-01-09T09:49:50.000+01:00",
        "case": case,
        "step": step,
        "activity": "Request Payment",
        "role": "UNDEFINED",
        "amount": 0.0,
    }
    return {**fields, **changes}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_log_is_read_line_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", row("a"), "", row("b"), row("a", 1))
    assert [(event.case, event.step) for event in read(path)] == [("a", 0), ("b", 0), ("a", 1)]
    assert [json.loads(event.payload)["case"] for event in load(path, None, 1)] == ["a", "b", "a"]
    assert len(load(path, 2, 1)) == 2


def test_a_compressed_log_is_read_under_any_name(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(gzip.compress(json.dumps(row()).encode()))
    assert load(path, None, 1) == [Event("a", 0, json.dumps(row()).encode())]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"log\.jsonl:2: not JSON \(.*\): b'\{'; write one JSON object on each line"),
        ("[1]", r"log\.jsonl:2: not a JSON object: b'\[1\]'"),
        ("\ufffd" * 80, r"log\.jsonl:2: not JSON \(.*…; write one JSON object on each line"),
        ("[" * 100_000, r"log\.jsonl:2: not JSON"),
        ({"case": "a"}, r"log\.jsonl:2: the field 'time' is missing; write the fields time, case, step"),
        (row(step="1"), r"log\.jsonl:2: step='1' is str, must be int"),
        (row(step=True), r"log\.jsonl:2: step=True is bool, must be int"),
        (row(amount="3"), r"log\.jsonl:2: amount='3' is str, must be int or float"),
        (row("a b"), r"log\.jsonl:2: case='a b' cannot be a token of a subject"),
        (row("a.b"), r"case='a\.b' cannot be"),
        (row(""), r"case='' cannot be"),
        (row("a", 2), r"log\.jsonl:2: case 'a' has step 2 instead of step 1"),
        (row("a", 0), r"log\.jsonl:2: case 'a' has step 0 instead of step 1"),
        (row("b", -1), r"log\.jsonl:2: case 'b' has step -1 instead of step 0"),
    ],
)
def test_a_mistake_is_named_by_file_and_line(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "log.jsonl", row("a"), line)
    with pytest.raises(DemoError, match=message) as caught:
        load(path, None, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_needed(tmp_path: Path, name: str) -> None:
    fields = row()
    del fields[name]
    with pytest.raises(DemoError, match=f"the field '{name}' is missing"):
        load(write(tmp_path / "log.jsonl", fields), None, 1)


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="nowhere: no such file; correct --data"):
        load(tmp_path / "nowhere", None, 1)
    with pytest.raises(DemoError, match=r"cannot be read \(Is a directory\)"):
        load(tmp_path, None, 1)
    with pytest.raises(DemoError, match="has no event"):
        load(write(tmp_path / "empty"), None, 1)


@pytest.mark.parametrize("cut", [12, 60])
def test_damaged_gzip_is_one_line_too(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "log.jsonl.gz"
    whole = gzip.compress("".join(json.dumps(row("a", step)) + "\n" for step in range(50)).encode())
    path.write_bytes(whole[:cut])
    with pytest.raises(DemoError, match="the gzip data is damaged after event"):
        load(path, None, 1)
    path.write_bytes(whole[:cut] + b"\xff" * 40)
    with pytest.raises(DemoError, match="damaged"):
        load(path, None, 1)


def test_the_generated_log_has_the_shape_of_the_real_one() -> None:
    events = load(None, None, 1)
    assert len(events) == GENERATED_EVENTS == 55_628
    steps = Counter(event.case for event in events)
    assert len(steps) == 10_357
    assert Counter(steps.values()) == LENGTHS
    # The keys are interleaved: 2,000 messages in flight have hundreds of keys.
    assert 300 < len({event.case for event in events[20_000:22_000]}) < 1_000


@pytest.mark.parametrize("count", [1, 7, 1_000, 60_000])
def test_a_generated_log_is_a_valid_one_of_any_length(tmp_path: Path, count: int) -> None:
    events = generate(count, 3)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\n".join(event.payload for event in events))
    assert list(read(path)) == events
    assert len(events) == count
    times = [json.loads(event.payload)["time"] for event in events]
    assert times == sorted(times)


def test_a_generated_log_is_a_function_of_its_seed() -> None:
    assert generate(500, 1) == generate(500, 1)
    assert generate(500, 1) != generate(500, 2)
