"""Snapshots of a group from its broker, and the time at which it took an assignment from a member.

A cohort's assignments have leases instead, and the members' own histories say when each ran out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memsource import Segment

Assignment = tuple[str, str, int]
"""A partition at a process: member, partition, assignment."""


class Member(NamedTuple):
    """A member as the broker knows it; ``id`` is another one when a classic member has joined again."""

    id: str
    partitions: frozenset[tuple[str, int]]


class Snapshot(NamedTuple):
    """The group at a moment between ``asked`` and ``answered``, in seconds of the engine's clock.

    ``members`` have the names of their histories. ``state`` is the broker's word. For a cohort, ``generation`` and
    ``planned`` are its plan: the planned owner of each partition; generation 0 is no plan.
    """

    asked: float
    answered: float
    state: str
    members: Mapping[str, Member]
    generation: int = 0
    planned: Sequence[str | None] = ()

    @property
    def stable(self) -> bool:
        """Whether every member has been told what it owns."""
        return self.state == "STABLE"

    @property
    def owners(self) -> dict[tuple[str, int], str]:
        """Who owns each partition."""
        return {place: name for name, member in self.members.items() for place in member.partitions}


NONE: Final = Snapshot(0.0, 0.0, "UNKNOWN", {})


class Removal(NamedTuple):
    """A member was still in the group ``after``, and not any more ``before``: seconds of the engine's clock."""

    after: float
    before: float


class Moves(NamedTuple):
    """How many partitions plans moved from one member to another, and how many they had to."""

    made: int
    least: int


class Span(NamedTuple):
    """An assignment in its member's history, from ``begin`` to ``end``; an infinite ``end`` is unknown.

    ``ending`` is revoked, lost or crashed, or empty for one that had no end.
    """

    begin: float
    end: float
    ending: str


def spans(segments: Sequence[Segment]) -> dict[Assignment, Span]:
    """All assignments in these histories. Pure."""
    found: dict[Assignment, Span] = {}
    for segment in segments:
        opened: dict[Assignment, float] = {}
        for row in segment.rows:
            assignment = segment.member, row.partition, row.assignment
            if row.event == "assigned":
                opened[assignment] = row.mono
            elif row.event in ("revoked", "lost") and assignment in opened:
                found[assignment] = Span(opened.pop(assignment), row.mono, row.event)
        for assignment, begin in opened.items():
            found[assignment] = Span(begin, inf, "crashed" if segment.crashed else "")
    return found


def removals(spans: Mapping[Assignment, Span], snapshots: Sequence[Snapshot]) -> dict[Assignment, Removal]:
    """The assignments whose member the broker removed from the group while it held them. Pure.

    A member that had given a partition back, or knew that it was lost, before the broker was asked, lost nothing.
    """
    removed = _members_removed(snapshots)
    found = {}
    for assignment, span in spans.items():
        for removal in removed[assignment[0]]:
            if span.begin <= removal.after and removal.before < span.end:
                found[assignment] = removal
                break
    return found


def deadlines(segments: Sequence[Segment]) -> dict[Assignment, float]:
    """When the leases of assignments ran out at last, of those that had one. Pure."""
    return {
        (segment.member, row.partition, row.assignment): row.number
        for segment in segments
        for row in segment.rows
        if row.event in ("leased", "lost") and row.number
    }


def moves(snapshots: Sequence[Snapshot]) -> Moves:
    """Count the moves of a cohort's plans. Pure. A partition without an owner is given, not moved."""
    made = least = 0
    before: Sequence[str | None] = ()
    for after in (snapshot.planned for snapshot in snapshots if snapshot.planned):
        if before:
            made += sum(old is not None and old != new for old, new in zip(before, after, strict=True))
            least += least_moves(before, {new for new in after if new is not None})
        before = after
    return Moves(made, least)


def least_moves(owners: Sequence[str | None], members: Collection[str]) -> int:
    """How many of the partitions that have an owner have to move, until ``members`` share all evenly. Pure."""
    held = sorted((Counter(owners)[member] for member in members), reverse=True)
    each, more = divmod(len(owners), len(members)) if members else (0, 0)
    kept = sum(min(count, each + (index < more)) for index, count in enumerate(held))
    return sum(owner is not None for owner in owners) - kept


def handovers(segments: Sequence[Segment]) -> list[float]:
    """Seconds from the end of what ran of a partition at the one who gave it back, until another one had it. Pure."""
    drained: dict[Assignment, float] = {}
    given: dict[str, list[tuple[float, str]]] = defaultdict(list)
    begun: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for segment in segments:
        for row in segment.rows:
            assignment = segment.member, row.partition, row.assignment
            if row.event == "drained":
                drained[assignment] = row.mono
            elif row.event == "revoked" and assignment in drained:
                given[row.partition].append((drained[assignment], segment.member))
            elif row.event == "assigned":
                begun[row.partition].append((row.mono, segment.member))
    found = []
    for partition, times in given.items():
        for since, member in times:
            at, who = min((one for one in begun[partition] if one[0] > since), default=(inf, member))
            if who != member:
                found.append(at - since)
    return found


def rebalances(snapshots: Sequence[Snapshot]) -> int:
    """How often the broker gave partitions to other members than before. Pure."""
    count, before = 0, dict[tuple[str, int], str]()
    for snapshot in snapshots:
        owners = snapshot.owners
        if snapshot.stable and owners and owners != before:
            count += bool(before)
            before = owners
    return count


def last_owners(snapshots: Sequence[Snapshot]) -> dict[str, tuple[str, float]]:
    """Who owns each partition in the end, and since when the broker has said so. Pure."""
    found: dict[str, tuple[str, float]] = {}
    for snapshot in snapshots:
        if snapshot.stable and snapshot.members:
            before, found = found, {}
            for (topic, number), name in snapshot.owners.items():
                partition = f"{topic}/{number}"
                last = before.get(partition)
                found[partition] = last if last is not None and last[0] == name else (name, snapshot.answered)
    return found


def _members_removed(snapshots: Sequence[Snapshot]) -> dict[str, list[Removal]]:
    removed: dict[str, list[Removal]] = defaultdict(list)
    present: dict[str, tuple[str, float]] = {}
    for snapshot in snapshots:
        if snapshot.state == "DEAD":
            # So a broker calls a group that it has not loaded yet.
            continue
        for name, (number, asked) in list(present.items()):
            member = snapshot.members.get(name)
            if member is None or member.id != number:
                removed[name].append(Removal(asked, snapshot.answered))
                del present[name]
        for name, member in snapshot.members.items():
            present[name] = member.id, snapshot.asked
    return removed
