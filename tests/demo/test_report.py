"""The report fails for each broken promise, and shows its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from demo import Report
from demo.history import Verdict, examine
from lanes.core.types import PartitionId
from lanes.history.recorder import Recorder

KEYS = [
    "events",
    "keys",
    "seconds",
    "rate",
    "serial_rate",
    "speedup",
    "width",
    "stranded",
    "order_violations",
    "lost",
    "doubled",
    "redelivered",
    "dead_letters",
    "max_in_flight_seen",
    "max_in_flight",
    "rss_mb",
]


def report(**changes: Any) -> Report:
    green: dict[str, Any] = {
        "events": 100,
        "keys": 20,
        "done": 100,
        "seconds": 2.0,
        "serial_rate": 0.5,
        "repeats": 3,
        "dead_letters": 2,
        "max_in_flight_seen": 50,
        "max_in_flight": 50,
        "rss_mb": 44.04,
        "kills": 1,
        "workers": 2,
        "redelivered": {"restart": 4, "held": 1, "late": 0},
        "verdicts": [Verdict("PerKeyOrder", "passed", "")],
    }
    return Report(**{**green, **changes})


def test_a_report_without_a_fault_is_green() -> None:
    assert report().ok
    assert report().broken == []
    assert all(good for _, _, good in report().rows())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"violations": [("a", 1)]},
            "order violations: 1 (refused, because a later step of its case was stored): a step 1",
        ),
        ({"lost": [("a", 1)] * 5}, "lost: 5 (neither stored nor dead-lettered): a step 1, a step 1, a step 1, …"),
        ({"doubled": [("a", 1)]}, "doubled: 1 (stored more than once): a step 1"),
        ({"foreign": [("a", 1)]}, "foreign: 1 (stored, but not in the log): a step 1"),
        ({"missing_letters": [("a", 1)]}, "dead letters missing: 1 "),
        ({"unexpected_letters": [("a", 1)]}, "dead letters unexpected: 1 "),
        ({"max_in_flight_seen": 51}, "in flight: 51 seen, above the bound of 50"),
        ({"verdicts": [Verdict("NoOverlap", "violated", "here")]}, "history NoOverlap: violated: here"),
        ({"verdicts": [Verdict("NoOverlap", "unproven", "a gap")]}, "history NoOverlap: unproven: a gap"),
        ({"failure": "the worker died"}, "ended early: the worker died"),
    ],
)
def test_every_broken_promise_fails_the_report(changes: dict[str, Any], line: str) -> None:
    broken = report(**changes)
    assert not broken.ok
    assert [found for found in broken.broken if found.startswith(line)]
    assert len(broken.broken) == 1
    assert "failure" in changes or "foreign" in changes or not all(good for _, _, good in broken.rows())


def test_a_kill_is_a_row_of_its_own_and_the_sample_is_labelled_as_a_measurement() -> None:
    rows = report(killed=["worker-1 after 50 events, at 1.00 s", "worker-2 after 60 events, at 2.00 s"]).rows()
    assert [row for row in rows if row[0] in ("workers", "kill -9")] == [
        ("workers", "2", True),
        ("kill -9", "worker-1 after 50 events, at 1.00 s", True),
        ("kill -9", "worker-2 after 60 events, at 2.00 s", True),
    ]
    assert ("measured one at a time", "0.5 messages/s, in a sample before the run", True) in rows
    assert ("speed-up", "100.0 ×", True) in rows
    assert ("measured one at a time", "not measured", True) in report(serial_rate=0.0).rows()


def test_the_line_for_machines_has_exactly_its_keys() -> None:
    changes = {"lost": [("a", 1)], "doubled": [("b", 1)], "violations": [("c", 1)], "width": 4, "stranded": 2}
    line = json.loads(report(**changes).json())
    assert list(line) == KEYS
    assert line == {
        "events": 100,
        "keys": 20,
        "seconds": 2.0,
        "rate": 50.0,
        "serial_rate": 0.5,
        "speedup": 100.0,
        "width": 4,
        "stranded": 2,
        "order_violations": 1,
        "lost": 1,
        "doubled": 1,
        "redelivered": 5,
        "dead_letters": 2,
        "max_in_flight_seen": 50,
        "max_in_flight": 50,
        "rss_mb": 44.0,
    }


def test_events_that_no_worker_reads_are_stranded(tmp_path: Path) -> None:
    publisher = Recorder(tmp_path, member="publisher")
    publisher.open(source="test", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=0.0)
    for position in (3, 4):
        publisher.produced(PartitionId("orders__p2", 0), position, b"a", 0.0)
    publisher.close("stopped", 1.0)
    found = examine(tmp_path)
    (verdict,) = [each for each in found.verdicts if each.name == "NothingStranded"]
    assert (found.stranded, verdict.status) == (2, "violated")
    assert ("stranded", "2", False) in report(stranded=found.stranded).rows()


def test_without_a_history_the_stranded_events_are_unknown(tmp_path: Path) -> None:
    unknown = report(stranded=examine(tmp_path).stranded)
    assert ("stranded", "unknown", False) in unknown.rows()
    assert json.loads(unknown.json())["stranded"] is None


def test_a_missing_measurement_causes_no_division_by_zero() -> None:
    empty = report(seconds=0.0, serial_rate=0.0, done=0)
    assert (empty.rate, empty.speedup) == (0.0, 0.0)
    assert ("speed-up", "not measured", True) in empty.rows()


def test_redeliveries_are_shown_by_cause() -> None:
    assert ("redelivered", "4 restart, 1 held", True) in report().rows()
    assert ("redelivered", "none", True) in report(redelivered={"held": 0}).rows()
