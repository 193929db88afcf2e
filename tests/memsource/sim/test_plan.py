"""A plan accepts the limits of each range, and refuses values beyond them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.plan import AMOUNT_MAX, NUMBERS_END, Fault, Plan, Schedule

CRASH = Fault(3, "crash")
FREEZE = Fault(7, "freeze", 1, 5.0)


def test_fault_plans_are_compared_by_value() -> None:
    assert Plan(faults=(CRASH, FREEZE)) == Plan(faults=(Fault(3, "crash"), FREEZE))
    assert len({Plan(), Plan(), Plan(seed=1), Plan(schedule=Schedule(jumps=(1,)))}) == 3


def test_the_limits_of_each_range_are_valid() -> None:
    end = NUMBERS_END - 1
    Plan(seed=end, limit=1, faults=(Fault(0, "clock_jump", amount=-AMOUNT_MAX), Fault(end, "slow", end, AMOUNT_MAX)))
    Schedule(deviations=((0, 1), (1, 1), (end, end)), jumps=(0, 1, end))
    Plan(personality="jetstream", faults=(Fault(0, "redeliver"),))


def unknown(name: str) -> Any:
    """A value of a type that mypy refuses."""
    return name


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Fault(0, unknown("explode")), "fault kind 'explode' is unknown: use one of crash, freeze, "),
        (lambda: Fault(-1, "crash"), "at=-1"),
        (lambda: Fault(NUMBERS_END, "crash"), "at and target must be whole numbers"),
        (lambda: Fault(0, "crash", -1), "target=-1"),
        (lambda: Fault(0, "crash", unknown("0")), "at and target must be whole numbers, 0 or more"),
        (lambda: Fault(True, "crash"), "at=True"),
        (lambda: Fault(0, "freeze", 0, -0.5), "amount must be a number of seconds in 0 … 1e+09"),
        (lambda: Fault(0, "freeze", 0, float("nan")), "amount=nan"),
        (lambda: Fault(0, "freeze", 0, float("inf")), "amount=inf"),
        (lambda: Fault(0, "clock_jump", 0, -2 * AMOUNT_MAX), "amount must be a number of seconds in -1e+09 … 1e+09"),
        (lambda: Fault(0, "freeze", 0, unknown("5")), "amount must be a number"),
        (lambda: Fault(0, "freeze", 0, True), "amount=True"),
        (lambda: Schedule(((3, 1), (3, 2))), "turn 3 follows turn 3: sort the turns, and name each turn once"),
        (lambda: Schedule(((3, 1), (2, 2))), "turn 2 follows turn 3"),
        (lambda: Schedule(jumps=(4, 4)), "turn 4 follows turn 4"),
        (lambda: Schedule(((3, 0),)), "deviation (3, 0): the turn must be 0 or more, and the index 1"),
        (lambda: Schedule(((-1, 1),)), "deviation (-1, 1)"),
        (lambda: Schedule(jumps=(-1,)), "jump at turn -1"),
        (lambda: Plan(unknown("rabbit")), "personality 'rabbit' is unknown: use one of kafka, jetstream"),
        (lambda: Plan(seed=-1), "seed=-1: must be a whole number in 0 … 2**64-1"),
        (lambda: Plan(seed=NUMBERS_END), f"seed={NUMBERS_END}"),
        (lambda: Plan(limit=0), "limit=0: must be a number of messages, 1 or more"),
        (lambda: Plan(faults=(FREEZE, CRASH)), "faults= are not in the order of their boundaries"),
        (lambda: Plan(faults=(Fault(0, "redeliver"),)), "'redeliver' never happens on 'kafka'"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ImpossiblePlan) as caught:
        wrong()
    assert said in str(caught.value)
