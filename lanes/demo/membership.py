"""What the broker knew of a group, again and again, and what follows: when it took an assignment from a member."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memsource import Segment

Assignment = tuple[str, str, int]
"""A partition at a process: member, partition, epoch."""


class Member(NamedTuple):
    """A member as the broker knows it; ``id`` is another one when a classic member has joined again."""

    id: str
    partitions: frozenset[tuple[str, int]]


class Snapshot(NamedTuple):
    """The group at a moment between ``asked`` and ``answered``, in seconds of the engine's clock.

    ``members`` by the name they have in the history. ``state`` is the broker's word for it.
    """

    asked: float
    answered: float
    state: str
    members: Mapping[str, Member]

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


class Span(NamedTuple):
    """An assignment as its member's history has it: from ``begin`` until ``end``, infinite when nobody said so.

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
            assignment = segment.member, row.partition, row.epoch
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
