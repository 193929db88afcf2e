"""The campaigns: whole consumers in the simulator, and the engine beside its naive models.

Each runs until a check that it is asked for has found something, at most so long. The same runs every time, and none
is made small: what counts is the check.
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
"""Runs of the simulator after which a fault counts as not found: one that takes more needs other cases."""

RUNS_A_SEED: Final = 6
"""Few, so that there are many cases: of each seed there is one."""

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
    """``checks``: check -> the first thing it found; ``runs``: how many it took, 0 where they are not counted."""

    checks: dict[str, str] = field(default_factory=dict)
    runs: int = 0


Campaign = Callable[[Collection[str]], Found]
"""Takes the names of checks; ends when one of them has found something."""


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
        # The check is the function of the state machine that was not content.
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
