"""The plan of a cohort: which member owns which partition.

A plan is as even as the weights allow, with as few moves as possible. Planning is deterministic, so members with the
same view compute the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class CohortPlan(NamedTuple):
    """The owners of the partitions and the roles of the members.

    Attributes:
        owners: Member that owns each partition. ``None`` = no member lives.
        active: Members that own a partition, sorted.
        standbys: Live members that own no partition and do not drain, sorted.
        under_provisioned: Whether the number of live members that do not drain is below the target.
    """

    owners: tuple[str | None, ...]
    active: tuple[str, ...]
    standbys: tuple[str, ...]
    under_provisioned: bool


def plan(
    owners: Sequence[str | None],
    members: Mapping[str, int],
    *,
    target: int | None = None,
    draining: Collection[str] = (),
) -> CohortPlan:
    """Plan which member owns which partition.

    The order of ``members`` does not matter. With the same members, a plan for the owners of an earlier result returns
    the same owners. With equal weights the shares differ by at most one, and no equally even plan takes fewer moves.

    Args:
        owners: Present owner of each partition. The partitions of an owner that is not among ``members`` count as free.
        members: Weight of each live member, 1 or more. A member that gets partitions gets its proportion, rounded down
            or up, and at least one partition.
        target: Maximum number of members that get partitions. Members that own the most partitions are chosen
            first. ``None`` = all members.
        draining: Members that get no partition while a member that does not drain lives.

    Returns:
        The plan, which covers every partition if a member lives.

    Raises:
        ValueError: A weight or the target is below 1.
    """
    for member, weight in members.items():
        if weight < 1:
            raise ValueError(f"the weight of member {member!r} is {weight}; use 1 or more")
    if target is not None and target < 1:
        raise ValueError(f"the target is {target} members; use 1 or more, or None")
    willing = [member for member in members if member not in draining]
    under_provisioned = target is not None and len(willing) < target
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
    chosen = candidates[: min(len(owners), len(candidates) if target is None else target)]
    shares = _shares(len(owners), {member: members[member] for member in chosen}, owned)
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
    return CohortPlan(tuple(planned), active, standbys, under_provisioned)


def _shares(partitions: int, weights: Mapping[str, int], owned: Mapping[str, list[int]]) -> dict[str, int]:
    """Return the number of partitions of each member.

    A member whose proportion is below one partition gets one partition, so that the next plan chooses the same
    members. Each other member gets its proportion of the remaining partitions, rounded down. The members with the
    largest remainders get one partition more (Hamilton's method). Among equal remainders, a member that saves a move
    is preferred, then the member with the lower name. With equal weights all remainders are equal, and no other
    choice takes fewer moves.
    """
    shares: dict[str, int] = {}
    heavy = dict(weights)
    total = sum(heavy.values())
    while light := [member for member, weight in heavy.items() if partitions * weight < total]:
        for member in light:
            shares[member] = 1
            total -= heavy.pop(member)
        partitions -= len(light)
    for member, weight in heavy.items():
        shares[member] = partitions * weight // total
    rest = partitions - sum(shares[member] for member in heavy)

    def rank(member: str) -> tuple[int, bool, str]:
        return -(partitions * heavy[member] % total), len(owned[member]) <= shares[member], member

    for member in sorted(heavy, key=rank)[:rest]:
        shares[member] += 1
    return shares
