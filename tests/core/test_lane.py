"""The state machine of a lane, pair by pair, and the place of a late message."""

from __future__ import annotations

import re
from collections import deque

import pytest

from lanes.core import lane
from lanes.core.lane import (
    ABANDONED,
    FINISHED,
    HELD,
    NEW,
    PARKING,
    QUEUED,
    RUNNING,
    SETTLED,
    STATE_NAMES,
    TRANSITIONS,
    IllegalTransition,
    Lane,
    insert,
    step,
)
from lanes.core.types import Message
from tests.core.builders import failed, new_message, new_partition

STATES = (NEW, QUEUED, RUNNING, HELD, PARKING, FINISHED, SETTLED, ABANDONED)
EVENTS = sorted({event for _, event in TRANSITIONS} | {"no such event"})

# Written out once more, so that a slip in the table is not its own proof.
LEGAL = {
    ("new", "admit"): "queued",
    ("queued", "start"): "running",
    ("queued", "abandon"): "abandoned",
    ("running", "ack"): "finished",
    ("running", "retry"): "held",
    ("running", "give up"): "parking",
    ("running", "abandon"): "abandoned",
    ("held", "due"): "queued",
    ("held", "abandon"): "abandoned",
    ("parking", "parked"): "finished",
    ("parking", "abandon"): "abandoned",
    ("finished", "settle"): "settled",
    ("finished", "abandon"): "abandoned",
}


def test_every_state_has_its_name() -> None:
    assert [STATE_NAMES[state].upper() for state in STATES] == [
        name for state in STATES for name in lane.__dict__ if name.isupper() and lane.__dict__[name] is state
    ]


def test_the_table_is_the_machine() -> None:
    assert {(STATE_NAMES[s], event): STATE_NAMES[to] for (s, event), to in TRANSITIONS.items()} == LEGAL


@pytest.mark.parametrize(("state", "event"), sorted(TRANSITIONS))
def test_a_legal_pair_leads_on(state: int, event: str) -> None:
    message = new_message(new_partition(), 3)
    message.state = state
    step(message, event)
    assert message.state == TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if (s, e) not in TRANSITIONS])
def test_any_other_pair_names_lane_state_and_event_and_changes_nothing(state: int, event: str) -> None:
    message = new_message(new_partition(2), 3)
    message.state = state
    said = f"lane of S/2 position 3: {event!r} is not allowed while {STATE_NAMES[state]}"
    with pytest.raises(IllegalTransition, match=f"^{re.escape(said)}$"):
        step(message, event)
    assert message.state == state


def test_a_lane_shows_its_state_and_place() -> None:
    head = new_message(new_partition(2), 3)
    head.state = HELD
    assert repr(Lane(head, failed(), 1.5)) == "<Lane held at S/2 position 3>"


class Chain:
    """Unfinished messages of one key, chained as the engine chains them; the first one in the state given."""

    def __init__(self, *positions: int, head: int = QUEUED, attempt: int = 1) -> None:
        partition = new_partition()
        self.partition = partition
        self.members = [new_message(partition, position) for position in positions]
        self.ready: deque[Message] = deque([new_message(partition, 1_000, key=b"other")])
        self.tails: dict[bytes, Message] = {}
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
        """Insert a late message; the positions of the chain after it, from its head."""
        message = new_message(self.partition, position)
        message.state = QUEUED
        self.members.append(message)
        # In any order: what it is called with comes out of a dict by delivery.
        insert(message, self.members[::-1], self.tails, self.ready)
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


def test_a_late_message_alone_is_the_head() -> None:
    assert Chain().insert(5) == [5]


@pytest.mark.parametrize(
    ("late", "expected"),
    [(1, [1, 10, 20, 30]), (15, [10, 15, 20, 30]), (25, [10, 20, 25, 30]), (35, [10, 20, 30, 35])],
)
def test_while_nothing_has_started_it_goes_by_position(late: int, expected: list[int]) -> None:
    assert Chain(10, 20, 30).insert(late) == expected


@pytest.mark.parametrize("head", [RUNNING, HELD, PARKING])
@pytest.mark.parametrize(
    ("late", "expected"),
    [(1, [10, 1, 20, 30]), (15, [10, 15, 20, 30]), (25, [10, 20, 25, 30]), (35, [10, 20, 30, 35])],
)
def test_behind_a_head_that_has_started_it_goes_by_position(head: int, late: int, expected: list[int]) -> None:
    assert Chain(10, 20, 30, head=head).insert(late) == expected


@pytest.mark.parametrize("head", [RUNNING, HELD, PARKING])
def test_several_late_ones_behind_a_head_that_has_started(head: int) -> None:
    chain = Chain(10, head=head)
    assert chain.insert(5) == [10, 5]
    assert chain.insert(3) == [10, 3, 5]
    assert chain.insert(12) == [10, 3, 5, 12]
    assert chain.insert(7) == [10, 3, 5, 7, 12]


@pytest.mark.parametrize(
    ("late", "expected"), [(3, [10, 3, 5, 20]), (7, [10, 5, 7, 20]), (12, [10, 5, 12, 20]), (25, [10, 5, 20, 25])]
)
def test_a_head_that_waits_for_its_second_attempt_has_started(late: int, expected: list[int]) -> None:
    # A message that came late while it was held stands behind it, below its position.
    assert Chain(10, 5, 20, head=QUEUED, attempt=2).insert(late) == expected


def test_the_place_in_the_ready_queue_is_kept() -> None:
    chain = Chain(10)
    chain.ready.append(new_message(chain.partition, 2_000, key=b"another"))
    chain.insert(5)
    assert [m.position for m in chain.ready] == [1_000, 5, 2_000]
