"""The decisions of a member: the order of visits, its share, and what it gives up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("partitions", "owned", "others"),
    [(4, 2, [Member(2, waits=False), Member(0, waits=True)]), (7, 3, [Member(3, waits=False), Member(1, waits=True)])],
)
def test_a_member_above_its_least_share_gives_up_a_partition_for_a_member_below_it(
    partitions: int, owned: int, others: list[Member]
) -> None:
    held_now = held(dict.fromkeys(range(owned), 0.0), got_on=False)
    assert given_up(held_now, 100.0, 5.0, partitions, others) == [0]
    assert given_up(held_now, 4.0, 5.0, partitions, others) == []


def test_a_member_above_its_maximum_gives_up_first() -> None:
    """Otherwise 3, 4 and 1 of 8 partitions become 2, 4 and 2: nobody waits, and the second keeps its four."""
    others = [Member(4, waits=False), Member(1, waits=True)]
    assert given_up(held(dict.fromkeys(range(3), 0.0)), 100.0, 5.0, 8, others) == []
    assert given_up(held(dict.fromkeys(range(4), 0.0)), 100.0, 5.0, 8, [Member(3, waits=False), others[1]]) == [0]


@given(
    partitions=st.integers(1, 64),
    joins=st.lists(st.integers(0, 60), max_size=4),
    random=st.randoms(use_true_random=False),
)
def test_members_that_join_at_any_time_leave_each_member_its_least_share(
    partitions: int, joins: list[int], random: Random
) -> None:
    """Members look one after the other. A member sees what the others told at their last looks, and may look before the
    budget of its partitions has passed."""
    members = len(joins) + 1
    assume(partitions >= members)
    owned, told, free = [0] * members, [Member(0, waits=False)] * members, partitions

    def look(me: int, joined: Sequence[int], now: float) -> None:
        nonlocal free
        others = [told[each] for each in joined if each != me]
        acquired = max(0, min(most_owned(partitions, len(others)) - owned[me], free))
        owned[me], free = owned[me] + acquired, free - acquired
        told[me] = Member(owned[me], waits(owned[me], partitions, len(others)))
        left = len(given_up(held(dict.fromkeys(range(owned[me]), 0.0)), now, 5.0, partitions, others))
        owned[me], free = owned[me] - left, free + left

    for turn in range(80):
        joined = [0, *(number for number, at in enumerate(sorted(joins), start=1) if at <= turn)]
        look(random.choice(joined), joined, random.choice([4.0, 10.0]))
    for _ in range(40):
        for me in random.sample(range(members), members):
            look(me, range(members), 10.0)
    assert not free
    assert min(owned) >= partitions // members


def test_a_turn_lasts_until_a_message_was_settled() -> None:
    assert given_up(held({0: 0.0}, got_on=False), 100.0, 0.0, 1, [Member(0, waits=True)]) == []


def test_subscriptions_whose_names_have_a_slash_exclude_nobody_else() -> None:
    names = [("a/b", "c", "d"), ("a", "b/c", "d"), ("a", "b", "c/d"), ("a%2Fb", "c", "d"), ("a", "b", "c")]
    assert len({lock_name(*each, 0) for each in names}) == len(names)
    assert lock_name("lanes", "orders", "billing", 7) == "lanes/orders/billing/7"
