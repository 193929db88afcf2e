"""Partitions are assigned and revoked one by one: other partitions continue, and a lost partition has no further
effect."""

from __future__ import annotations

import anyio
import pytest

from lanes import Message, Nak
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import consumer_of, publish, settled, started, turns, until


def two_partitions(*keys: str) -> MemoryBroker:
    broker = MemoryBroker(2)
    for partition in broker.partitions:
        publish(broker, keys, partition=partition)
    return broker


class ByPartition:
    """A handler that waits at the gate of its partition. The handler records (partition, position)."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.cancelled: list[tuple[int, int]] = []
        self.epochs: list[int] = []
        self.gates = [anyio.Event(), anyio.Event()]

    async def __call__(self, message: Message) -> None:
        number = message.partition.id.number
        self.started.append((number, message.position))
        self.epochs.append(message.epoch)
        try:
            await self.gates[number].wait()
        except BaseException:
            self.cancelled.append((number, message.position))
            raise
        self.ended.append((number, message.position))


@pytest.mark.anyio
async def test_a_revoked_partition_drains_while_another_continues() -> None:
    broker = two_partitions("a", "a")
    source = MemorySource(broker)
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 2)
        source.revoke(0)
        await turns()
        # The drain waits only for running handlers.
        assert source.called("release") == []
        handler.gates[0].set()
        await until(lambda: source.called("release"))
        assert broker.acked(0) == [0]
        assert broker.unacked(0) == [1]
        assert (0, 1) not in handler.started
        handler.gates[1].set()
        await until(lambda: broker.acked(1) == [0, 1])
        broker.publish(key="later", partition=1)
        await until(lambda: broker.acked(1) == [0, 1, 2])
        assert run.consumer.status().in_flight == 0
        assert list(run.consumer.status().floors) == ["memory/1"]
        assert await run.stop() is None
    assert handler.cancelled == []
    assert [call.partition for call in source.called("release")] == [0, 1]


@pytest.mark.anyio
async def test_a_short_revoke_cancels_only_its_own_handlers() -> None:
    broker = two_partitions("a")
    source = MemorySource(broker)
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 2)
        source.revoke(0, timeout=0.01)
        await until(lambda: source.called("release"))
        assert handler.cancelled == [(0, 0)]
        handler.gates[1].set()
        await until(lambda: broker.acked(1) == [0])
        assert await run.stop() is None
    assert broker.acked(0) == []


@pytest.mark.anyio
async def test_an_idle_partition_is_released_at_once_while_another_is_saturated() -> None:
    broker = MemoryBroker(2)
    publish(broker, [None] * 10, partition=1)
    source = MemorySource(broker)
    handler = ByPartition()
    async with started(consumer_of(source, handler, concurrency=2, max_in_flight=2)) as run:
        await until(lambda: len(handler.started) == 2)
        source.revoke(0)
        await until(lambda: source.called("release"))
        handler.gates[1].set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_partition_that_returns_continues_at_its_position() -> None:
    broker = two_partitions("a", "a", "b")
    source = MemorySource(broker, assigned=[0])
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 2)
        source.revoke(0)
        await turns()
        handler.gates[0].set()
        await until(lambda: source.owned == [])
        assert broker.unacked(0) == [1]
        source.assign(0)
        source.assign(1)
        handler.gates[1].set()
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    # The new assignment has only the unfinished messages, under a new epoch.
    assert sorted(handler.ended) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert handler.epochs[handler.started.index((0, 1))] == 2
    assert broker.deliveries(0, 0) == 1


@pytest.mark.anyio
async def test_a_lost_partition_is_neither_settled_nor_released() -> None:
    broker = two_partitions("a", "b")
    source = MemorySource(broker)
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 4)
        source.lose(0)
        await until(lambda: len(handler.cancelled) == 2)
        handler.gates[0].set()
        handler.gates[1].set()
        await until(lambda: broker.acked(1) == [0, 1])
        assert run.consumer.status().in_flight == 0
        assert run.consumer.status().zombies == 2
        assert await run.stop() is None
    assert sorted(handler.cancelled) == [(0, 0), (0, 1)]
    assert broker.acked(0) == []
    assert [call.partition for call in source.called("release")] == [1]


@pytest.mark.anyio
async def test_finished_messages_of_a_lost_partition_are_not_settled() -> None:
    broker = two_partitions("a", "b")
    source = MemorySource(broker)
    source.block("settle")
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 4)
        handler.gates[1].set()
        await until(lambda: source.called("settle"))
        # These finish while that settlement is on its way.
        handler.gates[0].set()
        await until(lambda: len(handler.ended) == 4)
        source.lose(0)
        await until(lambda: "memory/0" not in run.consumer.status().floors)
        source.unblock("settle")
        await until(lambda: broker.acked(1) == [0, 1])
        assert await run.stop() is None
    assert broker.acked(0) == []


@pytest.mark.anyio
async def test_a_partition_lost_during_its_drain_is_not_released() -> None:
    broker = two_partitions("a")
    source = MemorySource(broker)
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 2)
        source.revoke(0, timeout=3600)
        await until(lambda: run.consumer.status().partitions["memory/0"].draining)
        source.lose(0)
        await until(lambda: handler.cancelled == [(0, 0)])
        handler.gates[1].set()
        await until(lambda: broker.acked(1) == [0])
        assert await run.stop() is None
    assert broker.acked(0) == []
    assert [call.partition for call in source.called("release")] == [1]


@pytest.mark.anyio
async def test_a_key_waits_for_the_zombie_of_its_former_assignment() -> None:
    broker = MemoryBroker()
    publish(broker, ["a", "a", "b"])
    source = MemorySource(broker)
    gate = anyio.Event()
    running: list[tuple[int, int]] = []
    log: list[tuple[str, int, int]] = []

    async def handler(message: Message) -> None:
        here = (message.epoch, message.position)
        assert message.key == b"b" or not running
        if message.key == b"a":
            running.append(here)
        log.append(("start", *here))
        try:
            if here == (1, 0):
                with anyio.CancelScope(shield=True):
                    await gate.wait()
        finally:
            if message.key == b"a":
                running.remove(here)
            log.append(("end", *here))

    async with started(consumer_of(source, handler)) as run:
        await until(lambda: broker.acked() == [2])
        source.lose(0)
        source.assign(0)
        await until(lambda: broker.deliveries(0) == 2)
        publish(broker, ["b"])
        await until(lambda: broker.acked() == [2, 3])
        await turns()
        # Other keys continue; this one waits for its cancelled handler.
        assert ("start", 2, 0) not in log
        assert run.consumer.status().in_flight == 3
        gate.set()
        await until(lambda: broker.unfinished == 0)
        assert run.consumer.status().zombies == 1
        assert await run.stop() is None
    of_key = [entry for entry in log if entry[2] in (0, 1)]
    assert [(what, epoch, position) for what, epoch, position in of_key] == [
        ("start", 1, 0),
        ("end", 1, 0),
        ("start", 2, 0),
        ("end", 2, 0),
        ("start", 2, 1),
        ("end", 2, 1),
    ]


@pytest.mark.anyio
async def test_a_lost_partition_drops_its_retries() -> None:
    broker = two_partitions("a")
    source = MemorySource(broker, assigned=[0])
    attempts: list[tuple[int, int]] = []
    now = 0.0

    async def handler(message: Message) -> None:
        attempts.append((message.epoch, message.attempt))
        if message.epoch == 1:
            raise Nak(delay=0.001)

    async with started(consumer_of(source, handler, attempts=9, clock=lambda: now)) as run:
        # The consumer's clock decides about the hold, not real time.
        await until(lambda: run.consumer.status().held == 1 if attempts else False)
        source.lose(0)
        source.assign(0)
        await until(lambda: broker.acked(0) == [0])
        now = 1.0
        with anyio.move_on_after(0.01):
            await until(lambda: len(attempts) > 2)
        assert await run.stop() is None
    # Attempts begin again with an assignment, and the old hold has no effect.
    assert attempts == [(1, 1), (2, 1)]
    assert settled(source) == [0]


@pytest.mark.anyio
async def test_a_partition_assigned_during_a_stop_is_given_back_unhandled() -> None:
    broker = two_partitions("a")
    source = MemorySource(broker, assigned=[0])
    handler = ByPartition()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.started) == 1)
        run.consumer.stop()
        source.assign(1)
        await until(lambda: source.called("release"))
        assert [call.partition for call in source.called("release")] == [1]
        handler.gates[0].set()
        assert await run.end() is None
    assert handler.started == [(0, 0)]
    assert broker.acked(1) == []


@pytest.mark.anyio
async def test_a_clean_handover_repeats_nothing() -> None:
    broker = MemoryBroker(2)
    sources = [MemorySource(broker, assigned=[0]), MemorySource(broker, assigned=[1])]
    handled: list[tuple[int, int]] = []

    async def handler(message: Message) -> None:
        for _ in range(message.position % 4):
            await anyio.lowlevel.checkpoint()
        handled.append((message.partition.id.number, message.position))

    async with started(consumer_of(sources[0], handler)) as one, started(consumer_of(sources[1], handler)) as other:
        await until(lambda: [source.owned for source in sources] == [[0], [1]])
        for number in range(8):
            former, later = sources[number % 2], sources[1 - number % 2]
            publish(broker, [key % 5 for key in range(20)], partition=0)
            publish(broker, [key % 5 for key in range(5)], partition=1)
            await turns(number)
            former.revoke(0)
            await until(lambda: 0 not in former.owned)  # noqa: B023 - awaited before it changes
            later.assign(0)
        await until(lambda: not broker.unfinished)
        assert await one.stop() is None
        assert await other.stop() is None
    assert len(handled) == len(set(handled)) == 8 * 25
    for partition, count in ((0, 20), (1, 5)):
        for key in range(5):
            of_key = [p for n, p in handled if n == partition and p % count % 5 == key]
            assert of_key == sorted(of_key)
