"""The campaigns that search for mutants: whole consumers, the engine against its naive models, retry loops and leases.

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

from memsource.adapters.runs import AdapterSchedule, run_schedule
from memsource.personality import PersonalityName
from memsource.sim.runs.campaign import Campaign as Schedules
from memsource.sim.runs.run import Conditions
from tests.cohort.cases import AIMED, FORCED
from tests.cohort.slices import campaign as cohort_campaign
from tests.core.cohort.campaign import walk
from tests.core.test_engine_machine import EngineMachine
from tests.core.test_engine_modes_machine import ModesMachine
from tests.core.test_partition_budgets_machine import BudgetMachine
from tests.memsource.sim.slices import campaign
from tests.simulated.slices import ADAPTERS, adapter_of

RUNS: Final = 600
"""Runs of the simulator after which a fault counts as not found. A fault that needs more runs needs better cases."""

RUNS_A_SEED: Final = 6
"""Few runs for each seed, so that there are many cases; each seed has one case."""

ADAPTER_RUNS: Final = 400
"""Runs of a real adapter after which a fault counts as not found."""

WIDTH_RUNS: Final = 100
"""Runs with changes of a width after which a fault counts as not found."""

WIDTH_RUNS_A_SEED: Final = 2
"""The first of these runs has no faults, the second one has."""

WALKS: Final = 12_000
"""Walks of lease machines after which a fault counts as not found."""

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


Campaign = Callable[[Collection[str], int], Found]
"""A function of the names of checks and of the first seed; it ends when one of these checks has found a failure."""


def _simulated(found_by: Collection[str], first: int, *, personality: PersonalityName) -> Found:
    found = Found()
    for seed in count(first):
        for run in campaign(personality, seed, runs=RUNS_A_SEED).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _machine(_: Collection[str], __: int, *, machine: type[RuleBasedStateMachine]) -> Found:
    try:
        run_state_machine_as_test(machine, settings=settings(EFFORT, stateful_step_count=60))
    except Exception as error:
        # The check is the function of the state machine that failed.
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        name = last.name if "/tests/core/" in last.filename else type(error).__name__
        return Found({name: f"{last.filename}:{last.lineno}: {last.line}"})
    return Found()


def _cohort(found_by: Collection[str], first: int, *, begin: int = 0) -> Found:
    found = Found()
    for seed in count(begin + first):
        for run in cohort_campaign(seed).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _widths(found_by: Collection[str], first: int, *, personality: PersonalityName) -> Found:
    from tests.memsource.sim.widths import campaign as widths_campaign
    from tests.memsource.sim.widths import case_of

    found = Found()
    for seed in count(first):
        if case_of(seed).personality != personality:
            continue
        for run in widths_campaign(seed, runs=WIDTH_RUNS_A_SEED).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= WIDTH_RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _walks(found_by: Collection[str], first: int) -> Found:
    found = Found()
    for number in range(first, first + WALKS):
        found.runs += 1
        try:
            walk(number).run()
        except AssertionError as error:
            # The text of a broken promise begins with its letter.
            promise, _, what = str(error).partition(" ")
            found.checks.setdefault(promise, f"walk {number}: {what}")
            if promise in found_by:
                break
    return found


def _adapter(found_by: Collection[str], first: int, *, name: str) -> Found:
    found = Found()
    adapter = adapter_of(name)
    for seed in range(first, first + ADAPTER_RUNS):
        found.runs += 1
        found.checks = run_schedule(AdapterSchedule(name, seed), adapter).run.findings | found.checks
        if found.checks.keys() & set(found_by):
            break
    return found


def _kept_attempts(found_by: Collection[str], first: int) -> Found:
    from tests.memsource.sim.kept_attempts import MOVES, OUTAGE, blocked_and_parked

    found = Found()
    conditions = Conditions(test=blocked_and_parked, settles=True)
    for seed in count(first):
        budget = (OUTAGE, MOVES)[seed // 3 % 2]
        for run in Schedules(conditions, runs=RUNS_A_SEED, budget=budget, seed=seed).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _publishing(found_by: Collection[str], first: int, *, batches: bool = False) -> Found:
    from tests.memsource.sim.publishing import FAULTS, MOVES, copied, copied_in_batches

    found = Found()
    conditions = Conditions(test=copied_in_batches if batches else copied, settles=True)
    for seed in count(first):
        for run in Schedules(conditions, runs=RUNS_A_SEED, budget=(FAULTS, MOVES)[seed % 2], seed=seed).each():
            found.runs += 1
            found.checks = run.findings | found.checks
            if found.checks.keys() & set(found_by) or found.runs >= RUNS:
                return found
    raise AssertionError("there are seeds for ever")


def _retry_loops(found_by: Collection[str], _: int) -> Found:
    from tests.retries.harness import LOOPS, faults_of
    from tests.retries.stubs import STUBBED, stubbed_faults_of

    found = Found()
    played = [(loop.name, partial(faults_of, loop)) for loop in LOOPS]
    played += [(kind.__name__, partial(stubbed_faults_of, kind)) for kind in STUBBED]
    # The loops that are meant to show the fault come first, and end the search.
    for name, play in sorted(played, key=lambda each: each[0] not in found_by):
        found.runs += 1
        if faults := play():
            # The check is the retry loop.
            found.checks[name] = faults[0]
        if found.checks.keys() & set(found_by):
            break
    return found


CAMPAIGNS: Final[dict[str, Campaign]] = {
    **{f"{name}_adapter": partial(_adapter, name=name) for name in ADAPTERS},
    "jetstream": partial(_simulated, personality="jetstream"),
    "kafka": partial(_simulated, personality="kafka"),
    "cohort": _cohort,
    "kafka_widths": partial(_widths, personality="kafka"),
    "jetstream_widths": partial(_widths, personality="jetstream"),
    "lease_walks": _walks,
    "cohort_targets": partial(_cohort, begin=AIMED),
    "cohort_forced": partial(_cohort, begin=FORCED.start),
    "kept_attempts": _kept_attempts,
    "publishing": _publishing,
    "publishing_batches": partial(_publishing, batches=True),
    "retry_loops": _retry_loops,
    "engine": partial(_machine, machine=EngineMachine),
    "modes": partial(_machine, machine=ModesMachine),
    "budgets": partial(_machine, machine=BudgetMachine),
}
