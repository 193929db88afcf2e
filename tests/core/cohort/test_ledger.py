"""The ledger of a cohort partition behaves like a set of all done sequences, and stays small."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from lanes.core.cohort.ledger import NOTHING, DeliveryLedger, Done, decode_done, encode_done


@st.composite
def dones(draw: st.DrawFn) -> Done:
    highest = draw(st.integers(0, 60))
    outstanding = draw(st.sets(st.integers(1, highest))) if highest else set()
    return Done(highest, tuple(sorted(outstanding)))


def members(done: Done) -> set[int]:
    return set(range(1, done.highest + 1)) - set(done.outstanding)


@given(dones(), dones())
def test_the_union_of_ledgers_equals_the_union_of_their_sets(one: Done, other: Done) -> None:
    union = one.union(other)
    assert members(union) == members(one) | members(other)
    assert union == other.union(one)
    assert union.outstanding == tuple(sorted(union.outstanding))


@given(dones(), st.integers(0, 70))
def test_all_sequences_up_to_an_acknowledged_floor_are_done(done: Done, floor: int) -> None:
    merged = done.union(Done(floor, ()))
    assert members(merged) == members(done) | set(range(1, floor + 1))
    assert merged.floor >= floor
    assert set(range(1, merged.floor + 1)) <= members(merged)


@given(dones())
def test_a_ledger_is_equal_after_encoding_and_decoding(done: Done) -> None:
    assert decode_done(json.loads(json.dumps(encode_done(done)))) == done


@pytest.mark.parametrize(
    "encoded",
    [None, {}, "5", [], [True], [1.0], [-1], [2**63], [5, -1], [5, "1"], [5, 5], [5, 0, 0], [5, 1, 4], [[]], [5, None]],
)
def test_an_invalid_encoding_is_refused(encoded: Any) -> None:
    with pytest.raises(ValueError, match="ledger"):
        decode_done(encoded)


def test_the_error_for_an_invalid_ledger_is_short_for_any_value() -> None:
    with pytest.raises(ValueError, match="ledger") as refused:
        decode_done("x" * 10**6)
    assert len(str(refused.value)) < 200


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against plain sets. Deliveries are new or repeated, and skip the sequences of other partitions.

    The deliveries of a consumer rise. A skipped outstanding message that is not in flight has left the stream.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = DeliveryLedger()
        self.delivered: set[int] = set()
        self.held: set[int] = set()
        self.done: set[int] = set()
        self.saved: set[int] = set()
        self.reached = 0

    def reach(self, sequence: int) -> None:
        gone = {each for each in self.outstanding - self.held if self.reached < each < sequence}
        self.done |= gone
        self.reached = max(self.reached, sequence)

    @property
    def outstanding(self) -> set[int]:
        return self.delivered - self.done

    @rule(target=sequences, skipped=st.integers(0, 3), count=st.integers(1, 4))
    def first_deliveries(self, skipped: int, count: int) -> Any:
        first = self.ledger.highest + 1 + skipped
        for sequence in range(first, first + count):
            assert self.ledger.delivered(sequence)
            self.reach(sequence)
            self.delivered.add(sequence)
            self.held.add(sequence)
        return multiple(*range(first, first + count))

    @rule(sequence=sequences)
    def again(self, sequence: int) -> None:
        outstanding = sequence not in self.done
        assert self.ledger.delivered(sequence) == outstanding
        self.reach(sequence)
        if outstanding:
            self.held.add(sequence)

    @rule(sequence=sequences)
    def settle(self, sequence: int) -> None:
        assert self.ledger.settled(sequence) == (sequence not in self.done)
        self.done.add(sequence)
        self.held.discard(sequence)

    @rule()
    def save(self) -> None:
        saved = self.ledger.save()
        assert saved == self.ledger.snapshot()
        self.saved = set(self.done)

    @rule()
    def hand_over(self) -> None:
        """Hand the ledger over to a member without messages in flight."""
        self.ledger = DeliveryLedger(self.ledger.snapshot())
        self.held.clear()
        self.saved = set(self.done)
        self.reached = 0

    @invariant()
    def agrees(self) -> None:
        ledger, outstanding = self.ledger, self.outstanding
        floor = min(outstanding) - 1 if outstanding else ledger.highest
        assert ledger.floor == floor
        assert len(ledger) == len(outstanding)
        assert ledger.snapshot() == Done(ledger.highest, tuple(sorted(outstanding)))
        assert ledger.since_saved == sum(sequence > floor for sequence in self.done - self.saved)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_stuck_message_costs_constant_memory() -> None:
    ledger = DeliveryLedger()
    ledger.delivered(1)
    for sequence in range(2, 20_000):
        ledger.delivered(sequence)
        ledger.settled(sequence)
    assert (len(ledger), ledger.floor, ledger.since_saved) == (1, 0, 19_998)
    assert encode_done(ledger.save()) == [19_999, 19_998]
    ledger.settled(1)
    assert (ledger.floor, ledger.since_saved) == (19_999, 0)


def test_a_message_that_left_the_stream_is_done() -> None:
    """A limit or a purge removed some of the outstanding messages of the former owner."""
    ledger = DeliveryLedger(Done(50, (3, 5, 8, 40)))
    assert ledger.delivered(5)
    assert ledger.snapshot() == Done(50, (5, 8, 40))
    assert ledger.delivered(51)
    assert ledger.snapshot() == Done(51, (5, 51))
    # A new consumer skips a message in flight that left the stream: this member still finishes it.
    assert ledger.delivered(51)
    assert ledger.delivered(52)
    assert ledger.snapshot() == Done(52, (5, 51, 52))
    assert ledger.settled(5)
    assert len(ledger) == 2


def test_many_messages_that_left_the_stream_are_passed_over_once() -> None:
    done = Done(20_000, tuple(range(1, 20_001)))
    ledger = DeliveryLedger(done)
    for sequence in range(10_001, 20_001):
        assert ledger.delivered(sequence)
    assert len(ledger) == 10_000
    assert ledger.floor == 10_000


def test_settled_messages_below_the_floor_need_no_saving() -> None:
    ledger = DeliveryLedger()
    for sequence in range(1, 8):
        ledger.delivered(sequence)
    for sequence in (5, 4, 7, 3):
        ledger.settled(sequence)
    assert (ledger.floor, ledger.since_saved) == (0, 4)
    ledger.settled(2)
    ledger.settled(1)
    assert (ledger.floor, ledger.since_saved) == (5, 1)


def test_outstanding_sequences_of_a_handover_run_and_done_ones_do_not() -> None:
    ledger = DeliveryLedger(Done(9, (4, 7)))
    taken = [ledger.delivered(sequence) for sequence in (4, 5, 7, 4, 9, 10)]
    assert taken == [True, False, True, True, False, True]


def test_a_sequence_that_was_never_delivered_cannot_be_settled() -> None:
    with pytest.raises(ValueError, match="sequence 3 is settled, but the highest delivered is 2"):
        DeliveryLedger(Done(2, ())).settled(3)


def test_a_new_ledger_has_no_floor_and_no_outstanding_sequences() -> None:
    ledger = DeliveryLedger()
    assert (ledger.floor, ledger.snapshot()) == (0, NOTHING)
    assert repr(ledger) == "<DeliveryLedger floor 0, highest 0, 0 outstanding>"
