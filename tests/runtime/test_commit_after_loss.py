"""A commit under way never overwrites a commit of the next owner."""

from __future__ import annotations

import anyio
import pytest

from lanes import Consumer, Settings
from memsource import Group, GroupSource
from memsource.memory.group import Committed
from tests.fakes.grouped import ONCE, commits, group_of
from tests.fakes.support import Gated, consumer_of, started, turns, until


@pytest.mark.anyio
async def test_a_commit_of_a_lost_partition_is_cancelled() -> None:
    group = group_of("abcdef")
    source = GroupSource(group, "m-1")
    source.block("settle")
    async with started(consumer_of(source, Gated(free=[b"a", b"b"]), grace=0.02)) as run:
        await until(lambda: commits(source))
        group.join("m-2")
        group.lose("m-1", 0)
        await until(lambda: not run.consumer.active)
        assert group.owner(0) == "m-2"
        group.commit("m-2", 0, 5)
        source.unblock("settle")
        await turns()
        assert await run.stop() is None
    assert group.committed(0) == Committed(5)


@pytest.mark.anyio
@pytest.mark.usefixtures("hurried")
async def test_a_hanging_commit_is_cancelled_before_the_release() -> None:
    group = Group(2)
    for number in (0, 1):
        group.publish(key="a", partition=number)
    source = GroupSource(group, "m-1")
    source.block("settle")
    async with started(consumer_of(source, Gated(free=[b"a"]), drain_timeout=0.02, grace=0.02)) as run:
        await until(lambda: sum(len(call.commits) for call in source.called("settle")) == 2)
        # One of the two partitions is revoked.
        group.join("m-2")
        await until(lambda: "m-2" in [group.owner(0), group.owner(1)])
        moved = 0 if group.owner(0) == "m-2" else 1
        group.commit("m-2", moved, 5)
        source.unblock("settle")
        await until(lambda: group.committed(1 - moved) == Committed(1))
        await turns()
        assert await run.stop() is None
    assert group.committed(moved) == Committed(5)


@pytest.mark.anyio
async def test_commits_of_the_same_call_are_repeated() -> None:
    group = Group(2)
    for number in (0, 1):
        group.publish(key="a", partition=number)
    source = GroupSource(group, "m-1")
    source.block("settle")
    running: set[int] = set()
    gate = anyio.Event()

    async def handler(message: object) -> None:
        running.add(id(message))
        await gate.wait()

    settings = Settings(concurrency=4, retry=ONCE, commit_interval=0.05, grace=3600.0)
    async with started(Consumer(source, handler, settings=settings)) as run:
        await until(lambda: len(running) == 2)
        gate.set()
        # Both finished in the same interval, so one call commits both.
        await until(lambda: [len(call.commits) for call in source.called("settle")] == [2])
        group.join("m-2")
        group.lose("m-1", 0)
        await until(lambda: list(run.consumer.status().partitions) == ["memory/1"])
        source.unblock("settle")
        await until(lambda: group.committed(1) == Committed(1))
        assert group.committed(0) == Committed(0)
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("hurried")
async def test_a_commit_cancelled_with_the_run_does_not_start_again() -> None:
    group = group_of("abcdef")
    source = GroupSource(group, "m-1")
    source.block("settle")
    async with started(consumer_of(source, Gated(free=[b"a", b"b"]), grace=0.02)) as run:
        await until(lambda: commits(source))
        sent = len(commits(source))
        run.scope.cancel()
        await run.end()
        # One more bounded attempt at the end, in case the broker answers.
        assert len(commits(source)) <= sent + 1
