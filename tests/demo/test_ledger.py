"""The ledger answers each step correctly, and its audit reports each kind of fault."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import DemoError
from demo.ledger import Apply, Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def test_the_ledger_applies_steps_in_order(ledger: Ledger) -> None:
    assert ledger.apply([Apply("a", 0, 1), Apply("b", 0, 1), Apply("a", 1, 1)]) == ["applied"] * 3
    audit = ledger.audit([("a", 0), ("a", 1), ("b", 0)], [])
    assert (audit.stored, audit.repeats) == (3, 0)
    assert not (audit.doubled or audit.lost or audit.violations or audit.foreign)
    assert ledger.stored == 3


def test_a_step_that_the_ledger_has_already_is_a_repeat(ledger: Ledger) -> None:
    ledger.apply([Apply("a", 0, 1), Apply("a", 1, 1)])
    # As after a crash: both steps are delivered again, in order, under a new assignment.
    assert ledger.apply([Apply("a", 0, 2), Apply("a", 1, 2), Apply("a", 2, 2)]) == ["repeat", "repeat", "applied"]
    assert ledger.audit([("a", 0), ("a", 1), ("a", 2)], []).repeats == ledger.repeats == 2


def test_a_step_that_comes_after_its_successor_is_a_violation_and_is_lost(ledger: Ledger) -> None:
    assert ledger.apply([Apply("a", 1, 1), Apply("a", 0, 1)]) == ["applied", "violation"]
    audit = ledger.audit([("a", 0), ("a", 1)], [])
    assert (audit.violations, audit.lost) == ([("a", 0)], [("a", 0)])
    assert ledger.violations == 1


def test_a_step_after_a_missing_one_is_no_violation(ledger: Ledger) -> None:
    # The step between them became a dead letter.
    assert ledger.apply([Apply("a", 0, 1), Apply("a", 2, 1)]) == ["applied", "applied"]
    assert not ledger.audit([("a", 0), ("a", 1), ("a", 2)], [("a", 1)]).lost


def test_an_event_neither_stored_nor_dead_lettered_is_lost(ledger: Ledger) -> None:
    ledger.apply([Apply("a", 0, 1)])
    assert ledger.audit([("a", 0), ("a", 1), ("b", 0)], [("b", 0)]).lost == [("a", 1)]


def test_a_step_that_is_stored_twice_is_doubled(ledger: Ledger) -> None:
    ledger.apply([Apply("a", 0, 1)])
    # A ledger that forgets the last step of a case accepts a step again, and its table has both rows.
    with sqlite3.connect(ledger.path) as other:
        other.execute("DELETE FROM position")
    other.close()
    assert ledger.apply([Apply("a", 0, 2)]) == ["applied"]
    audit = ledger.audit([("a", 0)], [])
    assert (audit.doubled, audit.stored) == ([("a", 0)], 1)


def test_a_stored_step_without_an_event_is_foreign(ledger: Ledger) -> None:
    ledger.apply([Apply("x", 0, 1)])
    assert ledger.audit([], []).foreign == [("x", 0)]


def test_the_ledger_stores_a_batch_in_one_transaction(ledger: Ledger) -> None:
    ledger.apply([Apply("a", 0, 1)])
    with sqlite3.connect(ledger.path) as other:
        assert other.execute("SELECT count(*) FROM applied").fetchone() == (1,)
    other.close()


def test_an_unwritable_ledger_prints_one_line(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"ledger .*/no/ledger cannot be used \(.*\): free space"):
        Ledger(tmp_path / "no" / "ledger")
    ledger.close()
    with pytest.raises(DemoError, match="cannot be used"):
        ledger.apply([Apply("a", 0, 1)])
    with pytest.raises(DemoError, match="cannot be used"):
        ledger.audit([], [])
