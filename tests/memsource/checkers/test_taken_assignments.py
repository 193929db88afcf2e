"""An assignment that the broker took from a member excuses its late handlers and commits; no other assignment does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from memsource.checkers import ExclusiveOwner, MakeChecker, NoDuplicateCleanly, NoOverlap, OrderAcrossAssignments, check
from tests.memsource.checkers.cases import COMMITS
from tests.memsource.checkers.rows import (
    Fields,
    Rows,
    assigned,
    at,
    confirmed,
    delivered,
    ended,
    owned,
    parsed,
    ran,
    segment,
    sent,
    started,
)

HANDED_OVER = [owned("revoking"), owned("drained"), owned("revoked")]
RUNS = [delivered(1), started(1), at(102.0, ended(1))]


def two(first: Rows, second: Rows) -> list[Rows]:
    """One partition at m-1 and half a second later at m-2, in assignment 1 of each member."""
    later = segment(second, rules=COMMITS, member="m-2", pid=2, start=100.5, end=None)
    return [segment(first, rules=COMMITS, end=None), later]


def flat(*parts: Fields | Sequence[Any]) -> Rows:
    """Rows and lists of rows, flattened."""
    return [row for part in parts for row in ([part] if isinstance(part, dict) else flat(*part))]


BREAKS: dict[MakeChecker, list[Rows]] = {
    NoOverlap: two(flat(assigned(), RUNS), flat(assigned(), RUNS)),
    ExclusiveOwner: two(flat(assigned(), at(101.0, ran(0)), at(101.1, *HANDED_OVER)), flat(assigned())),
    # m-2 begins at the last commit, and m-1 continues at its own position.
    OrderAcrossAssignments: two(
        flat(assigned(), [delivered(n) for n in (0, 1, 2)], ran(0), ran(1), at(101.0, ran(2))),
        flat(assigned(), [delivered(n) for n in (0, 1, 2)], at(100.6, ran(0)), at(101.5, ran(1))),
    ),
    # m-2 begins to repeat the message before m-1 hands the message over.
    NoDuplicateCleanly: two(
        flat(
            assigned(),
            delivered(0, "a"),
            delivered(1, "b"),
            ran(1, "b"),
            at(100.7, sent(0, 1), confirmed(0), HANDED_OVER),
        ),
        flat(assigned(), delivered(0, "a"), delivered(1, "b"), at(100.9, ran(1, "b"))),
    ),
}


def violated(make: MakeChecker, segments: list[Rows], taken: Collection[tuple[str, str, int]]) -> bool:
    (verdict,) = check(parsed(*segments), [make], taken=taken)
    return verdict.status == "violated"


@pytest.mark.parametrize("make", BREAKS, ids=lambda make: make.name)
def test_late_actions_of_a_taken_assignment_are_excused(make: MakeChecker) -> None:
    segments = BREAKS[make]
    assert violated(make, segments, [])
    assert not violated(make, segments, [("m-1", "S/0", 1)])
    # Another partition, another assignment, and another member.
    assert violated(make, segments, [("m-1", "S/1", 1), ("m-1", "S/0", 2), ("m-3", "S/0", 1)])


@pytest.mark.parametrize("make", [NoOverlap, ExclusiveOwner], ids=lambda make: make.name)
def test_late_actions_of_either_owner_are_excused(make: MakeChecker) -> None:
    assert not violated(make, BREAKS[make], [("m-2", "S/0", 1)])


def test_a_start_after_the_known_loss_is_not_excused() -> None:
    owner = flat(assigned(), RUNS)
    before = two(owner, flat(assigned(), delivered(1), started(1), owned("lost"), ended(1)))
    after = two(owner, flat(assigned(), delivered(1), owned("lost"), started(1), ended(1)))
    assert not violated(NoOverlap, before, [("m-2", "S/0", 1)])
    assert violated(NoOverlap, after, [("m-2", "S/0", 1)])


def test_a_late_commit_of_a_taken_assignment_may_overwrite_the_next_one() -> None:
    late = flat(assigned(), delivered(0), ran(0), at(101.0, sent(1), confirmed(1)))
    clean = flat(assigned(), [delivered(n, str(n)) for n in (0, 1, 2)], ran(0, "0"), ran(2, "2"))
    next_owner = flat(clean, sent(1, 1), confirmed(1), HANDED_OVER)
    rows = flat(assigned(1), delivered(2, "2"), ran(2, "2"))
    again = segment(rows, rules=COMMITS, member="m-3", pid=3, start=103.0, end=None)
    segments = [*two(late, next_owner), again]
    assert violated(NoDuplicateCleanly, segments, [])
    assert not violated(NoDuplicateCleanly, segments, [("m-1", "S/0", 1)])
    in_time = two(flat(assigned(), delivered(0), ran(0), sent(1), confirmed(1)), next_owner)
    assert violated(NoDuplicateCleanly, [*in_time, again], [("m-1", "S/0", 1)])


def test_a_lost_message_of_the_owner_after_a_taken_assignment_is_found() -> None:
    taken = flat(assigned(), [delivered(n) for n in (0, 1, 2, 3)], ran(0), at(101.0, ran(1)))
    skips = flat(assigned(), [delivered(n) for n in (0, 1, 2, 3)], at(101.5, ran(3)))
    assert violated(OrderAcrossAssignments, two(taken, skips), [("m-1", "S/0", 1)])


@pytest.mark.parametrize("floor", [1, 2, 3])
def test_the_third_owner_may_continue_from_either_commit(floor: int) -> None:
    four = [delivered(n) for n in (0, 1, 2, 3)]
    taken = flat(assigned(), four, ran(0), ran(1), at(101.5, sent(floor), confirmed(floor)))
    back = flat(assigned(), four, at(101.0, ran(0)), owned("lost"))
    third = flat(assigned(floor), [delivered(n) for n in range(floor, 4)], ran(floor))
    segments = [*two(taken, back), segment(third, rules=COMMITS, member="m-3", pid=3, start=103.0, end=None)]
    # A message that neither owner had started is still a hole.
    assert violated(OrderAcrossAssignments, segments, [("m-1", "S/0", 1)]) == (floor == 3)


def test_the_third_owner_may_repeat_messages_above_its_floor() -> None:
    four = [delivered(n) for n in (0, 1, 2, 3)]
    taken = flat(assigned(), four, ran(0), ran(1))
    back = flat(assigned(), four, at(101.0, ran(0), sent(1), confirmed(1), owned("lost")))
    third = flat(assigned(1), [delivered(n) for n in (1, 2, 3)], ran(2))
    segments = [*two(taken, back), segment(third, rules=COMMITS, member="m-3", pid=3, start=103.0, end=None)]
    assert violated(OrderAcrossAssignments, segments, [("m-1", "S/0", 1)])
