"""The project's own campaign: thousands of schedules and every crash point, on both brokers, and nothing is found."""

from __future__ import annotations

import pytest

from memsource.sim.plans.plan import PERSONALITIES
from tests.memsource.sim.slices import RUNS_A_SEED, tally

SCHEDULES = 20_000
SWEPT_SEEDS = 20


@pytest.mark.timeout(1800)  # it computes for minutes on two cores, and they may be busy with something else
def test_no_schedule_breaks_a_promise() -> None:
    seeds = range(SCHEDULES // (RUNS_A_SEED * len(PERSONALITIES)))
    result = tally("schedules", seeds)
    assert result.found == []
    assert result.runs >= SCHEDULES
    assert result.missing() == []


@pytest.mark.timeout(1800)  # it computes for minutes on two cores, and they may be busy with something else
def test_no_crash_at_any_boundary_breaks_a_promise() -> None:
    result = tally("sweep", range(SWEPT_SEEDS))
    assert result.found == []
    assert result.sweeps == SWEPT_SEEDS * len(PERSONALITIES)
    assert result.happened["fault: crash"] == result.runs - result.sweeps
