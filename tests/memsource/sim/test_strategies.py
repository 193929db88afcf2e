"""The strategies give all the plans of their description, and shrink to the simplest."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.faults import AMOUNTS, FaultBudget, faults
from memsource.sim.plans.plan import FAULT_KINDS, IMPOSSIBLE_FAULTS, Fault, Plan, Schedule
from memsource.sim.plans.strategies import fault_plans, plans, schedules, traffics
from memsource.sim.plans.traffic import Traffic

BUDGET = FaultBudget(**dict.fromkeys(FAULT_KINDS, 2))

# Only the search decides the shrunk value: no database, no health checks.
SEARCH = settings(
    database=None,
    derandomize=True,
    max_examples=2_000,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.long
@given(plans(BUDGET, boundaries=30, max_turn=20, max_deviations=3))
def test_plans_keep_to_their_bounds(plan: Plan) -> None:
    counts = Counter(fault.kind for fault in plan.faults)
    assert all(count <= 2 for count in counts.values())
    assert all(fault.at < 30 and fault.amount in AMOUNTS[fault.kind] for fault in plan.faults)
    assert len(plan.schedule.deviations) <= 3
    assert len(plan.schedule.jumps) <= 3
    assert all(turn <= 20 for turn, _ in plan.schedule.deviations)
    assert all(turn <= 20 for turn in plan.schedule.jumps)
    assert plan.limit is None


def test_strategies_shrink_to_a_run_without_faults() -> None:
    assert find(plans(BUDGET), lambda plan: True, settings=SEARCH) == Plan()
    assert find(schedules(), lambda each: len(each.deviations) > 0, settings=SEARCH) == Schedule(((0, 1),))
    assert find(schedules(), lambda each: len(each.jumps) > 0, settings=SEARCH) == Schedule(jumps=(0,))
    assert find(traffics(), lambda each: True, settings=SEARCH) == Traffic(n=1, keys=1, skew=0.0)


@pytest.mark.long
@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_of_fault_is_found_and_shrinks(kind: str) -> None:
    found = find(plans(BUDGET), lambda plan: any(each.kind == kind for each in plan.faults), settings=SEARCH)
    (fault,) = found.faults
    assert (fault.at, fault.kind, fault.target) == (0, kind, 0)
    assert fault.amount == AMOUNTS[fault.kind][0]
    assert found.personality == ("jetstream" if kind in IMPOSSIBLE_FAULTS["kafka"] else "kafka")


@pytest.mark.long
@given(plans(BUDGET, personalities=["jetstream"]))
def test_only_the_requested_brokers_are_drawn(plan: Plan) -> None:
    assert plan.personality == "jetstream"


@given(fault_plans(faults(crash=1), boundaries=0))
def test_without_a_boundary_there_is_no_fault(found: tuple[Fault, ...]) -> None:
    assert found == ()


def test_a_fault_that_a_broker_never_has_is_refused() -> None:
    with pytest.raises(ImpossiblePlan, match="redeliver=1: never happens on kafka"):
        fault_plans(faults(redeliver=1))
    with pytest.raises(ImpossiblePlan, match="redeliver=1: never happens on kafka"):
        plans(faults(redeliver=1), personalities=["kafka"])


@pytest.mark.long
@given(st.data())
def test_both_brokers_share_the_budget_of_their_common_faults(data: st.DataObject) -> None:
    found = data.draw(plans(faults(redeliver=1, crash=1)))
    assert {fault.kind for fault in found.faults} <= (
        {"crash", "redeliver"} - {"kafka": {"redeliver"}}.get(found.personality, set())
    )


@pytest.mark.process
def test_without_hypothesis_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['hypothesis'] = None; import memsource.sim.plans.strategies"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: memsource.sim.plans.strategies needs hypothesis, which is not installed: "
        "pip install '.[testing]' in the checkout of lanes"
    )
