"""The plan of a cohort: which member owns which partition.

It is as even as the weights allow, with as few moves as possible. It is deterministic, so members with the same view
compute the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class CohortPlan(NamedTuple):
    """The owner of each partition.

    ``owners`` has the member of each partition, None only without a live member. ``active`` are the members that own a
    partition, ``standbys`` the live ones that own none; both are sorted. ``under_provisioned``: fewer members live than
    the target asks for.
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

    The order of ``members`` does not matter, and a plan made from its own result stays the same. With equal weights the
    shares differ by at most one, and no plan that is as even takes fewer moves.

    Args:
        owners: The present owner of each partition. An owner that is not among ``members`` counts as none.
        members: The weight of each live member, 1 or more. A member that gets partitions gets its proportion, rounded
            down or up, and at least one.
        target: Maximum number of members that get partitions; those that own most come first. ``None`` = all.
        draining: Members that get no partition while another member lives.

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
    # Members that own most come first, so that they stay; names decide between equals.
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
    """The number of partitions of each member.

    A member whose proportion is below one gets one, so that a chosen member stays chosen. The others get their
    proportion of the rest rounded down, and one more by the largest remainders (Hamilton's method). Between equal
    remainders a member that saves a move comes first, then the name decides. With equal weights all remainders are
    equal, and no other choice takes fewer moves.
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
