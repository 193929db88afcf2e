"""The queue of an engine with budgets per partition agrees with a naive queue after every call."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.core.fair_queue import FairQueue
from lanes.core.types import Message, PartitionId
from tests.core.builders import new_message, new_partition
from tests.effort import runs

PARTITIONS = [new_partition(number) for number in range(4)]
UNKNOWN = PartitionId("S", 9)

CALLS = st.lists(
    st.tuples(st.sampled_from(["append", "popleft", "pop_head", "begin", "end", "set", "clear"]), st.integers(0, 3)),
    max_size=40,
)


class NaiveQueue:
    """Heads in lists, with a line that is computed again after each call."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.heads: dict[PartitionId, list[Message]] = {partition.id: [] for partition in PARTITIONS}
        self.running: Counter[PartitionId] = Counter()
        self.line: list[PartitionId] = []

    def free(self, name: PartitionId) -> int:
        """The heads of a partition that could start now."""
        heads = len(self.heads[name])
        return max(0, min(heads, self.limit - self.running[name])) if self.limit else heads

    def renew(self, called: PartitionId | None = None) -> None:
        stay = [name for name in self.line if self.free(name)]
        stay += [name for name in self.heads if self.free(name) and name not in stay]
        self.line = [name for name in stay if name != called] + [name for name in stay if name == called]

    def in_order(self) -> list[Message]:
        others = sorted(name for name in self.heads if name not in self.line)
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
        name = PARTITIONS[number].id
        head = new_message(PARTITIONS[number], position)
        if call == "append":
            queue.append(head)
            naive.heads[name].append(head)
            naive.renew()
        elif call == "popleft" and naive.line:
            name = naive.line[0]
            assert queue.popleft() is naive.heads[name].pop(0)
            naive.running[name] += 1
            naive.renew(name)
        elif call == "pop_head" and naive.heads[name]:
            assert queue.pop_head(name) is naive.heads[name].pop(0)
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
            queue[naive.in_order().index(former)] = head
            naive.heads[name][-1] = head
        elif call == "clear":
            queue.clear()
            naive.heads = {name: [] for name in naive.heads}
            naive.renew()
        agree(queue, naive)


@given(limit=st.integers(0, 2), numbers=st.lists(st.integers(0, 3)), running=st.lists(st.integers(0, 3)))
def test_extending_a_cleared_queue_by_its_heads_restores_the_turns(
    limit: int, numbers: list[int], running: list[int]
) -> None:
    queue = FairQueue(limit)
    queue.extend([new_message(PARTITIONS[number], position) for position, number in enumerate(numbers)])
    for number in running:
        queue.begin(PARTITIONS[number].id)
    heads, turns, size = list(queue), queue.turns(), len(queue)
    assert len(heads) == len(numbers)
    queue.clear()
    assert (list(queue), queue.turns(), len(queue)) == ([], [], 0)
    queue.extend(heads)
    assert (list(queue), queue.turns(), len(queue)) == (heads, turns, size)


def test_the_repr_counts_heads_and_partitions() -> None:
    queue = FairQueue(2)
    queue.extend([new_message(PARTITIONS[number], position) for position, number in enumerate([0, 0, 0, 1])])
    assert repr(queue) == "<FairQueue 3 startable heads of 2 partitions>"
    with pytest.raises(ValueError, match="not in list"):
        queue.index(new_message(PARTITIONS[0], 0))
