"""The queue of an engine with budgets per partition: the heads that can start, taken from the partitions in turn.

A partition has a turn while it has a head and fewer than ``limit`` running calls. After its turn, a partition goes to
the end of the line. A partition with a head and a free call therefore waits for at most one call of each other
partition.

The queue has the methods of ``collections.deque`` that the engine uses, so an engine without budgets keeps its deque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from lanes.core.types import Message, PartitionId

_UNLIMITED: Final = 1 << 62


class FairQueue:
    """The heads that can start, by partition.

    Args:
        limit: Maximum number of running calls of a partition. 0 = no limit.

    Attributes:
        running: Number of running calls of each partition. Calls of a fenced assignment count until they end.
    """

    __slots__ = ("_count", "_heads", "_limit", "_turns", "running")

    def __init__(self, limit: int) -> None:
        self.running: dict[PartitionId, int] = {}
        self._limit = limit or _UNLIMITED
        self._heads: dict[PartitionId, deque[Message]] = {}
        self._turns: deque[PartitionId] = deque()  # exactly the partitions with a head and a free call
        self._count = 0

    def append(self, head: Message) -> None:
        """Add a head at the end of the line of its partition."""
        name = head.partition.id
        before = self._startable(name)
        self._heads.setdefault(name, deque()).append(head)
        self._changed(name, before)

    def extend(self, heads: Iterable[Message]) -> None:
        """Add heads, each at the end of the line of its partition."""
        for head in heads:
            self.append(head)

    def popleft(self) -> Message:
        """Take the first head of the partition whose turn it is, and begin a call of that partition."""
        name = self._turns[0]
        head = self.pop_head(name)
        self.begin(name)
        return head

    def pop_head(self, name: PartitionId) -> Message:
        """Take the first head of a partition, for a call that ``begin`` counts."""
        before = self._startable(name)
        heads = self._heads[name]
        head = heads.popleft()
        if not heads:
            del self._heads[name]
        self._changed(name, before)
        return head

    def begin(self, name: PartitionId) -> None:
        """Count a call of a partition, whose turn comes again after those of the other partitions."""
        before = self._startable(name)
        self.running[name] = self.running.get(name, 0) + 1
        self._changed(name, before)
        if self._startable(name):
            self._turns.remove(name)
            self._turns.append(name)

    def end(self, name: PartitionId) -> None:
        """Count the end of a call of a partition."""
        before = self._startable(name)
        self.running[name] -= 1
        if not self.running[name]:
            del self.running[name]
        self._changed(name, before)

    def turns(self) -> list[PartitionId]:
        """Return the partitions with a head and a free call, in the order of their turns."""
        return list(self._turns)

    def heads(self, name: PartitionId) -> int:
        """Return the number of heads of a partition, whether or not the partition has a free call."""
        return len(self._heads.get(name, ()))

    def clear(self) -> None:
        """Remove all heads. Running calls still count."""
        self._heads.clear()
        self._turns.clear()
        self._count = 0

    def index(self, head: Message) -> int:
        """Return the index of a head in the order of the iteration."""
        return list(self).index(head)

    def __setitem__(self, place: int, head: Message) -> None:
        """Replace the head at an index by another head of the same partition."""
        former = list(self)[place]
        heads = self._heads[former.partition.id]
        heads[heads.index(former)] = head

    def __iter__(self) -> Iterator[Message]:
        """Yield all heads: first those of the partitions with a turn. ``extend`` in this order restores the turns."""
        for name in self._turns:
            yield from self._heads[name]
        for name in sorted(self._heads.keys() - set(self._turns)):
            yield from self._heads[name]

    def __len__(self) -> int:
        """Return the number of heads that could start now, each in a call of its own."""
        return self._count

    def _startable(self, name: PartitionId) -> int:
        return max(0, min(len(self._heads.get(name, ())), self._limit - self.running.get(name, 0)))

    def _changed(self, name: PartitionId, before: int) -> None:
        after = self._startable(name)
        self._count += after - before
        if after and not before:
            self._turns.append(name)
        elif before and not after:
            self._turns.remove(name)

    def __repr__(self) -> str:
        return f"<FairQueue {self._count} startable heads of {len(self._turns)} partitions>"
