"""Plans as Hypothesis strategies, for a user's own property tests. Needs the extra ``testing``.

Hypothesis shrinks traffic towards few messages, and plans towards no faults and steps in the order first in, first out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from memsource.personality import PERSONALITIES, PersonalityName
from memsource.sim.plans.faults import AMOUNTS, FaultBudget
from memsource.sim.plans.plan import NUMBERS_END, Fault, FaultKind, Plan, Schedule
from memsource.sim.plans.traffic import Traffic

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "memsource.sim.plans.strategies needs hypothesis, which is not installed: pip install '.[testing]' in the "
        "checkout of lanes"
    ) from error

__all__ = ["fault_plans", "plans", "schedules", "traffics"]

_SHARES: Final = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
_TARGETS: Final = st.integers(0, 7)
_NO_FAULTS: Final = FaultBudget()


def traffics(*, max_n: int = 50, max_keys: int = 8) -> st.SearchStrategy[Traffic]:
    """Draw traffic of any kind: with equal or skewed keys, with a hot key, without keys, with gaps.

    Args:
        max_n: Maximum number of messages, 1 or more. Traffic has at least 1 message.
        max_keys: Maximum number of keys, 1 or more. Traffic has at least 1 key.

    Returns:
        A Hypothesis strategy for traffic.
    """
    return st.builds(
        Traffic,
        n=st.integers(1, max_n),
        keys=st.integers(1, max_keys),
        skew=st.sampled_from([0.0, 1.0, 2.0]),
        hot=_SHARES,
        keyless=_SHARES,
        gaps=_SHARES,
    )


def schedules(*, max_turn: int = 500, max_deviations: int = 8, max_index: int = 6) -> st.SearchStrategy[Schedule]:
    """Draw schedules with few deviations from first in, first out, and few jumps of time.

    Args:
        max_turn: The last turn of a deviation or jump.
        max_deviations: Maximum number of deviations, and of jumps.
        max_index: The highest index of a deviation.

    Returns:
        A Hypothesis strategy for schedules.
    """
    turns = st.integers(0, max_turn)
    deviations = st.dictionaries(turns, st.integers(1, max_index), max_size=max_deviations)
    jumps = st.sets(turns, max_size=max_deviations)
    return st.builds(
        lambda found, jumped: Schedule(tuple(sorted(found.items())), tuple(sorted(jumped))), deviations, jumps
    )


def fault_plans(
    budget: FaultBudget, *, personality: PersonalityName = "kafka", boundaries: int = 200
) -> st.SearchStrategy[tuple[Fault, ...]]:
    """Draw the faults of a budget for one broker.

    Args:
        budget: Maximum number of faults of each kind.
        personality: The broker.
        boundaries: Number of boundaries; faults are at 0 … ``boundaries`` − 1.

    Returns:
        A Hypothesis strategy for tuples of faults.

    Raises:
        ImpossiblePlan: The budget allows a kind of fault that never happens on the broker.
    """
    budget.check((personality,))
    return _fault_plans(budget, personality, boundaries)


def plans(
    budget: FaultBudget = _NO_FAULTS,
    *,
    personalities: Sequence[PersonalityName] = PERSONALITIES,
    boundaries: int = 200,
    max_turn: int = 500,
    max_deviations: int = 8,
) -> st.SearchStrategy[Plan]:
    """Draw plans: a broker, a seed, a schedule, and faults of the budget that can happen on this broker.

    Args:
        budget: Maximum number of faults of each kind. Default: no faults.
        personalities: The brokers to draw from.
        boundaries: Number of boundaries; faults are at 0 … ``boundaries`` − 1.
        max_turn: The last turn of a deviation or jump.
        max_deviations: Maximum number of deviations, and of jumps.

    Returns:
        A Hypothesis strategy for plans.

    Raises:
        ImpossiblePlan: The budget allows a kind of fault that happens on none of the brokers.
    """
    budget.check(personalities)
    ordered = schedules(max_turn=max_turn, max_deviations=max_deviations)

    def of(personality: PersonalityName) -> st.SearchStrategy[Plan]:
        return st.builds(
            Plan,
            personality=st.just(personality),
            seed=st.integers(0, NUMBERS_END - 1),
            faults=_fault_plans(budget, personality, boundaries),
            schedule=ordered,
        )

    return st.sampled_from(list(personalities)).flatmap(of)


def _fault_plans(
    budget: FaultBudget, personality: PersonalityName, boundaries: int
) -> st.SearchStrategy[tuple[Fault, ...]]:
    kinds = [
        st.lists(_faults(kind, boundaries), max_size=budget.of(kind))
        for kind in budget.kinds(personality)
        if boundaries > 0
    ]
    return st.tuples(*kinds).map(lambda found: tuple(sorted(fault for each in found for fault in each)))


def _faults(kind: FaultKind, boundaries: int) -> st.SearchStrategy[Fault]:
    amounts = st.sampled_from(AMOUNTS[kind])
    return st.builds(Fault, at=st.integers(0, boundaries - 1), kind=st.just(kind), target=_TARGETS, amount=amounts)
