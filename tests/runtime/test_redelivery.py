"""A redelivered position never runs twice concurrently, and never runs again after its settlement."""

from __future__ import annotations

import dataclasses

import pytest

from lanes import Message, SourceTraits
from lanes.clock import monotonic
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, consumer_of, published, settled, started, turns, until


@pytest.mark.anyio
async def test_a_running_message_keeps_running_and_is_settled_with_its_newest_token() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 1)
        for again in (2, 3):
            source.redeliver([0])
            await until(lambda: broker.deliveries(0) == again)  # noqa: B023 - awaited before it changes
        await turns()
        assert run.consumer.status().redelivered == {"held": 2}
        assert run.consumer.status().in_flight == 1
        handler.let(0)
        await until(lambda: broker.acked() == [0])
        assert await run.stop() is None
    assert handler.started == [0]
    (call,) = source.called("settle")
    assert [delivery.count for delivery in call.deliveries] == [3]
    assert broker.stale == 0


@pytest.mark.anyio
async def test_a_queued_message_keeps_its_place() -> None:
    broker = published("a", "a", "a")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: run.consumer.status().in_flight == 3 if handler.started else False)
        source.redeliver([2, 1])
        await until(lambda: broker.deliveries(1) == 2)
        handler.let(0, 1, 2)
        await until(lambda: broker.unfinished == 0)
        assert run.consumer.status().redelivered == {"held": 2}
        assert await run.stop() is None
    assert handler.started == [0, 1, 2]
    assert broker.stale == 0


@pytest.mark.anyio
async def test_a_held_message_is_retried_once_and_settled_with_its_newest_token() -> None:
    broker = published("a")
    source = MemorySource(broker)
    attempts: list[int] = []
    go_on = False

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("not yet")
        await until(lambda: go_on)

    async with started(consumer_of(source, handler, attempts=2, backoff=0.001)) as run:
        await until(lambda: attempts == [1, 2])
        source.redeliver([0])
        await until(lambda: run.consumer.status().redelivered == {"held": 1})
        go_on = True
        await until(lambda: broker.acked() == [0])
        assert await run.stop() is None
    assert attempts == [1, 2]
    assert broker.stale == 0


@pytest.mark.anyio
async def test_a_settled_message_is_settled_again_and_not_run() -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: broker.unfinished == 0)
        source.redeliver([0])
        assert broker.unacked() == [0]
        await until(lambda: broker.unfinished == 0)
        status = run.consumer.status()
        assert (status.redelivered, status.in_flight, status.settled) == ({"settled": 1}, 0, 2)
        assert await run.stop() is None
    assert handler.started == [0, 1]
    assert settled(source).count(0) == 2
    assert broker.stale == 0


class Remembering(MemorySource):
    """A source that claims to remember settled positions, but redelivers them."""

    async def open(self) -> SourceTraits:
        return dataclasses.replace(await super().open(), remembers=True)


@pytest.mark.anyio
async def test_the_engine_does_not_track_settled_positions_for_a_source_that_does() -> None:
    broker = published("a", "a")
    source = Remembering(broker)
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: broker.unfinished == 0)
        source.redeliver([0])
        await until(lambda: run.consumer.status().redelivered == {"late": 1})
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert handler.started == [0, 1, 0]


@pytest.mark.anyio
async def test_a_delivery_that_was_lost_on_the_way_runs_later() -> None:
    broker = MemoryBroker()
    source = MemorySource(broker)
    handler = Gated(free=[b"a", b"b"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: source.called("receive"))
        broker.publish(key="a")
        # The broker counts the message as delivered, but it never arrives.
        broker.deliver(0, 1, 1, monotonic())
        broker.publish(key="b")
        await until(lambda: broker.acked() == [1])
        source.redeliver([0])
        await until(lambda: broker.acked() == [0, 1])
        assert run.consumer.status().redelivered == {"late": 1}
        assert await run.stop() is None
    assert handler.started == [1, 0]


@pytest.mark.anyio
async def test_an_expired_ack_wait_does_not_run_a_slow_handler_twice() -> None:
    broker = published("a", "b")
    now = 0.0
    source = MemorySource(broker, clock=lambda: now, extend_interval=3600.0)
    handler = Gated(free=[b"b"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: broker.acked() == [1])
        now = broker.ack_wait + 1.0
        assert broker.expire(now) == 1
        await until(lambda: run.consumer.status().redelivered == {"held": 1})
        handler.let(0)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert handler.started.count(0) == 1
    assert broker.stale == 0
