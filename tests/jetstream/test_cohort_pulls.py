"""How the room for messages is shared among the cohort partitions of a member, without a server."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lanes.core.types import Room
from lanes_jetstream.cohort_pulls import pull_in_turns
from tests.jetstream.stub_pulls import Side

LARGE = 1 << 30


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


@given(
    st.integers(1, 3_000), st.integers(1, 64), st.integers(0, 64), st.lists(st.integers(0, 63), max_size=64), st.data()
)
def test_what_is_requested_fits_into_the_room(
    messages: int, owned: int, elsewhere: int, busy: list[int], data: st.DataObject
) -> None:
    side = Side([f"c{number}" for number in range(owned)])
    for each, taken in zip(side.pulls, data.draw(st.lists(st.integers(0, 40), max_size=owned)), strict=False):
        each._outstanding = taken
    before = sum(each.taken for each in side.pulls)
    room = Room(messages, LARGE)
    at_once(pull_in_turns(side.pulls, {side.pulls[n] for n in busy if n < owned}, room, owned + elsewhere))
    assert sum(each.taken for each in side.pulls) <= max(messages, before)


@given(st.integers(1, 64), st.integers(0, 64), st.integers(0, 63))
def test_a_partition_that_comes_finds_room(owned: int, elsewhere: int, busy: int) -> None:
    """Whatever busy ones ask for, each partition of the cohort can ask for something at once."""
    partitions = owned + elsewhere
    side = Side([f"c{number}" for number in range(partitions)])
    room = Room(partitions * 4, LARGE)
    pulling = side.pulls[:owned]
    # It was busy a moment ago.
    pulling[-1]._outstanding = partitions * 2
    for _ in range(3):
        at_once(pull_in_turns(pulling, set(pulling[: busy + 1]), room, partitions))
    at_once(pull_in_turns(side.pulls, set(pulling[: busy + 1]), room, partitions))
    assert all(each.taken for each in side.pulls)


def test_one_busy_partition_gets_most_of_the_room() -> None:
    side = Side([f"c{number}" for number in range(64)])
    at_once(pull_in_turns(side.pulls, set(), Room(2_000, LARGE), 64))
    at_once(pull_in_turns(side.pulls, {side.pulls[5]}, Room(2_000, LARGE), 64))
    assert side.pulls[5].taken > 1_500
