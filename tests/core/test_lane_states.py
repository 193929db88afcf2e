"""A lane changes its state only by the pairs of its table."""

from __future__ import annotations

import re

import pytest

from lanes.core import lane
from lanes.core.lane import (
    ABANDONED,
    BLOCKED,
    DEAD_LETTERING,
    DEAD_LETTERING_BLOCKED,
    FINISHED,
    HANDLED,
    HELD,
    NEW,
    PUBLISH_HELD,
    PUBLISHING,
    QUEUED,
    RUNNING,
    SETTLED,
    STATE_NAMES,
    TRANSITIONS,
    IllegalTransition,
    StoppedLane,
    step,
)
from tests.core.builders import failed, new_message, new_partition

STATES = (
    NEW,
    QUEUED,
    RUNNING,
    HELD,
    DEAD_LETTERING,
    FINISHED,
    SETTLED,
    ABANDONED,
    BLOCKED,
    DEAD_LETTERING_BLOCKED,
    PUBLISHING,
    PUBLISH_HELD,
    HANDLED,
)
EVENTS = sorted({event for _, event in TRANSITIONS} | {"no such event"})

# A second copy, so that a mistake in the table is found.
LEGAL = {
    ("new", "admit"): "queued",
    ("new", "settle"): "settled",
    ("new", "abandon"): "abandoned",
    ("queued", "start"): "running",
    ("queued", "abandon"): "abandoned",
    ("running", "ack"): "finished",
    ("running", "return"): "queued",
    ("running", "retry"): "held",
    ("running", "dead_letter"): "dead_lettering",
    ("running", "block"): "blocked",
    ("running", "dead_letter_and_block"): "dead_lettering_blocked",
    ("running", "abandon"): "abandoned",
    ("running", "publish"): "publishing",
    ("running", "handle"): "handled",
    ("publishing", "ack"): "finished",
    ("publishing", "retry_publish"): "publish_held",
    ("publishing", "dead_letter"): "dead_lettering",
    ("publishing", "block"): "blocked",
    ("publishing", "dead_letter_and_block"): "dead_lettering_blocked",
    ("publishing", "abandon"): "abandoned",
    ("publish_held", "due"): "publishing",
    ("publish_held", "park"): "dead_lettering",
    ("publish_held", "abandon"): "abandoned",
    ("handled", "ack"): "finished",
    ("handled", "return"): "queued",
    ("handled", "publish"): "publishing",
    ("handled", "retry"): "held",
    ("handled", "dead_letter"): "dead_lettering",
    ("handled", "block"): "blocked",
    ("handled", "dead_letter_and_block"): "dead_lettering_blocked",
    ("handled", "abandon"): "abandoned",
    ("held", "due"): "queued",
    ("held", "park"): "dead_lettering",
    ("held", "abandon"): "abandoned",
    ("blocked", "unblock"): "queued",
    ("blocked", "park"): "dead_lettering",
    ("blocked", "abandon"): "abandoned",
    ("dead_lettering_blocked", "dead_lettered"): "blocked",
    ("dead_lettering_blocked", "abandon"): "abandoned",
    ("dead_lettering", "dead_lettered"): "finished",
    ("dead_lettering", "abandon"): "abandoned",
    ("finished", "settle"): "settled",
    ("finished", "abandon"): "abandoned",
}


def test_every_lane_state_has_the_name_of_its_constant() -> None:
    assert [STATE_NAMES[state].upper() for state in STATES] == [
        name for state in STATES for name in lane.__dict__ if name.isupper() and lane.__dict__[name] is state
    ]


def test_the_transition_table_of_a_lane_has_exactly_the_legal_transitions() -> None:
    assert {(STATE_NAMES[s], event): STATE_NAMES[to] for (s, event), to in TRANSITIONS.items()} == LEGAL


@pytest.mark.parametrize(("state", "event"), sorted(TRANSITIONS))
def test_each_legal_event_moves_a_lane_to_its_next_state(state: int, event: str) -> None:
    message = new_message(new_partition(), 3)
    message.state = state
    step(message, event)
    assert message.state == TRANSITIONS[state, event]


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in STATES for e in EVENTS if (s, e) not in TRANSITIONS])
def test_an_illegal_pair_is_refused_with_lane_state_and_event(state: int, event: str) -> None:
    message = new_message(new_partition(2), 3)
    message.state = state
    said = f"lane of S/2 position 3: {event!r} is not allowed while {STATE_NAMES[state]}; "
    said += "a bug of lanes or of its source, please report it"
    with pytest.raises(IllegalTransition, match=f"^{re.escape(said)}$"):
        step(message, event)
    assert message.state == state


def test_the_repr_of_a_stopped_lane_shows_its_state_and_place() -> None:
    head = new_message(new_partition(2), 3)
    head.state = HELD
    assert repr(StoppedLane(head, failed(), 1.5)) == "<StoppedLane held at S/2 position 3>"
