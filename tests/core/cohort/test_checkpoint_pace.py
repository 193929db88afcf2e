"""The pace of checkpoints: prompt while they are few, never later than the interval."""

from __future__ import annotations

import pytest

from lanes.core.cohort.checkpoint_pace import CheckpointPace


def test_one_partition_waits_a_twentieth_of_the_interval() -> None:
    assert CheckpointPace(1.0).begin(0, 3) == 0.05
    assert CheckpointPace(10.0).begin(0, 3) == 0.5
    assert CheckpointPace(0.0).begin(0, 3) == 0.0


def test_many_partitions_wait_longer_up_to_the_interval() -> None:
    pace = CheckpointPace(1.0)
    waits = [pace.begin(number, 0) for number in range(200)]
    assert waits[1] == 0.05
    assert waits[19] == pytest.approx(0.4)
    assert waits[-1] == 1.0
    assert waits == sorted(waits)


def test_a_large_ledger_waits_longer() -> None:
    assert CheckpointPace(1.0).begin(0, 5_000) == pytest.approx(0.32)
    assert CheckpointPace(1.0).begin(0, 50_000) == 1.0


def test_a_write_that_begins_makes_room_for_the_others() -> None:
    pace = CheckpointPace(1.0)
    for number in range(10):
        pace.begin(number, 1_000)
    for number in range(9):
        pace.end(number)
        pace.end(number)
    assert pace.begin(9, 0) == 0.05
    assert repr(pace) == "<CheckpointPace of 1 s: 1 partitions wait>"
