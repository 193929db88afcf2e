"""The map of ring ranges equals a plain table of slots, and refuses to take slots of two owners."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core.ring_map import WHOLE, Assignment, RingMap
from lanes.errors import ConfigError
from lanes.ring import SLOTS, Range, slot

LAST = SLOTS - 1

# Few ends, so that ranges often meet, also at the ends of the ring.
ENDS = [0, 1, 2, 9, 10, 11, 100, 32_767, 32_768, LAST - 1, LAST]
RANGES = st.tuples(st.sampled_from(ENDS), st.sampled_from(ENDS)).map(lambda ends: Range(min(ends), max(ends)))
ASSIGNMENTS = st.builds(Assignment, RANGES, st.sampled_from("abc"))


def accepted(history: Sequence[Assignment]) -> tuple[RingMap, list[Assignment]]:
    """The map after a history, and the assignments that it did not refuse."""
    ring, kept = RingMap(), []
    for assignment in history:
        try:
            ring = ring.assign(assignment)
        except ConfigError:
            continue
        kept.append(assignment)
    return ring, kept


def owner(ring: RingMap, at: int) -> str | None:
    found = ring.find(at)
    assert found is None or at in found.range
    return None if found is None else found.consumer


@given(st.lists(ASSIGNMENTS, max_size=12))
def test_a_map_names_the_owner_that_a_table_of_slots_names(history: list[Assignment]) -> None:
    ring = RingMap()
    # A range has the same owner between two of the ends, so a slot of each stretch is enough.
    probes = sorted({probe for end in ENDS for probe in (end - 1, end, end + 1) if probe in WHOLE} | {5, 50, 20_000})
    table: dict[int, str | None] = dict.fromkeys(probes)
    for assignment in history:
        inside = [probe for probe in probes if probe in assignment.range]
        owners = {table[probe] for probe in inside}
        if len(owners) > 1:
            with pytest.raises(ConfigError, match="slots of several owners"):
                ring.assign(assignment)
            continue
        after = ring.assign(assignment)
        assert (after is ring) == (owners == {assignment.consumer})
        ring = after
        table.update(dict.fromkeys(inside, assignment.consumer))
        assert {probe: owner(ring, probe) for probe in probes} == table


@given(st.lists(ASSIGNMENTS, max_size=12))
def test_the_ranges_of_a_map_are_disjoint_and_leave_the_unowned_slots(history: list[Assignment]) -> None:
    ring, _ = accepted(history)
    ranges = sorted([each.range for each in ring.owned] + ring.unowned())
    assert [each.range for each in ring.owned] == sorted(each.range for each in ring.owned)
    assert sum(map(len, ranges)) == SLOTS
    assert ranges[0].lo == 0
    assert ranges[-1].hi == LAST
    assert all(one.hi + 1 == other.lo for one, other in pairwise(ranges))


@given(st.lists(ASSIGNMENTS, max_size=12))
def test_a_replay_of_the_accepted_assignments_gives_the_same_map(history: list[Assignment]) -> None:
    ring, kept = accepted(history)
    assert RingMap.replay(kept) == ring


@given(st.lists(ASSIGNMENTS, max_size=8))
def test_a_second_assignment_of_the_same_range_changes_nothing(history: list[Assignment]) -> None:
    ring, kept = accepted(history)
    if kept:
        assert ring.assign(kept[-1]) is ring


def test_a_part_of_a_range_splits_it() -> None:
    ring = RingMap.replay([Assignment(WHOLE, "a"), Assignment(Range(100, 200), "b")])
    assert ring.owned == (
        Assignment(Range(0, 99), "a"),
        Assignment(Range(100, 200), "b"),
        Assignment(Range(201, LAST), "a"),
    )


def test_both_ends_belong_to_a_range() -> None:
    ring = RingMap.replay([Assignment(Range(10, 20), "a")])
    assert [owner(ring, at) for at in (9, 10, 20, 21)] == [None, "a", "a", None]
    assert [at in Range(10, 20) for at in (9, 10, 20, 21)] == [False, True, True, False]
    assert len(Range(10, 20)) == 11
    assert len(WHOLE) == SLOTS


@pytest.mark.parametrize(
    ("range_", "shown"),
    [
        (Range(5, 15), "(5-9 of 'a', 10-15 of 'b')"),
        (Range(15, 25), "(15-20 of 'b', 21-25 of nobody)"),
        (Range(0, LAST), "(0-9 of 'a', 10-20 of 'b', 21-65535 of nobody)"),
    ],
    ids=str,
)
def test_a_range_of_several_owners_is_refused_with_its_parts(range_: Range, shown: str) -> None:
    ring = RingMap.replay([Assignment(Range(0, 9), "a"), Assignment(Range(10, 20), "b")])
    with pytest.raises(ConfigError, match=re.escape(f"{shown}; assign each part by itself")):
        ring.assign(Assignment(range_, "c"))


def test_two_ranges_of_one_owner_move_together() -> None:
    ring = RingMap.replay([Assignment(Range(0, 9), "a"), Assignment(Range(10, 20), "a"), Assignment(Range(5, 15), "b")])
    assert ring.owned == (
        Assignment(Range(0, 4), "a"),
        Assignment(Range(5, 15), "b"),
        Assignment(Range(16, 20), "a"),
    )


def test_a_split_gives_away_the_upper_part_of_a_range() -> None:
    ring = RingMap.replay([Assignment(Range(0, 99), "a"), Assignment(Range(100, 199), "a")])
    assert ring.split(40, "b") == Assignment(Range(40, 99), "b")
    assert ring.split(99, "b") == Assignment(Range(99, 99), "b")


@pytest.mark.parametrize(
    ("at", "said"),
    [(100, "nobody owns slot 100"), (0, "slot 0 is the first one of the range 0-99 of 'a'")],
)
def test_a_split_of_nothing_is_refused(at: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RingMap.replay([Assignment(Range(0, 99), "a")]).split(at, "b")


@pytest.mark.parametrize(
    ("lo", "hi", "said"),
    [
        (-1, 5, "lo=-1: must be a slot"),
        (0, SLOTS, "hi=65536: must be a slot, a whole number in 0 … 65535"),
        (7, 6, "lo=7, hi=6: a range ends at or above its first slot"),
        (True, 6, "lo=True: must be a slot"),
        ("0", 6, "lo='0': must be a slot"),
        (0.0, 6, r"lo=0\.0: must be a slot"),
        (0, 1 << 20_000, "hi="),
    ],
    ids=["negative", "beyond the ring", "reversed", "bool", "text", "float", "thousands of digits"],
)
def test_an_invalid_range_is_refused(lo: int, hi: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Range(lo, hi)


@pytest.mark.parametrize(("key", "expected"), [(0, 29_413), (1, 20_596), (42, 58_486), (2**128 - 1, 34_755)])
def test_the_public_slot_is_the_slot_of_other_programs(key: int, expected: int) -> None:
    assert slot(key) == expected
    assert slot(b"customer-42") == 40_279
