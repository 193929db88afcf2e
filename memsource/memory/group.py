"""A consumer group as data: a topic, its committed positions, the owners of partitions, and rebalances.

It acts only when it is called, and has no clock. So the same group serves a test on a real event loop, a simulation and
an explorer that tries every order of events. Its rules are those of Kafka, the ugly ones included:

- **Two views.** The coordinator knows the owner of a partition. A member believes its last ``poll``. Until the next one
  it continues to fetch and to commit, also a partition of another member.
- **A commit is barely checked**: only its member must be known. The member need not own the partition, and the position
  may fall or not exist. The last commit wins.
- A position is the *next to read*. With it the group keeps the positions completed above.
- **Rebalance**: the coordinator revokes partitions; their owners drain, commit and ``release`` them; then it assigns
  them again. Eager: all members release everything before any assignment. Cooperative: a member releases only
  partitions that move, and each is assigned as soon as it is free.
- A member reads from the position that is committed at the moment when it learns of its assignment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from lanes.core.types import PartitionKey
from memsource.memory.topic import Record, Topic, TopicState
from memsource.memory.watchers import Watched

_UNBOUNDED: Final = 1 << 62

Assignor: TypeAlias = Callable[[Sequence[str | None], Sequence[str]], list[str | None]]
"""Returns the new owner of each partition, from the present owners (None = free) and the members."""


class Committed(NamedTuple):
    """The commit of a partition: ``offset`` is the next to read, ``completed`` are rising half-open runs above it."""

    offset: int = 0
    completed: tuple[tuple[int, int], ...] = ()


class Notice(NamedTuple):
    """A message of the coordinator to a member about a partition."""

    kind: Literal["assigned", "revoking", "lost"]
    partition: int


class _MemberPartition(NamedTuple):
    """A partition as its member knows it: the position it reads next, and whether it is revoked."""

    position: int
    revoking: bool = False


class GroupState(NamedTuple):
    """The whole state of a group. Equal states behave alike. Hashable."""

    topic: TopicState
    committed: tuple[Committed, ...]
    owners: tuple[str | None, ...]
    asked: frozenset[int]
    members: tuple[tuple[str, tuple[Notice, ...], tuple[tuple[int, _MemberPartition], ...]], ...]


class UnknownMember(LookupError):
    """The group does not know this member, or no longer knows it; Kafka's UNKNOWN_MEMBER_ID."""


class _Member:
    __slots__ = ("notices", "partitions")

    def __init__(self, notices: Iterable[Notice] = (), owned: Iterable[tuple[int, _MemberPartition]] = ()) -> None:
        self.notices = list(notices)
        self.partitions = dict(owned)


class Group(Watched):
    """A topic, and the members that share its partitions.

    No method blocks. Not thread-safe. Methods raise ``IndexError`` for an unknown partition, and ``UnknownMember``
    for an unknown member.

    Args:
        partitions: Number of partitions, 1 or more. They are numbered from 0.
        name: Name of the topic.
        cooperative: Whether rebalances are cooperative; see the module.
        assignor: Pure function that decides the owners; None = ``plan``.

    Attributes:
        generation: Number of assignments so far. It is not part of the state.
    """

    def __init__(
        self, partitions: int = 1, *, name: str = "memory", cooperative: bool = False, assignor: Assignor | None = None
    ) -> None:
        super().__init__()
        self.topic = Topic(partitions, name)
        self.name = name
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

    # --- producers

    def publish(
        self,
        value: bytes | str = b"",
        *,
        key: PartitionKey | None = None,
        headers: Iterable[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Record:
        """Append one message.

        Args:
            value: The payload. A str is encoded as UTF-8.
            key: The key; None = a message without one.
            headers: The headers, in order.
            partition: Number of the partition; None = the same one for each key, and each in turn without a key.

        Returns:
            The message, with its partition and position.
        """
        record = self.topic.publish(value, key=key, headers=headers, partition=partition)
        self._changed()
        return record

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of positions, as compaction does.

        Args:
            count: Number of positions, 0 or more.
            partition: Number of the partition.
        """
        self.topic.skip(count, partition=partition)
        self._changed()

    # --- members

    def join(self, member: str) -> None:
        """Add a member, which starts a rebalance.

        Args:
            member: Name of the member.

        Raises:
            ValueError: The group knows the member.
        """
        if member in self._members:
            raise ValueError(f"member {member!r} has joined already: leave, or crash it, first")
        self._members[member] = _Member()
        self.rebalance()

    def leave(self, member: str) -> None:
        """Remove a member, which starts a rebalance. Idempotent.

        Args:
            member: Name of the member.
        """
        if member in self._members:
            self.crash(member)

    def crash(self, member: str) -> None:
        """Remove a member whose session has expired. Its later calls fail.

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
        """Restart a known member. Its revoked partitions are released, and the others are assigned to it again.

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
        """The notices of the next ``poll`` of a member.

        Args:
            member: Name of the member.

        Returns:
            The notices in order; the call does not take them.
        """
        return tuple(self._member(member).notices)

    def poll(self, member: str) -> list[Notice]:
        """The decisions of the coordinator about a member since its last poll.

        Args:
            member: Name of the member.

        Returns:
            The notices in order; none when nothing changed.
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
        """The partitions that a member believes to own, revoked ones included.

        Args:
            member: Name of the member.

        Returns:
            The numbers of the partitions, rising.
        """
        return sorted(self._member(member).partitions)

    def fetch(self, member: str, partition: int, messages: int, size: int = _UNBOUNDED) -> list[Record]:
        """Read the next records of a member. A revoked partition delivers none.

        Args:
            member: Name of the member.
            partition: Number of the partition.
            messages: Maximum number of records.
            size: Bytes after which it stops. The record that reaches them is the last one.

        Returns:
            The records in order; none when nothing is left or a bound is 0.

        Raises:
            KeyError: The member does not believe to own the partition.
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
            # Only a gap is left: it is read too.
            position = max(position, log.end)
        owned[partition] = _MemberPartition(position)
        return records

    def position(self, member: str, partition: int) -> int:
        """The position that a member reads next.

        Args:
            member: Name of the member.
            partition: Number of the partition.

        Returns:
            The position, 0 or more.

        Raises:
            KeyError: The member does not believe to own the partition.
        """
        return self._member(member).partitions[partition].position

    def commit(self, member: str, partition: int, offset: int, completed: Iterable[tuple[int, int]] = ()) -> None:
        """Commit a position, for any owner and after any former commit.

        Args:
            member: Name of the member.
            partition: Number of the partition.
            offset: The next position to read, 0 or more.
            completed: Positions completed above it, as rising half-open runs.

        Raises:
            ValueError: ``offset`` is below 0.
        """
        self._member(member)
        self.topic.log(partition)
        if offset < 0:
            raise ValueError(f"offset={offset} of partition {partition}: a position to read next is 0 or more")
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
        # Notices before a loss are outdated. After a loss it may have been assigned again.
        stale = 1 + [notice.kind for notice in notices].index("lost") if lost else len(notices)
        for notice in notices[:stale]:
            state.notices.remove(notice)
        if not lost:
            self._free(partition)
            self._assign()

    # --- the coordinator

    def rebalance(self) -> None:
        """Revoke the partitions that move, and assign the free ones. During a rebalance it plans again."""
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
            raise ValueError(f"partition {partition} of {self.name} has no owner: only an owned one can be revoked")
        self._ask(partition, owner)
        self._assign()

    def lose(self, member: str, partition: int, *, give: bool = True) -> None:
        """Take a partition from its owner, as at the end of its session or of its drain.

        Another member gets it at once, or at the end of a running eager rebalance. The former owner goes on until it
        polls.

        Args:
            member: Name of the owner.
            partition: Number of the partition.
            give: Whether another member gets it. Without another one it is free until the next rebalance.

        Raises:
            ValueError: The member is not the owner.
        """
        state = self._member(member)
        if self.owner(partition) != member:
            raise ValueError(
                f"partition {partition} of {self.name} is owned by {self._owners[partition]!r}, not by {member!r}: "
                "only its owner can lose it"
            )
        rebalancing = bool(self._asked)
        self._free(partition)
        state.notices.append(Notice("lost", partition))
        others = [other for other in self._members if give and other != member]
        if others and (self.cooperative or not self._asked):
            loads = Counter(self._owners)
            self._give(partition, min(others, key=lambda other: loads[other]))
        if rebalancing:
            self._assign()
        self._changed()

    def owner(self, partition: int) -> str | None:
        """The owner of a partition, as the coordinator knows it.

        Args:
            partition: Number of the partition.

        Returns:
            The name of the member, or None when the partition is free.
        """
        self.topic.log(partition)
        return self._owners[partition]

    def committed(self, partition: int) -> Committed:
        """The commit of a partition.

        Args:
            partition: Number of the partition.

        Returns:
            The last commit; its position is 0 before the first one.
        """
        self.topic.log(partition)
        return self._committed[partition]

    @property
    def members(self) -> list[str]:
        """The known members, in the order of ``join``."""
        return list(self._members)

    @property
    def rebalancing(self) -> bool:
        """Whether a revoked partition is not released yet."""
        return bool(self._asked)

    @property
    def unfinished(self) -> int:
        """The number of messages that are neither below a committed position nor completed above it."""
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
        """The state as a value. O(messages)."""
        return GroupState(
            self.topic.snapshot(),
            tuple(self._committed),
            tuple(self._owners),
            frozenset(self._asked),
            tuple((name, tuple(m.notices), tuple(sorted(m.partitions.items()))) for name, m in self._members.items()),
        )

    def restore(self, state: GroupState) -> None:
        """Return to a former state.

        Args:
            state: A result of ``snapshot`` of a group with the same number of partitions.
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
            raise UnknownMember(f"member {member!r} is not in group {self.name}: join first")
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
    """The default ``Assignor``: shares are even, with the fewest moves. Pure and deterministic."""
    if not members:
        return [None] * len(owners)
    share, rest = divmod(len(owners), len(members))
    loads = Counter(owners)
    # The rest goes to the members that own most.
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
