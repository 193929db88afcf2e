"""A plan stays within its budget, and a failing plan shrinks to a failing plan without a superfluous part."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.errors import ImpossiblePlan
from memsource.sim.plans.faults import FaultBudget, draw
from memsource.sim.plans.plan import FAULT_KINDS, Fault, Plan, Schedule
from memsource.sim.plans.shrink import shrink
from memsource.sim.plans.strategies import plans, traffics
from memsource.sim.plans.token import encode
from memsource.sim.plans.traffic import Traffic

BUDGETS = st.builds(FaultBudget, **{kind: st.integers(0, 4) for kind in FAULT_KINDS})
ANY = st.none() | st.booleans() | st.integers(-2, 2**65) | st.floats() | st.text(max_size=3)
LIMITS = st.none() | st.integers(1, 300)


def check_drawn(budget: FaultBudget, personality: PersonalityName, boundaries: int, seed: int) -> None:
    """Check that drawn faults make a plan and stay within their budget."""
    found = draw(budget, personality, boundaries, random.Random(seed))
    assert Plan(personality, faults=found).faults == found
    assert all(0 <= fault.at < boundaries for fault in found)
    assert all(count <= budget.of(kind) for kind, count in Counter(fault.kind for fault in found).items())


def check_said(at: object, kind: object, target: object, amount: object) -> None:
    """Check that any fault and schedule either raise an error or make a plan with a token."""
    makes: tuple[Callable[[], Plan], ...] = (
        lambda: Plan("jetstream", faults=(Fault(at, kind, target, amount),)),  # type: ignore[arg-type]
        lambda: Plan(schedule=Schedule(((at, target), (amount, at)), (at, target))),  # type: ignore[arg-type]
        lambda: Plan(seed=at, limit=target),  # type: ignore[arg-type]
    )
    for make in makes:
        try:
            plan = make()
        except ImpossiblePlan:
            continue
        encode(plan)


def check_shrunk(plan: Plan, chance: int) -> None:
    """Shrink a failing plan, and check that each remaining part is necessary for the failure."""

    def fails(tried: Plan) -> bool:
        return tried == plan or zlib.crc32(encode(tried).encode()) % chance == 0

    shrunk = shrink(plan, fails, attempts=100_000)
    assert shrunk.complete
    assert fails(shrunk.plan)
    schedule = shrunk.plan.schedule
    for number in range(len(shrunk.plan.faults)):
        faults = [*shrunk.plan.faults]
        del faults[number]
        assert not fails(replace(shrunk.plan, faults=tuple(faults)))
    for number in range(len(schedule.deviations)):
        deviations = [*schedule.deviations]
        del deviations[number]
        assert not fails(replace(shrunk.plan, schedule=replace(schedule, deviations=tuple(deviations))))
    for number in range(len(schedule.jumps)):
        jumps = [*schedule.jumps]
        del jumps[number]
        assert not fails(replace(shrunk.plan, schedule=replace(schedule, jumps=tuple(jumps))))


def check_traffic(wanted: Traffic, seed: int, partitions: int, fewer: int) -> None:
    """Check the messages of a seed.

    Each key has one partition. A smaller ``n`` gives the first messages of a larger ``n``.
    """
    items = wanted.items(seed, partitions)
    assert replace(wanted, n=min(fewer, wanted.n)).items(seed, partitions) == items[:fewer]
    homes = {(item.key, item.partition) for item in items if item.key is not None}
    assert len(homes) == len({key for key, _ in homes})
    assert all(0 <= item.partition < partitions and item.gap >= 0 for item in items)


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    """Return tests of drawn faults, any plans, failing plans and traffic."""
    seeds = st.integers(0, 2**64 - 1)

    @effort
    @given(BUDGETS, st.sampled_from(PERSONALITIES), st.integers(0, 100), seeds)
    def drawn(budget: FaultBudget, personality: PersonalityName, boundaries: int, seed: int) -> None:
        tick()
        check_drawn(budget, personality, boundaries, seed)

    @effort
    @given(ANY, st.sampled_from(FAULT_KINDS) | ANY, ANY, ANY)
    def said(at: object, kind: object, target: object, amount: object) -> None:
        tick()
        check_said(at, kind, target, amount)

    @effort
    @given(plans(FaultBudget(crash=3, clock_jump=2), boundaries=100), LIMITS, st.integers(2, 5))
    def shrunk(plan: Plan, limit: int | None, chance: int) -> None:
        tick()
        check_shrunk(replace(plan, limit=limit), chance)

    @effort
    @given(traffics(), seeds, st.integers(1, 9), st.integers(0, 50))
    def published(wanted: Traffic, seed: int, partitions: int, fewer: int) -> None:
        tick()
        check_traffic(wanted, seed, partitions, fewer)

    return [drawn, said, shrunk, published]
