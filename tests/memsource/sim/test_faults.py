"""Drawn faults keep to their budget, and every kind of fault is drawn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.faults import AMOUNTS, FAULTS_MAX, FaultBudget, crash_sweep, draw, faults
from memsource.sim.plans.plan import FAULT_KINDS, IMPOSSIBLE_FAULTS, Fault, Plan

BUDGETS = st.builds(faults, **{kind: st.integers(0, 3) for kind in FAULT_KINDS})


@given(BUDGETS, st.sampled_from(PERSONALITIES), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_drawn_faults_keep_to_their_budget(
    budget: FaultBudget, personality: PersonalityName, boundaries: int, seed: int
) -> None:
    found = draw(budget, personality, boundaries, random.Random(seed))
    assert found == draw(budget, personality, boundaries, random.Random(seed))
    assert Plan(personality, faults=found).faults == found
    assert all(count <= budget.of(kind) for kind, count in Counter(fault.kind for fault in found).items())
    assert all(fault.at < boundaries and fault.amount in AMOUNTS[fault.kind] for fault in found)


def test_every_kind_of_fault_is_drawn_with_any_size_and_at_any_boundary() -> None:
    budget = FaultBudget(**dict.fromkeys(FAULT_KINDS, 2))
    drawn = [draw(budget, "jetstream", 5, random.Random(seed)) for seed in range(300)]
    for kind in FAULT_KINDS:
        assert {sum(fault.kind == kind for fault in found) for found in drawn} == {0, 1, 2}
        assert {fault.amount for found in drawn for fault in found if fault.kind == kind} == set(AMOUNTS[kind])
    assert {fault.at for found in drawn for fault in found} == {0, 1, 2, 3, 4}
    full = sum(len(found) == len(budget) == 24 for found in drawn)
    assert 0 < full < 300


def test_some_faults_of_a_plan_are_close_together() -> None:
    drawn = [draw(faults(crash=1, freeze=1), "kafka", 100_000, random.Random(seed)) for seed in range(300)]
    near = sum(found[1].at - found[0].at <= 3 for found in drawn if len(found) == 2)
    assert 10 < near < 150


def test_a_fault_that_a_broker_never_has_is_not_drawn() -> None:
    budget = faults(redeliver=2, crash=1)
    budget.check(PERSONALITIES)
    assert budget.kinds("kafka") == ("crash",)
    assert budget.kinds("jetstream") == ("crash", "redeliver")
    drawn = {fault.kind for seed in range(50) for fault in draw(budget, "kafka", 9, random.Random(seed))}
    assert drawn == {"crash"}


def test_a_run_without_boundaries_has_no_fault() -> None:
    assert draw(faults(crash=5), "kafka", 0, random.Random(1)) == ()


def test_crashes_are_planned_at_every_boundary() -> None:
    assert list(crash_sweep(3)) == [(Fault(at, "crash", 0, 1.0),) for at in range(3)]
    assert list(crash_sweep(1, target=2, amount=0.5)) == [(Fault(0, "crash", 2, 0.5),)]
    assert list(crash_sweep(0)) == []


def unchecked(**wrong: Any) -> FaultBudget:
    return faults(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: unchecked(crash=-1), "crash=-1: must be a whole number of faults in 0 … 1000"),
        (lambda: unchecked(slow=1.5), "slow=1.5: must be a whole number"),
        (lambda: unchecked(slow=True), "slow=True: must be a whole number of faults in 0 … 1000, not a bool"),
        (lambda: unchecked(freeze=FAULTS_MAX + 1), "freeze=1001"),
        (lambda: unchecked(crsh=1), "memsource.faults has no option crsh=: did you mean crash=?"),
        (
            lambda: faults(redeliver=2).check(["kafka"]),
            "redeliver=2: never happens on kafka; leave out redeliver, or add 'jet",
        ),
        (lambda: faults(redeliver=2, crash=1).check(["kafka"]), "redeliver=2: never happens on kafka"),
        (
            lambda: faults().check("kafka"),  # type: ignore[arg-type]
            "personalities='kafka': must be a sequence; write ('kafka',) for one broker",
        ),
        (lambda: faults().check(["rabbit"]), "personality 'rabbit' is unknown"),  # type: ignore[list-item]
        (lambda: faults().check([]), "personalities=(): name one or more of kafka, jetstream"),
        (lambda: draw(faults(), "kafka", -1, random.Random(1)), "boundaries=-1"),
        (lambda: crash_sweep(-1), "boundaries=-1"),
    ],
)
def test_an_impossible_budget_is_refused_by_name(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(ImpossiblePlan) as caught:
        wrong()
    assert said in str(caught.value)


def test_every_kind_of_fault_is_possible_at_a_broker() -> None:
    assert all(any(kind not in IMPOSSIBLE_FAULTS[name] for name in PERSONALITIES) for kind in FAULT_KINDS)
