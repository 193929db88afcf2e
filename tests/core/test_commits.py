"""When a partition commits: after a while or after so many, one at a time, again when nobody knows."""

from __future__ import annotations

import pytest

from lanes.core.commits import PartitionCommits
from lanes.core.types import Settlement
from tests.core.builders import new_partition

INTERVAL, COUNT = 5.0, 10


def commits(floor: int = 3) -> PartitionCommits:
    return PartitionCommits(floor, INTERVAL, COUNT)


def commit(floor: int, ordinal: int = 0) -> Settlement:
    settlement = Settlement(new_partition(), [], floor, [])
    settlement.ordinal = ordinal
    return settlement


def test_nothing_is_pending_at_first() -> None:
    new = commits()
    assert (new.pending, new.confirmed, new.confirmed_ordinal) == (False, 3, 0)
    assert repr(new) == "<PartitionCommits confirmed 3, sending none, 0 changes since>"


def test_a_change_waits_for_the_interval_from_the_first_on() -> None:
    changed = commits()
    changed.changed(1, 100.0)
    changed.changed(COUNT - 2, 104.0)
    assert changed.pending
    assert changed.due_at(urgent=False) == 105.0
    assert changed.due_at(urgent=True) == 100.0


@pytest.mark.parametrize("count", [COUNT, COUNT + 1])
def test_so_many_changes_do_not_wait(count: int) -> None:
    changed = commits()
    changed.changed(1, 100.0)
    changed.changed(count - 1, 104.0)
    assert changed.due_at(urgent=False) == 100.0


def test_one_is_on_its_way() -> None:
    sending = commits()
    sending.changed(2, 100.0)
    first = commit(7, 4)
    sending.send(first)
    assert (sending.pending, sending.changes) == (False, 0)
    sending.changed(1, 101.0)
    assert not sending.pending
    assert repr(sending) == "<PartitionCommits confirmed 3, sending 7, 1 changes since>"
    sending.confirm(first)
    assert (sending.pending, sending.confirmed, sending.confirmed_ordinal) == (True, 7, 4)
    assert sending.due_at(urgent=False) == 106.0


@pytest.mark.parametrize(("again_at", "due_at"), [(0.0, 100.0), (107.0, 107.0)])
def test_an_unknown_result_is_due_again(again_at: float, due_at: float) -> None:
    sending = commits()
    sending.changed(1, 100.0)
    sending.send(commit(7, 4))
    sending.unknown(again_at)
    assert (sending.pending, sending.confirmed, sending.confirmed_ordinal) == (True, 3, 0)
    assert sending.due_at(urgent=False) == sending.due_at(urgent=True) == due_at
