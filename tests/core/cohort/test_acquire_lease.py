"""How a partition is taken, and taken over from oneself: single cases."""

from __future__ import annotations

import pytest

from lanes.core.cohort import phases
from lanes.core.cohort.actions import (
    Consumer,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    LeaseLost,
    LeaseOwned,
    LeaseReleased,
    LeaseRevoked,
    Overlapping,
    Read,
    Unknown,
    Wait,
    Write,
)
from lanes.core.cohort.lease_machine import LOOK_SECONDS
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.records import Lease, decode
from tests.core.cohort.world import MARGIN, TTL, World, actions, owned, until


@pytest.mark.parametrize(
    ("retention", "names"),
    [
        ("limits", "Read Read Write Read FindConsumers Write CreateConsumer Read Write DeleteConsumer"),
        ("interest", "Read Read Write Read FindConsumers Write CreateConsumer Read Write DeleteConsumer"),
        ("workqueue", "Read Read Write Read FindConsumers Write DeleteConsumer CreateConsumer Read Write"),
    ],
)
def test_a_partition_is_taken_in_this_order(retention: str, names: str) -> None:
    world = World(retention)
    (member, _) = world.up()
    world.tell(member)
    assert [action.__name__ for action in actions(world, member)] == names.split()
    assert world.seen == [LeaseOwned(1001, 0, 1001, NOTHING, again=False)]
    assert (member.machine.token, member.machine.consumer) == (1001, (1001, 0))
    assert member.machine.deadline == world.server.now + TTL - MARGIN


def test_an_acquisition_without_an_answer_is_read_back_and_counts_from_the_send() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, Write)
    sent = world.server.now
    world.serve(member)
    world.answer(member, unknown=True)
    world.elapse(1)
    actions(world, member)
    assert member.machine.phase == phases.OWNED
    lease = decode(Lease, "l.0", world.server.entries["l.0"][0] or b"")
    assert (lease.member, lease.epoch) == ("member-0", member.machine.token)
    assert sent + TTL - MARGIN < member.machine.deadline  # the verification has renewed it


def test_a_lease_that_is_held_is_read_again_after_a_while_or_at_a_hint() -> None:
    world, _ = owned()
    other = world.members[1]
    assert other is not None
    world.target = 1
    world.tell(other)
    world.act(other)
    assert world.ask(other) == Wait(world.server.now + LOOK_SECONDS)
    other.machine.hinted(world.clock(other))
    assert world.ask(other) == Read("l.0")


def test_a_missing_state_waits_for_a_lease_and_the_margin_and_no_hint_shortens_it() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.lose_bucket()
    world.tell(member)
    actions(world, member)
    member.machine.hinted(world.clock(member))
    assert world.ask(member) == Wait(world.server.now + TTL + MARGIN)
    world.elapse(TTL + MARGIN)
    actions(world, member)
    assert member.machine.phase == phases.OWNED


def test_a_missing_state_waits_for_the_longest_lease_that_a_consumer_tells() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.lose_bucket()
    world.tell(member)
    action = until(world, member, FindConsumers)
    assert member.machine.phase == phases.SURVEYING
    made = Consumer(3, 0, "n", 0, 60), Consumer(4, 0, "m", 0, 30), Consumer(5, 0, "o", 0)
    now = world.clock(member)
    member.machine.apply(action, Unknown, now, now)
    world.elapse(LOOK_SECONDS)
    now += LOOK_SECONDS
    action = member.machine.next(now, "n")
    member.machine.apply(action, Found(made, 1), now, now)
    # With as much of a margin for it as for its own.
    assert member.machine.next(now, "n") == Wait(now + 60 + 60 * MARGIN / TTL)


@pytest.mark.parametrize("ends", ["unplanned", "fenced"])
def test_who_waited_for_a_lost_bucket_waits_again_when_it_begins_anew(ends: str) -> None:
    """The bucket may be lost again meanwhile, and somebody have owned in between who does not know yet."""
    world = World("limits")
    (member, _) = world.up()
    world.lose_bucket()
    world.tell(member)
    actions(world, member)
    assert member.machine.phase == phases.GRACE
    world.elapse(TTL + MARGIN)
    if ends == "unplanned":
        until(world, member, Read, "s.0")
        member.machine.planned(False, world.clock(member))
        world.serve(member)
        world.answer(member)
        actions(world, member)
        assert member.machine.phase == phases.IDLE
        member.machine.planned(True, world.clock(member))
    else:
        # It was frozen with what it had asked for under way.
        until(world, member, FindConsumers)
        world.elapse(2 * TTL)
        world.lose_bucket()
        world.answer(member, unknown=True)
        world.elapse(LOOK_SECONDS)
    until(world, member, FindConsumers)
    assert member.machine.phase == phases.SURVEYING


def test_a_takeover_from_itself_keeps_the_token_and_gets_a_sub_number() -> None:
    world, member = owned()
    world.pull(member)
    world.pull(member, lose=True)
    world.pull(member)
    # It is owned meanwhile, but there is nothing to pull from; and a second one changes nothing.
    assert (member.machine.consumer, member.machine.token) == (None, 1001)
    assert member.machine.deadline > world.server.now
    member.machine.takeover(NOTHING, world.clock(member))
    actions(world, member)
    assert world.seen[1:] == [LeaseOwned(1001, 1, 1001, Done(1, (1,)), again=True)]
    assert set(world.server.durables) == {(1001, 1)}
    assert member.queue == [1]


def test_an_epoch_with_none_above_it_is_refused_with_the_remedy() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    action = until(world, member, FindConsumers)
    now = world.clock(member)
    with pytest.raises(
        ValueError, match=r"partition 0: epoch 9007199254740992 is the last possible one.*delete the durable"
    ):
        member.machine.apply(action, Found((Consumer(2**53, 0, "x", 0),), 1), now, now)
    # Given up, and it may be driven on.
    assert member.machine.phase == phases.LOOKING
    assert member.machine.events == []


def test_a_higher_epoch_ends_a_takeover_from_itself() -> None:
    world, member = owned()
    world.clean = False
    member.machine.takeover(NOTHING, world.clock(member))
    action = until(world, member, FindConsumers)
    member.machine.apply(action, Found((Consumer(5000, 0, "n", 0),), 1), world.clock(member), world.clock(member))
    assert member.machine.events == [LeaseLost("epoch 5000 is above this member's 1001")]


@pytest.mark.parametrize("phase", sorted(phases.TAKING - {phases.REFINDING}))
def test_a_takeover_that_outlives_the_lease_is_lost(phase: str) -> None:
    world, member = owned("workqueue" if phase == phases.CLEARING else "limits")
    member.machine.takeover(NOTHING, world.clock(member))
    while member.machine.phase != phase:
        world.act(member)
    world.elapse(TTL)
    assert isinstance(world.ask(member), Read)  # for a new lease: nothing ran
    assert [type(event) for event in world.seen] == [LeaseOwned, LeaseLost]
    assert world.pulled == ((0, -1), "")


def test_a_revocation_during_a_takeover_comes_behind_it() -> None:
    world, member = owned()
    member.machine.takeover(NOTHING, world.clock(member))
    member.machine.planned(False, world.clock(member))
    actions(world, member)
    assert [type(event) for event in world.seen] == [LeaseOwned, LeaseOwned, LeaseRevoked, LeaseReleased]


def test_a_name_that_is_taken_by_another_acquisition_makes_it_choose_again() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    world.server.perform(CreateConsumer(1001, 0, "of another", 1))
    actions(world, member)
    assert world.seen == [LeaseOwned(1002, 0, 1002, NOTHING, again=False)]
    assert set(world.server.durables) == {(1002, 0)}


@pytest.mark.parametrize("planned", [True, False])
def test_on_a_work_queue_a_lower_consumer_that_came_late_is_deleted_before_the_next_try(planned: bool) -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    world.server.perform(CreateConsumer(500, 0, "of another", None))
    world.serve(member)
    world.answer(member)
    assert member.machine.phase == phases.REFINDING
    member.machine.planned(planned, world.clock(member))
    actions(world, member)
    assert set(world.server.durables) == ({(1001, 0)} if planned else {(500, 0)})
    assert member.machine.idle is not planned


def test_on_a_work_queue_a_higher_consumer_says_that_it_is_the_old_one() -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    world.server.perform(CreateConsumer(5000, 0, "of another", None))
    assert actions(world, member) == [CreateConsumer, FindConsumers, Read]
    assert (member.machine.phase, world.seen) == (phases.LOOKING, [])


def test_on_a_work_queue_a_consumer_of_somebody_else_is_tried_again_at_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    with monkeypatch.context() as patch:
        patch.setattr(world.server, "create", lambda _: Overlapping)
        for _ in range(3):
            assert actions(world, member)[-2:] == [CreateConsumer, FindConsumers]
            assert member.machine.obstructed
            assert world.ask(member) == Wait(world.server.now + LOOK_SECONDS)
            world.elapse(LOOK_SECONDS)
    actions(world, member)
    assert member.machine.phase == phases.OWNED


def test_garbage_of_a_listing_is_deleted_and_nothing_above() -> None:
    world, member = owned()
    member.machine.seen([(7, 0), (1001, 0), (1001, 1), (1002, 0)], world.clock(member))
    # A higher epoch is a reason to look at the lease, which comes first.
    assert actions(world, member) == [Read, Write, DeleteConsumer]
    assert set(world.server.durables) == {(1001, 0)}


def test_a_listing_spares_the_one_of_its_own() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    assert FindConsumers in actions(world, member)
    world.elapse(TTL / 3)
    member.machine.seen(world.server.durables, world.clock(member))
    assert actions(world, member) == [Read, Write]


@pytest.mark.parametrize(("key", "phase"), [("l.0", "looking"), ("s.0", "checking")])
def test_a_hostile_record_is_refused_by_its_key_and_asked_for_again_later(key: str, phase: str) -> None:
    world = World("limits")
    (member, _) = world.up()
    world.server.entries[key] = b'{"version":1,"member":[]}', 7, float("inf")
    world.tell(member)
    with pytest.raises(ValueError, match=f"the key '{key}' of the cohort's bucket holds"):
        actions(world, member)
    assert member.machine.phase == phase
    assert world.ask(member) == Wait(world.server.now + LOOK_SECONDS)


@pytest.mark.parametrize("empty", [b"", None])
def test_an_empty_lease_is_free(empty: bytes | None) -> None:
    world = World("limits")
    (member, _) = world.up()
    world.server.entries["l.0"] = empty, 7, float("inf")
    world.tell(member)
    actions(world, member)
    assert member.machine.phase == phases.OWNED
