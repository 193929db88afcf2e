"""The ledger of a source that settles each message distinguishes positions in flight, settled positions and unknown
ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.lane import SETTLED
from lanes.core.ledgers import AckLedger
from lanes.core.types import Message, Partition
from tests.core.builders import new_message, new_partition

PARTITION = new_partition()


def admit(ledger: AckLedger, *positions: int, partition: Partition = PARTITION) -> list[Message]:
    messages = [new_message(partition, position, size=position + 1) for position in positions]
    for message in messages:
        ledger.unsettled[message.position] = message
        ledger.highest = max(ledger.highest, message.position)
    return messages


def settled(ledger: AckLedger, upto: int) -> list[int]:
    return [position for position in range(upto) if ledger.is_settled(position)]


def test_a_new_ledger_is_empty() -> None:
    ledger = AckLedger()
    assert ledger.floor() == 0
    assert settled(ledger, 5) == []
    assert repr(ledger) == "<AckLedger 0 unsettled, 0 settled runs, highest -1>"


def test_a_message_in_flight_is_not_settled() -> None:
    ledger = AckLedger()
    messages = admit(ledger, 0, 1, 2)
    assert ledger.settle([messages[1]]) == (1, 2)
    assert settled(ledger, 5) == [1]
    assert (list(ledger.unsettled), ledger.holes()) == ([0, 2], 2)
    assert repr(ledger) == "<AckLedger 2 unsettled, 1 settled runs, highest 2>"


@pytest.mark.parametrize(
    ("order", "runs"),
    [
        ([[0], [1], [2]], 1),  # each joins the run below
        ([[2], [1], [0]], 1),  # each joins the run above
        ([[0], [2], [1]], 1),  # the last joins both
        ([[0], [2]], 2),
        ([[2, 0, 1]], 1),  # one settlement, any order
        ([[0, 2, 4], [6]], 4),
        ([[0, 1, 4, 5], [2, 3]], 1),
        ([[5], [0, 1], [3]], 3),
    ],
)
def test_neighbouring_settled_positions_are_merged_into_one_run(order: list[list[int]], runs: int) -> None:
    ledger = AckLedger()
    messages = admit(ledger, *range(8))
    for positions in order:
        ledger.settle([messages[position] for position in positions])
    assert settled(ledger, 10) == sorted(position for positions in order for position in positions)
    ledger._tidy()
    assert f" {runs} settled runs," in repr(ledger)


def test_a_message_that_is_settled_again_is_not_counted() -> None:
    ledger = AckLedger()
    messages = admit(ledger, 0, 1)
    assert ledger.settle(messages) == (2, 3)
    assert ledger.settle(messages) == (0, 0)
    assert ledger.settle([messages[0], *admit(ledger, 3), messages[1]]) == (1, 4)
    assert settled(ledger, 5) == [0, 1, 3]


def test_the_ledger_keeps_no_settled_positions_if_the_source_knows_them() -> None:
    ledger = AckLedger(knows_settled=False)
    messages = admit(ledger, 0, 1, 2, 64)
    assert ledger.settle([messages[3], *messages[:2]]) == (3, 68)
    assert ledger.settle(messages[:1]) == (0, 0)
    assert settled(ledger, 100) == []
    assert (list(ledger.unsettled), ledger._starts, ledger._loose) == ([2], [], set())
    assert messages[0].state == SETTLED


def test_a_message_twice_in_one_settlement_counts_once() -> None:
    ledger = AckLedger()
    (message,) = admit(ledger, 4)
    assert ledger.settle([message, message]) == (1, 5)


def test_another_message_of_the_same_position_settles_nothing() -> None:
    ledger = AckLedger()
    (held,) = admit(ledger, 4)
    stranger = new_message(new_partition(), 4)
    assert ledger.settle([stranger]) == (0, 0)
    assert ledger.unsettled == {4: held}
    assert not ledger.is_settled(4)


def test_the_floor_is_below_everything_unfinished() -> None:
    ledger = AckLedger()
    messages = admit(ledger, 3, 4, 9)
    assert ledger.floor() == 3
    ledger.settle(messages[:1])
    assert ledger.floor() == 4
    ledger.settle(messages[2:])
    assert ledger.floor() == 4
    ledger.settle(messages[1:2])
    assert ledger.floor() == 10


def test_positions_in_a_gap_are_not_settled() -> None:
    ledger = AckLedger()
    low, high = admit(ledger, 0, 10**18)
    ledger.settle([low, high])
    assert not ledger.is_settled(1)
    assert not ledger.is_settled(10**18 - 1)
    assert ledger.is_settled(10**18)
    assert ledger.floor() == 10**18 + 1


def test_beyond_the_limit_the_lowest_runs_are_forgotten() -> None:
    ledger = AckLedger()
    ledger._runs_limit = 16
    for message in admit(ledger, *range(0, 32, 2)):
        ledger.settle([message])
    assert settled(ledger, 40) == list(range(0, 32, 2))
    ledger.settle(admit(ledger, 32))
    # Above its limit, the ledger forgets an eighth of its runs.
    assert settled(ledger, 40) == list(range(4, 34, 2))
    assert " 15 settled runs" in repr(ledger)


def test_a_full_ledger_with_a_small_limit_forgets_one_run_at_a_time() -> None:
    ledger = AckLedger()
    ledger._runs_limit = 2
    ledger.settle(admit(ledger, 0, 2, 4))
    ledger._tidy()
    assert settled(ledger, 9) == [2, 4]
    ledger.settle(admit(ledger, 6))
    assert settled(ledger, 9) == [4, 6]


@given(st.lists(st.lists(st.integers(0, 60), max_size=12), max_size=20), st.integers(0, 8))
def test_a_settled_position_is_known_before_the_ledger_has_merged_it_into_a_run(
    orders: list[list[int]], loose_limit: int
) -> None:
    ledger = AckLedger()
    ledger._loose_limit = loose_limit
    messages = admit(ledger, *range(61))
    known: set[int] = set()
    for positions in orders:
        ledger.settle([messages[position] for position in positions])
        known.update(positions)
        assert settled(ledger, 70) == sorted(known)
    ledger._tidy()
    assert settled(ledger, 70) == sorted(known)
    runs = sum(1 for position in known if position - 1 not in known)
    assert f" {runs} settled runs," in repr(ledger)


def test_the_number_of_runs_stays_bounded() -> None:
    ledger = AckLedger()
    ledger._runs_limit = 64
    for position in range(0, 4_000, 2):
        ledger.settle(admit(ledger, position))
        assert int(repr(ledger).split(" unsettled, ")[1].split()[0]) <= 64
