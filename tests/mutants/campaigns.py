"""The campaigns that search for mutants: whole consumers in the simulator, and the engine against its naive models.

A campaign ends when a requested check has found a failure, or after a bounded number of runs. Its runs are
deterministic. It does not shrink a failure, because only the name of the check matters.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from memsource.personality import PersonalityName
from tests.cohort.slices import campaign as cohort_campaign
from tests.core.test_engine_machine import EngineMachine
from tests.core.test_engine_modes_machine import ModesMachine
from tests.memsource.sim.slices import campaign

RUNS: Final = 600
"""Runs of the simulator after which a fault counts as not found. A fault that needs more runs needs better cases."""

RUNS_A_SEED: Final = 6
"""Few runs for each seed, so that there are many cases; each seed has one case."""

EFFORT: Final = settings(
    max_examples=1_000,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Found:
    """The findings of a campaign.

    Attributes:
        checks: The first finding of each check, by the name of the check.
        runs: Number of runs; 0 for a campaign that does not count runs.
    """

    checks: dict[str, str] = field(default_factory=dict)
    runs: int = 0


Campaign = Callable[[Collection[str]], Found]
"""A function of the names of checks; it ends when one of these checks has found a failure."""


def _simulated(found_by: Collection[str], *, personality: PersonalityName) -> Found:
    found = Found()
    for seed in count():
        for run in campaign(personality, seed, runs=RUNS_A_SEED).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _machine(_: Collection[str], *, machine: type[RuleBasedStateMachine]) -> Found:
    try:
        run_state_machine_as_test(machine, settings=settings(EFFORT, stateful_step_count=60))
    except Exception as error:
        # The check is the function of the state machine that failed.
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        name = last.name if "/tests/core/" in last.filename else type(error).__name__
        return Found({name: f"{last.filename}:{last.lineno}: {last.line}"})
    return Found()


def _cohort(found_by: Collection[str]) -> Found:
    found = Found()
    for seed in count():
        for run in cohort_campaign(seed).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


CAMPAIGNS: Final[dict[str, Campaign]] = {
    "jetstream": partial(_simulated, personality="jetstream"),
    "kafka": partial(_simulated, personality="kafka"),
    "cohort": _cohort,
    "engine": partial(_machine, machine=EngineMachine),
    "modes": partial(_machine, machine=ModesMachine),
}
