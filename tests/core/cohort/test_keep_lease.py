"""An owner renews its lease in time, detects its loss, and hands it over after a drain. ``test_faults`` has the orders
of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lanes.core.cohort import phases
from lanes.core.cohort.actions import (
    LeaseLost,
    LeaseOwned,
    LeaseReleased,
    LeaseRevoked,
    Read,
    Refused,
    Wait,
    Write,
)
from lanes.core.cohort.lease_machine import LOOK_SECONDS, IllegalInput, LeaseMachine
from lanes.core.cohort.ledger import NOTHING, Done
from lanes.core.cohort.records import Lease, State, decode, encode
from tests.core.cohort.world import MARGIN, TTL, actions, owned, until


def test_a_lease_is_renewed_after_a_third_of_it_also_while_draining() -> None:
    world, member = owned()
    assert world.ask(member) == Wait(world.server.now + TTL / 3)
    for draining in (False, True):
        if draining:
            world.pull(member)
            world.start(member)
            world.target = 1
            world.tell(member)
        world.elapse(TTL / 3)
        assert actions(world, member)[:2] == [Read, Write]
        assert member.machine.deadline == world.server.now + TTL - MARGIN
    assert member.machine.phase == phases.DRAINING


def test_the_deadline_counts_from_the_send_of_a_renewal() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    until(world, member, Write)
    sent = world.server.now
    world.elapse(1)
    world.serve(member)
    world.elapse(1)
    world.answer(member)
    assert member.machine.deadline == sent + TTL - MARGIN


def test_a_renewal_without_an_answer_is_read_back_and_is_no_loss() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    until(world, member, Write)
    sent = world.server.now
    world.serve(member)
    world.answer(member, unknown=True)
    assert world.ask(member) == Wait(sent + LOOK_SECONDS)
    world.elapse(LOOK_SECONDS)
    world.act(member)  # the member reads the lease
    assert member.machine.deadline == sent + TTL - MARGIN
    actions(world, member)
    assert member.machine.deadline == world.server.now + TTL - MARGIN
    assert LeaseLost not in map(type, world.seen)


def test_a_pause_postpones_a_due_renewal() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    world.ask(member)
    world.answer(member, unknown=True)
    assert world.ask(member) == Wait(world.server.now + LOOK_SECONDS)


def test_a_deadline_that_passes_during_an_action_is_a_loss() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    action = world.ask(member)
    world.elapse(TTL)
    member.machine.expire(world.clock(member))
    assert member.machine.events == [LeaseLost("the lease was not renewed in time")]
    assert (member.machine.deadline, member.machine.token, member.machine.consumer) == (-float("inf"), None, None)
    # The result of the action no longer matters.
    member.machine.apply(action, (None, 5), world.clock(member), world.clock(member))
    assert member.machine.phase == phases.FENCED
    assert member.machine.next(world.clock(member), "n") == Wait(float("inf"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [(None, "the lease is gone"), (encode(Lease("member-1", "n")), "the lease is held by 'member-1'"), (b"", "gone")],
)
def test_a_renewal_that_reads_another_nonce_or_nothing_is_a_loss(value: bytes | None, reason: str) -> None:
    world, member = owned()
    world.clean = False
    world.elapse(TTL / 3)
    action = world.ask(member)
    world.members[0] = None
    member.asked = None
    member.machine.apply(action, (value, 99), world.clock(member), world.clock(member))
    (lost,) = member.machine.events
    assert isinstance(lost, LeaseLost)
    assert reason in lost.reason


def test_a_clean_move_hands_over_the_whole_ledger() -> None:
    world, member = owned()
    for _ in range(3):
        world.pull(member)
    world.start(member)
    world.start(member)
    world.finish(member, 1)
    world.target = 1
    for one in world.up():
        world.tell(one)
    actions(world, member)
    assert member.machine.phase == phases.DRAINING  # 1 still runs
    world.finish(member)
    assert member.machine.deadline == -float("inf")
    actions(world, member)
    assert member.machine.idle
    _, other = world.up()
    world.elapse(LOOK_SECONDS)
    actions(world, other)
    assert world.seen[1:] == [LeaseRevoked(), LeaseReleased(), LeaseOwned(1002, 0, 1002, Done(3, (3,)), again=False)]


def test_a_forced_handover_with_running_handlers_writes_the_ledger_and_lets_the_lease_expire() -> None:
    world, member = owned()
    for _ in range(2):
        world.pull(member)
        world.start(member)
    world.finish(member, 1)
    world.target = 1
    for one in world.up():
        world.tell(one)
    actions(world, member)
    expires = world.server.now + TTL - MARGIN
    (sequence,) = member.running
    member.zombies, member.running = member.running, []
    member.machine.drained(member.ledger.snapshot(), world.clock(member), ended=False)
    assert [action.__name__ for action in actions(world, member)] == ["Write"]
    state = decode(State, "s.0", world.server.entries["s.0"][0] or b"")
    assert (state.done.highest, state.done.outstanding) == (2, (sequence,))
    # The lease is neither renewed nor released, so no member acquires the lease before its expiry.
    assert world.ask(member) == Wait(expires)
    _, other = world.up()
    actions(world, other)
    assert other.machine.phase == phases.LOOKING
    world.elapse(TTL - MARGIN)
    actions(world, member)
    assert (member.machine.idle, world.seen[1:]) == (True, [LeaseRevoked(), LeaseReleased()])
    actions(world, other)
    assert other.machine.phase == phases.LOOKING


def test_a_plan_that_changes_back_does_not_stop_a_handover() -> None:
    world, member = owned()
    member.machine.planned(False, world.clock(member))
    member.machine.planned(True, world.clock(member))
    world.react(member)
    actions(world, member)
    assert [type(event) for event in world.seen] == [LeaseOwned, LeaseRevoked, LeaseReleased, LeaseOwned]


def test_the_newest_checkpoint_is_stored_under_the_fence_of_its_lease() -> None:
    world, member = owned()
    for done in (Done(3, (1,)), Done(4, (1,))):
        member.machine.checkpoint(done, world.clock(member))
    revision = world.server.entries["l.0"][1]
    assert world.act(member) == Write("s.0", encode(State(1001, Done(4, (1,)))), None, fence=("l.0", revision))
    assert world.act(member) is None


def test_a_refused_checkpoint_leads_to_a_renewal() -> None:
    world, member = owned()
    member.machine.checkpoint(Done(3, (1,)), world.clock(member))
    action = until(world, member, Write)
    member.asked = None
    member.machine.apply(action, Refused, world.clock(member), world.clock(member))
    assert actions(world, member)[:3] == [Read, Write, Write]


def test_a_missing_consumer_is_a_loss_unless_the_report_is_old() -> None:
    world, member = owned()
    world.clean = False
    member.machine.takeover(NOTHING, world.clock(member))
    member.machine.gone("503", world.clock(member))
    assert member.machine.events == []
    actions(world, member)
    member.machine.gone("503", world.clock(member))
    assert member.machine.events == [LeaseLost("503")]


def test_a_lost_partition_is_acquired_again_only_after_its_handlers_ended() -> None:
    world, member = owned()
    world.clean = False
    world.pull(member)
    world.start(member)
    member.machine.gone("503", world.clock(member))
    world.react(member)
    assert (world.act(member), member.machine.phase) == (None, phases.FENCED)
    member.machine.drained(NOTHING, world.clock(member))  # the report of the drain was under way at the loss
    world.finish(member)
    assert world.act(member) == Read("l.0")


def test_no_partition_is_acquired_after_stop() -> None:
    world, member = owned()
    member.machine.stop(world.clock(member))
    world.react(member)
    actions(world, member)
    member.machine.planned(True, world.clock(member))
    assert member.machine.idle
    assert member.machine.next(world.clock(member), "n") == Wait(float("inf"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda machine: machine.drained(NOTHING, 1000.0), "cohort partition 0: 'drained' is not allowed while owned"),
        (lambda machine: machine.ended(1000.0), "cohort partition 0: 'ended' is not allowed while owned"),
        (lambda machine: machine.apply(Read("x"), None, 1000.0, 1000.0), "a result of Read(key='x') is not allowed"),
    ],
)
def test_an_illegal_input_is_refused_with_phase_and_input(call: Callable[[LeaseMachine], None], said: str) -> None:
    _, member = owned()
    with pytest.raises(IllegalInput) as refused:
        call(member.machine)
    assert said in str(refused.value)


def test_the_next_action_is_refused_before_the_result_of_the_last_one() -> None:
    world, member = owned()
    world.elapse(TTL / 3)
    world.ask(member)
    with pytest.raises(IllegalInput, match="'next' is not allowed while owned and Read"):
        member.machine.next(world.clock(member), "n")


def test_an_invalid_record_under_a_lease_is_a_loss() -> None:
    world, member = owned()
    world.clean = False
    world.elapse(TTL / 3)
    world.server.entries["l.0"] = b"[]", 7, float("inf")
    with pytest.raises(ValueError, match="not an object"):
        actions(world, member)
    assert [type(event) for event in member.machine.events] == [LeaseLost]


@pytest.mark.parametrize(
    ("retention", "margin", "said"),
    [
        ("forever", 2.0, "retention='forever': use"),
        ("limits", 0.0, "margin=0.0: use"),
        ("limits", 5.0, "margin=5.0: use"),
    ],
)
def test_invalid_settings_are_refused(retention: str, margin: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LeaseMachine(0, "a", retention=retention, ttl=TTL, margin=margin)
