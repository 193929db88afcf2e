"""The first difference of two final states is named, and a state that cannot be compared is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from memsource.sim.errors import ImpossiblePlan
from memsource.sim.world.state import apart, copied

MANY = dict.fromkeys(range(100), 1)


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ({"a": 2}, {"a": 1}, "'a' is 2, expected 1"),
        ({}, {"a": 1}, "'a' is missing, expected 1"),
        ({"a": 1}, {}, "'a' is 1, not expected at all"),
        ([1, 3], [1, 2], "item 1 is 3, expected 2"),
        ([1], [1, 2], "1 items, expected 2"),
        (3, 2, "3, expected 2"),
        ({"rows": {**MANY, 99: 2}, "n": 1}, {"rows": MANY, "n": 1}, "in 'rows': 99 is 2, expected 1"),
        (([*MANY, 5],), ([*MANY, 6],), "in item 0: item 100 is 5, expected 6"),
        ({"seen": {*MANY} - {7}}, {"seen": {*MANY}}, "in 'seen': 7 is missing"),
        ({*MANY, "x"}, {*MANY}, "'x' was not expected"),
        ({"b", "c"}, {"a", "b"}, "'a' is missing; 'c' was not expected"),
        ({"a": [1]}, {"a": {1}}, "'a' is [1], expected {1}"),
        ({"a": [1]}, {"a": (1,)}, "'a' is [1], expected (1,)"),
    ],
)
def test_the_first_difference_between_two_states_is_named_with_its_path(
    found: object, expected: object, said: str
) -> None:
    assert found != expected
    assert apart(found, expected) == said


@pytest.mark.parametrize(
    ("found", "other", "said"),
    [
        ({"a": 2}, {"a": 1}, "'a' is 2, B has 1"),
        ({}, {"a": 1}, "'a' is missing, B has 1"),
        ({"a": 1}, {}, "'a' is 1, B lacks it"),
        ({"a": [1, 3]}, {"a": [1, 2]}, "in 'a': item 1 is 3, B has 2"),
        ([1], [1, 2], "1 items, B has 2"),
        ({"b", "c"}, {"a", "b"}, "'a' is missing; 'c' was found, B lacks it"),
        (3, 2, "3, B has 2"),
    ],
)
def test_two_states_are_compared_when_neither_is_known_to_be_right(found: object, other: object, said: str) -> None:
    assert apart(found, other, "B") == said


class WithoutEquals:
    def __repr__(self) -> str:
        return "<an account>"


class NoTruth:
    def __eq__(self, other: object) -> Any:
        return self

    def __hash__(self) -> int:
        return 1

    def __bool__(self) -> bool:
        raise ValueError("the truth of many values is ambiguous")


def test_a_state_unequal_to_its_copy_is_refused() -> None:
    states: list[Callable[[], object]] = [WithoutEquals, lambda: {"a": [WithoutEquals()]}]
    for state in states:
        with pytest.raises(ImpossiblePlan, match=r"is not equal to a copy of itself \(.*<an account>.*with __eq__$"):
            copied(state)
    with pytest.raises(ImpossiblePlan, match=r"cannot be copied and compared \(the truth of many values is ambiguous"):
        copied(lambda: NoTruth())


def test_a_copied_state_does_not_change() -> None:
    rows = {"a": [1, math.nan]}
    kept = copied(lambda: rows)
    rows["a"].append(2)
    assert kept != rows
    assert apart(rows, kept) == "in 'a': 3 items, expected 2"
