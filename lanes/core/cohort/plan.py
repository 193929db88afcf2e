"""Who is to own which partition of a cohort: as even as the weights allow, with as few moves as that takes.

Pure and deterministic: any member may compute the plan, and members that see the same compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

__all__ = ["CohortPlan", "plan"]


class CohortPlan(NamedTuple):
    """``owners``: the member of each partition, None only where no member lives. ``active``: who owns some, sorted.

    ``standbys``: who lives and owns nothing, sorted. ``under_provisioned``: fewer members live than were wished for.
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

    ``owners``: the present owner of each partition; one that is not among ``members`` counts as none. ``members``: the
    weight of each that lives, 1 or more; who gets some gets its proportion, rounded down or up, and one at least.
    ``target``: at most so many members get some, those that own most first; None = all. Everything is covered however
    few there are.
    ``draining``: members that get nothing as long as there is another.

    The order of ``members`` does not matter, and a plan planned again stays. With equal weights all get as many within
    one, and no plan that is as even takes fewer moves. Raises ``ValueError`` for a weight or a target below 1.
    """
    for member, weight in members.items():
        if weight < 1:
            raise ValueError(f"the weight of member {member!r} is {weight}: give it 1 or more")
    if target is not None and target < 1:
        raise ValueError(f"the target is {target} members: wish for 1 or more, or for None")
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
    # Who owns most comes first, and a name decides between equals: the incumbents stay.
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
    """How many each gets: one at least, so that who is chosen stays chosen; the others share what is left of it.

    They get their proportion rounded down, and one more by the largest remainders (Hamilton's method). Between equal
    remainders it goes to whom it saves a move, then by name: with equal weights that is all there is to decide, and no
    other choice takes fewer moves.
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
