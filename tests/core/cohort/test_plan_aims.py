"""The plan of a small cohort is the best of all assignments, by the aims in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from lanes.core.cohort.plan import CohortPlan, plan

NAMES = "abcd"
owners = st.lists(st.none() | st.sampled_from([*NAMES, "dead"]), min_size=1, max_size=5)
members = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 4), min_size=1)
targets = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 6))
drains = st.sets(st.sampled_from(NAMES))
limits = st.none() | st.integers(1, 4)

Owners = Sequence[str | None]
Numbers = Mapping[str, int]


def assignments(before: Owners, names: Sequence[str]) -> Iterator[Owners]:
    """Every assignment of the partitions to members."""
    return product(names, repeat=len(before))


def excess(assignment: Owners, preferred: Numbers) -> int:
    """The number of partitions above the targets."""
    return sum(max(0, count - preferred.get(str(name), count)) for name, count in Counter(assignment).items())


def moves(before: Owners, after: Owners, weights: Numbers) -> int:
    """The number of partitions taken from a live member."""
    return sum(old in weights and old != new for old, new in zip(before, after, strict=True))


def fair(count: int, weights: Numbers, preferred: Numbers) -> dict[str, Fraction]:
    """The division into fractions of partitions that is proportional to the weights as far as the targets allow.

    Every choice of the members at their lower bound, at their upper bound and in between is tried. In the fair
    division, no part moves from a member with more for its weight to a member with less, unless a bound forbids it.
    """
    enough = sum(preferred.get(name, count) for name in weights) >= count
    low = {name: 1 if enough else preferred[name] for name in weights}
    high = {name: min(count, preferred.get(name, count)) if enough else count for name in weights}
    for places in product((low, high, None), repeat=len(weights)):
        found = {name: Fraction(place[name]) for name, place in zip(weights, places, strict=True) if place is not None}
        between = [name for name in weights if name not in found]
        rest = count - sum(found.values(), Fraction())
        found |= {name: rest * weights[name] / sum(weights[one] for one in between) for name in between}
        can_gain = [name for name in weights if found[name] < high[name]]
        can_give = [name for name in weights if found[name] > low[name]]
        if (
            sum(found.values()) == count
            and all(low[name] <= found[name] <= high[name] for name in weights)
            and all(
                found[one] / weights[one] >= found[other] / weights[other]
                for one, other in product(can_gain, can_give)
                if one != other
            )
        ):
            return found
    raise AssertionError("there is no fair division")


def unevenness(assignment: Owners, quotas: Mapping[str, Fraction]) -> Fraction:
    """The distance of an assignment from the fair division."""
    counts = Counter(assignment)
    return sum(((counts[name] - quota) ** 2 for name, quota in quotas.items()), Fraction())


@given(owners, members, targets, drains)
@example(["a"] * 5, {"a": 1, "b": 1}, {"a": 2}, set())
@example(["a"] * 5, {"a": 1, "b": 1}, {"a": 2, "b": 2}, set())
@example(["a", "a", "b", "b", "b"], {"a": 1, "b": 3, "c": 1}, {"b": 1}, {"c"})
def test_the_plan_is_the_best_of_all_assignments(
    before: list[str | None], weights: dict[str, int], preferred: dict[str, int], draining: set[str]
) -> None:
    planned = plan(before, weights, targets=preferred, draining=draining)
    willing = sorted(set(weights) - draining) or sorted(weights)
    # With more members than partitions the present owners stay, so only the owners of the plan share the partitions.
    sharing = willing if len(willing) <= len(before) else list(planned.active)
    quotas = fair(len(before), {name: weights[name] for name in sharing}, preferred)

    def cost(assignment: Owners) -> tuple[int, Fraction, int]:
        return excess(assignment, preferred), unevenness(assignment, quotas), moves(before, assignment, weights)

    assert set(planned.owners) == set(sharing)
    assert cost(planned.owners) == min(cost(each) for each in assignments(before, sharing))
    assert excess(planned.owners, preferred) == min(excess(each, preferred) for each in assignments(before, willing))
    assert planned.under_provisioned == (excess(planned.owners, preferred) > 0)


@given(owners, members, targets, drains, limits)
@example(["a", "b", "c", "a"], {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 3}, set(), 2)
def test_with_a_limit_of_active_members_no_choice_of_members_has_less_excess(
    before: list[str | None],
    weights: dict[str, int],
    preferred: dict[str, int],
    draining: set[str],
    active_members: int | None,
) -> None:
    planned = plan(before, weights, active_members=active_members, targets=preferred, draining=draining)
    willing = sorted(set(weights) - draining) or sorted(weights)
    most = min(len(willing), len(before), active_members or len(willing))
    assert len(planned.active) == most
    possible = [each for each in assignments(before, willing) if len(set(each)) <= most]
    assert excess(planned.owners, preferred) == min(excess(each, preferred) for each in possible)
    quotas = fair(len(before), {name: weights[name] for name in planned.active}, preferred)
    least = excess(planned.owners, preferred)
    shared = [each for each in assignments(before, planned.active) if excess(each, preferred) == least]
    assert (unevenness(planned.owners, quotas), moves(before, planned.owners, weights)) == min(
        (unevenness(each, quotas), moves(before, each, weights)) for each in shared
    )


@given(owners, members, targets, drains, limits)
def test_planning_again_from_the_owners_of_a_plan_gives_the_same_plan(
    before: list[str | None],
    weights: dict[str, int],
    preferred: dict[str, int],
    draining: set[str],
    active_members: int | None,
) -> None:
    def again(owners: Owners, names: Sequence[str]) -> CohortPlan:
        ordered = {name: weights[name] for name in names}
        return plan(owners, ordered, active_members=active_members, targets=preferred, draining=draining)

    planned = again(before, sorted(weights))
    assert again(before, sorted(weights, reverse=True)) == planned
    assert again(planned.owners, sorted(weights)) == planned


@given(owners, members, drains, limits)
def test_without_targets_the_former_and_the_new_rules_give_equal_plans(
    before: list[str | None], weights: dict[str, int], draining: set[str], active_members: int | None
) -> None:
    former, new = (
        plan(before, weights, active_members=active_members, draining=draining, rules=rules) for rules in (0, 1)
    )
    assert new == former
    assert not new.under_provisioned


@given(owners, members, targets, drains)
def test_the_former_rules_ignore_targets_and_still_report_members_above_their_target(
    before: list[str | None], weights: dict[str, int], preferred: dict[str, int], draining: set[str]
) -> None:
    former = plan(before, weights, targets=preferred, draining=draining, rules=0)
    assert former.owners == plan(before, weights, draining=draining).owners
    assert former.under_provisioned == (excess(former.owners, preferred) > 0)


def test_each_partition_has_an_owner_even_above_the_targets() -> None:
    members = {"a": 1, "b": 1}
    assert Counter(plan([None] * 6, members, targets={"a": 2}).owners) == {"a": 2, "b": 4}
    assert not plan([None] * 6, members, targets={"a": 2}).under_provisioned
    assert Counter(plan([None] * 6, members, targets={"a": 1, "b": 3}).owners) == {"a": 3, "b": 3}
    assert plan([None] * 6, members, targets={"a": 1, "b": 3}).under_provisioned
    # A member that joins takes the excess.
    joined = plan(["a"] * 3 + ["b"] * 3, members | {"c": 1}, targets={"a": 1, "b": 3})
    assert Counter(joined.owners) == {"a": 1, "b": 3, "c": 2}
    assert not joined.under_provisioned


def test_a_draining_member_adds_nothing_to_the_targets() -> None:
    planned = plan(["a", "b", "b", "b"], {"a": 1, "b": 1}, targets={"a": 2, "b": 2}, draining={"b"})
    assert planned == CohortPlan(("a",) * 4, ("a",), (), under_provisioned=True)


def test_a_standby_with_a_higher_target_replaces_an_active_member_that_would_be_over_its_target() -> None:
    before = ["a", "a", "b", "b"]
    weights = dict.fromkeys("abc", 1)
    assert plan(before, weights, active_members=2, targets={"a": 2, "b": 2, "c": 9}).owners == tuple(before)
    planned = plan(before, weights, active_members=2, targets={"a": 2, "b": 1, "c": 9})
    assert planned == CohortPlan(("a", "a", "c", "c"), ("a", "c"), ("b",))


def test_among_standbys_whose_target_is_enough_the_one_with_the_most_partitions_becomes_active() -> None:
    # The limit was 2 before, so two members own partitions, and "a" owns as many as "b".
    targets = {"a": 1, "b": 3, "c": 3, "d": 6}
    planned = plan(["b", "a"], dict.fromkeys("abcd", 1), active_members=1, targets=targets)
    assert planned == CohortPlan(("b", "b"), ("b",), ("a", "c", "d"))
    # If no target is enough, the highest target leaves the least excess.
    planned = plan(["b", "a"] * 4, dict.fromkeys("abcd", 1), active_members=1, targets=targets)
    assert planned == CohortPlan(("d",) * 8, ("d",), ("a", "b", "c"), under_provisioned=True)


def test_a_standby_with_an_equal_target_replaces_no_active_member() -> None:
    targets = {"a": 1, "b": 1}
    assert plan(["b"] * 3, {"a": 1, "b": 1}, active_members=1, targets=targets).owners == ("b", "b", "b")


def test_a_standby_replaces_one_active_member_only() -> None:
    targets = {"a": 1, "b": 1, "c": 2}
    planned = plan(["a", "b"] * 3, dict.fromkeys("abc", 1), active_members=2, targets=targets)
    assert planned.active == ("a", "c")


def test_among_standbys_whose_target_is_too_low_the_one_with_the_highest_target_becomes_active() -> None:
    targets = {"a": 1, "b": 2, "c": 3, "d": 2}
    planned = plan(["a"] * 6, dict.fromkeys("abcd", 1), active_members=1, targets=targets)
    assert planned.active == ("c",)
