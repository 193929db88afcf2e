"""A source belongs to one consumer: a second consumer is refused at its start, and does not disturb the first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import pytest

import lanes
from lanes import ConfigError, Consumer
from lanes.core.types import Message, Partition, Room, Settlement
from lanes.runtime.consumer_arguments import use_source
from lanes.source import SourceEvent, SourceTraits
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_kafka import KafkaSource
from memsource import GroupSource, MemorySource
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, acknowledge, consumer_of, published, started, until


@dataclass
class Wrapper:
    """A source around another one, without a hash and equal to each other wrapper."""

    inner: MemorySource = field(compare=False)

    async def open(self) -> SourceTraits:
        return await self.inner.open()

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        return await self.inner.receive(room)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        await self.inner.settle(settlements)

    async def extend(self, messages: Sequence[Message]) -> None:
        await self.inner.extend(messages)

    async def release(self, partition: Partition) -> None:
        await self.inner.release(partition)

    async def aclose(self) -> None:
        await self.inner.aclose()


def memory() -> lanes.Source:
    return MemorySource(published("a", "b"))


def wrapped() -> lanes.Source:
    return Wrapper(MemorySource(published("a", "b")))


def grouped() -> lanes.Source:
    return GroupSource(group_of("ab"), "m0")


SOURCES = [memory, wrapped, grouped]


@pytest.mark.anyio
@pytest.mark.parametrize("make", SOURCES)
async def test_a_second_consumer_after_the_first_is_refused(make: Callable[[], lanes.Source]) -> None:
    source = make()
    async with started(Consumer(source, acknowledge)) as first:
        await until(lambda: first.consumer.ready)
        assert await first.stop() is None
    async with started(Consumer(source, acknowledge)) as second:
        with pytest.raises(ConfigError) as refused:
            await second.consumer.opened()
        assert isinstance(await second.end(), ConfigError)
    assert str(refused.value) == (
        f"this {type(source).__qualname__} belongs to another consumer: make a source for each consumer"
    )


@pytest.mark.anyio
async def test_a_second_consumer_at_the_same_time_does_not_disturb_the_first() -> None:
    source = MemorySource(published("a", "b"))
    source.finish()
    gated = Gated()
    async with started(consumer_of(source, gated)) as first:
        await until(lambda: gated.running == 2)
        with pytest.raises(ConfigError, match="this MemorySource belongs to another consumer"):
            await lanes.run(source, acknowledge)
        assert not any(call.name == "aclose" for call in source.calls)
        gated.let(0, 1)
        assert await first.end() is None
    assert sorted(gated.ended) == [0, 1]


@pytest.mark.anyio
async def test_a_start_that_failed_has_used_its_source() -> None:
    source = MemorySource(published("a"))
    source.fail("open", lanes.SourceError("no broker"))
    with pytest.raises(lanes.SourceError):
        await lanes.run(source, acknowledge)
    with pytest.raises(ConfigError, match="make a source for each consumer"):
        await lanes.run(source, acknowledge)


@pytest.mark.anyio
async def test_equal_sources_and_consumers_that_never_ran_refuse_nothing() -> None:
    sources = [MemorySource(published("a")), MemorySource(published("a"))]
    assert Wrapper(sources[0]) == Wrapper(sources[1])
    for source in sources:
        source.finish()
        wrapper = Wrapper(source)
        Consumer(wrapper, acknowledge)
        with anyio.fail_after(10):
            await lanes.run(wrapper, acknowledge)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KafkaSource({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, topics="t"),
        lambda: JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=subject_token(1)),
        lambda: JetStreamSource("nats://127.0.0.1:1", stream="S", cohort=Cohort("c"), key=subject_token(1)),
    ],
    ids=["kafka", "durable", "cohort"],
)
def test_the_sources_of_brokers_are_used_once(make: Callable[[], object]) -> None:
    source = make()
    use_source(source)
    with pytest.raises(ConfigError, match="belongs to another consumer: make a source for each consumer"):
        use_source(source)
    del source
    gc.collect()
    use_source(make())


def test_a_source_without_weak_references_is_accepted() -> None:
    class Slots:
        __slots__ = ()

    source = Slots()
    use_source(source)
    use_source(source)
