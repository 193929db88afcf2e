"""``Group`` of the Kafka broker supports restarted members, losses without a new owner, and recreated topics."""

from __future__ import annotations

from memsource import Group
from memsource.memory.group import Committed, Notice


def test_a_restarted_member_is_assigned_all_but_its_revoked_partitions() -> None:
    group = Group(3, cooperative=True)
    group.join("a")
    group.poll("a")
    group.join("b")
    assert group.pending("a") == (Notice("revoking", 2),)
    group.rejoin("a")
    assert group.pending("a") == (Notice("assigned", 0), Notice("assigned", 1))
    assert (group.partitions_of("a"), group.rebalancing, group.owner(2)) == ([], False, "b")
    assert group.poll("b") == [("assigned", 2)]


def test_a_partition_lost_without_give_stays_free() -> None:
    group = Group(1, cooperative=True)
    group.join("a")
    group.join("b")
    group.lose("a", 0, give=False)
    assert group.owner(0) is None
    group.rebalance()
    assert group.owner(0) is not None


def test_a_partition_lost_without_give_stays_free_in_a_rebalance_of_others() -> None:
    group = Group(4, cooperative=True)
    group.join("a")
    group.join("b")
    # The rebalance waits for the partitions that move from one member to the other.
    assert group.rebalancing
    group.lose("a", 0, give=False)
    assert (group.owner(0), group.rebalancing) == (None, True)
    group.poll("a")
    for partition in (2, 3):
        group.release("a", partition)
    assert (group.owner(0) is not None, group.rebalancing) == (True, False)


def test_a_recreated_topic_is_empty_and_has_no_commits() -> None:
    group = Group(2)
    group.publish()
    group.join("a")
    group.commit("a", 1, 7)
    woken: list[int] = []
    group.watch(lambda: woken.append(1))
    group.recreate()
    assert (group.unfinished, group.committed(1), group.topic.published, woken) == (0, Committed(), 0, [1])
