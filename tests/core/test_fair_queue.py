"""The queue of an engine with budgets per partition agrees with a naive queue after every call."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.core.fair_queue import FairQueue
from lanes.core.types import BudgetId, Message, PartitionId
from tests.core.builders import new_message, new_partition
from tests.effort import runs

PARTITIONS = [new_partition(number) for number in range(4)]
WITH_QUEUES = [*PARTITIONS[:2], *(new_partition(number, source) for source in "QR" for number in range(2))]
"""Two partitions with a budget each, and two physical queues of two partitions."""
for _partition in WITH_QUEUES[2:]:
    _partition.budget = _partition.id.source
UNKNOWN = PartitionId("S", 9)

CALLS = st.lists(
    st.tuples(st.sampled_from(["append", "popleft", "pop_head", "begin", "end", "set", "clear"]), st.integers(0, 5)),
    max_size=40,
)


class NaiveQueue:
    """Heads in lists, with a line that is computed again after each call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.heads: dict[BudgetId, list[Message]] = {partition.budget: [] for partition in WITH_QUEUES}
        self.running: Counter[BudgetId] = Counter()
        self.line: list[BudgetId] = []

    def append(self, head: Message) -> None:
        """Add a head after the heads of its partition; the heads of a budget are in the order of the iteration."""
        heads = self.heads[head.partition.budget]
        own = [index for index, each in enumerate(heads) if each.partition is head.partition]
        heads.insert(own[-1] + 1 if own else len(heads), head)

    def pop(self, name: BudgetId) -> Message:
        """Take the first head. The other heads of its partition go to the end."""
        head = self.heads[name].pop(0)
        self.heads[name].sort(key=lambda each: each.partition is head.partition)
        return head

    def free(self, name: BudgetId) -> int:
        """The heads of a budget that could start now."""
        heads = len(self.heads[name])
        return max(0, min(heads, self.limit - self.running[name])) if self.limit else heads

    def renew(self, called: BudgetId | None = None) -> None:
        stay = [name for name in self.line if self.free(name)]
        stay += [name for name in self.heads if self.free(name) and name not in stay]
        self.line = [name for name in stay if name != called] + [name for name in stay if name == called]

    def in_order(self) -> list[Message]:
        others = sorted((name for name in self.heads if name not in self.line), key=lambda n: (isinstance(n, str), n))
        return [head for name in [*self.line, *others] for head in self.heads[name]]


def agree(queue: FairQueue, naive: NaiveQueue) -> None:
    assert queue.turns() == naive.line
    assert list(queue) == naive.in_order()
    assert len(queue) == sum(naive.free(name) for name in naive.heads)
    assert queue.running == {name: count for name, count in naive.running.items() if count}
    assert {name: queue.heads(name) for name in naive.heads} == {name: len(all_) for name, all_ in naive.heads.items()}
    assert queue.heads(UNKNOWN) == 0
    assert [queue.index(head) for head in naive.in_order()] == [*range(len(naive.in_order()))]


@settings(max_examples=runs(150))
@given(limit=st.integers(0, 3), calls=CALLS)
def test_the_fair_queue_agrees_with_a_naive_queue(limit: int, calls: list[tuple[str, int]]) -> None:
    queue, naive = FairQueue(limit), NaiveQueue(limit)
    for position, (call, number) in enumerate(calls):
        name = WITH_QUEUES[number].budget
        head = new_message(WITH_QUEUES[number], position)
        if call == "append":
            queue.append(head)
            naive.append(head)
            naive.renew()
        elif call == "popleft" and naive.line:
            name = naive.line[0]
            assert queue.popleft() is naive.pop(name)
            naive.running[name] += 1
            naive.renew(name)
        elif call == "pop_head" and naive.heads[name]:
            assert queue.pop_head(name) is naive.pop(name)
            naive.renew()
        elif call == "begin":
            queue.begin(name)
            naive.running[name] += 1
            naive.renew(name)
        elif call == "end" and naive.running[name]:
            queue.end(name)
            naive.running[name] -= 1
            naive.renew()
        elif call == "set" and naive.heads[name]:
            former = naive.heads[name][-1]
            head = new_message(former.partition, position)
            queue[naive.in_order().index(former)] = head
            naive.heads[name][-1] = head
        elif call == "clear":
            queue.clear()
            naive.heads = {name: [] for name in naive.heads}
            naive.renew()
        agree(queue, naive)


@given(limit=st.integers(0, 2), numbers=st.lists(st.integers(0, 5)), running=st.lists(st.integers(0, 5)))
def test_extending_a_cleared_queue_by_its_heads_restores_the_turns(
    limit: int, numbers: list[int], running: list[int]
) -> None:
    queue = FairQueue(limit)
    queue.extend([new_message(WITH_QUEUES[number], position) for position, number in enumerate(numbers)])
    for number in running:
        queue.begin(WITH_QUEUES[number].budget)
    heads, turns, size = list(queue), queue.turns(), len(queue)
    assert len(heads) == len(numbers)
    queue.clear()
    assert (list(queue), queue.turns(), len(queue)) == ([], [], 0)
    queue.extend(heads)
    assert (list(queue), queue.turns(), len(queue)) == (heads, turns, size)


def test_the_repr_counts_heads_and_partitions() -> None:
    queue = FairQueue(2)
    queue.extend([new_message(PARTITIONS[number], position) for position, number in enumerate([0, 0, 0, 1])])
    assert repr(queue) == "<FairQueue 3 startable heads of 2 budgets>"
    with pytest.raises(ValueError, match="not in list"):
        queue.index(new_message(PARTITIONS[0], 0))
