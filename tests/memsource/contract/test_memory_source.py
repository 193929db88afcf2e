"""``MemorySource`` keeps the contract of a source, and the contract suite finds sources that do not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import anyio.lowlevel
import pytest

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.source import Delivered, Source, SourceEvent
from memsource.contract.harness import messages_of
from memsource.contract.source import Ability, Check, ContractBroken, Sample, checks
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.memsource.contract.delegate import Delegate, name_of

EVERYTHING: Final[tuple[Ability, ...]] = ("ack wait", "revoke", "lose", "finish")


class MemoryHarness:
    """A broker in memory whose clock moves only by ``elapse``."""

    can: Collection[Ability] = EVERYTHING
    # Every event arrives within a few turns of the loop.
    patience = 0.005
    ack_wait = 3.0

    def __init__(self, partitions: int = 1, wrap: Callable[[MemorySource], Source] | None = None) -> None:
        self.now = 0.0
        self.broker = MemoryBroker(partitions, ack_wait=self.ack_wait)
        self._wrap = wrap
        self._newest: MemorySource

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            record = self.broker.publish(sample.value, key=sample.key, headers=sample.headers)
            # Positions have gaps, so no check may expect consecutive positions.
            self.broker.skip(record.position % 3, partition=record.partition)

    def source(self) -> Source:
        self._newest = MemorySource(self.broker, clock=lambda: self.now)
        return self._newest if self._wrap is None else self._wrap(self._newest)

    async def unsettled(self) -> int:
        return sum(len(self.broker.unacked(number)) for number in self.broker.partitions)

    async def elapse(self, seconds: float) -> None:
        self.now += seconds
        self.broker.expire(self.now)

    async def revoke(self, partition: Partition) -> None:
        self._newest.revoke(partition.id.number)

    async def lose(self, partition: Partition) -> None:
        self._newest.lose(partition.id.number)

    async def finish(self) -> None:
        self._newest.finish()


@pytest.mark.anyio
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("check", checks(EVERYTHING), ids=name_of)
async def test_the_memory_source_keeps_the_contract(check: Check, partitions: int) -> None:
    await check(MemoryHarness(partitions))


@pytest.mark.anyio
async def test_partitions_take_turns_when_room_is_scarce() -> None:
    broker = MemoryBroker(2)
    for number in range(6):
        broker.publish(partition=number % 2)
    source = MemorySource(broker)
    await source.open()
    await source.receive(Room(0, 0))
    came = [message for _ in range(6) for message in messages_of(await source.receive(Room(1, 1 << 20)))]
    assert sorted(message.partition.id.number for message in came[:2]) == [0, 1]
    assert len(came) == 6


Broken = Delegate[MemorySource]


class IgnoresRoom(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self.inner.receive(Room(room.messages + 1, room.bytes))


class IgnoresPaused(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self.inner.receive(room._replace(paused=frozenset()))


class LosesWhatItTookWhenCancelled(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        await anyio.lowlevel.checkpoint()
        return events


class DeliversBackwards(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        for event in events:
            if isinstance(event, Delivered):
                event.run.reverse()
        return events


class SettlesEverythingUpToThere(Broken):
    def __init__(self, source: MemorySource) -> None:
        super().__init__(source)
        self.came: list[Message] = []

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await self.inner.receive(room)
        self.came += [message for event in events if isinstance(event, Delivered) for message in event.run]
        return events

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        for settlement in settlements:
            highest = max(message.position for message in settlement.messages)
            below = [m for m in self.came if m.partition is settlement.partition and m.position <= highest]
            await self.inner.settle([Settlement(settlement.partition, below)])


class SettlesAtTheEndOnly(Broken):
    def __init__(self, source: MemorySource) -> None:
        super().__init__(source)
        self.later: list[Settlement] = []

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.later += settlements

    async def aclose(self) -> None:
        await self.inner.settle(self.later)
        await self.inner.aclose()


class ExtendsNothing(Broken):
    async def extend(self, messages: Sequence[Message]) -> None:
        pass


class ClosesOnce(Broken):
    closed = False

    async def aclose(self) -> None:
        assert not self.closed
        self.closed = True
        await self.inner.aclose()


class ForgetsWhoOwnedIt(Broken):
    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return [event for event in await self.inner.receive(room) if isinstance(event, Delivered)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("broken", "finder"),
    [
        (IgnoresRoom, "room_is_respected"),
        (IgnoresPaused, "paused_partitions_are_left_out"),
        (LosesWhatItTookWhenCancelled, "receive_is_cancel_safe"),
        (DeliversBackwards, "delivers_everything_in_order"),
        (SettlesEverythingUpToThere, "unsettled_comes_back"),
        (SettlesAtTheEndOnly, "release_flushes"),
        (ExtendsNothing, "extend_keeps_messages"),
        (ClosesOnce, "aclose_is_idempotent"),
        (ForgetsWhoOwnedIt, "assigns_before_it_delivers"),
    ],
)
async def test_the_contract_finds_each_source_in_memory_that_breaks_it(
    broken: type[Broken], finder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memsource.contract.harness.TIMEOUT", 0.05)
    found = set()
    for check in checks(EVERYTHING):
        try:
            await check(MemoryHarness(wrap=broken))
        except AssertionError:
            found.add(name_of(check))
    assert finder in found


def test_a_source_that_breaks_the_contract_fails_with_an_error_of_its_own() -> None:
    assert issubclass(ContractBroken, AssertionError)


@pytest.mark.parametrize("ability", EVERYTHING)
def test_a_missing_ability_is_not_checked(ability: Ability) -> None:
    without = tuple(each for each in EVERYTHING if each != ability)
    assert len(checks(())) < len(checks(without)) < len(checks(EVERYTHING))
