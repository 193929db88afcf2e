"""Owned partitions of a cohort, event by event and without a lease store."""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
import pytest

import lanes
from lanes.cohort.membership import CohortSettings
from lanes.core.cohort.actions import LeaseLost, LeaseOwned, LeaseReleased, LeaseRevoked
from lanes.core.cohort.ledger import Done
from lanes.core.types import Message, Partition, PartitionId, Settlement
from lanes.source import Assigned, Generation, Lost, Revoking
from tests.cohort.stub_cohort import StubCohort, StubPartition, stub_cohort, taken_over
from tests.fakes.cut_short import cut_short

pytestmark = pytest.mark.anyio


class Moving:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def owning(number: int = 3, **about: object) -> tuple[StubCohort[StubPartition], StubPartition]:
    """A member with one partition, whose assignment the consumer has received."""
    of = stub_cohort(**about)
    of.tell((number, taken_over(7)))
    assert of.names() == ["Generation", "Assigned"]
    return of, of.partitions.by_number[number]


def settlement(owned: StubPartition, *positions: int) -> Settlement:
    partition = owned.partition
    return Settlement(partition, [Message(partition, position, None, 1, None, position) for position in positions])


async def nothing() -> None:
    """Flush nothing."""


async def release(of: StubCohort[StubPartition], partition: Partition) -> None:
    await of.partitions.release(partition, nothing)


# --- events


async def test_a_partition_from_assignment_to_release() -> None:
    of = stub_cohort()
    assert of.partitions.next_events() == [Generation(1, standby=False)]
    of.tell((3, taken_over(7)))
    (assigned,) = of.partitions.next_events()
    assert isinstance(assigned, Assigned)
    partition = assigned.partition
    assert (partition.id, partition.epoch, partition.incarnation) == (PartitionId("S", 3), 7, "now")
    owned = of.partitions.of(partition)
    assert owned is not None
    assert (owned.announced, owned.durable) == (True, (7, 0))
    assert owned.follows(1)
    of.tell((3, taken_over(7, 1, again=True)))
    assert of.names() == []
    assert (owned.durable, owned.expected, owned.rests) == ((7, 1), 1, 2), "once for each durable"
    of.tell((3, LeaseRevoked()))
    assert of.partitions.next_events() == [Revoking(partition, 7.0)]
    assert owned.durable is None
    owned.ledger.delivered(5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(release, of, partition)
        await anyio.wait_all_tasks_blocked()
        assert (of.told(), of.stub.dones) == ([("drained", 3)], [Done(5, (5,))])
        of.tell((3, LeaseReleased()), (3, taken_over(8)))
        # The caller of the release has not received the events yet.
        assert of.names() == []
        wakes = of.wakes
    assert of.wakes > wakes, "the source is woken for the next event"
    (assigned,) = of.partitions.next_events()
    assert isinstance(assigned, Assigned)
    assert assigned.partition.epoch == 8
    assert of.partitions.of(partition) is None


@pytest.mark.parametrize("overdue", ["keep", "force"])
async def test_a_moving_partition_is_cancelled_only_with_force(overdue: str) -> None:
    settings = CohortSettings(drain_within=5.0, overdue=overdue)  # type: ignore[arg-type]
    of, owned = owning(settings=settings)
    of.tell((3, LeaseRevoked()))
    assert of.partitions.next_events() == [Revoking(owned.partition, {"keep": math.inf, "force": 5.0}[overdue])]


async def test_each_partition_may_have_its_own_source_name() -> None:
    of = stub_cohort(name="S{}".format)
    of.tell((3, taken_over(7)))
    assert of.partitions.by_number[3].partition.id == PartitionId("S3", 3)
    assert repr(of.partitions) == "<OwnedPartitions of 1 partitions of S0>"


async def test_a_reported_loss_allows_a_new_acquisition() -> None:
    of, owned = owning()
    wakes = of.wakes
    of.tell((3, LeaseLost("why")))
    assert (owned.durable, of.wakes) == (None, wakes + 1)
    of.partitions.step()
    assert of.told() == [], "the membership has not heard of it"
    assert of.partitions.next_events() == [Lost(owned.partition, "why")]
    assert of.told() == [], "the membership has not heard of it"
    for _ in range(2):
        of.partitions.step()
    assert of.told() == [("ended", 3)]
    assert owned.over.is_set()


async def test_a_deadline_that_has_passed_is_not_extended() -> None:
    of = stub_cohort()
    of.tell((1, taken_over(7)), deadline=60)
    of.tell((2, taken_over(7)), deadline=-0.001)
    before = {number: owned.partition.deadline for number, owned in of.partitions.by_number.items()}
    of.stub.deadlines = {number: of.clock() + 90 for number in (1, 2)}
    of.tell()
    raised = {number: owned.partition.deadline for number, owned in of.partitions.by_number.items()}
    assert raised[1] == of.stub.deadlines[1] > before[1]
    assert raised[2] == before[2]
    of.stub.deadlines[1] = -math.inf
    of.tell()
    assert of.partitions.by_number[1].partition.deadline == raised[1]


async def test_a_renewal_after_the_deadline_loses_the_partition_at_the_next_step() -> None:
    of = stub_cohort(clock=Moving())
    numbers = range(400)
    of.tell(*((number, taken_over(7)) for number in numbers), (400, taken_over(7)))
    of.partitions.next_events()
    for number in numbers:
        of.partitions.by_number[number].partition.deadline = of.clock()
    of.tell()
    assert of.told() == [], "the membership hears of nothing while it tells something"
    of.partitions.step()
    assert of.stub.told == [
        ("gone", number, "the deadline passed before the renewal of the lease was seen") for number in numbers
    ]
    assert of.names() == ["Lost"] * len(numbers)
    assert list(of.partitions.by_number) == [400]


async def test_an_expired_lease_is_left_to_the_membership() -> None:
    """The membership reports its loss with the reason."""
    of = stub_cohort(clock=Moving())
    of.tell((3, taken_over(7)), deadline=0.0)
    of.partitions.step()
    assert of.told() == []
    of.tell((3, LeaseLost("no answer")))
    assert of.names() == ["Generation", "Assigned", "Lost"]


async def test_a_partition_past_its_deadline_is_lost_at_the_next_step_after_the_membership_has_failed() -> None:
    """A partition that was renewed too late is given up at the next step."""
    of, owned = owning()
    owned.partition.deadline = of.clock()
    gone, of.stub.gone = of.stub.gone, lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        of.partitions.step()
    of.stub.gone = gone  # type: ignore[method-assign]
    of.partitions.step()
    assert of.names() == ["Lost"]


async def test_a_new_plan_is_reported_once() -> None:
    of = stub_cohort()
    of.tell()
    of.stub.generation, of.stub.standby = 2, True
    of.tell()
    of.tell()
    assert of.partitions.next_events() == [Generation(1, standby=False), Generation(2, standby=True)]


async def test_a_plan_is_reported_again_when_a_member_exceeds_its_target() -> None:
    of = stub_cohort()
    of.tell()
    of.stub.target_honoured = True
    of.tell()
    of.stub.under_provisioned = True
    of.tell()
    of.tell()
    assert of.partitions.next_events() == [
        Generation(1, standby=False),
        Generation(1, standby=False, target_honoured=True),
        Generation(1, standby=False, under_provisioned=True, target_honoured=True),
    ]


async def test_a_plan_is_reported_after_the_member_has_joined() -> None:
    of = stub_cohort()
    of.stub.joined = anyio.Event()
    of.stub.generation = 2
    of.tell()
    assert of.partitions.next_events() == [Generation(1, standby=False)]


async def test_a_durable_that_cannot_be_followed_is_a_failure() -> None:
    def follow(owned: StubPartition, lease: LeaseOwned) -> None:
        raise lanes.SourceError("the stream ends sooner")

    of = StubCohort(StubPartition, follow)
    of.tell((3, taken_over(7)))
    assert [str(of.partitions.failure), of.names()] == ["the stream ends sooner", ["Generation"]]
    assert of.partitions.by_number == {}


async def test_the_messages_before_the_start_of_a_cohort_do_not_count_as_read() -> None:
    of = stub_cohort(first=20)
    assert of.partitions.highest == 0
    of.tell((1, taken_over(7, done=Done(19, ()))))
    assert of.partitions.highest == 0
    of.tell((2, taken_over(7, done=Done(7, ()))))
    assert of.partitions.highest == 7


# --- deliveries, and what is done


async def test_a_missing_delivery_of_a_durable_starts_a_takeover() -> None:
    of, owned = owning()
    assert [owned.follows(delivery) for delivery in (1, 2, 4, 5)] == [True, True, False, False]
    owned.ledger.delivered(9)
    of.partitions.take_over(owned)
    assert (of.told(), of.stub.dones, owned.durable) == ([("takeover", 3)], [Done(9, (9,))], None)
    of.tell((3, taken_over(7, 1, again=True)))
    assert [owned.follows(delivery) for delivery in (1, 2)] == [True, True]


async def test_settlements_count_only_while_the_lease_holds() -> None:
    """No settlement counts after the deadline, after the loss, or for an earlier assignment."""
    clock = Moving()
    of, owned = owning(clock=clock)
    owned.ledger.delivered(5)
    owned.ledger.delivered(6)
    assert of.partitions.settled(settlement(owned, 5)) is owned
    clock.now = owned.partition.deadline
    assert of.partitions.settled(settlement(owned, 6)) is None
    assert of.partitions.leased(owned.partition) is None
    assert of.partitions.of(owned.partition) is owned
    assert owned.ledger.snapshot() == Done(6, (6,))
    of.tell((3, LeaseLost("why")), (3, taken_over(8)))
    assert of.partitions.settled(settlement(owned, 6)) is None
    again = of.partitions.by_number[3]
    assert of.partitions.leased(again.partition) is again


@pytest.mark.parametrize(("retention", "written"), [("limits", True), ("interest", True), ("workqueue", False)])
async def test_a_ledger_is_stored_after_more_settlements_than_max_in_flight(retention: str, written: bool) -> None:
    of, owned = owning(retention=retention)
    of.partitions.in_flight = 3
    for position in range(1, 9):
        owned.ledger.delivered(position)
    of.partitions.settled(settlement(owned, 2, 3, 4))
    assert of.stub.dones == []
    of.partitions.settled(settlement(owned, 5))
    of.partitions.settled(settlement(owned, 6, 7, 8))
    assert of.stub.dones == [Done(8, (1, 6, 7, 8))] * written


@pytest.mark.parametrize(("retention", "soon"), [("limits", True), ("interest", True), ("workqueue", False)])
async def test_a_ledger_is_stored_soon_after_a_settlement_above_the_floor(retention: str, soon: bool) -> None:
    of, owned = owning(retention=retention)
    of.partitions.in_flight = 100
    for position in range(1, 5):
        owned.ledger.delivered(position)
    of.partitions.settled(settlement(owned, 1))
    assert of.stub.soon == [], "the durable has the floor"
    of.partitions.settled(settlement(owned, 3))
    assert [each[:2] for each in of.stub.soon] == [(3, 2)] * soon
    for _, _, ledger in of.stub.soon:
        assert [ledger(), ledger()] == [Done(4, (2, 4)), None], "the second write has nothing new"
    assert of.stub.dones == []


# --- giving up


async def test_a_release_that_no_revocation_asked_for_makes_the_member_leave() -> None:
    of, owned = owning()
    await cut_short(release, of, owned.partition)
    assert of.told() == [("stop", -1), ("drained", 3)]
    of.tell((3, LeaseRevoked()))
    assert of.names() == [], "the partition is already being given up"


async def test_a_release_sends_the_acknowledgements_first_and_gives_the_lease_up_even_after_an_error() -> None:
    of, owned = owning()

    async def flush() -> None:
        assert (of.told(), owned.durable) == ([("stop", -1)], None)
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await of.partitions.release(owned.partition, flush)
    assert of.told() == [("stop", -1), ("drained", 3)]
    of.tell((3, LeaseReleased()), (3, taken_over(8)))
    assert of.names() == ["Assigned"]


async def test_a_cancelled_release_gives_the_lease_up_too() -> None:
    of, owned = owning()
    of.tell((3, LeaseRevoked()))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(of.partitions.release, owned.partition, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        assert of.told() == []
        tasks.cancel_scope.cancel()
    assert of.told() == [("drained", 3)]


async def test_a_release_with_a_running_handler_leaves_the_lease_to_expire() -> None:
    of, owned = owning()
    owned.partition.unended = 1
    await release(of, owned.partition)
    assert of.told() == [("stop", -1), ("drained, and it runs", 3)]


async def test_a_release_whose_revocation_was_not_reported_succeeds() -> None:
    of, owned = owning()
    of.tell((3, LeaseRevoked()))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(release, of, owned.partition)
        await anyio.wait_all_tasks_blocked()
        assert of.told() == [("drained", 3)]
        of.tell((3, LeaseReleased()))
    assert owned.over.is_set()


async def test_a_release_of_a_partition_whose_loss_was_not_reported_fails() -> None:
    of, owned = owning()
    partition = owned.partition
    of.tell((3, LeaseLost("why")), (3, taken_over(8)))
    with pytest.raises(lanes.SourceError, match="S/3 was lost before it was released"):
        await release(of, partition)
    of.partitions.next_events()
    await release(of, partition)
    assert of.told() == []


async def test_a_loss_during_a_release_fails_the_release_and_is_reported_after_it() -> None:
    of, owned = owning()

    async def expect_loss() -> None:
        with pytest.raises(lanes.SourceError, match="S/3 was lost before it was released"):
            await release(of, owned.partition)

    async with anyio.create_task_group() as tasks:
        for _ in range(2):  # Two concurrent calls are one release.
            tasks.start_soon(expect_loss)
        await anyio.wait_all_tasks_blocked()
        of.tell((3, LeaseLost("why")))
        assert of.names() == []
    assert of.partitions.next_events() == [Lost(owned.partition, "why")]


async def test_a_leaving_member_gives_up_idle_partitions() -> None:
    of, owned = owning()
    owned.ledger.delivered(5)
    owned.ledger.settled(5)
    # The outstanding messages of this partition belong to earlier owners, and none was delivered here.
    of.tell((4, taken_over(8, done=Done(9, (7,)))))
    assert of.partitions.leave()
    assert of.told() == [("drained", 3), ("drained", 4)]
    assert [owned.durable for owned in of.partitions.by_number.values()] == [None, None]
    assert of.partitions.leave()
    assert len(of.told()) == 2


async def test_a_leaving_member_with_unfinished_messages_does_not_leave_in_order() -> None:
    of, owned = owning()
    owned.ledger.delivered(5)
    assert not of.partitions.leave()
    assert of.told() == []


async def test_unread_losses_do_not_keep_a_member_from_leaving() -> None:
    """Four losses: a reported loss, an unreported loss, a loss that the leave finds, and a loss by the give-up."""
    of = stub_cohort()
    of.tell(*((number, taken_over(7)) for number in (1, 2, 3, 4)))
    of.partitions.next_events()
    of.tell((1, LeaseLost("why")))
    of.partitions.next_events()
    of.tell((2, LeaseLost("why")))
    of.partitions.by_number[3].partition.deadline = of.clock()
    of.stub.drained = of.stub.gone  # type: ignore[assignment,method-assign]
    assert of.partitions.leave()
    ended = [("ended", number) for number in (1, 2, 3, 4)]
    assert of.told() == [("gone", 3), *ended[:3], ("gone", 4), ended[3]]
    assert of.names() == []


async def test_a_call_for_a_former_ownership_does_not_give_the_new_ownership_up() -> None:
    of, former = owning()
    of.tell((3, LeaseLost("why")))
    of.names()
    of.partitions.step()
    of.tell((3, taken_over(8)))
    told = of.told()
    of.partitions.lose(former, "its durable was deleted")
    of.partitions.take_over(former)
    assert of.told() == told == [("ended", 3)]
