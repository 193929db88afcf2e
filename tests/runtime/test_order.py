"""Per key: one handler at a time, in source order. Across keys: as many at once as there are workers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes import Message
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.effort import runs
from tests.fakes.support import Gated, consumer_of, published, started, turns, until

KEYS = {
    "fewer keys than workers": st.sampled_from([b"a", b"b"]),
    "one hot key": st.sampled_from([b"hot"] * 8 + [b"a", b"b", b"c"]),
    "keyless": st.none(),
    "mixed": st.sampled_from([b"hot", b"hot", b"a", b"b", None]),
}


class Observed:
    """A handler that records overlaps within a lane and the order of completions.

    Lane: a partition and a key. ``plan`` says for every (partition, position) how many turns of the loop the
    handler takes and how many attempts fail.
    """

    def __init__(self, plan: dict[tuple[int, int], tuple[int, int]]) -> None:
        self.plan = plan
        self.completed: dict[tuple[int, bytes | None], list[int]] = defaultdict(list)
        self.overlaps: list[str] = []
        self.wrong_attempts: list[int] = []
        self.most = 0
        self._running: dict[tuple[int, bytes], int] = {}
        self._count = 0
        self._attempts: dict[tuple[int, int], int] = defaultdict(int)

    async def __call__(self, message: Message) -> None:
        number, position = message.partition.id.number, message.position
        pause, failures = self.plan[number, position]
        self._attempts[number, position] += 1
        if message.attempt != self._attempts[number, position]:
            self.wrong_attempts.append(position)
        if message.key is not None:
            other = self._running.setdefault((number, message.key), position)
            if other != position:
                self.overlaps.append(f"{position} of {message.key!r} ran beside {other}")
        self._count += 1
        self.most = max(self.most, self._count)
        try:
            for _ in range(pause):
                await anyio.lowlevel.checkpoint()
            if message.attempt <= failures:
                raise ValueError("not yet")
        finally:
            self._count -= 1
            if message.key is not None:
                self._running.pop((number, message.key), None)
        self.completed[number, message.key].append(position)


@pytest.mark.anyio
@pytest.mark.parametrize("keys", list(KEYS.values()), ids=list(KEYS))
@settings(max_examples=runs(30))
@given(data=st.data())
async def test_keys_keep_their_order_without_overlap(
    keys: st.SearchStrategy[bytes | None], data: st.DataObject
) -> None:
    broker = MemoryBroker(data.draw(st.integers(1, 3), label="partitions"))
    messages = data.draw(
        st.lists(st.tuples(keys, st.integers(0, 6), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 2)), max_size=60),
        label="messages: key, turns, failures, gap behind",
    )
    plan = {}
    expected: dict[tuple[int, bytes | None], list[int]] = defaultdict(list)
    for key, pause, failures, gap in messages:
        record = broker.publish(key=key)
        broker.skip(gap, partition=record.partition)
        plan[record.partition, record.position] = (pause, failures)
        expected[record.partition, key].append(record.position)
    handler = Observed(plan)
    concurrency = data.draw(st.integers(1, 8), label="concurrency")
    in_flight = concurrency + data.draw(st.integers(0, 8), label="in flight beyond that")
    source = MemorySource(broker, batch=data.draw(st.integers(1, 20), label="batch"))
    source.finish()
    consumer = consumer_of(source, handler, concurrency=concurrency, max_in_flight=in_flight, attempts=3)
    with anyio.fail_after(20):
        await consumer.run()
    assert handler.overlaps == []
    assert handler.wrong_attempts == []
    completed = {lane: sorted(each) if lane[1] is None else each for lane, each in handler.completed.items()}
    assert completed == expected
    assert handler.most <= concurrency
    assert broker.unfinished == 0
    assert consumer.status().peak_in_flight <= in_flight


@pytest.mark.anyio
async def test_a_stuck_key_does_not_stop_the_others() -> None:
    broker = published(*[b"hot", b"hot", b"hot"], *[b"%d" % number for number in range(20)])
    handler = Gated(free=[b"%d" % number for number in range(20)])
    source = MemorySource(broker)
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(broker.acked()) == 20)
        assert handler.started.count(0) == 1
        assert 1 not in handler.started
        handler.let(0, 1, 2)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_keyless_messages_run_concurrently() -> None:
    source = MemorySource(published(*[None] * 10))
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=4)) as run:
        await until(lambda: handler.running == 4)
        await turns()
        assert handler.started == [0, 1, 2, 3]
        handler.let(*range(10))
        await until(lambda: len(handler.ended) == 10)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_key_never_uses_a_second_worker() -> None:
    source = MemorySource(published(*[b"a", b"b"] * 5))
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=8)) as run:
        await until(lambda: handler.running == 2)
        await turns()
        assert handler.started == [0, 1]
        handler.let(*range(10))
        await until(lambda: len(handler.ended) == 10)
        assert [position for position in handler.ended if position % 2] == [1, 3, 5, 7, 9]
        assert [position for position in handler.ended if not position % 2] == [0, 2, 4, 6, 8]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_the_same_key_in_two_partitions_is_two_lanes() -> None:
    broker = MemoryBroker(2)
    for partition in broker.partitions:
        broker.publish(key="same", partition=partition)
        broker.publish(key="same", partition=partition)
    handler = Gated()
    source = MemorySource(broker)
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 2)
        await turns()
        assert handler.started == [0, 0]
        handler.let(0, 1)
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_messages_published_later_are_handled() -> None:
    broker = MemoryBroker()
    handler = Gated(free=[b"a"])
    async with started(consumer_of(MemorySource(broker), handler)) as run:
        for _ in range(5):
            broker.publish(key="a")
            await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert handler.ended == [0, 1, 2, 3, 4]


@pytest.mark.anyio
@pytest.mark.parametrize("lanes", [1, 2])
async def test_keys_that_share_a_lane_wait_for_each_other(lanes: int) -> None:
    keys = [f"k{number}" for number in range(12)]
    broker = published(*keys)
    handler = Gated()
    consumer = consumer_of(MemorySource(broker), handler, lanes=lanes, concurrency=12)
    async with started(consumer) as run:
        await until(lambda: handler.running == lanes)
        await turns()
        assert handler.running == lanes
        handler.let(*range(12))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "running"),
    [
        ({}, [0, 1, 3, 4]),
        ({"keyless": "one_lane"}, [0, 1, 3]),
        ({"order": "partition"}, [0]),
        ({"order": "none"}, [0, 1, 2, 3, 4]),
    ],
)
async def test_each_order_has_its_own_lanes(settings: dict[str, Any], running: list[int]) -> None:
    broker = published("a", "b", "a", None, None)
    handler = Gated()
    async with started(consumer_of(MemorySource(broker), handler, concurrency=9, **settings)) as run:
        await until(lambda: len(handler.started) == len(running))
        await turns()
        assert sorted(handler.started) == running
        handler.let(*range(5))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
