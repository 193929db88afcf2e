"""A consumer group as data: a topic, its committed positions, who owns which partition, and how that changes.

It acts only when it is called, and knows no time, so the same group serves a test on a real event loop, a simulation
and an explorer that tries every order of events. Its rules are those of Kafka, the ugly ones included:

- **Two views.** The coordinator says who owns a partition; a member believes what it has ``poll``\\ ed so far. In
  between it goes on: a member whose partition was given to another one still fetches and commits.
- **A commit is checked for nothing** but that its member is known: neither whether it owns the partition, nor whether
  the position rises, nor whether there is such a position. The last one wins.
- A position is *next to read*. With it goes what is completed above it, which the group only keeps.
- **Rebalance**: owners are asked to give partitions back (``revoking``), drain, commit, and ``release`` them; then
  they are assigned anew. Eager: everybody gives up everything before anybody gets anything. Cooperative: only what
  moves is given up, and assigned as it comes free.
- A member reads from the position that is committed at the moment it learns of its assignment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from lanes.core.types import PartitionKey
from memsource.memory.topic import Record, Topic, TopicState
from memsource.memory.watchers import Watched

__all__ = ["Assignor", "Committed", "Group", "GroupState", "Notice", "UnknownMember", "plan"]

_UNBOUNDED: Final = 1 << 62

Assignor: TypeAlias = Callable[[Sequence[str | None], Sequence[str]], list[str | None]]
"""Who is to own each partition, from who owns it now (None = nobody) and the members."""


class Committed(NamedTuple):
    """What is committed of a partition: ``offset`` is next to read, ``completed`` are rising half-open runs above."""

    offset: int = 0
    completed: tuple[tuple[int, int], ...] = ()


class Notice(NamedTuple):
    """What the coordinator tells a member about a partition."""

    kind: Literal["assigned", "revoking", "lost"]
    partition: int


class _Held(NamedTuple):
    """A partition in the eyes of a member: what it reads next, and whether it was asked to give it back."""

    position: int
    revoking: bool = False


class GroupState(NamedTuple):
    """Everything that decides what a group does next. Equal states behave alike; hashable."""

    topic: TopicState
    committed: tuple[Committed, ...]
    owners: tuple[str | None, ...]
    asked: frozenset[int]
    members: tuple[tuple[str, tuple[Notice, ...], tuple[tuple[int, _Held], ...]], ...]


class UnknownMember(LookupError):
    """The group does not know this member, or knows it no more; Kafka's UNKNOWN_MEMBER_ID."""


class _Member:
    __slots__ = ("held", "notices")

    def __init__(self, notices: Iterable[Notice] = (), held: Iterable[tuple[int, _Held]] = ()) -> None:
        self.notices = list(notices)
        self.held = dict(held)


class Group(Watched):
    """``partitions`` numbered from 0 of one topic called ``name``, and the members that share them.

    ``cooperative``: how a rebalance goes, see above. ``assignor`` says who is to own what, from the owners and the
    members in the order in which they came; pure, a name or None for each partition. ``generation`` counts the
    assignments; it decides nothing and is no part of the state. Nothing blocks. Not thread-safe. Methods that name a
    partition raise ``IndexError`` for one that does not exist; those that name a member raise ``UnknownMember`` for
    one the group does not know.
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
        """Append one message and return it; see ``Topic.publish``."""
        record = self.topic.publish(value, key=key, headers=headers, partition=partition)
        self._changed()
        return record

    def skip(self, count: int, *, partition: int = 0) -> None:
        """Leave a gap of ``count`` positions; see ``Topic.skip``."""
        self.topic.skip(count, partition=partition)
        self._changed()

    # --- members

    def join(self, member: str) -> None:
        """A member comes, which starts a rebalance. Raises ``ValueError`` when it is known already."""
        if member in self._members:
            raise ValueError(f"member {member!r} has joined already: leave, or crash it, first")
        self._members[member] = _Member()
        self.rebalance()

    def leave(self, member: str) -> None:
        """A member goes, with all it owns, which starts a rebalance. Idempotent."""
        if member in self._members:
            self.crash(member)

    def crash(self, member: str) -> None:
        """A member is gone without a word and its session has expired: nothing it says counts any more."""
        self._member(member)
        del self._members[member]
        for number, owner in enumerate(self._owners):
            if owner == member:
                self._free(number)
        self.rebalance()

    def rejoin(self, member: str) -> None:
        """A known member starts anew and hears again of all it owns; what it was asked for counts as released."""
        state = self._member(member)
        owned = [number for number, owner in enumerate(self._owners) if owner == member]
        state.held.clear()
        state.notices = [Notice("assigned", number) for number in owned if number not in self._asked]
        for number in self._asked.intersection(owned):
            self._free(number)
        self._assign()
        self._changed()

    def pending(self, member: str) -> tuple[Notice, ...]:
        """What the next ``poll`` of this member brings."""
        return tuple(self._member(member).notices)

    def poll(self, member: str) -> list[Notice]:
        """What the coordinator has decided about this member since it asked last, in that order."""
        state = self._member(member)
        notices, state.notices = state.notices, []
        for kind, number in notices:
            if kind == "assigned":
                state.held[number] = _Held(self._committed[number].offset)
            elif kind == "revoking":
                state.held[number] = state.held[number]._replace(revoking=True)
            else:
                del state.held[number]
        return notices

    def held(self, member: str) -> list[int]:
        """The partitions a member believes to own, those it was asked for included."""
        return sorted(self._member(member).held)

    def fetch(self, member: str, partition: int, messages: int, size: int = _UNBOUNDED) -> list[Record]:
        """What a member reads next: at most ``messages``, and the last one is that which reaches ``size`` bytes.

        Nothing of a partition it was asked for. Raises ``KeyError`` for one that it does not believe to own.
        """
        log = self.topic.log(partition)
        held = self._member(member).held
        position, revoking = held[partition]
        if revoking or messages <= 0 or size <= 0:
            return []
        records = log.read(position, messages, size)
        if records:
            position = records[-1].position + 1
        if not log.read(position, 1, 1):
            # Only a gap is left, which is read as well.
            position = max(position, log.end)
        held[partition] = _Held(position)
        return records

    def position(self, member: str, partition: int) -> int:
        """What a member reads next. Raises ``KeyError`` for a partition that it does not believe to own."""
        return self._member(member).held[partition].position

    def commit(self, member: str, partition: int, offset: int, completed: Iterable[tuple[int, int]] = ()) -> None:
        """Keep a position, whoever owns the partition and whatever was committed before.

        ``completed``: rising half-open runs above it. Raises ``ValueError`` for an offset below 0.
        """
        self._member(member)
        self.topic.log(partition)
        if offset < 0:
            raise ValueError(f"offset={offset} of partition {partition}: a position to read next is 0 or more")
        self._committed[partition] = Committed(offset, tuple((start, end) for start, end in completed))

    def release(self, member: str, partition: int) -> None:
        """A member gives a partition back, whether it was asked for it or not. Idempotent."""
        state = self._member(member)
        if state.held.pop(partition, None) is None:
            return
        notices = [notice for notice in state.notices if notice.partition == partition]
        lost = any(notice.kind == "lost" for notice in notices)
        # What it has not heard of is over with it; but behind a loss it may have been assigned anew.
        stale = 1 + [notice.kind for notice in notices].index("lost") if lost else len(notices)
        for notice in notices[:stale]:
            state.notices.remove(notice)
        if not lost:
            self._free(partition)
            self._assign()

    # --- the coordinator

    def rebalance(self) -> None:
        """Ask for what is to move, and assign what is free. Again while one is under way: plans anew."""
        target = self._plan()
        for number, owner in enumerate(self._owners):
            if owner is not None and not (self.cooperative and owner == target[number]):
                self._ask(number, owner)
        self._assign()

    def revoke(self, partition: int) -> None:
        """Ask for one partition, as a rebalance does. Raises ``ValueError`` when nobody owns it. Idempotent."""
        owner = self.owner(partition)
        if owner is None:
            raise ValueError(f"partition {partition} of {self.name} has no owner: nobody can be asked")
        self._ask(partition, owner)
        self._assign()

    def lose(self, member: str, partition: int, *, give: bool = True) -> None:
        """Take a partition from its owner without asking: its session or its time to drain is over.

        Another member gets it at once, or by the eager rebalance that is under way, when that ends; without another
        one, or not to ``give``, it stays free until the next rebalance. The former owner goes on until it polls. Raises
        ``ValueError`` when it is not the owner.
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
        """Who owns a partition in the eyes of the coordinator."""
        self.topic.log(partition)
        return self._owners[partition]

    def committed(self, partition: int) -> Committed:
        """What is committed of a partition; position 0 before the first commit."""
        self.topic.log(partition)
        return self._committed[partition]

    @property
    def members(self) -> list[str]:
        """The members known, in the order in which they came."""
        return list(self._members)

    @property
    def rebalancing(self) -> bool:
        """Whether somebody was asked for a partition and has not released it."""
        return bool(self._asked)

    @property
    def unfinished(self) -> int:
        """How many messages of all partitions are neither below a committed position nor completed above it."""
        return sum(
            position >= offset and not any(start <= position < end for start, end in completed)
            for log, (offset, completed) in zip(self.topic.logs, self._committed, strict=True)
            for position in log.positions
        )

    def recreate(self) -> None:
        """The topic is deleted and made anew: it is empty, and nothing of it is committed."""
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
            tuple((name, tuple(m.notices), tuple(sorted(m.held.items()))) for name, m in self._members.items()),
        )

    def restore(self, state: GroupState) -> None:
        """Be in a state that ``snapshot`` of a group of as many partitions returned."""
        self.topic.restore(state.topic)
        self._committed = list(state.committed)
        self._owners = list(state.owners)
        self._asked = set(state.asked)
        self._members = {name: _Member(notices, held) for name, notices, held in state.members}
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
    """Who is to own which partition: as even as can be, with as few moves as that allows. Pure and deterministic."""
    if not members:
        return [None] * len(owners)
    share, rest = divmod(len(owners), len(members))
    loads = Counter(owners)
    # Who owns most already gets what cannot be shared evenly.
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
