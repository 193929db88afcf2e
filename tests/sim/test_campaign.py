"""The project's own campaign: thousands of schedules and every crash point, on both brokers, and nothing is found."""

from __future__ import annotations

import pytest

from memsource.sim.plan import FAULT_KINDS, PERSONALITIES
from tests.sim.slices import RUNS_A_SEED, tally

SCHEDULES = 20_000
SWEPT_SEEDS = 20

SOMETIMES = (
    "abandoned",
    "ahead_reached",
    "archived",
    "blocked",
    "commit_failed",
    "dlq_confirmed",
    "hastened",
    "lost",
    "paused",
    "redelivered",
    "retry",
    "unblocked",
    "zombie",
    *(f"fault: {kind}" for kind in FAULT_KINDS),
)
"""Rare branches: a campaign in which one of them was never taken proves little."""


@pytest.mark.timeout(600)
def test_no_schedule_breaks_a_promise() -> None:
    seeds = range(SCHEDULES // (RUNS_A_SEED * len(PERSONALITIES)))
    result = tally("schedules", seeds)
    assert result.found == []
    assert result.runs >= SCHEDULES
    assert [name for name in SOMETIMES if not result.happened[name]] == []


@pytest.mark.timeout(600)
def test_no_crash_at_any_boundary_breaks_a_promise() -> None:
    result = tally("sweep", range(SWEPT_SEEDS))
    assert result.found == []
    assert result.sweeps == SWEPT_SEEDS * len(PERSONALITIES)
    assert result.happened["fault: crash"] == result.runs - result.sweeps
