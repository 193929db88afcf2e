"""The decisions of a member: the order of visits, its share, and the partitions that it gives up."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lanes_postgres.subscription.owned import lock_name
from lanes_postgres.subscription.visits import (
    Hold,
    Member,
    Visit,
    Work,
    acquirable,
    given_up,
    in_order,
    most_owned,
    waits,
)

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


def test_nothing_is_given_up_while_every_member_has_its_share() -> None:
    assert given_up(held({0: 0.0, 1: 0.0}), 100.0, 5.0, 3, [Member(1, waits=False)]) == []
    assert given_up(held({0: 0.0}), 100.0, 5.0, 1, [Member(0, waits=False)]) == []


@pytest.mark.parametrize(("partitions", "owned", "others"), [(8, 4, [2, 2]), (7, 4, [1, 1, 1]), (64, 16, 4 * [12])])
def test_a_member_above_its_maximum_gives_up_the_excess_although_nobody_waits(
    partitions: int, owned: int, others: list[int]
) -> None:
    """Otherwise the counts stay, because every other member has its least share."""
    holds = held(dict.fromkeys(range(owned), 0.0))
    excess = owned - most_owned(partitions, len(others))
    members = [Member(each, waits=False) for each in others]
    assert given_up(holds, 100.0, 5.0, partitions, members) == list(range(excess))


def test_a_member_above_its_maximum_keeps_the_excess_while_no_member_has_room_for_it() -> None:
    """The counts of others may be old."""
    others = [Member(3, waits=False), Member(3, waits=True)]
    assert given_up(held(dict.fromkeys(range(4), 0.0)), 100.0, 5.0, 8, others) == []


def test_a_member_acquires_up_to_its_maximum() -> None:
    assert acquirable(0, 8, [Member(2, waits=False), Member(2, waits=False)]) == 3
    assert acquirable(3, 8, [Member(2, waits=False), Member(2, waits=False)]) == 0
    assert acquirable(4, 8, [Member(2, waits=False), Member(2, waits=False)]) == 0


def test_a_member_with_its_least_share_leaves_free_partitions_to_a_member_that_waits() -> None:
    others = [Member(1, waits=False), Member(0, waits=True)]
    assert acquirable(1, 4, others) == 0
    assert acquirable(0, 4, others) == 1
    assert acquirable(3, 4, others) == 0
    # In turns too, a member that owns nothing acquires a partition.
    assert acquirable(0, 1, others) == 1


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
    """In another order, the members would have 2, 4 and 2 of 8 partitions in place of 3, 4 and 1.

    No member would then wait, and the second member would keep its four.
    """
    others = [Member(4, waits=False), Member(1, waits=True)]
    assert given_up(held(dict.fromkeys(range(3), 0.0)), 100.0, 5.0, 8, others) == []
    assert given_up(held(dict.fromkeys(range(4), 0.0)), 100.0, 5.0, 8, [Member(3, waits=False), others[1]]) == [0]


@given(
    partitions=st.integers(1, 64),
    joins=st.lists(st.integers(0, 60), max_size=4),
    leaves=st.lists(st.integers(0, 60), max_size=2),
    random=st.randoms(use_true_random=False),
)
@example(partitions=7, joins=[0, 40, 40, 40], leaves=[39], random=Random(5))
def test_members_that_join_and_leave_at_any_time_get_equal_shares(
    partitions: int, joins: list[int], leaves: list[int], random: Random
) -> None:
    """Members look one after the other. A member tells its count before it acquires, and sees what the others told.
    Some partitions are younger than the budget."""
    assume(len(leaves) <= len(joins))
    kept = len(joins) + 1 - len(leaves)
    assume(partitions >= kept)
    owned: dict[int, dict[int, float]] = {}
    told: dict[int, Member] = {}
    free = set(range(partitions))
    moves = 0

    def look(me: int, now: float) -> None:
        nonlocal moves
        holds, before = owned[me], told.get(me, Member(0, waits=False))
        told[me] = Member(len(holds), before.waits)
        others = [member for each, member in told.items() if each != me]
        for number in random.sample(sorted(free), min(len(free), acquirable(len(holds), partitions, others))):
            free.remove(number)
            holds[number] = now
            moves += 1
        told[me] = told[me]._replace(waits=waits(len(holds), partitions, len(others)))
        for number in given_up(
            {each: Hold(since, True) for each, since in holds.items()}, now, 5.0, partitions, others
        ):
            del holds[number]
            free.add(number)

    for turn in range(80):
        owned |= {number: {} for number, at in enumerate([0, *sorted(joins)]) if at == turn}
        for number in [number for number, at in enumerate(sorted(leaves)) if at == turn and number in owned]:
            free |= owned.pop(number).keys()
            told.pop(number, None)
        for _ in range(2):
            if owned:
                look(random.choice(sorted(owned)), float(turn))
    for turn in range(80, 120):
        for me in random.sample(sorted(owned), len(owned)):
            look(me, float(turn))
        if turn == 110:
            moves = 0
    assert not free
    assert {len(holds) for holds in owned.values()} <= {
        partitions // len(owned),
        most_owned(partitions, len(owned) - 1),
    }
    assert not moves


def test_a_turn_lasts_until_a_message_was_settled() -> None:
    assert given_up(held({0: 0.0}, got_on=False), 100.0, 0.0, 1, [Member(0, waits=True)]) == []


def test_subscriptions_whose_names_have_a_slash_exclude_nobody_else() -> None:
    names = [("a/b", "c", "d"), ("a", "b/c", "d"), ("a", "b", "c/d"), ("a%2Fb", "c", "d"), ("a", "b", "c")]
    assert len({lock_name(*each, 0) for each in names}) == len(names)
    assert lock_name("lanes", "orders", "billing", 7) == "lanes/orders/billing/7"
