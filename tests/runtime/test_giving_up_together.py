"""Giving a partition up while its handlers, its batch mates or its clients are busy with something else."""

from __future__ import annotations

import anyio
import pytest

from lanes import Consumer, Message, Settings, Term
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import Gated, consumer_of, published, started, until


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["lose", "revoke"])
async def test_a_batch_over_two_partitions_goes_on_with_the_one_that_is_kept(how: str) -> None:
    broker = MemoryBroker(partitions=2)
    for number in range(4):
        broker.publish(str(number), key=f"key {number}", partition=number % 2)
    source = MemorySource(broker)
    calls: list[set[int]] = []

    async def handler(batch: list[Message]) -> None:
        calls.append({message.partition.id.number for message in batch})
        if len(calls) == 1:
            await anyio.sleep_forever()

    settings = Settings(batch=10, linger=0.05, concurrency=1, drain_timeout=0, grace=5)
    async with Consumer(source, handler, settings=settings) as consumer:
        await until(lambda: calls == [{0, 1}])
        if how == "lose":
            source.lose(0)
        else:
            source.revoke(0, timeout=0)
        # The handler ended, cancelled; the partition that was kept is handled again, and goes on.
        await until(lambda: len(broker.acked(1)) == 2)
        broker.publish("more", key="key 1", partition=1)
        await until(lambda: len(broker.acked(1)) == 3)
        assert consumer.healthy
    assert broker.acked(0) == []


@pytest.mark.anyio
async def test_a_revoke_makes_a_drain_shorter_that_has_begun() -> None:
    source = MemorySource(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler, drain_timeout=600.0, grace=5.0)) as run:
        await until(lambda: handler.running == 1)
        run.consumer.stop()
        source.revoke(0, timeout=0.01)
        assert await run.end() is None
    assert source.broker.acked() == []


@pytest.mark.anyio
async def test_clients_are_paused_although_every_handler_hangs() -> None:
    source = MemorySource(published(*range(10)))
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=2, max_in_flight=2)) as run:
        await until(lambda: handler.running == 2)
        await until(lambda: any(call.room is not None and call.room.paused for call in source.calls))
        handler.let(*range(10))
        run.scope.cancel()
        await run.end()


@pytest.mark.anyio
@pytest.mark.parametrize("worst", [MemoryError(), Term("never")])
async def test_a_group_is_judged_by_its_worst_member(worst: Exception) -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    letters = MemoryDeadLetters(broker)
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise ExceptionGroup("all of it", [ValueError("no"), worst])

    consumer = consumer_of(source, handler, dead_letters=letters, attempts=3, backoff=0.001)
    if isinstance(worst, Term):
        await consumer.run()
        assert len(broker.dead_letters) == 1
    else:
        with pytest.raises(ExceptionGroup):
            await consumer.run()
        assert (broker.dead_letters, broker.unacked()) == ([], [0])
    assert attempts == [1]
