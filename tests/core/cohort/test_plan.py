"""The plan of a cohort is even, needs as few moves as possible, and is the same at every member."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.cohort.plan import CohortPlan, plan

NAMES = [f"m{number}" for number in range(8)]
members = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 5), min_size=1)
equals = st.lists(st.sampled_from(NAMES), min_size=1, unique=True).map(lambda names: dict.fromkeys(names, 1))
owners = st.lists(st.none() | st.sampled_from(NAMES), min_size=1, max_size=24)
limits = st.none() | st.integers(1, 9)


def moved(before: list[str | None], after: CohortPlan, weights: dict[str, int]) -> int:
    """The number of partitions taken from a live member."""
    return sum(old in weights and old != new for old, new in zip(before, after.owners, strict=True))


@given(owners, equals, limits)
def test_shares_of_equal_members_differ_by_one_at_most_and_cover_everything(
    before: list[str | None], weights: dict[str, int], active_members: int | None
) -> None:
    planned = plan(before, weights, active_members=active_members)
    counts = Counter(planned.owners)
    assert None not in counts
    assert len(counts) == min(len(before), len(weights), active_members or len(weights))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert planned.active == tuple(sorted(str(owner) for owner in counts))
    assert sorted(planned.active + planned.standbys) == sorted(weights)


@given(owners, equals, limits)
def test_no_other_plan_with_equal_shares_needs_fewer_moves(
    before: list[str | None], weights: dict[str, int], active_members: int | None
) -> None:
    planned = plan(before, weights, active_members=active_members)
    active = min(len(before), len(weights), active_members or len(weights))
    share, rest = divmod(len(before), active)
    loads = Counter(before)
    # Every choice of active members and of members with one more partition; partitions above a share must move.
    fewest = min(
        sum(max(0, loads[name] - (name in chosen) * share - (name in more)) for name in weights)
        for chosen in combinations(sorted(weights), active)
        for more in combinations(chosen, rest)
    )
    assert moved(before, planned, weights) == fewest


@given(owners, members, limits)
def test_each_member_gets_its_proportion_rounded_and_at_least_one(
    before: list[str | None], weights: dict[str, int], active_members: int | None
) -> None:
    planned = plan(before, weights, active_members=active_members)
    counts = Counter(str(owner) for owner in planned.owners)
    assert set(counts) == set(planned.active)
    assert len(counts) == min(len(before), len(weights), active_members or len(weights))
    total = sum(weights[name] for name in counts)
    proportions = {name: len(before) * weights[name] / total for name in counts}
    if min(proportions.values()) >= 1:
        assert all(abs(counts[name] - proportions[name]) < 1 for name in counts)
    for one in counts:
        assert all(counts[one] >= counts[other] - 1 for other in counts if weights[one] >= weights[other])


@given(owners, members.flatmap(lambda weights: st.permutations(list(weights.items()))), limits)
def test_the_plan_ignores_the_order_of_members_and_stays_when_planned_again(
    before: list[str | None], weights: list[tuple[str, int]], active_members: int | None
) -> None:
    planned = plan(before, dict(weights), active_members=active_members)
    assert plan(before, dict(sorted(weights)), active_members=active_members) == planned
    assert plan(planned.owners, dict(weights), active_members=active_members) == planned


def test_a_join_moves_only_what_balance_requires() -> None:
    weights = {f"member-{number:03}": 1 for number in range(100)}
    before = list(plan([None] * 1000, weights).owners)
    after = plan(before, weights | {"a-newcomer": 1})
    changed = [(old, new) for old, new in zip(before, after.owners, strict=True) if old != new]
    assert {new for _, new in changed} == {"a-newcomer"}
    assert len(changed) == 1000 // 101
    assert max(Counter(old for old, _ in changed).values()) == 1


def test_a_leave_redistributes_only_the_partitions_of_the_leaver() -> None:
    weights = {f"member-{number:03}": 1 for number in range(100)}
    before = plan([None] * 1000, weights)
    del weights["member-042"]
    after = plan(before.owners, weights)
    changed = {old for old, new in zip(before.owners, after.owners, strict=True) if old != new}
    assert changed == {"member-042"}
    assert sorted(Counter(after.owners).values()) == [10] * 89 + [11] * 10


def test_with_one_partition_the_other_members_are_standbys() -> None:
    planned = plan(["b"], {"a": 9, "b": 1, "c": 1})
    assert planned == CohortPlan(("b",), ("b",), ("a", "c"))
    # The owner dies, and a standby takes over.
    assert plan(["b"], {"a": 1, "c": 1}) == CohortPlan(("a",), ("a",), ("c",))


def test_a_limit_of_active_members_keeps_the_owners_and_makes_the_rest_standbys() -> None:
    before = ["d", "c"] * 4
    planned = plan(before, dict.fromkeys("abcd", 1), active_members=2)
    assert planned == CohortPlan(tuple(before), ("c", "d"), ("a", "b"))


def test_too_few_members_still_cover_everything() -> None:
    planned = plan([None] * 4, {"a": 1}, active_members=3)
    assert planned == CohortPlan(("a",) * 4, ("a",), (), too_few_members=True)
    # The number exceeds the partitions, but enough members live.
    assert not plan([None], dict.fromkeys("abc", 1), active_members=3).too_few_members


def test_without_members_no_partition_is_owned() -> None:
    assert plan(["a", None], {}) == CohortPlan((None, None), (), ())
    assert plan(["a"], {}, active_members=1).too_few_members


def test_a_draining_member_gets_no_partition_while_another_lives() -> None:
    planned = plan(["a", "a", "b"], {"a": 1, "b": 1}, draining={"a"})
    assert planned == CohortPlan(("b",) * 3, ("b",), ())
    assert plan(["a", None], {"a": 1}, draining={"a"}, active_members=1) == CohortPlan(
        ("a", "a"), ("a",), (), too_few_members=True
    )


def test_a_heavier_member_gets_its_proportion() -> None:
    assert Counter(plan([None] * 64, {"big": 3, "small": 1}).owners) == {"big": 48, "small": 16}


def test_a_share_below_one_partition_is_one() -> None:
    assert Counter(plan([None] * 5, {"big": 100, "small": 1, "tiny": 1}).owners) == {"big": 3, "small": 1, "tiny": 1}


@pytest.mark.parametrize(
    ("weight", "active_members", "targets", "rules", "error"),
    [
        (0, None, {}, 1, "the weight of member 'a' is 0; use 1 or more"),
        (-1, None, {}, 1, "the weight of member 'a' is -1; use 1 or more"),
        (1, 0, {}, 1, "the number of active members is 0; use 1 or more, or None"),
        (1, None, {"a": 0}, 1, "the target of member 'a' is 0; use 1 or more, or None"),
        (1, None, {}, 2, "the plan rules 2 are unknown; use 0 to 1"),
        (1, None, {}, -1, "the plan rules -1 are unknown; use 0 to 1"),
    ],
)
def test_an_invalid_argument_is_refused_by_name(
    weight: int, active_members: int | None, targets: dict[str, int], rules: int, error: str
) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        plan([None], {"a": weight}, active_members=active_members, targets=targets, rules=rules)
