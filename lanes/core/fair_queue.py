"""The queue of heads in an engine with bounds per partition.

A *budget* counts the use of such a bound. The budgets take turns to start their heads.

A budget belongs to one partition, or to all partitions of a physical queue. A budget has a turn if it has a head and
fewer than ``limit`` running calls. After its turn, a budget moves to the end of the sequence. Between two turns of such
a budget, each other budget therefore starts at most one call. The partitions of a physical queue share its turns in
sequence.

The queue has the methods of ``collections.deque`` that the engine uses, so an engine without budgets keeps its deque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from lanes.core.types import BudgetId, Message, PartitionId

_UNLIMITED: Final = 1 << 62


class PartitionsInTurn:
    """The heads of a physical queue, whose partitions take turns.

    The class has the methods of ``deque`` that a budget needs.
    """

    __slots__ = ("_count", "_heads")

    def __init__(self) -> None:
        self._heads: dict[PartitionId, deque[Message]] = {}  # the partitions with a head, in the order of their turns
        self._count = 0

    def append(self, head: Message) -> None:
        """Add a head after the other heads of its partition."""
        self._heads.setdefault(head.partition.id, deque()).append(head)
        self._count += 1

    def popleft(self) -> Message:
        """Take the first head of the partition whose turn it is."""
        name = next(iter(self._heads))
        heads = self._heads.pop(name)
        head = heads.popleft()
        if heads:
            self._heads[name] = heads
        self._count -= 1
        return head

    def replace(self, former: Message, head: Message) -> None:
        """Replace a head by another head of the same partition."""
        heads = self._heads[former.partition.id]
        heads[heads.index(former)] = head

    def __iter__(self) -> Iterator[Message]:
        """Yield all heads. If a caller appends the heads to an empty queue in this order, the turns are the same."""
        for heads in self._heads.values():
            yield from heads

    def __len__(self) -> int:
        return self._count


class FairQueue:
    """The heads that can start, by budget.

    Args:
        limit: Maximum number of running calls of a budget. 0 = no limit.

    Attributes:
        running: Number of running calls of each budget. The number includes the calls of a fenced assignment until they
            end.
    """

    __slots__ = ("_count", "_heads", "_limit", "_turns", "running")

    def __init__(self, limit: int) -> None:
        self.running: dict[BudgetId, int] = {}
        self._limit = limit or _UNLIMITED
        self._heads: dict[BudgetId, deque[Message] | PartitionsInTurn] = {}
        self._turns: deque[BudgetId] = deque()  # exactly the budgets with a head and a free call
        self._count = 0

    def append(self, head: Message) -> None:
        """Add a head after the other heads of its partition."""
        name = head.partition.budget
        before = self._startable(name)
        heads = self._heads.get(name)
        if heads is None:
            heads = self._heads[name] = PartitionsInTurn() if isinstance(name, str) else deque()
        heads.append(head)
        self._changed(name, before)

    def extend(self, heads: Iterable[Message]) -> None:
        """Add heads, each after the other heads of its partition."""
        for head in heads:
            self.append(head)

    def popleft(self) -> Message:
        """Take the first head of the budget whose turn it is, and begin a call of that budget."""
        name = self._turns[0]
        head = self.pop_head(name)
        self.begin(name)
        return head

    def pop_head(self, name: BudgetId) -> Message:
        """Take the first head of a budget, for a call that ``begin`` counts."""
        before = self._startable(name)
        heads = self._heads[name]
        head = heads.popleft()
        if not heads:
            del self._heads[name]
        self._changed(name, before)
        return head

    def begin(self, name: BudgetId) -> None:
        """Count a new call of a budget. The next turn of the budget follows the turns of the other budgets."""
        before = self._startable(name)
        self.running[name] = self.running.get(name, 0) + 1
        self._changed(name, before)
        if self._startable(name):
            self._turns.remove(name)
            self._turns.append(name)

    def end(self, name: BudgetId) -> None:
        """Count the end of a call of a budget."""
        before = self._startable(name)
        self.running[name] -= 1
        if not self.running[name]:
            del self.running[name]
        self._changed(name, before)

    def turns(self) -> list[BudgetId]:
        """Return the budgets that have a head and fewer running calls than the limit, in the order of their turns."""
        return list(self._turns)

    def heads(self, name: BudgetId) -> int:
        """Return the number of heads of a budget, even if its running calls have reached the limit."""
        return len(self._heads.get(name, ()))

    def clear(self) -> None:
        """Remove all heads. The numbers of running calls do not change."""
        self._heads.clear()
        self._turns.clear()
        self._count = 0

    def index(self, head: Message) -> int:
        """Return the index of a head in the order of the iteration."""
        return list(self).index(head)

    def __setitem__(self, place: int, head: Message) -> None:
        """Replace the head at an index by another head of the same partition."""
        former = list(self)[place]
        heads = self._heads[former.partition.budget]
        if isinstance(heads, PartitionsInTurn):
            heads.replace(former, head)
        else:
            heads[heads.index(former)] = head

    def __iter__(self) -> Iterator[Message]:
        """Yield all heads, beginning with the budgets that have a turn.

        If a caller extends an empty queue in this order, the turns are the same.
        """
        for name in self._turns:
            yield from self._heads[name]
        for name in in_order(self._heads.keys() - set(self._turns)):
            yield from self._heads[name]

    def __len__(self) -> int:
        """Return the number of heads that could start now, each in a separate call."""
        return self._count

    def _startable(self, name: BudgetId) -> int:
        return max(0, min(len(self._heads.get(name, ())), self._limit - self.running.get(name, 0)))

    def _changed(self, name: BudgetId, before: int) -> None:
        after = self._startable(name)
        self._count += after - before
        if after and not before:
            self._turns.append(name)
        elif before and not after:
            self._turns.remove(name)

    def __repr__(self) -> str:
        return f"<FairQueue {self._count} startable heads of {len(self._turns)} budgets>"


def in_order(budgets: Iterable[BudgetId]) -> list[BudgetId]:
    """Return budgets in an order that depends only on their names: first the partitions, then the physical queues."""
    names = list(budgets)
    return [
        *sorted(name for name in names if not isinstance(name, str)),
        *sorted(n for n in names if isinstance(n, str)),
    ]
