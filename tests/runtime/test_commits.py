"""A consumer commits finished messages after an interval or a number of messages, and at a drain, on a failing broker
too."""

from __future__ import annotations

import anyio
import pytest

from lanes import Consumer, Message, Settings, SourceError
from memsource import Group, GroupSource
from memsource.memory.group import Committed
from tests.fakes.grouped import ONCE, HandClock, commits, epochs, group_of
from tests.fakes.support import Gated, consumer_of, started, turns, until
from tests.fakes.telemetry import Sdk

# --- the time of a commit


@pytest.mark.anyio
async def test_exactly_the_finished_messages_are_committed() -> None:
    group = group_of("abacd")
    source = GroupSource(group, "m")
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: sorted(handler.started) == [0, 1, 3, 4])
        handler.let(1, 3)
        await until(lambda: group.committed(0) == Committed(0, ((1, 2), (3, 4))))
        handler.let(0)
        await until(lambda: group.committed(0) == Committed(2, ((3, 4),)))
        handler.let(4)
        await until(lambda: group.committed(0) == Committed(2, ((3, 5),)))
        handler.let(2)
        await until(lambda: group.committed(0) == Committed(5))
        assert commits(source) == sorted(commits(source))
        assert await run.stop() is None
    assert group.unfinished == 0


@pytest.mark.anyio
async def test_a_commit_waits_for_its_interval() -> None:
    group = group_of("abc")
    source = GroupSource(group, "m")
    clock = HandClock()
    handler = Gated(free=[b"a", b"b"])
    settings = Settings(concurrency=4, retry=ONCE, commit_interval=0.05)
    async with started(Consumer(source, handler, settings=settings, clock=clock)) as run:
        await until(lambda: handler.ended == [0, 1] and run.consumer.status().settled == 2)
        # The interval passes for the loop, but not for the consumer's clock.
        await clock.asked_again()
        assert commits(source) == []
        clock.now += 0.05
        await until(lambda: commits(source) == [2])
        await turns()
        assert commits(source) == [2]
        handler.let(2)
        assert await run.stop() is None
    assert commits(source) == [2, 3]


@pytest.mark.anyio
async def test_many_finished_messages_are_committed_before_the_interval() -> None:
    group = group_of(map(str, range(40)))
    source = GroupSource(group, "m")
    handler = Gated(free=[str(number).encode() for number in range(40) if number not in (9, 39)])
    consumer = consumer_of(source, handler, max_ahead=120, commit_interval=3600.0, concurrency=40)
    async with started(consumer) as run:
        # 38 have finished, and a quarter of max_ahead is 30.
        await until(lambda: group.committed(0).offset == 9)
        assert sum(end - start for start, end in group.committed(0).completed) >= 21
        handler.let(9)
        await until(lambda: run.consumer.status().settled == 39)
        await turns()
        assert len(commits(source)) == 1
        handler.let(39)
        assert await run.stop() is None
    assert group.committed(0) == Committed(40)


@pytest.mark.anyio
async def test_gaps_at_the_end_of_a_log_are_committed() -> None:
    group = group_of("ab")
    group.skip(5)
    source = GroupSource(group, "m")
    async with started(consumer_of(source, Gated(free=[b"a", b"b"]))) as run:
        await until(lambda: group.committed(0) == Committed(7))
        group.skip(3)
        await until(lambda: group.committed(0) == Committed(10))
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_stop_commits_at_once() -> None:
    group = group_of("abcabc", partitions=3)
    source = GroupSource(group, "m")
    source.finish()
    consumer = consumer_of(source, Gated(free=[b"a", b"b", b"c"]), commit_interval=3600.0)
    await consumer.run()
    assert group.unfinished == 0
    assert [call.name for call in source.calls][-1] == "aclose"


@pytest.mark.anyio
async def test_a_cancelled_run_commits_finished_messages() -> None:
    group = group_of("aba")
    source = GroupSource(group, "m")
    handler = Gated(free=[b"b"])
    async with started(consumer_of(source, handler, commit_interval=3600.0)) as run:
        await until(lambda: handler.ended == [1])
        run.scope.cancel()
        await run.end()
    assert group.committed(0) == Committed(0, ((1, 2),))


@pytest.mark.anyio
async def test_finished_messages_are_counted_once(sdk: Sdk) -> None:
    group = group_of("abcabc", partitions=2)
    source = GroupSource(group, "m")
    source.finish()
    consumer = consumer_of(source, Gated(free=[b"a", b"b", b"c"]))
    await consumer.run()
    assert sum(number for number, _ in sdk.numbers("lanes.settled")) == 6
    assert consumer.status().settled == 6


# --- failing commits


@pytest.mark.anyio
@pytest.mark.parametrize("done", [False, True], ids=["not made", "made all the same"])
async def test_an_unconfirmed_commit_is_repeated(done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.01, 0.01))
    group = group_of("aab")
    source = GroupSource(group, "m")
    source.fail("settle", SourceError("timed out", retryable=True), times=2, done=done)
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(commits(source)) >= 3)
        assert run.consumer.status().partitions["memory/0"].confirmed in (0, 2)
        await until(lambda: run.consumer.status().partitions["memory/0"].confirmed == 2)
        assert commits(source) == sorted(commits(source))
        assert group.committed(0) == Committed(2)
        handler.let(2)
        assert await run.stop() is None
    assert group.committed(0) == Committed(3)


@pytest.mark.anyio
async def test_a_failing_commit_does_not_stop_the_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.01, 0.01))
    group = group_of(["a"] * 20)
    source = GroupSource(group, "m")
    source.fail("settle", SourceError("no leader", retryable=True), times=1_000_000)
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: len(handler.ended) == 20)
        await until(lambda: run.consumer.status().partitions["memory/0"].floor == 20)
        status = run.consumer.status().partitions["memory/0"]
        assert (status.confirmed, status.ahead, status.holes) == (0, 20, 0)
        run.scope.cancel()
        await run.end()
    assert group.committed(0) == Committed(0)


@pytest.mark.anyio
async def test_a_final_error_of_a_commit_stops_the_consumer() -> None:
    group = group_of("ab")
    source = GroupSource(group, "m")
    error = SourceError("fenced for good")
    source.fail("settle", error, times=100)
    async with started(consumer_of(source, Gated(free=[b"a"]), drain_timeout=0.0, grace=0.05)) as run:
        assert await run.end() is error


@pytest.mark.anyio
async def test_a_partition_has_one_commit_under_way() -> None:
    group = group_of("abcd")
    source = GroupSource(group, "m")
    source.block("settle")
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: commits(source) == [1])
        handler.let(1, 2)
        await until(lambda: run.consumer.status().settled == 3)
        await turns()
        assert commits(source) == [1]
        source.unblock("settle")
        await until(lambda: group.committed(0) == Committed(3))
        assert commits(source) == [1, 3]
        handler.let(3)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_drain_waits_for_the_commit_under_way() -> None:
    group = group_of("abcdefgh", partitions=3)
    assert len({group.publish(key=key).partition for key in "abcdefgh"}) == 3
    source = GroupSource(group, "m")
    source.block("settle")
    handler = Gated(free=[key.encode() for key in "abcdefgh"])
    async with started(consumer_of(source, handler, grace=3600.0, drain_timeout=3600.0)) as run:
        await until(lambda: len(handler.ended) == 16)
        await until(
            lambda: {each.partition.id.number for c in source.called("settle") for each in c.commits} == {0, 1, 2}
        )
        run.consumer.stop()
        await turns()
        source.unblock("settle")
        assert await run.end() is None
    assert group.unfinished == 0


@pytest.mark.anyio
async def test_messages_finished_during_a_commit_are_committed_before_the_release() -> None:
    group = Group(2)
    for key, partition in (("x", 0), ("y", 0), ("z", 1)):
        group.publish(key=key, partition=partition)
    source = GroupSource(group, "m")
    source.block("settle")
    clock = HandClock()
    running: set[bytes] = set()
    gate = anyio.Event()

    async def handler(message: Message) -> None:
        assert message.key is not None
        running.add(message.key)
        if message.key != b"x":
            await gate.wait()

    settings = Settings(concurrency=4, retry=ONCE, commit_interval=0.02, grace=3600.0)
    async with started(Consumer(source, handler, settings=settings, clock=clock)) as run:
        await until(lambda: running == {b"x", b"y", b"z"} and run.consumer.status().settled == 1)
        clock.now += 0.02
        await until(lambda: commits(source) == [1])
        run.consumer.stop()
        await turns()
        # No commit is due yet: the drains commit both partitions, while another commit hangs.
        gate.set()
        await turns()
        source.unblock("settle")
        assert await run.end() is None
    assert group.unfinished == 0
    for number in (0, 1):
        release = next(i for i, call in enumerate(source.calls) if call.partition == number)
        later = [each for call in source.calls[release:] for each in call.commits]
        assert number not in [each.partition.id.number for each in later]


@pytest.mark.anyio
async def test_messages_finished_during_a_drains_commit_are_committed_when_due() -> None:
    group = Group(2, cooperative=True)
    for key, partition in (("x", 0), ("y", 0), ("z", 1)):
        group.publish(key=key, partition=partition)
    source = GroupSource(group, "m")
    source.block("settle")
    clock = HandClock()
    handler = Gated(free=[b"x", b"z"])
    settings = Settings(concurrency=4, retry=ONCE, commit_interval=0.02, grace=3600.0)
    async with started(Consumer(source, handler, settings=settings, clock=clock)) as run:
        await until(lambda: len(handler.ended) == 2 and run.consumer.status().settled == 2)
        group.revoke(1)
        # The drain of one partition also sends the commit of the other.
        await until(lambda: sorted(commits(source)) == [1, 1])
        handler.let(1)
        await until(lambda: run.consumer.status().settled == 3)
        clock.now += 0.02
        source.unblock("settle")
        await until(lambda: group.committed(0) == Committed(2))
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("hurried")
async def test_a_hanging_commit_does_not_prevent_the_release() -> None:
    group = group_of("a")
    source = GroupSource(group, "m")
    source.block("settle")
    async with started(consumer_of(source, Gated(free=[b"a"]), drain_timeout=0.02, grace=0.02)) as run:
        await until(lambda: source.called("settle"))
        group.revoke(0)
        await until(lambda: [call.partition for call in source.called("release")] == [0])
        # The only member gets the partition again, with the uncommitted messages.
        await until(lambda: epochs(run) == [2])
        source.unblock("settle")
        await until(lambda: group.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("hurried")
async def test_nothing_is_committed_after_the_release_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.001, 0.001))
    group = Group(2)
    group.publish(key="a", partition=0)
    source = GroupSource(group, "m")
    source.fail("settle", SourceError("no leader", retryable=True), times=1_000_000)
    source.block("release")
    async with started(consumer_of(source, Gated(free=[b"a"]), drain_timeout=0.02, grace=0.3)) as run:
        await until(lambda: source.called("settle"))
        group.revoke(0)
        await until(lambda: source.called("release"))
        before = len(source.calls)
        for _ in range(3):
            tried = len(source.called("settle"))
            group.publish(key="a", partition=1)
            await until(lambda: len(source.called("settle")) > tried)  # noqa: B023 (awaited here)
        later = [each.partition.id.number for call in source.calls[before:] for each in call.commits]
        assert set(later) == {1}
        run.scope.cancel()
        await run.end()
