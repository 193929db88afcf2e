"""Snapshots of a group from its broker, and the intervals in which the broker removed members.

For a cohort, the end of each lease comes from the histories of the members.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from memsource import Segment

Assignment = tuple[str, str, int]
"""An assignment: member, partition, and number of the assignment."""


class Member(NamedTuple):
    """A member in a report of the broker.

    A classic member of Kafka receives a new ``id`` at each join. A member on PostgreSQL receives a new ``id`` at each
    connection. With ranges, ``partitions`` contains pieces such as ``"3#17"``.
    """

    id: str
    partitions: frozenset[tuple[str, int | str]]


class Snapshot(NamedTuple):
    """The group at a time between ``asked`` and ``answered``, in seconds of the engine's clock.

    Attributes:
        asked: Time of the request.
        answered: Time of the answer.
        state: State of the group: the broker's word for a Kafka group; STABLE, MOVING or UNKNOWN otherwise.
        members: Members by their names in the histories.
        generation: Generation of a cohort's plan; 0 without a plan.
        planned: Planned owner of each partition of a cohort; None = no owner.
        sessions: Whether the broker frees the partitions of a member when its session ends, as PostgreSQL does. The
            leases of a cohort outlast the process of a member.
    """

    asked: float
    answered: float
    state: str
    members: Mapping[str, Member]
    generation: int = 0
    planned: Sequence[str | None] = ()
    sessions: bool = False

    @property
    def stable(self) -> bool:
        """Whether every member has received its assignment."""
        return self.state == "STABLE"

    @property
    def owners(self) -> dict[tuple[str, int | str], str]:
        """Name of the owner of each owned partition."""
        return {place: name for name, member in self.members.items() for place in member.partitions}


NONE: Final = Snapshot(0.0, 0.0, "UNKNOWN", {})


class Removal(NamedTuple):
    """The removal of a member, later than ``after`` and earlier than ``before``, in seconds of the engine's clock."""

    after: float
    before: float


class Moves(NamedTuple):
    """Number of partitions that plans moved between members, and the least possible number."""

    made: int
    least: int


class Span(NamedTuple):
    """An assignment in its member's history.

    Attributes:
        begin: Time of the assignment, in seconds of the engine's clock.
        end: Time of the end; infinite if the history has no end of the assignment.
        ending: Kind of the end: revoked, lost or crashed; "" without an end.
    """

    begin: float
    end: float
    ending: str


def spans(segments: Sequence[Segment]) -> dict[Assignment, Span]:
    """Return the span of each assignment in these histories."""
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
    """Return assignment → removal of its member, for each member that the broker removed during the assignment.

    An assignment that its member had ended before the broker's report does not count.
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
    """Return the last deadline of each assignment with a lease, in seconds of the engine's clock."""
    return {
        (segment.member, row.partition, row.assignment): row.number
        for segment in segments
        for row in segment.rows
        if row.event in ("leased", "lost") and row.number
    }


def moves(snapshots: Sequence[Snapshot]) -> Moves:
    """Count the moves of a cohort's plans. The first owner of a partition does not count as a move."""
    made = least = 0
    before: Sequence[str | None] = ()
    for after in (snapshot.planned for snapshot in snapshots if snapshot.planned):
        if before:
            made += sum(old is not None and old != new for old, new in zip(before, after, strict=True))
            least += least_moves(before, {new for new in after if new is not None})
        before = after
    return Moves(made, least)


def least_moves(owners: Sequence[str | None], members: Collection[str]) -> int:
    """Return the minimum number of owned partitions that must move before ``members`` share all partitions evenly."""
    held = sorted((Counter(owners)[member] for member in members), reverse=True)
    each, more = divmod(len(owners), len(members)) if members else (0, 0)
    kept = sum(min(count, each + (index < more)) for index, count in enumerate(held))
    return sum(owner is not None for owner in owners) - kept


def handovers(segments: Sequence[Segment]) -> list[float]:
    """Return for each handover the seconds from the old owner's last handler to the new owner's assignment."""
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
    """Return the number of times that the broker moved partitions between members."""
    count, before = 0, dict[tuple[str, int | str], str]()
    for snapshot in snapshots:
        owners = snapshot.owners
        if snapshot.stable and owners and owners != before:
            count += bool(before)
            before = owners
    return count


def last_owners(snapshots: Sequence[Snapshot]) -> dict[str, tuple[str, float]]:
    """Return the last owner of each partition, and the time of the broker's first report of that owner."""
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
            # A broker that has not loaded the group yet reports this state.
            continue
        for name, (number, asked) in list(present.items()):
            member = snapshot.members.get(name)
            if member is None or member.id != number:
                removed[name].append(Removal(asked, snapshot.answered))
                del present[name]
        for name, member in snapshot.members.items():
            present[name] = member.id, snapshot.asked
    return removed
