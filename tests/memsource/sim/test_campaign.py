"""Whole consumers in the simulator, on both brokers: no schedule and no crash point breaks a promise.

``make test`` runs the slice on which every planted fault is found; ``make campaign`` runs the 20,000 schedules.
"""

from __future__ import annotations

import pytest

from memsource.personality import PERSONALITIES
from tests.memsource.sim.slices import RUNS_A_SEED, tally
from tests.mutants.campaigns import RUNS as HUNTED_RUNS
from tests.mutants.campaigns import RUNS_A_SEED as HUNTED_RUNS_A_SEED

SCHEDULES = 20_000
SWEPT_SEEDS = 20


@pytest.mark.timeout(600)  # the campaign computes on both cores, which other tests keep busy
def test_no_schedule_breaks_a_promise() -> None:
    """These are the schedules in which ``tests/mutants`` finds its planted faults."""
    result = tally("schedules", range(HUNTED_RUNS // HUNTED_RUNS_A_SEED), runs=HUNTED_RUNS_A_SEED)
    assert result.found == []
    assert result.runs == HUNTED_RUNS * len(PERSONALITIES)


@pytest.mark.campaign
@pytest.mark.timeout(1800)  # the campaign computes for minutes on both cores
def test_no_schedule_of_twenty_thousand_breaks_a_promise() -> None:
    seeds = range(SCHEDULES // (RUNS_A_SEED * len(PERSONALITIES)))
    result = tally("schedules", seeds)
    assert result.found == []
    assert result.runs >= SCHEDULES
    assert result.missing() == []


@pytest.mark.timeout(1800)  # the campaign computes for minutes on both cores
def test_no_crash_at_any_boundary_breaks_a_promise() -> None:
    result = tally("sweep", range(SWEPT_SEEDS))
    assert result.found == []
    assert result.sweeps == SWEPT_SEEDS * len(PERSONALITIES)
    assert result.happened["fault: crash"] == result.runs - result.sweeps
