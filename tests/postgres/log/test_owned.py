"""One ownership: when its turn is over, and how its loss and the renewals of its lock are noticed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from lanes import PartitionId, SourceError
from lanes.clock import monotonic
from lanes.core.types import Partition, Room
from lanes.ownership import HeldLock, State, StateKey
from lanes.source import Assigned, Lost, Progressed, Revoking
from lanes_postgres.log.reading import READER, StoredMessage
from lanes_postgres.subscription.owned import Owned
from lanes_postgres.subscription.visitor import Visitor

ID = PartitionId("orders", 0)


def owned(completed: Sequence[tuple[int, int]], number: int = 0, held: Any = None) -> Owned:
    partition = Partition(ID, READER, "i", floor=11, completed=list(completed))
    return Owned(
        number=number,
        partition=partition,
        held=held,
        key=StateKey("billing", ID, "i"),
        epoch=1,
        floor=11,
        read=11,
        since=0.0,
        end=20,
    )


@pytest.mark.parametrize(
    ("floor", "completed", "got_on"),
    [
        (11, [(12, 14), (14, 17)], False),  # the same positions, in runs that touch
        (11, [(12, 14)], False),  # a part of them, while the rest is not stored again yet
        (11, [(12, 17)], False),
        (11, [(12, 18)], True),
        (17, [], True),
    ],
)
def test_a_turn_goes_on_until_a_message_is_finished_that_was_not(
    floor: int, completed: list[tuple[int, int]], got_on: bool
) -> None:
    one = owned([(12, 17)])
    one.stored(State(1, floor, completed))
    assert one.got_on() == got_on


@pytest.mark.parametrize("floor", [0, None])
def test_the_first_message_of_a_partition_counts_as_settled(floor: int | None) -> None:
    one = owned([])
    one.partition.floor, one.floor = floor, 0
    one.stored(State(1, 0, []))
    assert not one.settled
    one.stored(State(1, 1, []))
    assert (one.settled, one.floor) == (True, 1)


def test_a_loss_takes_back_an_assignment_that_was_not_told() -> None:
    """After a freeze, the next owner may have a higher epoch already."""
    lost, other = owned([]).partition, owned([]).partition
    visitor = Visitor.__new__(Visitor)
    visitor._events = [Assigned(other), Assigned(lost), Progressed(lost, 12), Revoking(lost, 1.0)]
    assert visitor._forget_assigned(lost)
    assert visitor._events == [Assigned(other)]
    visitor._events = [Revoking(lost, 1.0), Lost(other, "why")]
    assert not visitor._forget_assigned(lost)
    assert visitor._events == [Revoking(lost, 1.0), Lost(other, "why")]


@pytest.mark.parametrize(
    ("room", "taken", "size"),
    [
        (Room(2, 1_000), [11, 12], 20),
        (Room(9, 1_000), [11, 12, 13, 14], 40),
        (Room(9, 21), [11, 12, 13], 30),  # the last message may exceed the bytes
        (Room(9, 20), [11, 12], 20),
        (Room(9, 1), [11], 10),
        (Room(9, 0), [], 0),
        (Room(0, 1_000), [], 0),
    ],
)
def test_messages_are_taken_for_the_space_of_the_consumer(room: Room, taken: list[int], size: int) -> None:
    one = owned([])
    one.waiting.extend(StoredMessage(position, b"key", "s", "{}", b"value", 0.0) for position in range(11, 15))
    delivered = one.take(room)
    assert [message.position for message in one.waiting] == [*range(11 + len(taken), 15)]
    if not taken:
        assert delivered is None
        return
    assert delivered is not None
    assert ([message.position for message in delivered.run], delivered.size) == (taken, size)
    first = delivered.run[0]
    raw: Any = first.raw
    assert (first.partition, first.key, first.size, raw.value) == (one.partition, b"key", 10, b"value")


def test_a_resting_ownership_reads_its_waiting_messages_again() -> None:
    one = owned([])
    one.read = 15
    one.rest()
    assert one.read == 15, "no message waits"
    one.waiting.extend(StoredMessage(position, b"key", "s", None, b"", 0.0) for position in (13, 14))
    one.rest()
    assert (one.read, list(one.waiting)) == (13, [])


@pytest.mark.parametrize(("deadline", "now", "renewed"), [(110.0, 99.0, 110.0), (90.0, 99.0, 100.0)])
def test_a_deadline_only_rises(deadline: float, now: float, renewed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_postgres.subscription.owned.monotonic", lambda: now)
    one = owned([], held=HeldLock("0", lambda: None, free, deadline=deadline))
    one.partition.deadline = 100.0
    assert one.lost() == ""
    assert one.partition.deadline == renewed


def test_a_deadline_that_has_passed_is_a_loss_in_spite_of_a_later_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_postgres.subscription.owned.monotonic", lambda: 100.0)
    one = owned([], held=HeldLock("0", lambda: None, free, deadline=200.0))
    one.partition.deadline = 100.0
    assert one.lost() == "its lock was not renewed in time"
    assert one.partition.deadline == 100.0


async def free(held: HeldLock) -> None:
    """Free nothing."""


@pytest.mark.anyio
async def test_a_renewal_looks_at_its_own_partition_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each heartbeat renews the locks of all partitions, one after the other."""
    visitor = Visitor.__new__(Visitor)
    visitor.owned, visitor._events, visitor._earliest, visitor.wake = {}, [], math.inf, lambda: None
    until = monotonic() + 600.0
    locks = [HeldLock(str(number), partial(visitor.lock_changed, number), free, deadline=until) for number in range(9)]
    for number, held in enumerate(locks):
        visitor.own(owned([], number, held))
        visitor.owned[number].partition.deadline = until
    looked = []
    lost = Owned.lost

    def counted(self: Owned) -> str:
        looked.append(self.number)
        return lost(self)

    monkeypatch.setattr(Owned, "lost", counted)
    for held in locks:
        held.renewed(until + 3.0)
        visitor.check_owned()
    assert looked == list(range(9))
    assert {each.partition.deadline for each in visitor.owned.values()} == {until + 3.0}


@pytest.mark.anyio
async def test_a_passed_deadline_is_a_loss_without_a_change_of_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    visitor = Visitor.__new__(Visitor)
    visitor.owned, visitor._events, visitor._earliest = {}, [], math.inf
    gone = []
    monkeypatch.setattr(Visitor, "lose", lambda self, owned, reason: gone.append((owned.number, reason)))
    now = 100.0
    monkeypatch.setattr("lanes_postgres.subscription.visitor.monotonic", lambda: now)
    monkeypatch.setattr("lanes_postgres.subscription.owned.monotonic", lambda: now)
    for number in range(3):
        one = owned([], number, HeldLock(str(number), lambda: None, free, deadline=110.0 + number))
        one.partition.deadline = 110.0 + number
        visitor.own(one)
    visitor.check_owned()
    assert gone == []
    now = 110.0
    visitor.check_owned()
    assert gone == [(0, "its lock was not renewed in time")]
    del visitor.owned[0]
    now = 111.5
    visitor.check_owned()
    assert [number for number, _ in gone] == [0, 1]


@pytest.mark.anyio
async def test_a_release_that_fails_leaves_no_partition_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition left behind would have no owner: this member would skip the partition, but count it as owned."""
    visitor = Visitor.__new__(Visitor)
    visitor.owned, visitor._events, visitor._earliest = {}, [], math.inf
    released = []
    monkeypatch.setattr(Visitor, "_released", lambda self, owned: released.append(owned))

    async def broken(held: HeldLock) -> None:
        raise SourceError("no answer", retryable=True)

    one = owned([], 0, HeldLock("0", lambda: None, broken))
    visitor.own(one)
    with pytest.raises(SourceError):
        await visitor.release(one)
    assert visitor.owned == {} and released == [one]
