"""The simulated cohort moves slots between members by leases and epochs, and tells a member late of its loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsource.jetstream.cohort import Cohort

LEASE, REVOKE = 9.0, 5.0


def nothing() -> None:
    pass


def cohort(slots: int = 2, *members: str) -> Cohort:
    made = Cohort(slots, lease=LEASE, revoke_timeout=REVOKE, changed=nothing)
    for member in members:
        made.join(member, 0.0)
    return made


def heard(made: Cohort, member: str) -> list[tuple[str, int, int]]:
    return [(notice.kind, notice.slot, notice.epoch) for notice in made.poll(member)]


def test_a_moving_slot_is_revoked_and_assigned_after_its_release() -> None:
    made = cohort(2, "a", "b")
    assert heard(made, "a") == [("assigned", 0, 1), ("assigned", 1, 1), ("revoking", 1, 1)]
    moving = [made.moving]
    assert heard(made, "b") == []
    made.release("a", 1, 1, 1.0)
    moving.append(made.moving)
    assert heard(made, "b") == [("assigned", 1, 2)]
    moving.append(made.moving)
    assert moving == [True, True, False]
    assert [made.owner(slot) for slot in (0, 1)] == ["a", "b"]
    # A release after the deadline, of an earlier epoch.
    made.release("a", 1, 1, 2.0)
    assert made.owner(1) == "b"
    assert repr(made) == "<Cohort: 2 slots, 0 free, 0 asked for, 2 members>"


def test_the_deadline_takes_unreleased_slots() -> None:
    made = cohort(1, "a")
    made.poll("a")
    made.join("b", 1.0)
    assert made.next_at() == math.inf  # the most even plan
    made.leave("b", 1.0)
    made.join("c", 1.0)
    assert made.revoke(0, 2.0)
    assert made.revoke(0, 3.0)
    (notice,) = made.poll("a")
    assert (notice.kind, notice.timeout) == ("revoking", REVOKE)
    assert made.next_at() == 2.0 + REVOKE
    made.advance(made.next_at() - 0.001)
    assert made.owner(0) == "a"
    made.advance(made.next_at())
    assert heard(made, "a") == [("lost", 0, 1), ("assigned", 0, 2)]


@pytest.mark.parametrize(("at", "end"), [(0.0, 9.0), (2.9, 9.0), (3.0, 12.0), (8.0, 15.0)])
def test_slots_of_a_crashed_member_are_free_after_its_lease(at: float, end: float) -> None:
    made = cohort(1, "a")
    made.join("b", 0.0)
    made.crash("a", at)
    made.crash("a", at + 1)
    # The last renewal counts; renewals happen after each third of a lease.
    assert made.next_at() == end
    made.advance(end - 0.001)
    assert (made.owner(0), made.members) == ("a", ["a", "b"])
    made.advance(end)
    assert (made.owner(0), made.epoch(0), made.members) == ("b", 2, ["b"])
    made.join("a", end)
    made.leave("b", end)
    assert heard(made, "a") == [("assigned", 0, 3)]


def test_a_freeze_within_the_lease_changes_nothing() -> None:
    made = cohort(1, "a", "b")
    made.freeze("a", 4.0, 8.0)
    assert not made.runs("a")
    assert made.next_at() == 8.0
    assert heard(made, "a") == []
    made.advance(8.0)
    assert made.next_at() == math.inf
    assert heard(made, "a") == [("assigned", 0, 1)]


def test_a_frozen_member_learns_of_its_loss_when_it_wakes() -> None:
    made = cohort(1, "a", "b")
    made.poll("a")
    made.freeze("a", 4.0, 20.0)
    made.freeze("a", 5.0, 10.0)
    made.advance(19.0)
    # Two owners: the holder of the lease, and the former holder, which has not heard of its loss.
    assert (made.owner(0), heard(made, "b"), heard(made, "a")) == ("b", [("assigned", 0, 2)], [])
    assert made.members == ["b"]
    made.advance(20.0)
    assert heard(made, "a") == [("lost", 0, 1)]
    assert made.members == ["a", "b"]


def test_a_slot_planned_for_a_dead_member_stays_free() -> None:
    made = cohort(2, "a", "b")
    made.crash("b", 0.0)
    made.release("a", 1, 1, 1.0)
    assert (made.owner(1), made.moving) == (None, True)
    made.advance(LEASE)
    assert made.owner(1) == "a"


def test_a_lost_slot_goes_to_another_member_or_comes_back_later() -> None:
    made = cohort(1, "a")
    made.poll("a")
    assert made.lose(0, 1.0)
    assert not made.lose(0, 1.0)
    assert heard(made, "a") == [("lost", 0, 1)]
    made.advance(1.0 + LEASE / 3)
    assert heard(made, "a") == [("assigned", 0, 2)]
    made.join("b", 5.0)
    assert made.lose(0, 5.0)
    assert (made.owner(0), heard(made, "a"), heard(made, "b")) == ("b", [("lost", 0, 2)], [("assigned", 0, 3)])


def test_a_slot_released_early_goes_to_another_member_or_none() -> None:
    made = cohort(1, "a")
    made.release("a", 0, 1, 1.0)
    assert (made.owner(0), made.next_at()) == (None, math.inf)
    made.join("b", 2.0)
    assert made.owner(0) == "a"
    made.release("a", 0, 2, 3.0)
    assert made.owner(0) == "b"


def test_a_release_counts_once_and_only_for_its_assignment() -> None:
    made = cohort(1, "a")
    made.lose(0, 1.0)
    made.advance(1.0 + LEASE / 3)
    made.release("a", 0, 1, 5.0)
    assert (made.owner(0), made.epoch(0)) == ("a", 2)
    made = cohort(2, "a", "b", "c")
    made.freeze("b", 1.0, 2.0)
    for _ in range(2):
        made.release("a", 1, 1, 1.0)
    assert made.owner(1) is None
    made.advance(2.0)
    assert made.owner(1) == "b"


def test_every_rebalance_moves_a_partition() -> None:
    made = cohort(3, "a")
    made.poll("a")
    assert made.rebalance(1.0)
    assert heard(made, "a") == [("revoking", 0, 1)]
    made.release("a", 0, 1, 2.0)
    assert heard(made, "a") == [("assigned", 0, 2)]
    assert made.rebalance(3.0)
    assert heard(made, "a") == [("revoking", 1, 1)]
    made.join("b", 4.0)
    assert heard(made, "a") == [("revoking", 2, 1)]
    made.release("a", 1, 1, 4.0)
    made.release("a", 2, 1, 4.0)
    assert heard(made, "a") == [("assigned", 1, 2)]
    assert heard(made, "b") == [("assigned", 2, 2)]
    assert made.rebalance(5.0)
    assert not cohort(1).rebalance(0.0)


def test_a_simulated_cohort_refuses_impossible_arguments() -> None:
    for name in ("lease", "revoke_timeout"):
        settings: dict[str, Any] = {"lease": 1.0, "revoke_timeout": 1.0, name: 0.0}
        with pytest.raises(ValueError, match=f"{name}=0.0: must be more than 0 seconds"):
            Cohort(1, changed=nothing, **settings)
    with pytest.raises(ValueError, match="member 'a' has joined already"):
        cohort(1, "a").join("a", 0.0)


MEMBERS = ("a", "b", "c")
MEMBER = st.sampled_from(MEMBERS)
SLOT = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["join", "leave", "crash", "poll", "release"]), MEMBER),
    st.tuples(st.just("freeze"), MEMBER, st.sampled_from([1.0, 4.0, 20.0])),
    st.tuples(st.sampled_from(["lose", "revoke"]), SLOT),
    st.tuples(st.just("rebalance")),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 3.0, 8.0])),
)


class Beliefs:
    """The slots that each member believes it owns, from its notices: slot → epoch."""

    def __init__(self) -> None:
        self.cohort = cohort(3)
        self.now = 0.0
        self.own: dict[str, dict[int, int]] = {}
        self.asked: dict[str, set[int]] = {}

    def step(self, name: str, *arguments: Any) -> None:
        made = self.cohort
        if name == "wait":
            self.now += arguments[0]
            made.advance(self.now)
        elif name == "join":
            if arguments[0] not in self.own and arguments[0] not in made.members:
                made.join(arguments[0], self.now)
                self.own[arguments[0]], self.asked[arguments[0]] = {}, set()
        elif name in ("lose", "revoke", "rebalance"):
            getattr(made, name)(*arguments, self.now)
        elif arguments[0] in self.own:
            member = arguments[0]
            if name == "freeze":
                made.freeze(member, self.now, self.now + arguments[1])
            elif name == "poll":
                self.hear(member)
            elif name == "release":
                if made.runs(member):
                    for slot in sorted(self.asked[member]):
                        made.release(member, slot, self.own[member].pop(slot), self.now)
                    self.asked[member].clear()
            else:
                getattr(made, name)(member, self.now)
                del self.own[member], self.asked[member]

    def hear(self, member: str) -> None:
        for kind, slot, epoch, _ in self.cohort.poll(member):
            if kind == "assigned":
                assert slot not in self.own[member]
                self.own[member][slot] = epoch
            elif self.own[member].get(slot) == epoch:
                if kind == "revoking":
                    self.asked[member].add(slot)
                else:
                    del self.own[member][slot]
                    self.asked[member].discard(slot)


@given(st.lists(STEPS, max_size=40))
def test_two_members_own_a_slot_only_until_the_loser_hears_of_it(steps: list[Any]) -> None:
    world = Beliefs()
    epochs = [0, 0, 0]
    for step in steps:
        world.step(*step)
        made = world.cohort
        for slot in range(3):
            assert made.epoch(slot) >= epochs[slot]
            epochs[slot] = made.epoch(slot)
        # All running members read their notices, so only stopped members can be wrong.
        for member in world.own:
            if made.runs(member):
                world.hear(member)
                for slot, epoch in world.own[member].items():
                    assert (made.owner(slot), made.epoch(slot)) == (member, epoch)
    # Without faults the running members share all slots evenly.
    for _ in range(12):
        world.step("wait", 4.0)
        for member in list(world.own):
            world.hear(member)
            world.step("release", member)
    world.step("join", next((member for member in MEMBERS if member not in world.own), "a"))
    for _ in range(12):
        world.step("wait", 4.0)
        for member in list(world.own):
            world.hear(member)
            world.step("release", member)
    counts = sorted(len(own) for own in world.own.values())
    assert sum(counts) == 3
    assert counts[-1] - counts[0] <= 1
    assert world.cohort.next_at() == math.inf
