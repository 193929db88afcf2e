"""The campaign of the cohort: the real runtime, membership and lease machines keep every promise under faults."""

from __future__ import annotations

import pytest

from tests.cohort.cases import AIMED, DEPENDENT, FORCED
from tests.cohort.slices import RUNS_A_SEED, slice_of, tally
from tests.effort import is_full, runs

SCHEDULES = 10_000
QUICK_SEEDS = 30
QUICK_AIMED_SEEDS = 6
QUICK_DEPENDENT_SEEDS = 10
QUICK_FORCED_SEEDS = 10


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)
def test_no_schedule_of_a_cohort_breaks_a_promise() -> None:
    seeds = runs(QUICK_SEEDS)
    result = slice_of((0, seeds))
    assert result.found == []
    assert result.runs == seeds * RUNS_A_SEED
    assert not is_full() or result.missing() == []


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)
def test_no_schedule_of_a_cohort_with_targets_and_former_members_breaks_a_promise() -> None:
    seeds = runs(QUICK_AIMED_SEEDS, least=2)
    result = slice_of((AIMED, AIMED + seeds))
    assert result.found == []
    assert result.runs == seeds * RUNS_A_SEED


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)
def test_no_schedule_of_a_cohort_with_dependent_faults_breaks_a_promise() -> None:
    seeds = runs(QUICK_DEPENDENT_SEEDS)
    result = slice_of((DEPENDENT, DEPENDENT + seeds))
    assert result.found == []
    assert result.runs == seeds * RUNS_A_SEED


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)
def test_no_schedule_of_a_cohort_with_forced_drains_breaks_a_promise() -> None:
    seeds = runs(QUICK_FORCED_SEEDS)
    result = slice_of((FORCED.start, FORCED.start + seeds))
    assert result.found == []
    assert result.runs == seeds * RUNS_A_SEED


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_schedule_of_ten_thousand_breaks_a_promise() -> None:
    result = tally(range(QUICK_SEEDS, QUICK_SEEDS + SCHEDULES // RUNS_A_SEED + 1))
    assert result.found == []
    assert result.runs >= SCHEDULES
