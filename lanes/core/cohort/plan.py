"""The plan of a cohort: which member owns which partition.

A plan has these aims. An earlier aim has priority over each later aim:

1. Each partition has an owner.
2. The members exceed their targets by as few partitions as possible.
3. The members own partitions in proportion to their weights, as far as the targets allow.
4. As few partitions as possible change their owner.

The computation is deterministic, so members compute the same plan from the same records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

PLAN_RULES: Final = 1
"""Highest version of the plan rules that this code knows.

| version | rules |
|---|---|
| 0 | the plan ignores targets |
| 1 | the four aims above |

Without targets the two versions compute the same plan. The members of a cohort plan by the lowest version that a live
member knows, because a member that knows only a lower version would change every other plan back.
"""


class CohortPlan(NamedTuple):
    """The owners of the partitions and the roles of the members.

    Attributes:
        owners: Member that owns each partition. ``None`` = no member is alive.
        active: Members that own a partition, sorted.
        standbys: Live members that own no partition and do not drain, sorted.
        too_few_members: Whether the number of live members that do not drain is below ``active_members``.
        under_provisioned: Whether a member owns more partitions than its target.
    """

    owners: tuple[str | None, ...]
    active: tuple[str, ...]
    standbys: tuple[str, ...]
    too_few_members: bool = False
    under_provisioned: bool = False


def plan(
    owners: Sequence[str | None],
    members: Mapping[str, int],
    *,
    active_members: int | None = None,
    targets: Mapping[str, int] | None = None,
    draining: Collection[str] = (),
    rules: int = PLAN_RULES,
) -> CohortPlan:
    """Plan which member owns which partition.

    The order of ``members`` has no effect. If the caller passes the owners of a result with otherwise equal arguments,
    the function returns the same owners again. With equal weights and without targets, the numbers of partitions of two
    members differ by at most one.

    Args:
        owners: Current owner of each partition. A partition is free if its owner is not in ``members``.
        members: Weight of each live member, 1 or more. A member with partitions receives its proportion within the
            targets, rounded down or up, and at least one partition.
        active_members: Maximum number of members that receive partitions. The plan first chooses the members that own
            the most partitions. A member with a higher target replaces a chosen member if the chosen members would
            exceed their targets. The plan then chooses the member with the most partitions among members with a
            sufficient target. ``None`` = all members.
        targets: Largest number of partitions that each member prefers to own, 1 or more. A member without a target may
            own any number. ``None`` = no targets.
        draining: Members that receive no partition, unless every live member drains.
        rules: Version of the plan rules, 0 to ``PLAN_RULES``.

    Returns:
        The plan, which covers every partition if at least one member is live.

    Raises:
        ValueError: A weight, a target or ``active_members`` is below 1, or the version of the rules is unknown.
    """
    targets = targets or {}
    for member, weight in members.items():
        if weight < 1:
            raise ValueError(f"the weight of member {member!r} is {weight}; use 1 or more")
        if targets.get(member, 1) < 1:
            raise ValueError(f"the target of member {member!r} is {targets[member]}; use 1 or more, or None")
    if active_members is not None and active_members < 1:
        raise ValueError(f"the number of active members is {active_members}; use 1 or more, or None")
    if not 0 <= rules <= PLAN_RULES:
        raise ValueError(f"the plan rules {rules} are unknown; use 0 to {PLAN_RULES}")
    willing = [member for member in members if member not in draining]
    too_few_members = active_members is not None and len(willing) < active_members
    candidates = sorted(willing or members)
    owned: dict[str, list[int]] = {member: [] for member in candidates}
    free = []
    for partition, owner in enumerate(owners):
        if owner in owned:
            owned[owner].append(partition)
        else:
            free.append(partition)
    # Members that own most partitions are chosen first, so that few partitions move. Names decide between equal
    # members.
    candidates.sort(key=lambda member: -len(owned[member]))
    limits = {member: targets.get(member, len(owners)) if rules else len(owners) for member in candidates}
    chosen = _chosen(candidates, limits, len(owners), active_members)
    shares = _shares(len(owners), {member: members[member] for member in chosen}, limits, owned)
    for member, partitions in owned.items():
        share = shares.get(member, 0)
        free.extend(partitions[share:])
        del partitions[share:]
    free.sort(reverse=True)
    planned: list[str | None] = [None] * len(owners)
    for member in sorted(shares):
        partitions = owned[member]
        partitions.extend(free.pop() for _ in range(shares[member] - len(partitions)))
        for partition in partitions:
            planned[partition] = member
    active = tuple(sorted(shares))
    standbys = tuple(sorted(set(willing).difference(active)))
    under_provisioned = any(share > targets.get(member, share) for member, share in shares.items())
    return CohortPlan(tuple(planned), active, standbys, too_few_members, under_provisioned)


def _chosen(
    candidates: Sequence[str], limits: Mapping[str, int], partitions: int, active_members: int | None
) -> Sequence[str]:
    """Return the members that receive partitions, from candidates in the order of preference."""
    count = min(partitions, len(candidates) if active_members is None else active_members)
    chosen, rest = list(candidates[:count]), list(candidates[count:])
    missing = partitions - sum(limits[member] for member in chosen)
    while missing > 0 and rest:
        # Among equal limits, the last chosen member leaves. The first of the other members whose limit is enough
        # enters, because it owns the most partitions. If no limit is enough, the highest limit enters.
        leaves = min(reversed(chosen), key=limits.__getitem__)
        enough = [member for member in rest if limits[member] >= limits[leaves] + missing]
        enters = enough[0] if enough else max(rest, key=limits.__getitem__)
        gain = limits[enters] - limits[leaves]
        if gain <= 0:
            break
        chosen[chosen.index(leaves)] = enters
        rest.remove(enters)
        missing -= gain
    return chosen


def _shares(
    partitions: int, weights: Mapping[str, int], limits: Mapping[str, int], owned: Mapping[str, list[int]]
) -> dict[str, int]:
    """Return the number of partitions of each member.

    Each member receives its quota, rounded down. The members with the largest remainders receive one more partition
    (Hamilton's method). For equal remainders, the plan first prefers a member whose choice avoids the move of a
    partition. The plan then prefers the name that sorts first. With equal weights and without limits all remainders are
    equal, and this choice requires the fewest moves.
    """
    quotas = _quotas(partitions, weights, limits)
    shares = {member: int(quota) for member, quota in quotas.items()}

    def rank(member: str) -> tuple[Fraction, bool, str]:
        return shares[member] - quotas[member], len(owned[member]) <= shares[member], member

    for member in sorted(quotas, key=rank)[: partitions - sum(shares.values())]:
        shares[member] += 1
    return shares


def _quotas(partitions: int, weights: Mapping[str, int], limits: Mapping[str, int]) -> dict[str, Fraction]:
    """Divide the partitions in proportion to the weights, within a lower and an upper bound for each member.

    If the limits together reach the number of partitions, each member receives at least one partition and at most its
    limit. Otherwise each member receives at least its limit. A member with less than one partition would be a standby
    in the next plan, and its partition would move.

    A quota is ``level * weight``, limited by the bounds. The sum of the quotas increases with the level. The slope of
    this sum changes at each level at which a quota reaches a bound.
    """
    if not weights:
        return {}
    enough = sum(limits[member] for member in weights) >= partitions
    bounds = {
        member: (1, min(limits[member], partitions)) if enough else (limits[member], partitions) for member in weights
    }

    def quotas(level: Fraction) -> dict[str, Fraction]:
        return {
            member: min(max(level * weight, Fraction(bounds[member][0])), Fraction(bounds[member][1]))
            for member, weight in weights.items()
        }

    level = Fraction(partitions, sum(weights.values()))
    if all(bounds[member][0] <= level * weight <= bounds[member][1] for member, weight in weights.items()):
        return quotas(level)
    levels = sorted({Fraction(bound, weight) for member, weight in weights.items() for bound in bounds[member]})
    level = levels[bisect_right(levels, Fraction(partitions), key=lambda level: _total(quotas(level))) - 1]
    found = quotas(level)
    rising = [member for member, weight in weights.items() if bounds[member][0] <= level * weight < bounds[member][1]]
    if rising:
        level += (partitions - _total(found)) / sum(weights[member] for member in rising)
    return quotas(level)


def _total(quotas: Mapping[str, Fraction]) -> Fraction:
    return sum(quotas.values(), Fraction())
