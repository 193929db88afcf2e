"""``GroupSource`` keeps the contract of a source that commits, and the contract suite finds sources that do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import anyio
import pytest

from lanes.core.types import Partition, Room, Settlement
from lanes.errors import ConfigError, ContractError, SourceError
from lanes.source import Assigned, Delivered, Exhausted, Lost, Progressed, Revoking, Source, SourceEvent
from memsource import Group, GroupSource
from memsource.contract.source import Ability, Check, ContractBroken, Sample, checks
from memsource.memory.group import Committed
from tests.fakes.cut_short import cut_short
from tests.memsource.contract.delegate import Delegate, name_of

ABILITIES: Final[tuple[Ability, ...]] = ("revoke", "lose", "finish", "commits", "hands over")
POSITIONS_ALONE: Final[tuple[Ability, ...]] = ("revoke", "lose", "finish", "commits")
ROOM: Final = Room(100, 1 << 20)


class GroupHarness:
    """A group with one member at a time."""

    # Every event arrives within a few turns of the loop.
    patience = 0.005
    ack_wait = 0.0

    def __init__(
        self,
        partitions: int = 1,
        wrap: Callable[[GroupSource], Source] | None = None,
        *,
        cooperative: bool = False,
        can: Collection[Ability] = ABILITIES,
    ) -> None:
        self.can = can
        self.group = Group(partitions, cooperative=cooperative)
        self._wrap = wrap
        self._members = 0
        self._newest: GroupSource

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            record = self.group.publish(sample.value, key=sample.key, headers=sample.headers)
            # Positions have gaps, at the end too, so no check may expect consecutive positions.
            self.group.skip(record.position % 3, partition=record.partition)

    def source(self) -> Source:
        self._members += 1
        self._newest = GroupSource(self.group, f"m-{self._members}", hands_over="hands over" in self.can)
        return self._newest if self._wrap is None else self._wrap(self._newest)

    async def unsettled(self) -> int:
        return self.group.unfinished

    async def elapse(self, seconds: float) -> None:
        raise NotImplementedError("a group knows no time")

    async def revoke(self, partition: Partition) -> None:
        self.group.revoke(partition.id.number)

    async def lose(self, partition: Partition) -> None:
        self.group.lose(self._newest.member, partition.id.number)

    async def finish(self) -> None:
        self._newest.finish()


@pytest.mark.anyio
@pytest.mark.parametrize("cooperative", [False, True], ids=["eager", "cooperative"])
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("check", checks(ABILITIES), ids=name_of)
async def test_the_group_source_keeps_the_contract(check: Check, partitions: int, cooperative: bool) -> None:
    await check(GroupHarness(partitions, cooperative=cooperative))


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("check", checks(POSITIONS_ALONE), ids=name_of)
async def test_a_source_that_hands_nothing_over_keeps_the_contract(check: Check, partitions: int) -> None:
    await check(GroupHarness(partitions, can=POSITIONS_ALONE))


Broken = Delegate[GroupSource]


class AssignsWithoutAFloor(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        for event in events:
            if isinstance(event, Assigned):
                event.partition.floor = None
        return events


class StartsOneTooHigh(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        for event in events:
            if isinstance(event, Assigned) and event.partition.floor:
                event.partition.floor += 1
        return events


class StartsAtTheBeginning(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self.inner.settle([Settlement(each.partition, [], 0) for each in settlements])


class HandsNothingOver(Broken):
    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self.inner.settle([Settlement(each.partition, [], each.floor) for each in settlements])


class KeepsWhatWasCompletedOnce(Broken):
    def __init__(self, source: GroupSource) -> None:
        super().__init__(source)
        self.runs: set[tuple[int, int]] = set()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        for each in settlements:
            self.runs |= set(each.completed)
            await self.inner.settle([Settlement(each.partition, [], each.floor, sorted(self.runs))])


class CommitsOneAtATime(Broken):
    busy = False

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        assert not self.busy
        self.busy = True
        await anyio.lowlevel.checkpoint()
        await self.inner.settle(settlements)
        self.busy = False


class CommitsAtTheEndOnly(Broken):
    def __init__(self, source: GroupSource) -> None:
        super().__init__(source)
        self.later: list[Settlement] = []

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.later += settlements

    async def aclose(self) -> None:
        if self.inner.member in self.inner.group.members:
            await self.inner.settle(self.later)
        await self.inner.aclose()


class IgnoresPaused(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self.inner.receive(room._replace(paused=frozenset()))


class TellsNothing(Broken):
    """A source that loses ownership without an event, and continues to deliver."""

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        while True:
            events = [e for e in await self.inner.receive(room) if not isinstance(e, Revoking | Lost)]
            if events:
                return events


class DeliversTwice(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = list(await self.inner.receive(Room(room.messages // 2, room.bytes, room.paused)))
        return events + [event for event in events if isinstance(event, Delivered)]


class AnnouncesProgressBelow(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        return [Progressed(e.partition, 0) if isinstance(e, Progressed) else e for e in events]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("broken", "finder"),
    [
        (AssignsWithoutAFloor, "assigns_with_a_floor"),
        (StartsOneTooHigh, "starts_at_the_committed_floor"),
        (StartsAtTheBeginning, "starts_at_the_committed_floor"),
        (HandsNothingOver, "completed_is_handed_over"),
        (KeepsWhatWasCompletedOnce, "the_latest_commit_counts"),
        (CommitsOneAtATime, "partitions_commit_at_once"),
        (CommitsAtTheEndOnly, "release_commits_all"),
        (IgnoresPaused, "paused_partitions_are_left_out"),
        (TellsNothing, "nothing_more_after_revoking"),
        (TellsNothing, "nothing_more_after_loss"),
        (DeliversTwice, "delivers_everything_in_order"),
        (AnnouncesProgressBelow, "delivers_everything_in_order"),
    ],
)
async def test_the_contract_finds_each_source_of_a_group_that_breaks_it(
    broken: type[Broken], finder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsource.contract.harness.TIMEOUT", 0.05)
    (check,) = (check for check in checks(ABILITIES) if name_of(check) == finder)
    with pytest.raises((ContractBroken, AssertionError, ExceptionGroup)):
        await check(GroupHarness(3, wrap=broken))


def published(count: int, partitions: int = 1) -> Group:
    group = Group(partitions)
    for number in range(count):
        group.publish(b"%d" % number)
    return group


def positions(events: Sequence[SourceEvent]) -> list[int]:
    return [message.position for event in events if isinstance(event, Delivered) for message in event.run]


async def only(source: GroupSource, room: Room = ROOM) -> SourceEvent:
    (event,) = await source.receive(room)
    return event


async def opened(group: Group, member: str, *, hands_over: bool = True) -> tuple[GroupSource, Partition]:
    """A source with an assigned partition."""
    source = GroupSource(group, member, hands_over=hands_over)
    await source.open()
    event = await only(source)
    assert isinstance(event, Assigned)
    return source, event.partition


@pytest.mark.anyio
async def test_gaps_at_the_end_are_progress() -> None:
    group = published(2)
    group.skip(3)
    source, partition = await opened(group, "m-1")
    first = await source.receive(Room(1, 100))
    assert positions(first) == [0]
    assert not [event for event in first if isinstance(event, Progressed)]
    second = await source.receive(Room(1, 100))
    assert positions(second) == [1]
    assert second[1:] == [Progressed(partition, 5)]
    group.skip(4)
    # Without room a source reports only changes of ownership.
    await cut_short(source.receive, Room(0, 0))
    assert await source.receive(ROOM) == [Progressed(partition, 9)]
    await source.settle([Settlement(partition, [], 9)])
    await source.aclose()
    _, again = await opened(group, "m-2")
    assert (again.floor, group.unfinished) == (9, 0)


@pytest.mark.anyio
async def test_a_commit_with_a_lost_answer_was_made() -> None:
    group = published(5)
    source, partition = await opened(group, "m-1")
    source.fail("settle", SourceError("broken", retryable=True), done=True)
    with pytest.raises(SourceError, match="broken"):
        await source.settle([Settlement(partition, [], 3, [(4, 5)])])
    assert group.committed(0) == Committed(3, ((4, 5),))
    source.fail("settle", SourceError("refused"), times=2)
    for _ in range(2):
        with pytest.raises(SourceError, match="refused"):
            await source.settle([Settlement(partition, [], 5)])
    assert group.committed(0).offset == 3
    await source.settle([Settlement(partition, [], 5)])
    assert group.committed(0) == Committed(5)
    assert [commit.floor for call in source.called("settle") for commit in call.commits] == [3, 5, 5, 5]


@pytest.mark.anyio
async def test_other_calls_continue_during_a_slow_commit() -> None:
    group = published(1)
    source, partition = await opened(group, "m-1")
    source.block("settle")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source.settle, [Settlement(partition, [], 1)])
        # Other calls continue during the commit.
        assert positions(await source.receive(ROOM)) == [0]
        assert group.committed(0).offset == 0
        source.unblock("settle")
    assert group.committed(0).offset == 1


@pytest.mark.anyio
async def test_a_former_owner_continues_until_it_hears_of_the_loss() -> None:
    group = published(4)
    old, lost = await opened(group, "m-1")
    assert positions(await old.receive(Room(1, 100))) == [0]
    new = GroupSource(group, "m-2")
    await new.open()
    assert await only(old) == Revoking(lost, 30.0)
    group.lose("m-1", 0)
    event = await only(new)
    while not isinstance(event, Assigned):
        event = await only(new)
    await new.settle([Settlement(event.partition, [], 4)])
    # The broker accepts a lower commit, as Kafka does.
    await old.settle([Settlement(lost, [], 1)])
    assert group.committed(0).offset == 1
    assert isinstance(await only(old), Lost)
    assert old.owned == []
    await old.release(lost)
    assert group.owner(0) == "m-2"


@pytest.mark.anyio
async def test_a_member_with_an_expired_session_loses_all_partitions_and_joins_again() -> None:
    group = published(4, 2)
    source = GroupSource(group, "m-1")
    await source.open()
    before = [event.partition for event in await source.receive(ROOM) if isinstance(event, Assigned)]
    group.crash("m-1")
    with pytest.raises(SourceError, match="position 1 of partition 0 was not committed: member 'm-1'") as caught:
        await source.settle([Settlement(before[0], [], 1)])
    assert caught.value.retryable
    await source.release(before[1])
    (event,) = await source.receive(Room(0, 0))
    assert isinstance(event, Lost) and event.partition is before[0]
    after = [event.partition for event in await source.receive(Room(0, 0)) if isinstance(event, Assigned)]
    assert [partition.id for partition in after] == [partition.id for partition in before]
    assert not set(after) & set(before)
    await source.settle([Settlement(after[0], [], 1)])
    assert group.committed(0).offset == 1


@pytest.mark.anyio
async def test_partitions_move_by_an_eager_rebalance() -> None:
    group = published(8, 2)
    one = GroupSource(group, "m-1")
    await one.open()
    first = [event.partition for event in await one.receive(ROOM) if isinstance(event, Assigned)]
    two = GroupSource(group, "m-2")
    await two.open()
    assert await one.receive(Room(0, 0)) == [Revoking(partition, 30.0) for partition in first]
    await one.settle([Settlement(first[1], [], 2)])
    for partition in first:
        assert group.rebalancing
        await one.release(partition)
        await one.release(partition)  # idempotent
    ours, theirs = await only(one, Room(0, 0)), await only(two, Room(0, 0))
    assert isinstance(ours, Assigned) and isinstance(theirs, Assigned)
    assert {ours.partition.id.number, theirs.partition.id.number} == {0, 1}
    moved = theirs.partition if theirs.partition.id.number == 1 else ours.partition
    assert moved.floor == 2
    assert positions(await two.receive(ROOM)) == [2, 3]


@pytest.mark.anyio
async def test_without_hand_over_only_the_floor_is_kept() -> None:
    group = published(4)
    source, partition = await opened(group, "m-1", hands_over=False)
    await source.settle([Settlement(partition, [], 1, [(2, 3)])])
    assert group.committed(0) == Committed(1)
    with pytest.raises(ContractError, match="partition 0 has no floor"):
        await source.settle([Settlement(partition, [])])


@pytest.mark.anyio
async def test_a_finite_source_ends_only_after_a_rebalance() -> None:
    group = published(2)
    source, _ = await opened(group, "m-1")
    source.finish()
    await source.receive(ROOM)
    group.revoke(0)
    assert isinstance(await only(source), Revoking)
    await cut_short(source.receive, ROOM)
    group.lose("m-1", 0)
    # Without another member the rebalance assigns it again.
    assert [type(event) for event in await source.receive(ROOM)] == [Lost, Assigned]
    assert positions(await source.receive(ROOM)) == [0, 1]
    assert isinstance(await only(source), Exhausted)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch"):
        GroupSource(Group(), "m-1", batch=0)


def test_the_repr_of_a_group_shows_counts() -> None:
    group = published(3, 2)
    assert repr(GroupSource(group, "m-1")) == "<GroupSource m-1 of memory: 0 partitions>"
    group.join("m-1")
    assert repr(group) == "<Group memory: 2 partitions, 1 members, generation 2, 0 revoking>"
