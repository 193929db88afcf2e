"""After a handover, the next owner repeats only unfinished messages, and the drain ends within its timeout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from lanes import Consumer, History, Message, Retry, SourceError
from memsource import Group, GroupSource, MemorySource
from memsource.memory.group import Committed
from tests.fakes.grouped import commits, epochs, group_of
from tests.fakes.support import Gated, consumer_of, living, published, started, turns, until
from tests.fakes.threaded import assert_kept

# --- drains


@pytest.mark.anyio
async def test_the_next_owner_repeats_no_finished_message() -> None:
    group = group_of("abcabcabc")
    first = GroupSource(group, "first")
    handler = Gated(free=[b"b"])
    # 0 runs, 2 has finished, all of b has finished: 1, 4, 7.
    async with started(consumer_of(first, handler, drain_timeout=0.02, grace=0.05, commit_interval=3600.0)) as run:
        handler.let(2)
        await until(lambda: sorted(handler.ended) == [1, 2, 4, 7])
        assert await run.stop() is None
    assert group.committed(0) == Committed(0, ((1, 3), (4, 5), (7, 8)))
    second = GroupSource(group, "second")
    second.finish()
    again = Gated(free=[b"a", b"b", b"c"])
    consumer = consumer_of(second, again)
    await consumer.run()
    assert sorted(again.started) == [0, 3, 5, 6, 8]
    assert consumer.status().redelivered == {"settled": 4}
    assert group.committed(0) == Committed(9)


@pytest.mark.anyio
async def test_a_drain_without_a_completed_set_closes_the_prefix() -> None:
    group = group_of("aabbcd")
    first = GroupSource(group, "first", hands_over=False)
    handler = Gated(free=[b"c"])
    async with started(consumer_of(first, handler, concurrency=3)) as run:
        await until(lambda: handler.ended == [4] and sorted(handler.started) == [0, 2, 4, 5])
        run.consumer.stop()
        await turns()
        handler.let(0, 2)
        # 1 and 3 had not started; 4 above them had finished.
        await until(lambda: sorted(handler.started) == [0, 1, 2, 3, 4, 5])
        handler.let(1, 3, 5)
        assert await run.end() is None
    assert group.committed(0) == Committed(6)


@pytest.mark.anyio
async def test_a_drain_without_a_completed_set_starts_nothing_beyond_the_prefix() -> None:
    group = group_of("abab")
    handler = Gated(free=[b"b"])
    async with started(consumer_of(GroupSource(group, "first", hands_over=False), handler, concurrency=1)) as run:
        await until(lambda: handler.started == [0])
        run.consumer.stop()
        await turns()
        handler.let(0)
        assert await run.end() is None
    assert handler.started == [0]
    assert group.committed(0) == Committed(1)


@pytest.mark.anyio
async def test_no_handler_starts_after_the_deadline_of_a_drain(tmp_path: Path) -> None:
    group = group_of("aabc")
    source = GroupSource(group, "first", hands_over=False)
    handler = Gated(free=[b"a"])
    history = History(tmp_path, member="first")
    async with started(consumer_of(source, handler, history=history, concurrency=2, drain_timeout=0.02)) as run:
        # 3 has started, and 1 below it waits for a worker; the first free worker is cancelled.
        await until(lambda: sorted(handler.started) == [0, 2, 3])
        assert await run.stop() is None
    assert sorted(handler.started) == [0, 2, 3]
    assert sorted(handler.cancelled) == [2, 3]
    assert group.committed(0) == Committed(1)
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_an_open_prefix_does_not_delay_the_drain() -> None:
    group = Group(2)
    for key in "aab":
        group.publish(key=key, partition=0)
    group.skip(7, partition=1)
    group.publish(key="x", partition=1)
    source = GroupSource(group, "first", hands_over=False)
    handler = Gated(free=[b"b"])
    async with started(consumer_of(source, handler, concurrency=1, drain_timeout=0.02, grace=3600.0)) as run:
        await until(lambda: run.consumer.active and run.consumer.status().in_flight == 4)
        handler.let(0)
        # The only worker handles the other partition, and position 1 of this partition waits for the worker.
        await until(lambda: handler.started == [0, 2, 7])
        group.revoke(0)
        await until(lambda: source.called("release"))
        assert (handler.started, group.committed(0)) == ([0, 2, 7], Committed(1))
        handler.let(1, 7)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_stopped_lanes_are_left_to_the_next_owner() -> None:
    group = group_of("ab")
    source = GroupSource(group, "first")

    async def handler(message: Message) -> None:
        if message.key == b"a":
            raise ValueError("poison")

    async with started(consumer_of(source, handler, retry=Retry(attempts=9, backoff=60.0, max_backoff=60.0))) as run:
        await until(lambda: run.consumer.active and run.consumer.status().settled == 1)
        with anyio.fail_after(10):
            assert await run.stop() is None
    assert group.committed(0) == Committed(0, ((1, 2),))


# --- rebalance


@pytest.mark.anyio
@pytest.mark.parametrize("cooperative", [False, True], ids=["eager", "cooperative"])
@pytest.mark.parametrize("hands_over", [True, False], ids=["map", "no map"])
async def test_members_that_join_and_leave_repeat_nothing(cooperative: bool, hands_over: bool, tmp_path: Path) -> None:
    group = Group(4, cooperative=cooperative)
    keys = [f"k{number % 13}" for number in range(400)]
    handled: Counter[tuple[int, int]] = Counter()

    async def handler(message: Message) -> None:
        await turns(message.position % 7)
        handled[message.partition.id.number, message.position] += 1

    def one(name: str) -> Consumer:
        source = GroupSource(group, name, batch=5, hands_over=hands_over)
        return consumer_of(source, handler, history=History(tmp_path, member=name), max_ahead=40)

    async def publish() -> None:
        for number, key in enumerate(keys):
            group.publish(key=key)
            if number % 11 == 0:
                group.skip(2, partition=number % 4)
                await turns(3)

    async with started(one("m-1")) as first, started(one("m-2")) as second:
        await publish()
        async with started(one("m-3")) as third:
            await until(lambda: len(handled) > 150)
            assert await first.stop() is None
            await until(lambda: len(handled) > 300)
            assert await third.stop() is None
        await until(lambda: group.unfinished == 0)
        assert await second.stop() is None
    assert max(handled.values()) == 1
    assert len(handled) == 400
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_the_successor_of_a_crashed_member_repeats_uncommitted_messages(tmp_path: Path) -> None:
    group = group_of(["a", "b", "c", "d"] * 10)
    source = GroupSource(group, "m-1")
    handler = Gated(free=[b"a", b"b"])
    consumer = consumer_of(source, handler, history=History(tmp_path, member="m-1"), grace=0.05)
    async with started(consumer) as run:
        await until(lambda: group.committed(0).completed[-1:] == ((36, 38),))
        group.crash("m-1")
        group.publish(key="a")
        # The member learns of the loss from its next commit or receive, and joins again.
        await until(lambda: epochs(run) == [2])
        await until(lambda: sorted(handler.cancelled) == [2, 3])
        handler.let(*range(50))
        await until(lambda: group.committed(0) == Committed(41))
        assert await run.stop() is None
    counts = Counter(handler.ended)
    assert set(counts) == set(range(41))
    assert max(counts.values()) == 1
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_nothing_of_a_lost_partition_is_committed(tmp_path: Path) -> None:
    group = group_of("abc")
    source = GroupSource(group, "m-1")
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, history=History(tmp_path, member="m-1"), commit_interval=3600.0, grace=0.05)
    async with started(consumer) as run:
        await until(lambda: run.consumer.active and run.consumer.status().settled == 1)
        group.lose("m-1", 0)
        await until(lambda: not run.consumer.active)
        await until(lambda: sorted(handler.cancelled) == [1, 2])
        assert await run.stop() is None
        assert commits(source) == []
    assert run.consumer.status().zombies == 2
    assert group.committed(0) == Committed(0)
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_loss_during_a_commit_delays_no_partition() -> None:
    group = group_of("abc")
    source = GroupSource(group, "m-1")
    source.block("settle")
    handler = Gated(free=[b"a", b"b"])
    async with started(consumer_of(source, handler, drain_timeout=3600.0)) as run:
        await until(lambda: commits(source) and run.consumer.status().running == 1)
        before = living()
        group.revoke(0)
        await until(lambda: run.consumer.status().partitions["memory/0"].draining)
        # One more message finishes during the hanging commit.
        handler.let(2)
        await until(lambda: run.consumer.status().settled == 3)
        await turns()
        group.lose("m-1", 0)
        await until(lambda: epochs(run) == [2])
        source.unblock("settle")
        # Commit and drain have ended, long before the timeout.
        await until(lambda: living() < before)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_partition_assigned_during_a_stop_is_given_back_once() -> None:
    group = Group(3)
    for partition in range(3):
        group.skip(partition, partition=partition)
        group.publish(key="a", partition=partition)
    source = GroupSource(group, "m-1")
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: sorted(handler.started) == [0, 1, 2])
        run.consumer.stop()
        await turns()
        # The only member of a group is assigned each released partition again.
        handler.let(0)
        await until(lambda: group.generation > 3)
        await turns(200)
        assert [call.partition for call in source.called("release")] == [0, 0]
        handler.let(1, 2)
        assert await run.end() is None
    assert [group.committed(number).offset for number in range(3)] == [1, 2, 3]
    assert sorted(handler.started) == [0, 1, 2]


@pytest.mark.anyio
async def test_a_loss_during_a_failing_commit_delays_no_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = 0
    sleep = anyio.sleep

    async def noted(seconds: float) -> None:
        nonlocal pauses
        try:
            await sleep(seconds)
        finally:
            pauses += 1

    monkeypatch.setattr("lanes.runtime.settle.anyio.sleep", noted)
    group = group_of("ab")
    source = GroupSource(group, "m-1")
    source.fail("settle", SourceError("no leader", retryable=True), times=1_000_000)
    async with started(consumer_of(source, Gated(free=[b"a", b"b"]), drain_timeout=3600.0)) as run:
        await until(lambda: commits(source))
        group.revoke(0)
        before = len(source.called("settle"))
        await until(lambda: len(source.called("settle")) > before + 1)
        await turns(5)
        # Between two attempts a commit is due, none is under way, and no message arrives.
        run.consumer.pause()
        ended = pauses
        group.lose("m-1", 0)
        await until(lambda: epochs(run) == [2])
        await until(lambda: pauses > ended)
        await turns()
        run.scope.cancel()
        assert await run.end() is None


@pytest.mark.anyio
async def test_a_revoke_shortens_a_drain_that_has_begun() -> None:
    source = MemorySource(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler, drain_timeout=600.0, grace=5.0)) as run:
        await until(lambda: handler.running == 1)
        run.consumer.stop()
        source.revoke(0, timeout=0.01)
        assert await run.end() is None
    assert source.broker.acked() == []
