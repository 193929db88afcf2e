"""A source that breaks its contract stops the consumer with a ``ContractError``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest

from lanes import Consumer, ContractError, Message, Settings
from lanes.config import Order
from lanes.core.lane import IllegalTransition
from lanes.core.types import Partition, Room
from lanes.source import Assigned, Delivered, SourceEvent
from memsource import GroupSource, MemorySource
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, consumer_of, published, started, turns, until


@pytest.mark.anyio
@pytest.mark.parametrize("floor", [None, 0])
async def test_only_a_source_that_commits_has_a_floor(floor: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of("a")
    source = GroupSource(group, "m-1")
    receive = source.receive

    async def without(room: Any) -> list[SourceEvent]:
        events = list(await receive(room))
        for event in events:
            if isinstance(event, Assigned):
                event.partition.floor = floor
        return events

    monkeypatch.setattr(source, "receive", without)
    source.finish()
    consumer = consumer_of(source, Gated(free=[b"a"]))
    if floor is None:
        with pytest.raises(ContractError, match="assigned with floor=None, but the source settles by a position"):
            await consumer.run()
    else:
        await consumer.run()


@pytest.mark.anyio
@pytest.mark.parametrize("token", [-1, 0, (1 << 63) - 1, 1 << 63])
async def test_a_fencing_token_beyond_63_bits_is_refused(token: int) -> None:
    broker, handler = published("a"), Gated(free=[b"a"])
    source = MemorySource(broker, assigned=[])
    source.assign(0, fencing_token=token)
    source.finish()
    if 0 <= token < 1 << 63:
        await Consumer(source, handler).run()
        assert handler.ended == [0]
    else:
        with pytest.raises(ContractError, match=f"memory/0 was assigned with fencing_token={token}, but"):
            await Consumer(source, handler).run()
        assert handler.started == []


class Saying(MemorySource):
    """A source that returns ``also``, a forbidden event, after its first assignment."""

    def __init__(self, also: Callable[[Assigned], SourceEvent], *, partitions: int = 1) -> None:
        super().__init__(published("a", partitions=partitions, partition=0), assigned=[0])
        self.also: Callable[[Assigned], SourceEvent] | None = also

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = list(await super().receive(room))
        assigned = next((event for event in events if isinstance(event, Assigned)), None)
        if assigned is not None and self.also is not None:
            events.append(self.also(assigned))
            self.also = None
        return events


def unheard_of(assigned: Assigned) -> Delivered:
    """A run of another assignment."""
    other = Partition(assigned.partition.id, assigned.partition.reader)
    return Delivered(other, [Message(other, 0, b"a", 1, None, None)], 1)


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["key", "serial"])
@pytest.mark.parametrize(
    ("also", "said"),
    [
        pytest.param(lambda assigned: assigned, "memory: memory/0 is already assigned;", id="assigned twice"),
        pytest.param(unheard_of, "messages of memory/0, which was never assigned", id="never assigned"),
    ],
)
async def test_a_forbidden_event_is_a_bug_of_the_source(
    also: Callable[[Assigned], SourceEvent], said: str, order: Order
) -> None:
    consumer = Consumer(Saying(also), Gated(free=[b"a"]), settings=Settings(order=order))
    with anyio.fail_after(10), pytest.raises(ContractError, match=said):
        await consumer.run()


@pytest.mark.anyio
async def test_messages_of_a_partition_given_back_during_a_stop_are_no_bug() -> None:
    handler = Gated()
    source = Saying(lambda assigned: Delivered(assigned.partition, [], 0), partitions=2)
    consumer = Consumer(source, handler)
    async with started(consumer) as run:
        await until(lambda: handler.running == 1)
        run.consumer.stop()
        await turns()
        source.also = unheard_of
        source.assign(1)
        await until(lambda: [call.partition for call in source.called("release")] == [1])
        handler.let(0)
        assert await run.end() is None


@pytest.mark.anyio
async def test_a_bug_of_the_ledgers_is_not_blamed_on_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(*given: object) -> None:
        raise IllegalTransition("a bug of lanes")

    monkeypatch.setattr("lanes.core.engine.Engine.receive", illegal)
    with pytest.raises(IllegalTransition, match="a bug of lanes"):
        await consumer_of(GroupSource(group_of("a"), "m-1"), Gated()).run()


@pytest.mark.anyio
async def test_falling_positions_are_a_bug_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of("ab")
    source = GroupSource(group, "m-1")
    read = group.fetch
    monkeypatch.setattr(group, "fetch", lambda *args: read(*args)[::-1])
    with pytest.raises(ContractError, match="position 0 after 1"):
        await consumer_of(source, Gated()).run()
