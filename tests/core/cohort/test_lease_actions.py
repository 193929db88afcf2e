"""The actions of a lease machine have exact values: keys, compared revisions, fences, lifetimes and consumers."""

from __future__ import annotations

import pytest

from lanes.core.cohort import phases
from lanes.core.cohort.actions import (
    Action,
    Consumer,
    CreateConsumer,
    DeleteConsumer,
    FindConsumers,
    Found,
    LeaseLost,
    Overlapping,
    Read,
    Refused,
    Unknown,
    Wait,
    Write,
)
from lanes.core.cohort.lease_machine import LOOK_SECONDS, LeaseMachine
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.records import Lease, State, decode, encode
from tests.core.cohort.world import MARGIN, TTL, Member, World, actions, owned, until

PAST = -float("inf")


def values(world: World, member: Member) -> list[Action]:
    """The actions of a member until it needs an input."""
    done = []
    while (action := world.act(member)) is not None:
        done.append(action)
    return done


def lease(world: World) -> tuple[str, int]:
    """Nonce and revision of the present lease."""
    value, revision, _ = world.server.entries["l.0"]
    return decode(Lease, "l.0", value or b"").nonce, revision


def revoked() -> tuple[World, Member]:
    """A world whose first member has drained the partition."""
    world, member = owned()
    world.target = 1
    world.tell(member)
    assert member.machine.phase == phases.SAVING
    return world, member


def test_a_new_lease_machine_is_idle_and_waits() -> None:
    machine = LeaseMachine(3, "m", retention="limits", ttl=TTL, margin=MARGIN)
    assert (machine.partition, machine.member, machine.phase, machine.events) == (3, "m", phases.IDLE, [])
    assert (machine.deadline, machine.token, machine.consumer, machine.idle) == (PAST, None, None, True)
    assert (machine.obstructed, machine.outlasting) == (False, 0.0)
    assert machine.next(0.0, "n") == Wait(float("inf"))


def test_a_margin_of_almost_half_a_lease_is_allowed() -> None:
    machine = LeaseMachine(3, "m", retention="limits", ttl=10.0, margin=4.9)
    assert machine.phase == phases.IDLE


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_an_acquisition_stores_and_requests_exactly_the_expected_values(retention: str) -> None:
    world = World(retention)
    world.server.perform(Write("s.0", encode(State(7, Done(4, ()))), None))
    (member, _) = world.up()
    world.tell(member)
    sent = values(world, member)
    nonce, revision = lease(world)
    done = State(1001, Done(4, ()))
    assert member.machine.deadline == world.server.now + TTL - MARGIN
    create = CreateConsumer(1001, 0, nonce, 5 if retention == "limits" else None)
    delete = DeleteConsumer(0, 0)
    renewal = [Read("l.0"), Write("l.0", encode(Lease("member-0", nonce, 1001)), revision - 2, TTL)]
    assert sent == [
        Read("l.0"),
        Read("s.0"),
        Write("l.0", encode(Lease("member-0", nonce)), 0, TTL),
        Read("s.0"),
        FindConsumers(),
        Write("s.0", encode(done), None, fence=("l.0", revision - 2)),
        *([create, *renewal, delete] if retention == "limits" else [delete, create, *renewal]),
    ]
    assert (member.machine.obstructed, member.machine.outlasting) == (False, 0.0)


def test_no_handler_may_start_before_the_end_of_the_acquisition() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    for kind in (Write, CreateConsumer, DeleteConsumer):
        until(world, member, kind)
        assert (member.machine.deadline, member.machine.token, member.machine.consumer) == (PAST, None, None)
        world.serve(member)
        world.answer(member)
    actions(world, member)
    assert member.machine.deadline > PAST


def test_a_listing_without_longer_leases_adds_no_wait() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.lose_bucket()
    world.tell(member)
    action = until(world, member, FindConsumers)
    assert action == FindConsumers(marked=False)
    now = world.clock(member)
    member.machine.apply(action, Found((Consumer(3, 0, "n", 0, 5),), 900), now, now)
    assert member.machine.outlasting == 0.0
    member.asked = None
    assert world.ask(member) == Wait(now + TTL + MARGIN)


def test_a_longer_lease_is_forgotten_after_the_acquisition() -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.lose_bucket()
    world.tell(member)
    action = until(world, member, FindConsumers)
    assert action == FindConsumers(marked=True)
    now = world.clock(member)
    found = world.server.perform(action)
    member.machine.apply(action, Found(found.consumers, 900, lease=40), now, now)
    member.asked = None
    assert member.machine.outlasting == 40
    assert world.ask(member) == Wait(now + 40 + 4 * MARGIN)
    world.elapse(40 + 4 * MARGIN)
    actions(world, member)
    assert (member.machine.phase, member.machine.outlasting) == (phases.OWNED, 0.0)


@pytest.mark.parametrize("answered", [True, False])
def test_an_acquisition_that_is_read_back_too_late_is_given_up(answered: bool) -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, Write)
    world.serve(member)
    world.answer(member, unknown=True)
    world.elapse(LOOK_SECONDS)
    assert world.ask(member) == Read("l.0")
    assert member.machine.phase == phases.CONFIRMING
    world.serve(member)
    world.elapse(TTL - MARGIN - LOOK_SECONDS)
    world.answer(member, unknown=not answered)
    assert (member.machine.phase, member.machine.token) == (phases.LOOKING, None)


def test_a_handover_stores_exactly_the_expected_values() -> None:
    world, member = revoked()
    nonce, revision = lease(world)
    released = Lease("member-0", nonce, 1001, released=True)
    assert values(world, member) == [
        Write("s.0", encode(State(1001, NOTHING)), None, fence=("l.0", revision)),
        Read("l.0"),
        Write("l.0", encode(released), revision, TTL),
    ]
    assert member.machine.idle


@pytest.mark.parametrize("result", [Unknown, Refused])
def test_a_release_without_success_reads_the_lease_again(result: object) -> None:
    world, member = revoked()
    until(world, member, Write, "s.0")
    world.serve(member)
    world.answer(member)
    action = until(world, member, Write, "l.0")
    now = world.clock(member)
    member.asked = member.served = None
    member.machine.apply(action, result, now, now)
    assert member.machine.phase == phases.RELEASING
    world.clean = False
    world.elapse(LOOK_SECONDS)
    assert values(world, member)[0] == Read("l.0")
    assert member.machine.idle


def test_a_lease_of_another_acquisition_is_not_released() -> None:
    world, member = revoked()
    action = until(world, member, Read, "l.0")
    now = world.clock(member)
    member.asked = None
    member.machine.apply(action, (encode(Lease("member-1", "another")), 99), now, now)
    world.react(member)
    assert member.machine.idle
    assert values(world, member) == []


def test_a_checkpoint_counts_only_while_the_partition_is_owned() -> None:
    world = World("limits")
    (member, _) = world.up()
    member.machine.checkpoint(Done(3, ()), world.clock(member))
    world.tell(member)
    until(world, member, Write, "s.0")
    member.machine.checkpoint(Done(3, ()), world.clock(member))
    world.serve(member)
    world.answer(member)
    assert Write not in [type(each) for each in values(world, member) if getattr(each, "key", "") == "s.0"]
    world.target = 1
    world.tell(member)
    member.machine.checkpoint(Done(3, ()), world.clock(member))
    actions(world, member)
    assert decode(State, "s.0", world.server.entries["s.0"][0] or b"").done == NOTHING
    assert member.machine.idle


@pytest.mark.parametrize("event", ["gone", "seen", "takeover", "planned"])
def test_an_event_after_the_deadline_reports_the_deadline(event: str) -> None:
    world, member = owned()
    world.elapse(TTL)
    machine, now = member.machine, world.clock(member)
    calls = {
        "gone": lambda: machine.gone("503", now),
        "seen": lambda: machine.seen([], now),
        "takeover": lambda: machine.takeover(NOTHING, now),
        "planned": lambda: machine.planned(False, now),
    }
    calls[event]()
    assert machine.events == [LeaseLost("the lease was not renewed in time")]


def test_the_consumer_of_the_member_itself_ends_no_acquisition_on_a_work_queue() -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    action = until(world, member, CreateConsumer)
    assert isinstance(action, CreateConsumer)
    now = world.clock(member)
    member.asked = None
    member.machine.apply(action, Overlapping, now, now)
    find = world.ask(member)
    assert find == FindConsumers()
    member.asked = None
    member.machine.apply(find, Found((Consumer(1001, 0, action.nonce, 0),), 900), now, now)
    assert (member.machine.phase, member.machine.obstructed) == (phases.CLEARING, False)
    assert world.ask(member) == Wait(now + LOOK_SECONDS)


def test_a_listing_is_requested_after_each_renewal_without_one() -> None:
    world, member = owned()
    for _ in range(3):
        world.elapse(TTL / 3)
        assert actions(world, member) == [Read, Write, FindConsumers]
    world.elapse(TTL / 6)
    member.machine.seen([(1001, 0)], world.clock(member))
    for expected in ([Read, Write], [Read, Write, FindConsumers]):
        world.elapse(TTL / 3)
        assert actions(world, member) == expected


def test_a_refused_renewal_compares_with_the_revision_that_it_reads() -> None:
    world, member = owned()
    nonce, _ = lease(world)
    world.elapse(TTL / 3)
    until(world, member, Write)
    # A late write of this acquisition changes the revision.
    value, _, expires = world.server.entries["l.0"]
    world.server.entries["l.0"] = value, 77, expires
    world.server.revision = 77
    world.serve(member)
    world.answer(member)
    assert values(world, member)[:2] == [Read("l.0"), Write("l.0", encode(Lease("member-0", nonce, 1001)), 77, TTL)]


def test_a_takeover_by_the_same_owner_performs_exactly_the_expected_actions() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    until(world, member, FindConsumers)  # the renewal found no listing, so one is due
    world.serve(member)
    world.answer(member)
    world.elapse(TTL / 3)
    until(world, member, Write)
    world.serve(member)
    world.answer(member)
    member.machine.takeover(NOTHING, world.clock(member))
    assert actions(world, member) == [Read, FindConsumers, Write, CreateConsumer, Read, Write, DeleteConsumer]
    assert member.machine.consumer == (1001, 1)


def test_a_result_after_the_deadline_is_a_loss() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    action = until(world, member, Write)
    world.serve(member)
    assert member.served is not None
    (result,) = member.served
    world.elapse(TTL)
    now = world.clock(member)
    member.machine.apply(action, result, now, now - TTL)
    assert member.machine.events == [LeaseLost("the lease was not renewed in time")]
    assert member.machine.phase == phases.FENCED


def test_a_loss_by_an_invalid_record_shows_the_record() -> None:
    world, member = owned()
    world.clean = False
    world.elapse(TTL / 3)
    world.server.entries["l.0"] = b"[]", 7, float("inf")
    with pytest.raises(ValueError, match="not an object"):
        actions(world, member)
    (lost,) = member.machine.events
    assert isinstance(lost, LeaseLost)
    assert "the key 'l.0' of the cohort's bucket holds b'[]': not an object" in lost.reason


def test_a_bucket_that_is_lost_while_another_member_holds_the_lease_is_waited_for() -> None:
    world, _ = owned()
    other = world.members[1]
    assert other is not None
    world.target = 1
    world.tell(other)
    assert actions(world, other) == [Read]
    world.lose_bucket()
    world.elapse(LOOK_SECONDS)
    assert actions(world, other) == [Read, Read, FindConsumers]
    assert other.machine.phase == phases.GRACE


def test_an_acquisition_that_is_read_back_is_fenced_by_the_revision_that_it_reads() -> None:
    world = World("limits")
    (member, _) = world.up()
    world.tell(member)
    until(world, member, Write)
    world.serve(member)
    world.answer(member, unknown=True)
    world.elapse(LOOK_SECONDS)
    _, revision = lease(world)
    (state,) = [each for each in values(world, member) if isinstance(each, Write) and each.key == "s.0"]
    assert state.fence == ("l.0", revision)


def test_a_foreign_consumer_of_a_work_queue_is_an_obstacle_until_the_acquisition() -> None:
    world = World("workqueue")
    (member, _) = world.up()
    world.tell(member)
    for consumers in ((), (Consumer(1001, 0, "n", 0),)):
        action = until(world, member, CreateConsumer)
        now = world.clock(member)
        member.asked = None
        member.machine.apply(action, Overlapping, now, now)
        find = world.ask(member)
        member.asked = None
        member.machine.apply(find, Found(consumers, 900), now, now)
        assert member.machine.obstructed
        world.elapse(LOOK_SECONDS)
    actions(world, member)
    assert (member.machine.phase, member.machine.obstructed) == (phases.OWNED, False)


@pytest.mark.parametrize("result", [Unknown, Refused])
def test_a_ledger_that_could_not_be_written_is_not_handed_over(result: object) -> None:
    world, member = revoked()
    action = until(world, member, Write, "s.0")
    now = world.clock(member)
    member.asked = None
    member.machine.apply(action, result, now, now)
    assert member.machine.phase == phases.SAVING
    world.clean = False
    world.elapse(LOOK_SECONDS)
    assert actions(world, member) == [Read, Write, Write, Read, Write]
    assert member.machine.idle
