"""The decisions about transactions keep each output once and in order, under every outcome of a commit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lanes.core.types import Partition, PartitionId
from lanes.outputs.publisher import Output
from lanes_kafka.client.records import READER
from lanes_kafka.transactions.coverage import Coverage
from lanes_kafka.transactions.waiting import OVERHEAD, WaitingOutputs

LOG = PartitionId("in", 0)
NOTHING = Coverage.stored(-1, None)
SMALLEST = 12
"""Characters of metadata for a single run."""

positions = st.sets(st.integers(0, 300), max_size=60)
limits = st.integers(0, 40)


def runs_of(finished: set[int], floor: int) -> list[tuple[int, int]]:
    """The runs of the finished positions above a floor."""
    runs: list[tuple[int, int]] = []
    for position in sorted(each for each in finished if each > floor):
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return runs


def floor_of(finished: set[int]) -> int:
    return next(each for each in range(len(finished) + 1) if each not in finished)


def output(position: int, number: int = 1, *, assignment: int = 0, key: bytes | None = None) -> Output:
    return Output(
        target="out",
        value=b"v",
        key=key,
        headers=(),
        trace=(),
        number=number,
        source=LOG,
        incarnation="",
        position=position,
        attempt=1,
        message_key=key,
        assignment=assignment,
    )


@given(positions, limits)
def test_a_coverage_is_what_the_next_owner_reads(finished: set[int], limit: int) -> None:
    floor = floor_of(finished)
    coverage = NOTHING.extended(floor, runs_of(finished, floor), limit)
    assert coverage is not None
    assert len(coverage.metadata) <= limit
    assert Coverage.stored(floor, coverage.metadata) == coverage
    assert {each for each in range(301) if coverage.covers(each)} <= finished | set(range(floor))


@given(positions, limits)
def test_a_covered_message_has_no_uncovered_finished_message_below_it(finished: set[int], limit: int) -> None:
    # Else the output of a later message of a key could leave before the output of an earlier one.
    floor = floor_of(finished)
    coverage = NOTHING.extended(floor, runs_of(finished, floor), limit)
    assert coverage is not None
    covered = [coverage.covers(each) for each in sorted(finished)]
    assert covered == sorted(covered, reverse=True)


@given(st.lists(st.sets(st.integers(0, 300), max_size=40), max_size=5), st.integers(SMALLEST, 40))
def test_a_commit_covers_what_earlier_commits_have_covered(steps: list[set[int]], limit: int) -> None:
    finished: set[int] = set()
    coverage = NOTHING
    for more in steps:
        before = [each for each in finished if coverage.covers(each)]
        finished |= more
        floor = floor_of(finished)
        extended = coverage.extended(floor, runs_of(finished, floor), limit)
        assert extended is not None and len(extended.metadata) <= limit
        coverage = extended
        assert all(map(coverage.covers, before))
        new = [coverage.covers(each) for each in sorted(finished.difference(before))]
        assert new == sorted(new, reverse=True)


def test_a_limit_below_what_is_covered_is_told() -> None:
    coverage = NOTHING.extended(1, [(3, 4), (600, 601)], 40)
    assert coverage is not None and coverage.covers(600)
    assert coverage.extended(1, [(3, 4), (600, 601), (900, 901)], SMALLEST) is None
    assert coverage.extended(700, [], 0) == Coverage(700, [], "")


@pytest.mark.parametrize(("floor", "metadata"), [(-1001, ""), (-1, None), (-1001, "text")])
def test_a_group_without_a_position_covers_nothing(floor: int, metadata: str | None) -> None:
    assert not any(map(Coverage.stored(floor, metadata).covers, range(10)))


@pytest.mark.parametrize("metadata", ["", None, "foreign", "㐀" * 30])
def test_foreign_metadata_covers_nothing_above_the_floor(metadata: str | None) -> None:
    coverage = Coverage.stored(5, metadata)
    assert [each for each in range(20) if coverage.covers(each)] == [0, 1, 2, 3, 4]
    assert coverage.metadata == ""


def test_waiting_outputs_are_bounded_but_take_the_lowest_message() -> None:
    waiting, partition = WaitingOutputs(2 * (OVERHEAD + 1)), Partition(LOG, READER, floor=0)
    waiting.assign(partition)
    waiting.add(output(7))
    assert waiting.has_room(output(8))
    waiting.add(output(9))
    # Nothing frees the outputs 7 and 9 if 6 has to wait, because they may be above the set as encoded.
    assert [waiting.has_room(output(each)) for each in (6, 7, 8, 10)] == [True, True, False, False]
    waiting.remove(partition, [output(7)])
    assert waiting.has_room(output(10)) and waiting.size == OVERHEAD + 1


def test_outputs_of_a_former_assignment_are_not_accepted() -> None:
    waiting, former, present = (
        WaitingOutputs(1 << 20),
        Partition(LOG, READER, floor=0),
        Partition(LOG, READER, floor=0),
    )
    former.assignment, present.assignment = 1, 2
    waiting.assign(former)
    waiting.add(output(0, assignment=1))
    waiting.assign(present)
    assert not waiting.accepts(output(0, assignment=1)) and waiting.accepts(output(0, assignment=2))
    assert waiting.size == 0
    waiting.remove(former, [output(0, assignment=1)])
    waiting.forget(LOG)
    assert not waiting.accepts(output(0, assignment=2))


def test_a_failed_message_keeps_no_output() -> None:
    waiting, partition = WaitingOutputs(1 << 20), Partition(LOG, READER, floor=0)
    waiting.assign(partition)
    for number in (2, 1):
        waiting.add(output(3, number))
    waiting.add(output(4))
    assert [(each.position, each.number) for each in waiting.covered(partition, Coverage(5, [], ""))] == [
        (3, 1),
        (3, 2),
        (4, 1),
    ]
    waiting.refuse(output(3, 1))
    assert [each.position for each in waiting.covered(partition, Coverage(5, [], ""))] == [4]
    assert waiting.size == OVERHEAD + 1


KEYS = 3
MESSAGES = 24


class Transactions(RuleBasedStateMachine):
    """One partition and its owners. The broker applies the outputs and the position of a commit together, or neither.

    ``visible`` is the output topic under ``read_committed``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.visible: list[int] = []
        self.stored = Coverage.stored(-1, None)
        self.assignments = 0
        self.own()

    def own(self) -> None:
        self.assignments += 1
        self.partition = Partition(LOG, READER, floor=0)
        self.partition.assignment = self.assignments
        self.waiting = WaitingOutputs(1 << 20)
        self.waiting.assign(self.partition)
        self.finished = {each for each in range(MESSAGES) if self.stored.covers(each)}

    @rule(key=st.integers(0, KEYS - 1))
    def finish(self, key: int) -> None:
        """The first unfinished message of a key succeeds, with two outputs."""
        left = [each for each in range(key, MESSAGES, KEYS) if each not in self.finished]
        if left:
            for number in (1, 2):
                self.waiting.add(output(left[0], number, assignment=self.assignments, key=b"%d" % key))
            self.finished.add(left[0])

    def offered(self, limit: int) -> tuple[Coverage, Sequence[Output]]:
        floor = floor_of(self.finished)
        coverage = self.stored.extended(floor, runs_of(self.finished, floor), limit)
        if coverage is None:
            return self.stored, []
        return coverage, self.waiting.covered(self.partition, coverage)

    def apply(self, coverage: Coverage, outputs: Sequence[Output]) -> None:
        self.visible += [each.position for each in outputs]
        self.stored = Coverage.stored(coverage.floor, coverage.metadata)

    @rule(limit=st.sampled_from([0, SMALLEST, SMALLEST + 1, 40]), committed=st.booleans())
    def transact(self, limit: int, committed: bool) -> None:
        coverage, outputs = self.offered(limit)
        if committed:
            self.apply(coverage, outputs)
            self.waiting.remove(self.partition, outputs)

    @rule(limit=st.sampled_from([0, SMALLEST, 40]), committed=st.booleans())
    def transact_with_an_unknown_outcome(self, limit: int, committed: bool) -> None:
        coverage, outputs = self.offered(limit)
        if committed:
            self.apply(coverage, outputs)
        self.waiting.remove(self.partition, [each for each in outputs if self.stored.covers(each.position)])

    @precondition(lambda self: self.assignments < 6)
    @rule()
    def crash_or_lose(self) -> None:
        self.own()

    @invariant()
    def every_output_is_visible_once_and_in_order(self) -> None:
        for key in range(KEYS):
            of_key = [each for each in self.visible if each % KEYS == key]
            assert of_key == sorted(of_key)
        assert all(self.visible.count(each) == 2 for each in self.visible)
        assert set(self.visible) == {each for each in range(MESSAGES) if self.stored.covers(each)}

    def teardown(self) -> None:
        """The last owner finishes everything."""
        for key in range(KEYS):
            for _ in range(MESSAGES):
                self.finish(key)
        self.transact(40, True)
        assert sorted(self.visible) == sorted([*range(MESSAGES)] * 2)


TestTransactions = Transactions.TestCase
