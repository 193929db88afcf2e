"""The decisions of a member: the order of visits, its share, and what it gives up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lanes_postgres.subscription.visitor import lock_name
from lanes_postgres.subscription.visits import Hold, Member, Visit, Work, given_up, in_order, most_owned, waits

WORKS = [Work(0, 5, 30.0), Work(1, 9, 10.0), Work(2, 9, 20.0), Work(3, 1, None)]


@pytest.mark.parametrize(
    ("visit", "expected"), [("oldest", [1, 2, 0, 3]), ("backlog", [1, 2, 0, 3]), ("name", [0, 1, 2, 3])]
)
def test_partitions_are_visited_in_order(visit: Visit, expected: list[int]) -> None:
    assert [work.partition for work in in_order(WORKS, visit)] == expected


def held(since: Mapping[int, float], got_on: bool = True) -> dict[int, Hold]:
    return {partition: Hold(start, got_on) for partition, start in since.items()}


@pytest.mark.parametrize(("partitions", "others", "most"), [(64, 0, 64), (64, 1, 32), (64, 2, 22), (1, 3, 1)])
def test_a_member_owns_at_most_its_share(partitions: int, others: int, most: int) -> None:
    assert most_owned(partitions, others) == most


def test_a_member_below_the_equal_share_waits() -> None:
    assert waits(0, 1, 3)
    assert waits(20, 64, 2)
    assert not waits(21, 64, 2)
    assert not waits(1, 1, 1)


def test_nothing_is_given_up_while_nobody_waits() -> None:
    assert given_up(held({0: 0.0, 1: 0.0}), 100.0, 5.0, 2, [Member(0, waits=False)]) == []


def test_the_longest_held_partitions_above_the_share_are_given_up_after_the_budget() -> None:
    for got_on in (True, False):
        holds = held({0: 3.0, 1: 1.0, 2: 2.0, 3: 9.0}, got_on)
        assert given_up(holds, 10.0, 5.0, 4, [Member(0, waits=True)]) == [1, 2]
        assert given_up(holds, 6.5, 5.0, 4, [Member(0, waits=True)]) == [1]
        assert given_up(holds, 5.5, 5.0, 4, [Member(0, waits=True)]) == []


def test_more_members_than_partitions_take_turns() -> None:
    assert given_up(held({0: 0.0}), 6.0, 5.0, 1, [Member(0, waits=True)]) == [0]
    assert given_up(held({0: 0.0}), 4.0, 5.0, 1, [Member(0, waits=True)]) == []


@pytest.mark.parametrize(("partitions", "others"), [(2, 1), (64, 1), (3, 2)])
def test_a_member_at_its_share_keeps_it_while_another_acquires(partitions: int, others: int) -> None:
    kept = held(dict.fromkeys(range(most_owned(partitions, others)), 0.0))
    assert given_up(kept, 100.0, 5.0, partitions, others * [Member(0, waits=True)]) == []


def test_a_turn_lasts_until_a_message_was_settled() -> None:
    assert given_up(held({0: 0.0}, got_on=False), 100.0, 0.0, 1, [Member(0, waits=True)]) == []


def test_subscriptions_whose_names_have_a_slash_exclude_nobody_else() -> None:
    names = [("a/b", "c", "d"), ("a", "b/c", "d"), ("a", "b", "c/d"), ("a%2Fb", "c", "d"), ("a", "b", "c")]
    assert len({lock_name(*each, 0) for each in names}) == len(names)
    assert lock_name("lanes", "orders", "billing", 7) == "lanes/orders/billing/7"
