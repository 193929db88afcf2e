"""What a group does for a broker that knows time: members that start anew, losses for nobody, other topics."""

from __future__ import annotations

from memsource import Group
from memsource.memory.group import Committed, Notice


def test_a_member_that_starts_anew_hears_of_all_it_owns_and_has_released_what_it_was_asked_for() -> None:
    group = Group(3, cooperative=True)
    group.join("a")
    group.poll("a")
    group.join("b")
    assert group.pending("a") == (Notice("revoking", 2),)
    group.rejoin("a")
    assert group.pending("a") == (Notice("assigned", 0), Notice("assigned", 1))
    assert (group.partitions_of("a"), group.rebalancing, group.owner(2)) == ([], False, "b")
    assert group.poll("b") == [("assigned", 2)]


def test_what_is_lost_for_nobody_stays_free() -> None:
    group = Group(1, cooperative=True)
    group.join("a")
    group.join("b")
    group.lose("a", 0, give=False)
    assert group.owner(0) is None
    group.rebalance()
    assert group.owner(0) is not None


def test_a_new_topic_is_empty_and_nothing_of_it_is_committed() -> None:
    group = Group(2)
    group.publish()
    group.join("a")
    group.commit("a", 1, 7)
    woken: list[int] = []
    group.watch(lambda: woken.append(1))
    group.recreate()
    assert (group.unfinished, group.committed(1), group.topic.published, woken) == (0, Committed(), 0, [1])
