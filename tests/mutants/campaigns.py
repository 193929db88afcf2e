"""The campaigns: whole consumers under faults, and the engine beside its naive models.

Each runs examples until a check that it is asked for has found something, at most so many. The same ones every time,
and none is made small: what counts is the check.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.core.test_engine_machine import EngineMachine
from tests.core.test_engine_modes_machine import ModesMachine
from tests.mutants.findings import findings
from tests.mutants.plans import Plan, plans

Campaign = Callable[[Collection[str]], dict[str, str]]
"""Takes the names of checks; returns what was found until one of them found something: check -> the first thing."""

EFFORT: Final = settings(
    max_examples=1_000,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class _Found(Exception):
    """What was looked for was found."""


def _world(found_by: Collection[str], *, commits: bool) -> dict[str, str]:
    found: dict[str, str] = {}

    @EFFORT
    @given(plan=plans(commits=commits))
    def example(plan: Plan) -> None:
        found.update(findings(plan) | found)
        if any(name in found for name in found_by):
            raise _Found

    try:
        example()
    except _Found:
        pass
    return found


def _machine(_: Collection[str], *, machine: type[RuleBasedStateMachine]) -> dict[str, str]:
    try:
        run_state_machine_as_test(machine, settings=settings(EFFORT, stateful_step_count=60))
    except Exception as error:
        # The check is the function of the state machine that was not content.
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        name = last.name if "/tests/core/" in last.filename else type(error).__name__
        return {name: f"{last.filename}:{last.lineno}: {last.line}"}
    return {}


CAMPAIGNS: Final[dict[str, Campaign]] = {
    "acks": partial(_world, commits=False),
    "commits": partial(_world, commits=True),
    "engine": partial(_machine, machine=EngineMachine),
    "modes": partial(_machine, machine=ModesMachine),
}
