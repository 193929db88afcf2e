"""A late message is inserted into its lane by its position, after messages that have started."""

from __future__ import annotations

import pytest

from lanes.core.chains import Chains
from lanes.core.lane import DEAD_LETTERING, HELD, QUEUED, RUNNING
from lanes.core.ledgers import AckLedger
from lanes.core.types import Message
from tests.core.builders import new_engine, new_message, new_partition


class Chain:
    """Unfinished messages of one key in a chain; the first one has the given state."""

    def __init__(self, *positions: int, head: int = QUEUED, attempt: int = 1) -> None:
        self.chains = Chains(new_engine().policy)
        partition = self.partition = new_partition()
        partition.ledger = AckLedger()
        self.ready, self.tails = self.chains.ready, partition.tails
        self.members = [new_message(partition, position) for position in positions]
        self.ready.append(new_message(partition, 1_000, key=b"other"))
        for message, following in zip(self.members, self.members[1:], strict=False):
            message.next = following
        for message in self.members:
            message.state = QUEUED
        if self.members:
            self.members[0].state, self.members[0].attempt = head, attempt
            self.tails[b"k"] = self.members[-1]
            if head == QUEUED:
                self.ready.append(self.members[0])

    def insert(self, position: int) -> list[int]:
        """Insert a late message; returns the positions of the chain from its head."""
        message = new_message(self.partition, position)
        message.state = QUEUED
        self.members.append(message)
        # The dict of the ledger may have any order.
        self.partition.ledger = AckLedger()
        self.partition.ledger.unsettled = {m.position: m for m in self.members[::-1]}
        self.chains.insert(message)
        heads = [m for m in self.members if all(other.next is not m for other in self.members)]
        assert len(heads) == 1
        at: Message | None = heads[0]
        assert (at in self.ready) == (heads[0].state == QUEUED)
        assert len([m for m in self.ready if m.key == b"k"]) <= 1
        order = []
        while at is not None:
            order.append(at)
            at = at.next
        assert self.tails == {b"k": order[-1]}
        return [m.position for m in order]


def test_a_late_message_in_an_empty_lane_is_its_head() -> None:
    assert Chain().insert(5) == [5]


@pytest.mark.parametrize(
    ("late", "expected"),
    [(1, [1, 10, 20, 30]), (15, [10, 15, 20, 30]), (25, [10, 20, 25, 30]), (35, [10, 20, 30, 35])],
)
def test_a_late_message_goes_by_position_while_no_other_has_started(late: int, expected: list[int]) -> None:
    assert Chain(10, 20, 30).insert(late) == expected


@pytest.mark.parametrize("head", [RUNNING, HELD, DEAD_LETTERING])
@pytest.mark.parametrize(
    ("late", "expected"),
    [(1, [10, 1, 20, 30]), (15, [10, 15, 20, 30]), (25, [10, 20, 25, 30]), (35, [10, 20, 30, 35])],
)
def test_a_late_message_follows_a_started_head_by_position(head: int, late: int, expected: list[int]) -> None:
    assert Chain(10, 20, 30, head=head).insert(late) == expected


@pytest.mark.parametrize("head", [RUNNING, HELD, DEAD_LETTERING])
def test_several_late_messages_follow_a_started_head(head: int) -> None:
    chain = Chain(10, head=head)
    assert chain.insert(5) == [10, 5]
    assert chain.insert(3) == [10, 3, 5]
    assert chain.insert(12) == [10, 3, 5, 12]
    assert chain.insert(7) == [10, 3, 5, 7, 12]


@pytest.mark.parametrize(
    ("late", "expected"), [(3, [10, 3, 5, 20]), (7, [10, 5, 7, 20]), (12, [10, 5, 12, 20]), (25, [10, 5, 20, 25])]
)
def test_a_head_that_waits_for_its_second_attempt_has_started(late: int, expected: list[int]) -> None:
    # A message that arrived late during the hold follows the head although its position is lower.
    assert Chain(10, 5, 20, head=QUEUED, attempt=2).insert(late) == expected


def test_a_lane_keeps_its_turn_in_the_ready_queue_when_a_late_message_becomes_its_head() -> None:
    chain = Chain(10)
    chain.ready.append(new_message(chain.partition, 2_000, key=b"another"))
    chain.insert(5)
    assert [m.position for m in chain.ready] == [1_000, 5, 2_000]


def test_an_attempt_of_an_earlier_assignment_is_not_a_start() -> None:
    """Attempts under an earlier assignment do not count as a start, so a lower position is inserted before the
    message."""
    chain = Chain(10, 20, head=QUEUED, attempt=3)
    chain.partition.recalled = {10: 3}
    assert chain.insert(5) == [5, 10, 20]
    again = Chain(10, 20, head=QUEUED, attempt=4)
    again.partition.recalled = {10: 3}
    assert again.insert(5) == [10, 5, 20]
