"""A consumer group as a data structure: a topic, its committed positions, the owners of partitions, and rebalances.

The group acts only during calls of its methods, and has no clock. The same group therefore serves a test on a real
event loop, a simulation, and an explorer that tries every order of events. The group follows the rules of Kafka,
including those that surprise clients:

- **Two views.** The coordinator knows the present owner of a partition. A member knows its own partitions as of its
  last ``poll``. Until its next ``poll`` a member may fetch and commit, even if another member has become the owner.
- **Few checks of commits.** The group accepts each commit of a known member. The member need not own the partition, and
  the position may be lower than before or not exist. The last commit wins.
- A committed position is the *next position to read*. A commit also contains the completed positions above the
  committed position.
- **Rebalance.** The coordinator revokes partitions. The owners drain, commit and ``release`` the revoked partitions.
  The coordinator then assigns the released partitions.
- In an eager rebalance, all members release all partitions before any assignment. In a cooperative rebalance, a
  member releases only partitions that move, and the coordinator assigns each partition as soon as it is free.
- A member starts to read a partition at the committed position of the time when its ``poll`` returns the assignment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from lanes.arguments import check_flag, kind_of
from lanes.errors import ConfigError
from memsource.memory.topic import Record, Topic, TopicState, WatchedTopic

_UNBOUNDED: Final = 1 << 62

Assignor: TypeAlias = Callable[[Sequence[str | None], Sequence[str]], list[str | None]]
"""A function that maps the present owners of all partitions (None = free) and the members to the new owners."""


class Committed(NamedTuple):
    """The commit of a partition.

    Attributes:
        offset: The next position to read, 0 or more.
        completed: Positions completed above ``offset``, as half-open runs in ascending order.
    """

    offset: int = 0
    completed: tuple[tuple[int, int], ...] = ()


class Notice(NamedTuple):
    """A decision of the coordinator about a partition, for one member."""

    kind: Literal["assigned", "revoking", "lost"]
    partition: int


class _MemberPartition(NamedTuple):
    """A partition as its member knows it: the next position to read, and whether a revocation is in progress."""

    position: int
    revoking: bool = False


class GroupState(NamedTuple):
    """The state of a group. Two groups with equal settings and states make the same decisions. Hashable."""

    topic: TopicState
    committed: tuple[Committed, ...]
    owners: tuple[str | None, ...]
    asked: frozenset[int]
    members: tuple[tuple[str, tuple[Notice, ...], tuple[tuple[int, _MemberPartition], ...]], ...]


class UnknownMember(LookupError):
    """The member never joined the group, or the group has removed the member; Kafka's UNKNOWN_MEMBER_ID."""


class _Member:
    __slots__ = ("notices", "partitions")

    def __init__(self, notices: Iterable[Notice] = (), owned: Iterable[tuple[int, _MemberPartition]] = ()) -> None:
        self.notices = list(notices)
        self.partitions = dict(owned)


class Group(WatchedTopic):
    """A topic and the members that share its partitions.

    No method blocks. Not thread-safe. Methods raise ``IndexError`` for an unknown partition, and ``UnknownMember``
    for an unknown member.

    Args:
        partitions: Number of partitions, 1 or more. Partition numbers begin at 0.
        name: Name of the topic.
        cooperative: Whether rebalances are cooperative; see the module docstring. The default is eager.
        assignor: Pure function that returns the new owners of all partitions; None = ``plan``.

    Attributes:
        generation: Number of all assignments. ``snapshot`` leaves this number out.

    Raises:
        ConfigError: An argument is of a wrong type or out of its range.
    """

    def __init__(
        self, partitions: int = 1, *, name: str = "memory", cooperative: bool = False, assignor: Assignor | None = None
    ) -> None:
        super().__init__(partitions, name)
        self.name = name
        check_flag("cooperative", cooperative)
        if assignor is not None and not callable(assignor):
            raise ConfigError(f"assignor is {kind_of(assignor)}: pass a function that returns owners, or leave it out")
        self.cooperative = cooperative
        self._assignor = assignor or plan
        self.generation = 0
        self._committed = [Committed()] * partitions
        self._owners: list[str | None] = [None] * partitions
        self._asked: set[int] = set()
        self._members: dict[str, _Member] = {}

    def __repr__(self) -> str:
        return (
            f"<Group {self.name}: {len(self._owners)} partitions, {len(self._members)} members, "
            f"generation {self.generation}, {len(self._asked)} revoking>"
        )

    # --- members

    def join(self, member: str) -> None:
        """Add a member and start a rebalance.

        Args:
            member: Name of the member.

        Raises:
            ValueError: The member has joined already.
        """
        if member in self._members:
            raise ValueError(f"member {member!r} has joined already: call leave() or crash() first")
        self._members[member] = _Member()
        self.rebalance()

    def leave(self, member: str) -> None:
        """Remove a member and start a rebalance. Idempotent.

        Args:
            member: Name of the member.
        """
        if member in self._members:
            self.crash(member)

    def crash(self, member: str) -> None:
        """Remove a member whose session has expired. Later calls of the member raise ``UnknownMember``.

        Args:
            member: Name of the member.
        """
        self._member(member)
        del self._members[member]
        for number, owner in enumerate(self._owners):
            if owner == member:
                self._free(number)
        self.rebalance()

    def rejoin(self, member: str) -> None:
        """Restart a known member: release its revoked partitions, and assign the other partitions to the member again.

        Args:
            member: Name of the member.
        """
        state = self._member(member)
        owned = [number for number, owner in enumerate(self._owners) if owner == member]
        state.partitions.clear()
        state.notices = [Notice("assigned", number) for number in owned if number not in self._asked]
        for number in self._asked.intersection(owned):
            self._free(number)
        self._assign()
        self._changed()

    def pending(self, member: str) -> tuple[Notice, ...]:
        """Return the notices that the next ``poll`` of a member will return.

        Args:
            member: Name of the member.

        Returns:
            The notices in order.
        """
        return tuple(self._member(member).notices)

    def poll(self, member: str) -> list[Notice]:
        """Return the decisions of the coordinator about a member since its last poll, and apply them to the member.

        Args:
            member: Name of the member.

        Returns:
            The notices in order; empty if nothing changed.
        """
        state = self._member(member)
        notices, state.notices = state.notices, []
        for kind, number in notices:
            if kind == "assigned":
                state.partitions[number] = _MemberPartition(self._committed[number].offset)
            elif kind == "revoking":
                state.partitions[number] = state.partitions[number]._replace(revoking=True)
            else:
                del state.partitions[number]
        return notices

    def partitions_of(self, member: str) -> list[int]:
        """Return the partitions of a member as of its last ``poll``, which include revoked partitions.

        Args:
            member: Name of the member.

        Returns:
            The numbers of the partitions, in ascending order.
        """
        return sorted(self._member(member).partitions)

    def fetch(self, member: str, partition: int, messages: int, size: int = _UNBOUNDED) -> list[Record]:
        """Read the next records of a member. A revoked partition delivers no record.

        Args:
            member: Name of the member.
            partition: Number of the partition.
            messages: Maximum number of records.
            size: Bytes at which the call stops. The record that reaches ``size`` is the last record.

        Returns:
            The records in order; empty at the end of the log or if a bound is 0.

        Raises:
            KeyError: The member did not own the partition at its last ``poll``.
        """
        log = self.topic.log(partition)
        owned = self._member(member).partitions
        position, revoking = owned[partition]
        if revoking or messages <= 0 or size <= 0:
            return []
        records = log.read(position, messages, size)
        if records:
            position = records[-1].position + 1
        if not log.read(position, 1, 1):
            # No record follows, so the member also reads a gap at the end.
            position = max(position, log.end)
        owned[partition] = _MemberPartition(position)
        return records

    def position(self, member: str, partition: int) -> int:
        """Return the position that a member reads next.

        Args:
            member: Name of the member.
            partition: Number of the partition.

        Returns:
            The position, 0 or more.

        Raises:
            KeyError: The member did not own the partition at its last ``poll``.
        """
        return self._member(member).partitions[partition].position

    def commit(self, member: str, partition: int, offset: int, completed: Iterable[tuple[int, int]] = ()) -> None:
        """Commit a position, even if the member does not own the partition or an earlier commit is higher.

        Args:
            member: Name of the member.
            partition: Number of the partition.
            offset: The next position to read, 0 or more.
            completed: Positions completed above ``offset``, as half-open runs in ascending order.

        Raises:
            ValueError: ``offset`` is below 0.
        """
        self._member(member)
        self.topic.log(partition)
        if offset < 0:
            raise ValueError(f"offset={offset} of partition {partition}: must be 0 or more")
        self._committed[partition] = Committed(offset, tuple((start, end) for start, end in completed))

    def release(self, member: str, partition: int) -> None:
        """Release a partition, revoked or not. Idempotent.

        Args:
            member: Name of the member.
            partition: Number of the partition.
        """
        state = self._member(member)
        if state.partitions.pop(partition, None) is None:
            return
        notices = [notice for notice in state.notices if notice.partition == partition]
        lost = any(notice.kind == "lost" for notice in notices)
        # The notices up to a loss are outdated. After a loss the partition may have been assigned again.
        stale = 1 + [notice.kind for notice in notices].index("lost") if lost else len(notices)
        for notice in notices[:stale]:
            state.notices.remove(notice)
        if not lost:
            self._free(partition)
            self._assign()

    # --- the coordinator

    def rebalance(self) -> None:
        """Revoke all partitions, or the moving partitions of a cooperative group, and assign the free partitions.

        A call during a rebalance plans again.
        """
        target = self._plan()
        for number, owner in enumerate(self._owners):
            if owner is not None and not (self.cooperative and owner == target[number]):
                self._ask(number, owner)
        self._assign()

    def revoke(self, partition: int) -> None:
        """Revoke one partition, as a rebalance does. Idempotent.

        Args:
            partition: Number of the partition.

        Raises:
            ValueError: The partition has no owner.
        """
        owner = self.owner(partition)
        if owner is None:
            raise ValueError(f"partition {partition} of {self.name} has no owner; revoke only owned partitions")
        self._ask(partition, owner)
        self._assign()

    def lose(self, member: str, partition: int, *, give: bool = True) -> None:
        """Take a partition from its owner, as at the end of the owner's session or of its drain time.

        Another member receives the partition at once, or at the end of a running eager rebalance. The
        former owner continues to fetch and commit until its next ``poll``.

        Args:
            member: Name of the owner.
            partition: Number of the partition.
            give: Whether another member receives the partition immediately. With False, or without another member, the
                partition stays free until the next assignment of the group.

        Raises:
            ValueError: The member is not the owner.
        """
        state = self._member(member)
        if self.owner(partition) != member:
            raise ValueError(
                f"partition {partition} of {self.name} is owned by {self._owners[partition]!r}, not by {member!r}; "
                "pass the name of its owner"
            )
        rebalancing = bool(self._asked)
        self._free(partition)
        state.notices.append(Notice("lost", partition))
        others = [other for other in self._members if give and other != member]
        if others and (self.cooperative or not self._asked):
            loads = Counter(self._owners)
            self._give(partition, min(others, key=lambda other: loads[other]))
        if rebalancing and not self.cooperative:
            # The partition may have been the last one for which the rebalance waited.
            self._assign()
        self._changed()

    def owner(self, partition: int) -> str | None:
        """Return the owner of a partition in the view of the coordinator.

        Args:
            partition: Number of the partition.

        Returns:
            The name of the owner; None = the partition is free.
        """
        self.topic.log(partition)
        return self._owners[partition]

    def committed(self, partition: int) -> Committed:
        """Return the last commit of a partition.

        Args:
            partition: Number of the partition.

        Returns:
            The last commit; before the first commit, position 0.
        """
        self.topic.log(partition)
        return self._committed[partition]

    @property
    def members(self) -> list[str]:
        """The members, in the order of ``join``."""
        return list(self._members)

    @property
    def rebalancing(self) -> bool:
        """Whether a revoked partition still waits for its release."""
        return bool(self._asked)

    @property
    def unfinished(self) -> int:
        """The number of messages that the last commit of their partition does not report as finished."""
        return sum(
            position >= offset and not any(start <= position < end for start, end in completed)
            for log, (offset, completed) in zip(self.topic.logs, self._committed, strict=True)
            for position in log.positions
        )

    def recreate(self) -> None:
        """Delete the topic and create it again, empty and without commits."""
        self.topic = Topic(len(self._owners), self.name)
        self._committed = [Committed()] * len(self._owners)
        self._changed()

    # --- for explorers

    def snapshot(self) -> GroupState:
        """Return the state as a value. Takes O(messages) time."""
        return GroupState(
            self.topic.snapshot(),
            tuple(self._committed),
            tuple(self._owners),
            frozenset(self._asked),
            tuple((name, tuple(m.notices), tuple(sorted(m.partitions.items()))) for name, m in self._members.items()),
        )

    def restore(self, state: GroupState) -> None:
        """Return to an earlier state.

        Args:
            state: A result of ``snapshot``, from a group with the same number of partitions.
        """
        self.topic.restore(state.topic)
        self._committed = list(state.committed)
        self._owners = list(state.owners)
        self._asked = set(state.asked)
        self._members = {name: _Member(notices, owned) for name, notices, owned in state.members}
        self._changed()

    # --- inside

    def _member(self, member: str) -> _Member:
        state = self._members.get(member)
        if state is None:
            raise UnknownMember(f"member {member!r} is not in group {self.name}; call join() first")
        return state

    def _plan(self) -> list[str | None]:
        return self._assignor(self._owners, list(self._members))

    def _ask(self, partition: int, owner: str) -> None:
        if partition not in self._asked:
            self._asked.add(partition)
            self._members[owner].notices.append(Notice("revoking", partition))
            self._changed()

    def _free(self, partition: int) -> None:
        self._owners[partition] = None
        self._asked.discard(partition)

    def _assign(self) -> None:
        if self._asked and not self.cooperative:
            return
        target = self._plan()
        for number, owner in enumerate(self._owners):
            new = target[number]
            if owner is None and new is not None:
                self._give(number, new)

    def _give(self, partition: int, member: str) -> None:
        self.generation += 1
        self._owners[partition] = member
        self._members[member].notices.append(Notice("assigned", partition))
        self._changed()


def plan(owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
    """Plan even shares with the fewest moves; the default ``Assignor``. The function is pure and deterministic."""
    if not members:
        return [None] * len(owners)
    share, rest = divmod(len(owners), len(members))
    loads = Counter(owners)
    # The members that own most partitions get one more, if the shares are uneven.
    order = sorted(members, key=lambda member: -loads[member])
    room = {member: share + (number < rest) for number, member in enumerate(order)}
    target: list[str | None] = []
    for owner in owners:
        stays = owner is not None and room.get(owner, 0) > 0
        target.append(owner if stays else None)
        if owner is not None and stays:
            room[owner] -= 1
    free = (member for member in members for _ in range(room[member]))
    return [next(free) if owner is None else owner for owner in target]
