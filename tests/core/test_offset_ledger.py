"""The ledger of a source that commits knows the floor, and the finished offsets above the floor."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lanes.core.lane import SETTLED
from lanes.core.ledgers import OffsetLedger
from lanes.core.types import Message
from tests.core.builders import new_message, new_partition
from tests.effort import runs

PARTITION = new_partition()
BILLION = 10**9


def deliver(ledger: OffsetLedger, *offsets: int, now: float = 0.0) -> list[Message]:
    """Deliver and admit offsets; the size of each message is its offset plus one."""
    run = [new_message(PARTITION, offset, size=offset + 1) for offset in offsets]
    ledger.deliver(run, now)
    ledger.admit(run)
    return run


def offsets(runs: Sequence[tuple[int, int]]) -> set[int]:
    return {offset for start, end in runs for offset in range(start, end)}


# --- by example


def test_a_new_offset_ledger_has_only_its_floor() -> None:
    ledger = OffsetLedger(7)
    assert (ledger.floor(), ledger.highest, ledger.floor_ordinal, ledger.next_ordinal) == (7, 6, 0, 0)
    assert (ledger.completed(), ledger.in_flight(), ledger.holes(), ledger.last_finished()) == ([], [], 0, 6)
    assert repr(ledger) == "<OffsetLedger floor 7, 0 unfinished of 0 above it, highest 6>"


def test_the_floor_is_the_lowest_unfinished_offset() -> None:
    ledger = OffsetLedger(0)
    first, second, third = deliver(ledger, 3, 5, 9)
    assert ledger.floor() == 3
    assert ledger.settle([second]) == (1, 6)
    assert (ledger.floor(), ledger.completed(), ledger.in_flight()) == (3, [(5, 6)], [first, third])
    assert repr(ledger) == "<OffsetLedger floor 3, 2 unfinished of 3 above it, highest 9>"
    assert ledger.settle([first]) == (1, 4)
    assert (ledger.floor(), ledger.completed(), ledger.floor_ordinal) == (9, [], 2)
    assert ledger.settle([third]) == (1, 10)
    assert (ledger.floor(), ledger.completed(), ledger.floor_ordinal) == (10, [], 3)
    assert {m.state for m in (first, second, third)} == {SETTLED}


def test_messages_get_their_number_and_time_in_the_order_of_delivery() -> None:
    ledger = OffsetLedger(0)
    early = deliver(ledger, 3, 5, now=1.0)
    (late,) = deliver(ledger, BILLION, now=2.0)
    assert [(m.ordinal, m.received) for m in [*early, late]] == [(0, 1.0), (1, 1.0), (2, 2.0)]


def test_waiting_messages_are_numbered_before_their_admission() -> None:
    ledger = OffsetLedger(0)
    deliver(ledger, 0, 1)
    waiting = [new_message(PARTITION, 2), new_message(PARTITION, 3)]
    ledger.deliver(waiting, 0.0)
    ledger.waiting = waiting
    later = new_message(PARTITION, 4)
    ledger.deliver([later], 0.0)
    assert [m.ordinal for m in [*waiting, later]] == [2, 3, 4]


@pytest.mark.parametrize(("before", "position", "after"), [([4], 4, 4), ([4, 6], 5, 6), ([], 2, 2), ([], 0, 2)])
def test_an_offset_that_does_not_rise_is_refused(before: list[int], position: int, after: int) -> None:
    ledger = OffsetLedger(3)
    deliver(ledger, *before)
    said = rf"^S/0 delivered position {position} after {after}, but positions of an assignment must rise"
    with pytest.raises(ValueError, match=said):
        ledger.deliver([new_message(PARTITION, position)], 0.0)
    with pytest.raises(ValueError, match="after 100, but positions"):
        ledger.deliver([new_message(PARTITION, 100), new_message(PARTITION, 100)], 0.0)
    # The refused run left no entry.
    deliver(ledger, 50)
    assert [m.position for m in ledger.in_flight()] == [*before, 50]


def test_an_offset_below_what_the_source_has_read_is_refused() -> None:
    ledger = OffsetLedger(0)
    ledger.progressed(20)
    assert ledger.floor() == 20
    with pytest.raises(ValueError, match="delivered position 19 after 19"):
        ledger.deliver([new_message(PARTITION, 19)], 0.0)
    deliver(ledger, 20)
    assert ledger.floor() == 20


def test_a_run_spans_the_gaps_between_deliveries_and_no_others() -> None:
    ledger = OffsetLedger(0)
    run = deliver(ledger, 10, 12, 20, 30, 33, 40, 44)
    ledger.settle([run[i] for i in (1, 2, 4, 6)])
    assert ledger.floor() == 10
    assert ledger.completed() == [(12, 21), (33, 34), (44, 45)]


def test_a_gap_of_a_billion_offsets_costs_one_entry() -> None:
    ledger = OffsetLedger(0)
    head, *above = deliver(ledger, 0, *range(BILLION, BILLION + 50))
    ledger.settle(above)
    assert (ledger.floor(), ledger.completed()) == (0, [(BILLION, BILLION + 50)])
    assert (ledger.next_ordinal, len(ledger._open), len(ledger._offsets), len(ledger._messages)) == (51, 51, 51, 51)
    ledger.settle([head])
    assert (ledger.floor(), ledger.completed()) == (BILLION + 50, [])


def test_a_dropped_message_holds_the_floor() -> None:
    ledger = OffsetLedger(0)
    dropped, finished = deliver(ledger, 4, 5)
    ledger.drop(dropped)
    ledger.settle([finished])
    assert (ledger.in_flight(), ledger.holes(), ledger.floor(), ledger.completed()) == ([], 1, 4, [(5, 6)])
    ledger.progressed(100)
    assert ledger.floor() == 4


def test_the_highest_finished_offset_is_known() -> None:
    ledger = OffsetLedger(2)
    run = deliver(ledger, 2, 5, 9)
    assert ledger.last_finished() == 1
    ledger.settle([run[1]])
    assert ledger.last_finished() == 5
    ledger.settle([run[0]])
    assert (ledger.floor(), ledger.last_finished()) == (9, 5)


# --- the trailing position


def test_the_floor_follows_the_position_of_the_source() -> None:
    ledger = OffsetLedger(0)
    (message,) = deliver(ledger, 5)
    ledger.progressed(12)
    assert ledger.floor() == 5
    ledger.settle([message])
    assert ledger.floor() == 12
    ledger.progressed(9)
    assert ledger.floor() == 12


def test_waiting_messages_hold_the_floor_below_the_position_of_the_source() -> None:
    ledger = OffsetLedger(0)
    deliver(ledger, 5)
    waiting = new_message(PARTITION, 8)
    ledger.deliver([waiting], 0.0)
    ledger.waiting = [waiting]
    ledger.progressed(12)
    ledger.settle(ledger.in_flight())
    assert ledger.floor() == 6
    ledger.waiting = []
    ledger.admit([waiting])
    assert ledger.floor() == 8
    ledger.settle([waiting])
    assert ledger.floor() == 12


def test_dropped_waiting_messages_hold_the_floor() -> None:
    ledger = OffsetLedger(0)
    (message,) = deliver(ledger, 5)
    ledger.waiting = [new_message(PARTITION, 8)]
    ledger.progressed(12)
    assert [m.position for m in ledger.drop_waiting()] == [8]
    ledger.settle([message])
    assert (ledger.floor(), ledger.waiting) == (6, [])
    assert ledger.drop_waiting() == []


def test_dropping_no_message_keeps_the_position_of_the_source() -> None:
    ledger = OffsetLedger(0)
    ledger.progressed(12)
    assert ledger.drop_waiting() == []
    assert ledger.floor() == 12


# --- the completed set of a former owner


def test_offsets_completed_by_a_former_owner_are_finished_on_arrival() -> None:
    ledger = OffsetLedger(3, [(5, 7), (9, 10), (20, 22)])
    assert (ledger.floor(), ledger.completed()) == (3, [(5, 7), (9, 10), (20, 22)])
    run = [new_message(PARTITION, offset, size=offset) for offset in (3, 5, 6, 7, 9, 11)]
    ledger.deliver(run, 0.0)
    assert [m.position for m in ledger.admit(run)] == [5, 6, 9]
    assert [m.position for m in ledger.in_flight()] == [3, 7, 11]
    assert [m.state for m in run if m.state == SETTLED] == [SETTLED] * 3
    assert (ledger.floor(), ledger.completed()) == (3, [(5, 7), (9, 10), (20, 22)])
    assert ledger._seeded == [(20, 22)]


def test_a_completed_run_may_be_delivered_in_parts() -> None:
    ledger = OffsetLedger(0, [(1, 5)])
    for offset, floor, completed in [(0, 0, [(1, 5)]), (2, 0, [(2, 3), (3, 5)]), (4, 0, [(2, 5)])]:
        deliver(ledger, offset)
        assert (ledger.floor(), ledger.completed()) == (floor, completed)
    ledger.settle(ledger.in_flight())
    assert (ledger.floor(), ledger.completed()) == (5, [])


def test_completed_runs_below_the_position_of_the_source_are_left_out() -> None:
    ledger = OffsetLedger(0, [(5, 7), (10, 30)])
    ledger.progressed(20)
    assert (ledger.floor(), ledger.completed()) == (20, [(20, 30)])
    ledger.progressed(30)
    assert (ledger.floor(), ledger.completed()) == (30, [])


# --- trimming


def test_the_ledger_drops_its_entries_below_the_floor_when_they_are_half_of_all() -> None:
    ledger = OffsetLedger(0)
    run = deliver(ledger, *range(0, 4_000, 2))
    ledger.settle(run[:1_024])
    assert (ledger.floor(), len(ledger._open), ledger.floor_ordinal) == (2_048, 2_000, 1_024)
    ledger.settle(run[1_024:1_025])
    assert (ledger.floor(), len(ledger._open), ledger.floor_ordinal) == (2_050, 975, 1_025)
    ledger.settle(run[1_026:1_030])
    assert (ledger.floor(), ledger.completed(), ledger.next_ordinal) == (2_050, [(2_052, 2_059)], 2_000)
    ledger.drop(run[1_025])
    assert [m.position for m in ledger.in_flight()] == list(range(2_060, 4_000, 2))


def test_peek_computes_the_floor_without_a_change_of_the_ledger() -> None:
    ledger = OffsetLedger(0)
    ledger.settle(deliver(ledger, *range(2_000)))
    assert (ledger.peek(), len(ledger._open), ledger.floor_ordinal) == (2_000, 2_000, 0)
    assert (ledger.floor(), len(ledger._open), ledger.floor_ordinal) == (2_000, 0, 2_000)


def test_memory_follows_the_unfinished_messages() -> None:
    ledger = OffsetLedger(0)
    for offset in range(10_000):
        ledger.settle(deliver(ledger, offset))
        assert ledger.floor() == offset + 1
        assert len(ledger._open) == len(ledger._offsets) == len(ledger._messages) <= 1_025
    assert (ledger.next_ordinal, ledger.floor_ordinal, ledger.last_finished()) == (10_000, 10_000, 9_999)


def test_a_finished_message_above_an_unfinished_one_takes_about_50_bytes() -> None:
    """docs/guides/long-retries.md names the number."""
    ledger = OffsetLedger(BILLION)
    (held,) = deliver(ledger, BILLION)
    tracemalloc.start()
    try:
        for start in range(BILLION + 1, BILLION + 30_001, 100):
            ledger.settle(deliver(ledger, *range(start, start + 100)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 30_000 * 40 < taken < 30_000 * 60
    assert (ledger.floor(), ledger.oldest()) == (BILLION, held)
    assert ledger.completed() == [(BILLION + 1, BILLION + 30_001)]


# --- against dicts and sets


class NaiveLedger:
    """A naive ledger: every delivered offset in one dict."""

    def __init__(self, floor: int, completed: set[int]) -> None:
        self.at = floor
        self.seeds = completed
        self.finished: dict[int, bool] = {}
        self.held: set[int] = set()
        self.read = floor  # the source's own position

    def deliver(self, offset: int) -> None:
        self.finished[offset] = offset in self.seeds
        self.held |= set() if self.finished[offset] else {offset}
        self.read = max(self.read, offset + 1)

    def floor(self) -> int:
        open_offsets = [offset for offset, finished in self.finished.items() if not finished]
        return min(open_offsets, default=self.read)

    def completed(self) -> set[int]:
        """The finished offsets above the floor, and each gap between two of them without an unfinished offset."""
        floor, found = self.floor(), set()
        delivered = sorted(self.finished)
        for offset, following in zip(delivered, [*delivered[1:], None], strict=False):
            if offset >= floor and self.finished[offset]:
                found.add(offset)
                if following is not None and self.finished[following]:
                    found |= set(range(offset, following))
        return found | {offset for offset in self.seeds if offset >= max(self.read, floor)}


SHORT_STEPS: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.tuples(st.just("deliver"), st.lists(st.sampled_from([1, 1, 1, 2, 5]), max_size=6)),
    st.tuples(st.just("settle"), st.lists(st.integers(0, 30), max_size=6)),
    st.tuples(st.just("drop"), st.lists(st.integers(0, 30), max_size=1)),
    st.tuples(st.just("progressed"), st.lists(st.integers(1, 4), max_size=1)),
)
STEPS = st.one_of(SHORT_STEPS, st.tuples(st.just("many"), st.just(list[int]())))
SEEDS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)))


@settings(max_examples=runs(60))
@given(floor=st.integers(0, 3), seeds=SEEDS, steps=st.lists(SHORT_STEPS))
@example(floor=0, seeds=[(1, 1)], steps=[("deliver", [1]), ("progressed", [3])])
def test_a_short_offset_ledger_behaves_like_dicts_and_sets(
    floor: int, seeds: list[tuple[int, int]], steps: list[tuple[str, list[int]]]
) -> None:
    behaves_like_dicts_and_sets(floor, seeds, steps)


@pytest.mark.long
@given(floor=st.integers(0, 3), seeds=SEEDS, steps=st.lists(STEPS))
def test_the_offset_ledger_behaves_like_dicts_and_sets(
    floor: int, seeds: list[tuple[int, int]], steps: list[tuple[str, list[int]]]
) -> None:
    behaves_like_dicts_and_sets(floor, seeds, steps)


def behaves_like_dicts_and_sets(floor: int, seeds: list[tuple[int, int]], steps: list[tuple[str, list[int]]]) -> None:
    completed, end = [], floor
    for gap, length in seeds:
        completed.append((end + gap, end + gap + length))
        end += gap + length
    ledger, naive = OffsetLedger(floor, completed), NaiveLedger(floor, offsets(completed))
    messages: dict[int, Message] = {}
    last = floor
    for what, numbers in steps:
        if what == "deliver":
            position, run = naive.read - 1, []
            for step in numbers:
                position += step
                naive.deliver(position)
                run.append(position)
            messages |= {message.position: message for message in deliver(ledger, *run)}
        elif what == "many":
            run = [naive.read + 2 * n for n in range(1_100)]
            for position in run:
                naive.deliver(position)
            many = deliver(ledger, *run)
            messages |= {message.position: message for message in many}
            finished = [m for m in many[:-3] if m.position in naive.held]
            assert ledger.settle(finished)[0] == len(finished)
            naive.held -= {m.position for m in finished}
            naive.finished |= {m.position: True for m in finished}
        elif what == "progressed":
            for step in numbers:
                ledger.progressed(naive.read + step - 2)
                naive.read = max(naive.read, naive.read + step - 2)
        else:
            for number in numbers:
                if not naive.held:
                    continue
                position = sorted(naive.held)[number % len(naive.held)]
                naive.held.remove(position)
                if what == "drop":
                    ledger.drop(messages[position])
                else:
                    assert ledger.settle([messages[position]]) == (1, position + 1)
                    naive.finished[position] = True
        assert ledger.peek() == naive.floor()
        assert last <= ledger.floor() == naive.floor() == ledger.peek()
        last = ledger.floor()
        found = ledger.completed()
        assert all(start < stop for start, stop in found)
        assert all(below[1] <= above[0] for below, above in pairwise(found))
        assert offsets(found) == naive.completed()
        assert [m.position for m in ledger.in_flight()] == sorted(naive.held)
        assert ledger.next_ordinal == len(naive.finished)
        assert ledger.floor_ordinal == sum(1 for offset in naive.finished if offset < ledger.floor())
        assert ledger.holes() == sum(1 for finished in naive.finished.values() if not finished)
