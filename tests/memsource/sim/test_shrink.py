"""A shrunk plan fails, needs each of its parts, and takes few runs to find."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.sim.errors import SimulationError
from memsource.sim.plans.faults import FaultBudget
from memsource.sim.plans.plan import FAULT_KINDS, Fault, Plan, Schedule
from memsource.sim.plans.shrink import shrink
from memsource.sim.plans.strategies import plans
from memsource.sim.plans.token import encode

Fails = Callable[[Plan], bool]

BUDGET = FaultBudget(**dict.fromkeys(FAULT_KINDS, 2))
PLANS = st.builds(
    lambda plan, limit: replace(plan, limit=limit),
    plans(BUDGET, boundaries=60, max_turn=60),
    st.none() | st.integers(1, 100),
)


def weight(plan: Plan) -> int:
    """A number for a plan, the same in every process."""
    return zlib.crc32(encode(plan).encode())


def size(plan: Plan) -> tuple[float, ...]:
    """A measure that never rises."""
    return (
        len(plan.faults),
        len(plan.schedule),
        sum(fault.at for fault in plan.faults),
        sum(fault.target for fault in plan.faults),
        sum(abs(fault.amount) for fault in plan.faults),
        sum(index for _, index in plan.schedule.deviations),
    )


def asked(first: Plan) -> Fails:
    """A condition that the first plan fulfils, and any other plan by chance."""
    return lambda plan: plan == first or weight(plan) % 3 == 0


@pytest.mark.long
@given(PLANS, st.integers(1, 60))
def test_the_result_fails_and_is_never_larger(plan: Plan, attempts: int) -> None:
    fails = asked(plan)
    shrunk = shrink(plan, fails, attempts=attempts)
    assert fails(shrunk.plan)
    assert shrunk.attempts <= attempts
    assert all(now <= before for now, before in zip(size(shrunk.plan), size(plan), strict=True))
    assert (shrunk.plan.personality, shrunk.plan.seed) == (plan.personality, plan.seed)
    assert plan.limit is None or (shrunk.plan.limit is not None and shrunk.plan.limit <= plan.limit)


@pytest.mark.long
@given(PLANS)
def test_shrinking_again_gives_the_same(plan: Plan) -> None:
    fails = asked(plan)
    shrunk = shrink(plan, fails, attempts=100_000)
    assert shrunk.complete
    again = shrink(shrunk.plan, fails, attempts=100_000)
    assert again.plan == shrunk.plan
    assert again.complete


def without_one(plan: Plan) -> list[Plan]:
    """All plans with one fault, deviation, jump or message less."""
    schedule = plan.schedule
    fewer = [replace(plan, faults=tuple(each for each in plan.faults if each is not fault)) for fault in plan.faults]
    for point in schedule.deviations:
        kept = tuple(each for each in schedule.deviations if each != point)
        fewer.append(replace(plan, schedule=replace(schedule, deviations=kept)))
    for turn in schedule.jumps:
        jumps = tuple(each for each in schedule.jumps if each != turn)
        fewer.append(replace(plan, schedule=replace(schedule, jumps=jumps)))
    if plan.limit is not None and plan.limit > 1:
        fewer.append(replace(plan, limit=plan.limit - 1))
    return fewer


@pytest.mark.long
@given(PLANS)
def test_every_part_of_the_result_is_needed(plan: Plan) -> None:
    fails = asked(plan)
    shrunk = shrink(plan, fails, attempts=100_000).plan
    assert not any(fails(fewer) for fewer in without_one(shrunk))


@pytest.mark.long
@given(PLANS)
def test_no_plan_is_run_twice(plan: Plan) -> None:
    fails = asked(plan)
    tried: list[Plan] = []

    def counting(each: Plan) -> bool:
        tried.append(each)
        return fails(each)

    shrunk = shrink(plan, counting)
    assert len(tried) == len(set(tried)) == shrunk.attempts
    assert tried[0] == plan


def walk(rng: random.Random, steps: int = 1_000) -> Schedule:
    """The schedule of a random walk."""
    turns = sorted(rng.sample(range(3_000), steps))
    jumps = tuple(turn for turn in turns if rng.random() < 0.05)
    return Schedule(tuple((turn, rng.randint(1, 9)) for turn in turns if turn not in jumps), jumps)


@pytest.mark.parametrize("needed", [0, 1, 2, 3, 5])
def test_shrinking_a_walk_of_a_thousand_steps_keeps_the_needed_ones(needed: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        schedule = walk(rng)
        jump = frozenset(rng.sample(schedule.jumps, min(1, needed)))
        turns = frozenset(turn for turn, _ in rng.sample(schedule.deviations, max(0, needed - 1)))
        faults = tuple(
            sorted(Fault(rng.randrange(3, 500), kind, rng.randrange(8), 5.5) for kind in ("crash", "freeze"))
        )

        def fails(plan: Plan, jump: frozenset[int] = jump, turns: frozenset[int] = turns) -> bool:
            enough = plan.limit is None or plan.limit >= 19
            crashed = any(fault.kind == "crash" and fault.at >= 3 for fault in plan.faults)
            return enough and crashed and jump <= {*plan.schedule.jumps} and turns <= {*dict(plan.schedule.deviations)}

        plan = Plan(seed=seed, faults=faults, schedule=schedule)
        shrunk = shrink(plan, fails, attempts=300)
        assert shrunk.complete
        assert shrunk.plan == Plan(
            seed=seed,
            faults=(Fault(3, "crash"),),
            schedule=Schedule(tuple((turn, 1) for turn in sorted(turns)), tuple(jump)),
            limit=19,
        )


def test_faults_become_early_and_simple() -> None:
    first = Plan("jetstream", faults=(Fault(40, "freeze", 6, 47.3), Fault(90, "clock_jump", 5, -86_400.0)))

    def fails(plan: Plan) -> bool:
        found = {fault.kind: fault for fault in plan.faults}
        return (
            found.keys() == {"freeze", "clock_jump"}
            and found["freeze"].amount > 20
            and found["freeze"].target >= 3
            and found["clock_jump"].at >= 17
        )

    shrunk = shrink(first, fails)
    assert shrunk.complete
    assert shrunk.plan == Plan(
        "jetstream", faults=(Fault(0, "freeze", 3, 47.0), Fault(17, "clock_jump", 0, 0.0)), limit=1
    )


def test_deviations_become_small() -> None:
    first = Plan(schedule=Schedule(((3, 9), (8, 7))))
    shrunk = shrink(first, lambda plan: sum(index for _, index in plan.schedule.deviations) >= 11)
    assert sum(index for _, index in shrunk.plan.schedule.deviations) == 11
    assert len(shrunk.plan.schedule) == 2


@pytest.mark.parametrize("least", [1, 2, 3, 17, 100])
@pytest.mark.parametrize("limit", [None, 150])
def test_the_number_of_messages_becomes_minimal(least: int, limit: int | None) -> None:
    shrunk = shrink(Plan(limit=limit), lambda plan: plan.limit is None or plan.limit >= least, attempts=40)
    assert shrunk.plan.limit == least


def test_a_plan_that_needs_all_messages_keeps_them() -> None:
    assert shrink(Plan(), lambda plan: plan.limit is None).plan == Plan()


def test_after_the_last_run_the_smallest_failing_plan_is_returned() -> None:
    plan = Plan(schedule=walk(random.Random(1)))
    needed = plan.schedule.deviations[500]
    shrunk = shrink(plan, lambda tried: needed in tried.schedule.deviations, attempts=10)
    assert (shrunk.attempts, shrunk.complete) == (10, False)
    assert needed in shrunk.plan.schedule.deviations
    assert len(shrunk.plan.schedule) < 500


def test_a_plan_that_does_not_fail_is_refused() -> None:
    with pytest.raises(SimulationError, match="the plan does not fail, so it cannot be shrunk"):
        shrink(Plan(), lambda plan: False)


def test_shrinking_without_attempts_is_refused() -> None:
    with pytest.raises(ValueError, match="attempts=0: must be 1 or more"):
        shrink(Plan(), lambda plan: True, attempts=0)


def test_an_error_of_a_run_ends_the_shrinking() -> None:
    def fails(plan: Plan) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shrink(Plan(), fails)
