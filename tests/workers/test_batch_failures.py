"""A batch call that fails, times out or is cancelled keeps the order within a key, and each call has one span."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes import Consumer, HandlerHalted, History, Message, Retry, Settings
from memsource import GroupSource, MemoryBroker, MemoryDeadLetters, MemorySource
from tests.effort import runs
from tests.fakes.batches import AT_ONCE, Batches, batching, finite
from tests.fakes.grouped import group_of
from tests.fakes.support import break_positions, published, started, turns, until
from tests.fakes.telemetry import Sdk
from tests.fakes.threaded import assert_kept


@pytest.mark.anyio
async def test_a_message_that_its_source_cannot_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = published("a", "a", "b")
    source = finite(broker)
    break_positions(source, {0}, monkeypatch)
    handler = Batches()
    await batching(source, handler, dead_letters=MemoryDeadLetters(broker)).run()
    assert [dead_letter.error_text for dead_letter in broker.dead_letters] == ["no key"]
    assert sorted(position for call in handler.calls for position in call) == [1, 2]


# --- time and ownership


@pytest.mark.anyio
async def test_a_batch_over_its_timeout_is_cancelled_and_fails() -> None:
    broker = published(*"ab")
    handler = Batches(gated=True)
    consumer = batching(MemorySource(broker), handler, timeout=0.01, retry=AT_ONCE)
    async with started(consumer) as run:
        error = await run.end()
    assert isinstance(error, HandlerHalted)
    assert isinstance(error.__cause__, TimeoutError)
    assert "within timeout=0.01 s" in str(error)
    assert len(handler.cancelled) >= 3


@pytest.mark.anyio
async def test_a_revoke_waits_for_the_whole_batch() -> None:
    broker = MemoryBroker(2)
    for partition in (0, 1):
        broker.publish(key=f"k{partition}", partition=partition)
    source = MemorySource(broker)
    handler = Batches(gated=True)
    async with started(batching(source, handler)) as run:
        await until(lambda: handler.calls)
        assert len(handler.calls[0]) == 2
        source.revoke(0)
        await turns()
        assert source.owned == [0, 1]
        handler.gate.set()
        await until(lambda: source.owned == [1])
        assert broker.unfinished == 0
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_batch_is_cancelled_at_the_deadline_of_a_revoke(tmp_path: Path) -> None:
    broker = MemoryBroker(2)
    for partition in (0, 1):
        for _ in range(2):
            broker.publish(key=f"k{partition}", partition=partition)
    source = MemorySource(broker)
    handler = Batches(gated=True)
    consumer = batching(source, handler, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.calls)
        source.revoke(0, timeout=0.01)
        await until(lambda: handler.cancelled)
        await until(lambda: 0 not in source.owned)
        assert broker.acked(0) == []
        # The call was interrupted for both partitions; the other one starts again from its head.
        await until(lambda: len(handler.calls) == 2)
        handler.gate.set()
        await until(lambda: broker.acked(1) == [0, 1])
        assert await run.stop() is None
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_cancelled_run_cancels_the_batch_handlers() -> None:
    broker = published(*"ab")
    handler = Batches(gated=True)
    async with started(batching(MemorySource(broker), handler)) as run:
        await until(lambda: handler.calls)
        run.scope.cancel()
        await run.end()
    assert handler.cancelled == [[0, 1]]
    assert broker.unacked() == [0, 1]


# --- telemetry


@pytest.mark.anyio
async def test_a_call_of_a_batch_handler_is_one_span(sdk: Sdk) -> None:
    broker = published(*"abc")
    await batching(finite(broker), Batches()).run()
    spans = [span for span in sdk.spans() if span.attributes and "messaging.batch.message_count" in span.attributes]
    assert [span.attributes["messaging.batch.message_count"] for span in spans if span.attributes] == [3]


# --- order


@pytest.mark.anyio
@settings(max_examples=runs(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    keys=st.lists(st.sampled_from("aaaaaabbbcde"), min_size=1, max_size=60),
    size=st.integers(1, 9),
    concurrency=st.integers(1, 5),
    failing=st.integers(0, 40),
    commits=st.booleans(),
)
async def test_failed_messages_of_batches_keep_the_order_of_their_key(
    seed: int,
    keys: list[str],
    size: int,
    concurrency: int,
    failing: int,
    commits: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Skewed keys, failing messages and calls, two partitions: the history keeps every promise."""
    random = Random(seed)
    directory = tmp_path_factory.mktemp("history")
    done: dict[tuple[int, bytes | None], list[int]] = defaultdict(list)
    running: set[tuple[int, bytes | None]] = set()

    async def handler(batch: list[Message]) -> list[BaseException | None] | None:
        assert 1 <= len(batch) <= size
        lanes = {(message.partition.id.number, message.key) for message in batch}
        assert not lanes & running
        running.update(lanes)
        for _ in range(random.randrange(4)):
            await anyio.lowlevel.checkpoint()
        running.difference_update(lanes)
        if random.randrange(100) < failing // 4:
            raise ValueError("all of it")
        outcomes = [ValueError("item") if random.randrange(100) < failing else None for _ in batch]
        failed = set()
        for message, outcome in zip(batch, outcomes, strict=True):
            lane = message.partition.id.number, message.key
            if outcome is not None:
                failed.add(lane)
            if lane not in failed:
                done[lane].append(message.position)
        return list(outcomes)

    arguments: dict[str, Any] = {
        "batch": size,
        "concurrency": concurrency,
        "retry": Retry(attempts=1000, backoff=0.0),
        "history": History(directory),
    }
    if commits:
        group = group_of(keys, partitions=2)
        source = GroupSource(group, "m")
        source.finish()
        await batching(source, handler, commit_interval=0.0, **arguments).run()
        assert group.unfinished == 0
    else:
        broker = published(*keys, partitions=2)
        await batching(finite(broker), handler, **arguments).run()
        assert broker.unfinished == 0
    assert all(positions == sorted(set(positions)) for positions in done.values())
    assert sum(map(len, done.values())) == len(keys)
    assert_kept(directory)


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["lose", "revoke"])
async def test_a_batch_over_two_partitions_continues_with_the_one_that_stays(how: str) -> None:
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
        # The call was cancelled; the messages of the other partition are handled again.
        await until(lambda: len(broker.acked(1)) == 2)
        broker.publish("more", key="key 1", partition=1)
        await until(lambda: len(broker.acked(1)) == 3)
        assert consumer.healthy
    assert broker.acked(0) == []
