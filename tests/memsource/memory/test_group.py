"""``Group`` moves partitions between members, checks commits, and reports each change by a notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource import Group
from memsource.memory.group import Committed, Notice, UnknownMember, plan

MEMBERS = ("a", "b", "c")


def filled(count: int, partitions: int = 1, *, cooperative: bool = False) -> Group:
    group = Group(partitions, cooperative=cooperative)
    for number in range(count):
        group.publish(b"%d" % number)
    return group


def fetched(group: Group, member: str, partition: int = 0, messages: int = 100, size: int = 1 << 20) -> list[int]:
    return [record.position for record in group.fetch(member, partition, messages, size)]


def test_a_member_reads_from_the_commit_at_the_time_it_learns_of_its_assignment() -> None:
    group = filled(5)
    group.join("a")
    group.commit("a", 0, 2)
    assert group.poll("a") == [("assigned", 0)]
    assert group.poll("a") == []
    assert (group.position("a", 0), fetched(group, "a", messages=2), fetched(group, "a")) == (2, [2, 3], [4])
    assert fetched(group, "a") == []


def test_gaps_in_a_log_are_skipped() -> None:
    group = Group()
    group.skip(3)
    group.publish(b"12345")
    group.skip(2)
    group.publish(b"12345")
    group.skip(4)
    group.join("a")
    group.poll("a")
    assert (fetched(group, "a", messages=0), group.position("a", 0)) == ([], 0)
    assert (fetched(group, "a", size=0), group.position("a", 0)) == ([], 0)
    # The message that reaches the size is the last.
    assert (fetched(group, "a", size=5), group.position("a", 0)) == ([3], 4)
    assert (fetched(group, "a"), group.position("a", 0)) == ([6], 11)
    group.skip(1)
    assert (fetched(group, "a"), group.position("a", 0)) == ([], 12)


def test_a_commit_is_checked_for_nothing_but_its_member() -> None:
    group = filled(5)
    group.join("a")
    group.join("b")
    for member, offset in (("a", 4), ("b", 1), ("a", 10**9), ("b", 0)):
        group.commit(member, 0, offset, [(offset + 1, offset + 2)])
        assert group.committed(0) == Committed(offset, ((offset + 1, offset + 2),))
    group.crash("a")
    group.leave("b")
    group.leave("b")
    for member in MEMBERS:
        with pytest.raises(UnknownMember, match=f"member '{member}' is not in group memory; call join"):
            group.commit(member, 0, 3)
    group.join("a")
    with pytest.raises(ValueError, match="offset=-5 of partition 0"):
        group.commit("a", 0, -5)
    with pytest.raises(IndexError, match="partition=1: memory has only the partitions 0 to 0"):
        group.commit("a", 1, 0)
    assert group.committed(0).offset == 0


def test_unfinished_counts_the_messages_that_the_next_owner_gets() -> None:
    group = filled(10)
    group.join("a")
    assert group.unfinished == 10
    group.commit("a", 0, 3, [(4, 6), (9, 12)])
    assert group.unfinished == 4


def test_an_eager_rebalance_revokes_everything_first() -> None:
    group = filled(4, 4)
    group.join("a")
    assert group.poll("a") == [("assigned", number) for number in range(4)]
    group.join("b")
    assert group.poll("b") == []
    assert group.poll("a") == [("revoking", number) for number in range(4)]
    for number in range(4):
        assert fetched(group, "a", number) == []
        assert (group.rebalancing, group.owner(number)) == (True, "a")
        group.release("a", number)
    assert not group.rebalancing
    assert [notice.kind for notice in group.poll("a") + group.poll("b")] == ["assigned"] * 4
    assert Counter(map(group.owner, range(4))) == {"a": 2, "b": 2}


def test_a_cooperative_rebalance_revokes_only_partitions_that_move() -> None:
    group = filled(4, 4, cooperative=True)
    group.join("a")
    group.poll("a")
    group.join("b")
    assert group.poll("a") == [("revoking", 2), ("revoking", 3)]
    group.release("a", 3)
    # Assigned when the partition becomes free, while the other partition still drains.
    assert (group.poll("b"), group.rebalancing) == ([("assigned", 3)], True)
    group.release("a", 2)
    assert (group.poll("b"), group.rebalancing, group.partitions_of("a")) == ([("assigned", 2)], False, [0, 1])
    group.leave("a")
    assert group.poll("b") == [("assigned", 0), ("assigned", 1)]


def test_an_assignor_decides_the_owners() -> None:
    asked = []

    def newest(owners: Sequence[str | None], members: Sequence[str]) -> list[str | None]:
        asked.append((list(owners), list(members)))
        return [members[-1]] * len(owners)

    group = Group(2, cooperative=True, assignor=newest)
    group.join("a")
    group.poll("a")
    group.join("b")
    assert asked[-1] == (["a", "a"], ["a", "b"])
    assert group.poll("a") == [("revoking", 0), ("revoking", 1)]
    group.release("a", 0)
    assert (group.poll("b"), group.owner(1)) == ([("assigned", 0)], "a")


def test_a_member_that_joins_during_a_rebalance_takes_part_in_it() -> None:
    group = filled(3, 3)
    group.join("a")
    group.poll("a")
    group.join("b")
    group.poll("a")
    group.release("a", 0)
    group.join("c")
    assert group.poll("a") == []
    group.release("a", 1)
    group.release("a", 2)
    assert sorted(str(group.owner(number)) for number in range(3)) == ["a", "b", "c"]


def test_a_rebalance_does_not_wait_for_a_crashed_member() -> None:
    group = filled(2, 2)
    group.join("a")
    group.poll("a")
    group.join("b")
    group.crash("a")
    assert group.poll("b") == [("assigned", 0), ("assigned", 1)]
    assert (group.members, group.rebalancing) == (["b"], False)
    with pytest.raises(UnknownMember):
        group.poll("a")
    with pytest.raises(ValueError, match="'b' has joined already"):
        group.join("b")


def test_a_member_uses_a_lost_partition_until_it_polls() -> None:
    group = filled(6, 1, cooperative=True)
    group.join("a")
    group.poll("a")
    assert fetched(group, "a", messages=2) == [0, 1]
    group.join("b")
    group.lose("a", 0)
    group.poll("b")
    assert fetched(group, "b", messages=4) == [0, 1, 2, 3]
    group.commit("b", 0, 4)
    assert fetched(group, "a", messages=1) == [2]
    group.commit("a", 0, 1)
    assert group.committed(0).offset == 1
    with pytest.raises(ValueError, match="owned by 'b', not by 'a'"):
        group.lose("a", 0)
    assert group.poll("a") == [("lost", 0)]
    with pytest.raises(KeyError):
        group.fetch("a", 0, 1)


def test_the_only_member_gets_a_lost_partition_again_in_the_next_rebalance() -> None:
    group = filled(2)
    group.join("a")
    group.poll("a")
    group.lose("a", 0)
    assert (group.poll("a"), group.owner(0), group.partitions_of("a")) == ([("lost", 0)], None, [])
    with pytest.raises(ValueError, match="partition 0 of memory has no owner"):
        group.revoke(0)
    group.rebalance()
    assert group.poll("a") == [("assigned", 0)]


def test_a_release_does_not_affect_a_later_assignment() -> None:
    group = filled(2)
    group.join("a")
    group.poll("a")
    group.revoke(0)
    group.lose("a", 0)
    group.revoke(0)
    # The partition is lost, assigned and revoked again without a poll in between.
    assert group.owner(0) == "a"
    group.release("a", 0)
    assert (group.owner(0), group.rebalancing) == ("a", True)
    assert group.poll("a") == [Notice("assigned", 0), Notice("revoking", 0)]
    group.release("a", 0)
    assert not group.rebalancing
    group.release("a", 0)
    assert group.poll("a") == [Notice("assigned", 0)]


def test_a_member_may_release_before_it_hears_of_the_revocation() -> None:
    group = filled(2)
    group.join("a")
    group.poll("a")
    group.join("b")
    group.release("a", 0)
    assert [notice.kind for notice in group.poll("a") + group.poll("b")] == ["assigned"]


@given(st.lists(st.sampled_from([None, "a", "b", "c", "d"]), max_size=12), st.permutations(["a", "b", "c"]))
def test_a_plan_is_even_and_moves_as_little_as_that_allows(owners: list[str | None], members: list[str]) -> None:
    target = plan(owners, members)
    loads = Counter(target)
    assert loads.keys() <= set(members)
    assert len(target) == len(owners)
    sizes = [loads[member] for member in members]
    assert max(sizes) - min(sizes) <= 1
    stays = sum(old == new for old, new in zip(owners, target, strict=True))
    # No even plan moves fewer partitions.
    share, rest = divmod(len(owners), len(members))
    before = sorted((Counter(owners)[member] for member in members), reverse=True)
    assert stays == sum(min(load, share + (number < rest)) for number, load in enumerate(before))
    assert plan(owners, []) == [None] * len(owners)


def step(group: Group, random: Random) -> None:
    """Any event of a group."""
    member, number = random.choice(MEMBERS), random.choice(group.topic.partitions)
    if member not in group.members:
        group.join(member)
        return
    owner = group.owner(number)
    held = group.partitions_of(member)
    actions: list[Callable[[], object]] = [
        lambda: group.publish(key=random.choice("xyz")),
        lambda: group.publish(),
        lambda: group.skip(2, partition=number),
        lambda: group.poll(member),
        lambda: group.poll(member),
        lambda: group.commit(member, number, random.randrange(9), [(10, 12)]),
        lambda: random.choice([group.crash, group.leave])(member),
        group.rebalance,
    ]
    if owner is not None:
        actions += [lambda: group.revoke(number), lambda: group.lose(owner, number)]
    if held:
        actions += 3 * [lambda: group.release(member, held[0])]
        actions += 3 * [lambda: group.fetch(member, held[-1], random.randrange(4))]
    random.choice(actions)()


def coherent(group: Group) -> None:
    """Assert that broker and members agree after all notices, and that no partition is forgotten."""
    state = group.snapshot()
    believed: dict[int, list[str]] = {number: [] for number in group.topic.partitions}
    for name, notices, held in state.members:
        views = dict.fromkeys((number for number, _ in held), True)
        for kind, number in notices:
            assert (kind == "assigned") != views.get(number, False)
            views[number] = kind != "lost"
        for number, believes in views.items():
            if believes:
                believed[number].append(name)
    for number in group.topic.partitions:
        owner = group.owner(number)
        assert believed[number] == ([] if owner is None else [owner])
        assert owner is None or owner in group.members
        assert number not in state.asked or owner is not None


@given(st.integers(0, 2**32), st.booleans(), st.integers(1, 3))
def test_after_any_events_members_and_broker_agree(seed: int, cooperative: bool, partitions: int) -> None:
    group, twin = (Group(partitions, cooperative=cooperative) for _ in range(2))
    random = Random(seed)
    for _ in range(40):
        step(group, random)
        coherent(group)
    state = group.snapshot()
    assert hash(state) == hash(group.snapshot())
    twin.restore(state)
    assert twin.snapshot() == state
    # Equal states behave alike, and a state does not change when its group changes.
    for each in (group, twin):
        again = Random(seed + 1)
        for _ in range(40):
            step(each, again)
    assert group.snapshot() == twin.snapshot()
    kept = twin.snapshot()
    group.restore(state)
    assert (group.snapshot(), twin.snapshot()) == (state, kept)


def test_watchers_are_called_for_every_change() -> None:
    group = Group(2)
    heard: list[int] = []

    def watcher() -> None:
        heard.append(1)

    group.watch(watcher)
    group.watch(watcher)
    for change in (lambda: group.join("a"), group.publish, lambda: group.skip(1), lambda: group.lose("a", 0)):
        before = len(heard)
        change()
        assert len(heard) > before
    group.unwatch(watcher)
    group.unwatch(watcher)
    heard.clear()
    group.publish()
    assert not heard
