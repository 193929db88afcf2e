"""A lease is acquired only when no other member can rely on it, and a member can take over from itself."""

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
def test_an_acquisition_performs_the_actions_of_its_retention_in_order(retention: str, names: str) -> None:
    world = World(retention)
    (member, _) = world.up()
    world.tell(member)
    assert [action.__name__ for action in actions(world, member)] == names.split()
    assert world.seen == [LeaseOwned(1001, 0, 1001, NOTHING, again=False)]
    assert (member.machine.token, member.machine.consumer) == (1001, (1001, 0))
    assert member.machine.deadline == world.server.now + TTL - MARGIN


def test_an_acquisition_without_an_answer_is_read_back_and_its_deadline_counts_from_the_request() -> None:
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


def test_a_lease_of_another_member_is_read_again_after_a_while_or_at_a_hint() -> None:
    world, _ = owned()
    other = world.members[1]
    assert other is not None
    world.target = 1
    world.tell(other)
    world.act(other)
    assert world.ask(other) == Wait(world.server.now + LOOK_SECONDS)
    other.machine.hinted(world.clock(other))
    assert world.ask(other) == Read("l.0")


@pytest.mark.parametrize("retention", ["limits", "workqueue", "interest"])
def test_a_wait_for_a_lost_bucket_begins_again_if_the_next_bucket_had_an_owner_and_is_lost(retention: str) -> None:
    world = World(retention)
    (waiting, owner) = world.up()
    world.lose_bucket()
    world.tell(waiting)
    actions(world, waiting)
    world.target = 1
    world.tell(owner)
    actions(world, owner)
    assert (waiting.machine.phase, owner.machine.phase) == (phases.GRACE, phases.GRACE)
    world.elapse(TTL + MARGIN)
    actions(world, owner)
    assert owner.machine.phase == phases.OWNED
    # This member was cut off and did not see the new lease.
    world.lose_bucket()
    actions(world, waiting)
    assert (waiting.machine.phase, owner.machine.phase) == (phases.GRACE, phases.OWNED)
    world.settle()


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


def test_a_missing_state_waits_for_the_longest_lease_of_a_consumer() -> None:
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
    # The margin is in proportion to that lease.
    assert member.machine.next(now, "n") == Wait(now + 60 + 60 * MARGIN / TTL)


@pytest.mark.parametrize("ends", ["unplanned", "fenced"])
def test_a_second_acquisition_after_a_lost_bucket_waits_again(ends: str) -> None:
    """The bucket may be lost twice, and an owner in between may not know of the loss."""
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
        # The member was frozen with an action under way.
        until(world, member, FindConsumers)
        world.elapse(2 * TTL)
        world.lose_bucket()
        world.answer(member, unknown=True)
        world.elapse(LOOK_SECONDS)
    until(world, member, FindConsumers)
    assert member.machine.phase == phases.SURVEYING


def test_a_takeover_by_the_same_owner_keeps_the_token_and_gets_a_higher_number() -> None:
    world, member = owned()
    world.pull(member)
    world.pull(member, lose=True)
    world.pull(member)
    # The partition stays owned without a consumer to pull from, and a second takeover changes nothing.
    assert (member.machine.consumer, member.machine.token) == (None, 1001)
    assert member.machine.deadline > world.server.now
    member.machine.takeover(NOTHING, world.clock(member))
    actions(world, member)
    assert world.seen[1:] == [LeaseOwned(1001, 1, 1001, Done(1, (1,)), again=True)]
    assert set(world.server.durables) == {(1001, 1)}
    assert member.queue == [1]


def test_the_highest_possible_epoch_is_refused_with_the_remedy() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    action = until(world, member, FindConsumers)
    now = world.clock(member)
    with pytest.raises(
        ValueError, match=r"partition 0: epoch 9007199254740992 is the highest possible epoch.*delete the durable"
    ):
        member.machine.apply(action, Found((Consumer(2**53, 0, "x", 0),), 1), now, now)
    # The acquisition is abandoned, and the driver may continue.
    assert member.machine.phase == phases.LOOKING
    assert member.machine.events == []


def test_a_higher_epoch_ends_a_takeover_by_the_same_owner() -> None:
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
    assert isinstance(world.ask(member), Read)  # for a new lease: no handler ran
    assert [type(event) for event in world.seen] == [LeaseOwned, LeaseLost]
    assert world.pulled == ((0, -1), "")


def test_a_revocation_during_a_takeover_follows_it() -> None:
    world, member = owned()
    member.machine.takeover(NOTHING, world.clock(member))
    member.machine.planned(False, world.clock(member))
    actions(world, member)
    assert [type(event) for event in world.seen] == [LeaseOwned, LeaseOwned, LeaseRevoked, LeaseReleased]


def test_a_consumer_name_taken_by_another_acquisition_leads_to_a_new_epoch() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    world.server.perform(CreateConsumer(1001, 0, "of another", 1))
    actions(world, member)
    assert world.seen == [LeaseOwned(1002, 0, 1002, NOTHING, again=False)]
    assert set(world.server.durables) == {(1002, 0)}


@pytest.mark.parametrize("planned", [True, False])
def test_on_a_work_queue_a_late_lower_consumer_is_deleted_before_the_next_try(planned: bool) -> None:
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


def test_on_a_work_queue_a_higher_consumer_ends_the_acquisition() -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, CreateConsumer)
    world.server.perform(CreateConsumer(5000, 0, "of another", None))
    assert actions(world, member) == [CreateConsumer, FindConsumers, Read]
    assert (member.machine.phase, world.seen) == (phases.LOOKING, [])


def test_on_a_work_queue_a_foreign_consumer_is_retried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (member.machine.phase, member.machine.obstructed) == (phases.OWNED, False)


def test_lower_consumers_of_a_listing_are_deleted_and_higher_ones_not() -> None:
    world, member = owned()
    member.machine.seen([(7, 0), (1001, 0), (1001, 1), (1002, 0)], world.clock(member))
    # A higher epoch makes the machine read the lease first.
    assert actions(world, member) == [Read, Write, DeleteConsumer]
    assert set(world.server.durables) == {(1001, 0)}


def test_a_listing_leaves_the_consumer_of_the_owner() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    assert FindConsumers in actions(world, member)
    world.elapse(TTL / 3)
    member.machine.seen(world.server.durables, world.clock(member))
    assert actions(world, member) == [Read, Write]


@pytest.mark.parametrize(("key", "phase"), [("l.0", "looking"), ("s.0", "checking")])
def test_an_invalid_record_is_refused_with_its_key_and_read_again_later(key: str, phase: str) -> None:
    world = World("limits")
    (member, _) = world.up()
    world.server.entries[key] = b'{"version":1,"member":[]}', 7, float("inf")
    world.tell(member)
    with pytest.raises(ValueError, match=f"the key '{key}' of the cohort's bucket holds"):
        actions(world, member)
    assert member.machine.phase == phase
    assert world.ask(member) == Wait(world.server.now + LOOK_SECONDS)


@pytest.mark.parametrize("empty", [b"", None])
def test_a_lease_without_a_value_can_be_acquired(empty: bytes | None) -> None:
    world = World("limits")
    (member, _) = world.up()
    world.server.entries["l.0"] = empty, 7, float("inf")
    world.tell(member)
    actions(world, member)
    assert member.machine.phase == phases.OWNED
