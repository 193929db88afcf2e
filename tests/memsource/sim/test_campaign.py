"""Whole consumers in the simulator, on both brokers: no schedule and no crash point breaks a promise.

``make campaign`` runs 20,000 schedules, and those on which each planted fault is found; ``make test`` runs a slice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memsource.personality import PERSONALITIES
from tests.effort import SHARE, is_full, processes, runs
from tests.memsource.sim.slices import PROCESSES, RUNS_A_SEED, tally
from tests.mutants.campaigns import RUNS as HUNTED_RUNS
from tests.mutants.campaigns import RUNS_A_SEED as HUNTED_RUNS_A_SEED

SCHEDULES = 20_000
SWEPT_SEEDS = 20
QUICKLY_SWEPT_SEEDS = 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_schedule_breaks_a_promise() -> None:
    """These are some of the schedules in which ``tests/mutants`` finds its planted faults; ``make campaign`` has all of
    them, and more schedules of each seed."""
    seeds = HUNTED_RUNS // HUNTED_RUNS_A_SEED // SHARE
    result = tally("schedules", range(seeds), runs=HUNTED_RUNS_A_SEED, processes=1)
    assert result.found == []
    assert result.runs == seeds * HUNTED_RUNS_A_SEED * len(PERSONALITIES)


@pytest.mark.campaign
@pytest.mark.timeout(1800)  # the campaign computes for minutes on both cores
def test_no_schedule_of_twenty_thousand_breaks_a_promise(record_property: Callable[[str, object], None]) -> None:
    seeds = range(SCHEDULES // (RUNS_A_SEED * len(PERSONALITIES)))
    result = tally("schedules", seeds)
    record_property("campaign", {"schedules": result.runs, "violations": len(result.found)})
    assert result.found == []
    assert result.runs >= SCHEDULES
    assert len(seeds) >= HUNTED_RUNS // HUNTED_RUNS_A_SEED and RUNS_A_SEED >= HUNTED_RUNS_A_SEED
    assert result.missing() == []


@pytest.mark.long
@pytest.mark.sliced
@pytest.mark.timeout(600)
def test_no_crash_at_any_boundary_breaks_a_promise() -> None:
    sweep(range(runs(QUICKLY_SWEPT_SEEDS)), every=1 if is_full() else SHARE, processes=processes())


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_no_crash_at_any_boundary_of_twenty_seeds_breaks_a_promise() -> None:
    sweep(range(QUICKLY_SWEPT_SEEDS, SWEPT_SEEDS))


def sweep(seeds: range, *, every: int = 1, processes: int = PROCESSES) -> None:
    """Crash at one in ``every`` boundaries of the clean run of each seed, on each broker."""
    result = tally("sweep", seeds, every=every, processes=processes)
    assert result.found == []
    assert result.sweeps == len(seeds) * len(PERSONALITIES)
    assert result.happened["fault: crash"] == result.runs - result.sweeps
