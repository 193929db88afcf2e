"""A consumer reports each change of ownership as an event, and every message has the fencing token."""

from __future__ import annotations

import dataclasses

import pytest

import lanes
from lanes import Consumer, GroupEvent, Message, Nak, PartitionId, SourceError
from lanes.clock import monotonic
from lanes.source import SourceTraits
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import Gated, consumer_of, publish, started, until

ONE, OTHER = PartitionId("memory", 0), PartitionId("memory", 1)


@pytest.mark.anyio
async def test_the_fencing_token_is_the_epoch_that_handlers_get() -> None:
    broker, epochs = MemoryBroker(2), list[int]()
    source, dead_letters = MemorySource(broker, assigned=[1]), MemoryDeadLetters(broker)

    async def handler(message: Message) -> None:
        epochs.append(message.epoch)
        raise Nak

    async with started(consumer_of(source, handler, dead_letters=dead_letters)) as run:
        await until(lambda: run.consumer.ready)
        publish(broker, ["a"], partition=1)
        await until(lambda: len(epochs) == 1)
        source.assign(0, fencing_token=1 << 50)
        publish(broker, ["a"], partition=0)
        await until(lambda: broker.unfinished == 0)
        assert run.consumer.status().partitions["memory/0"].epoch == 1 << 50
        assert await run.stop() is None
    assert epochs == [1, 1 << 50]
    assert [dead_letter.epoch for dead_letter in broker.dead_letters] == epochs


@pytest.mark.anyio
async def test_events_report_every_change_of_ownership() -> None:
    broker, told = MemoryBroker(2), list[GroupEvent]()
    source = MemorySource(broker, assigned=[], plans=True)
    async with started(Consumer(source, Gated(), on_event=told.append)) as run:
        await until(lambda: source.called("receive"))
        # The member has joined, but has no plan yet.
        assert not run.consumer.ready
        source.plan(7, standby=True)
        await until(lambda: run.consumer.ready)
        assert not run.consumer.active
        source.plan(8)
        source.assign(0, fencing_token=5)
        await until(lambda: run.consumer.active)
        source.assign(1)
        source.lose(1)
        source.revoke(0)
        await until(lambda: source.owned == [])
        assert await run.stop() is None
    assert told == [
        GroupEvent(name="generation", generation=7),
        GroupEvent(name="standby", generation=7),
        GroupEvent(name="generation", generation=8),
        GroupEvent(name="assigned", partition=ONE, epoch=5),
        GroupEvent(name="assigned", partition=OTHER, epoch=2),
        GroupEvent(name="lost", partition=OTHER, epoch=2, reason="lost by the test"),
        GroupEvent(name="revoked", partition=ONE, epoch=5),
    ]


class Preferring(MemorySource):
    """A source whose process prefers to own one partition at most."""

    async def open(self) -> SourceTraits:
        return dataclasses.replace(await super().open(), consumer_target=1)


@pytest.mark.anyio
async def test_a_plan_above_the_targets_is_an_event_and_a_status() -> None:
    told = list[GroupEvent]()
    source = Preferring(MemoryBroker(2), assigned=[], plans=True)
    async with started(Consumer(source, Gated(), on_event=told.append)) as run:
        consumer = run.consumer

        def status() -> tuple[int | None, bool | None, bool]:
            now = consumer.status()
            return now.consumer_target, now.target_honoured, now.under_provisioned

        source.plan(7)
        await until(lambda: consumer.ready)
        # A member of the group runs code that knows no targets.
        assert status() == (1, False, False)
        source.plan(7, under_provisioned=True)
        await until(lambda: consumer.status().under_provisioned)
        assert status() == (1, False, True)
        source.plan(7, under_provisioned=True, target_honoured=True)
        await until(lambda: consumer.status().target_honoured)
        assert status() == (1, True, True)
        source.plan(8, target_honoured=True)
        await until(lambda: len(told) == 4)
        assert status() == (1, True, False)
        assert await run.stop() is None
    # A plan of the same number is no other generation.
    assert told == [
        GroupEvent(name="generation", generation=7),
        GroupEvent(name="under_provisioned", generation=7),
        GroupEvent(name="generation", generation=8),
        GroupEvent(name="provisioned", generation=8),
    ]


@pytest.mark.anyio
async def test_a_source_without_plans_compares_its_own_partitions_with_the_target() -> None:
    source = Preferring(MemoryBroker(2), assigned=[0])
    async with started(Consumer(source, Gated())) as run:
        await until(lambda: run.consumer.active)
        assert (run.consumer.status().target_honoured, run.consumer.status().under_provisioned) == (False, False)
        source.assign(1)
        await until(lambda: run.consumer.status().under_provisioned)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_without_a_target_no_target_is_honoured() -> None:
    async with started(Consumer(MemorySource(MemoryBroker(2), assigned=[0, 1]), Gated())) as run:
        await until(lambda: run.consumer.active)
        status = run.consumer.status()
        assert (status.consumer_target, status.target_honoured, status.under_provisioned) == (None, None, False)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_an_exception_of_on_event_stops_the_consumer() -> None:
    source = MemorySource(MemoryBroker())

    def on_event(event: GroupEvent) -> None:
        raise RuntimeError("no")

    async with started(Consumer(source, Gated(), on_event=on_event)) as run:
        error = await run.end()
    assert isinstance(error, RuntimeError)
    assert [call.partition for call in source.called("release")] == [0]


@pytest.mark.anyio
async def test_lanes_run_reports_events() -> None:
    source, told = MemorySource(MemoryBroker()), list[GroupEvent]()
    source.finish()
    await lanes.run(source, Gated(), on_event=told.append)
    assert told == [
        GroupEvent(name="assigned", partition=ONE, epoch=1),
        GroupEvent(name="revoked", partition=ONE, epoch=1),
    ]


@pytest.mark.anyio
async def test_a_failed_release_is_a_loss_even_during_a_lease() -> None:
    """A handover needs the confirmation of the source, which may know of a loss before the deadline."""
    source, told = MemorySource(MemoryBroker(), assigned=[]), list[str]()
    async with started(Consumer(source, Gated(), on_event=lambda event: told.append(event.name))) as run:
        await until(lambda: run.consumer.ready)
        source.assign(0, deadline=monotonic() + 3600.0)
        await until(lambda: told == ["assigned"])
        source.fail("release", SourceError("partition 0 was lost before it was released"))
        source.revoke(0)
        await until(lambda: len(told) > 1)
        assert await run.stop() is None
    assert told == ["assigned", "lost"]
