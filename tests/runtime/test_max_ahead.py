"""``max_ahead``: messages beyond the bound wait, only the partition at the bound stops, and a warning names the
cause."""

from __future__ import annotations

import logging
from collections import Counter

import anyio
import pytest

from lanes import SourceError
from lanes.observe import health
from memsource import Group, GroupSource
from memsource.memory.group import Committed
from tests.fakes.grouped import commits, group_of
from tests.fakes.support import Gated, consumer_of, started, turns, until

UNCONFIRMED = "until the broker has confirmed position 3 (a commit has no answer)"


def stalled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings about partitions at ``max_ahead``."""
    return [record.getMessage() for record in caplog.records if "max_ahead" in record.getMessage()]


def named(caplog: pytest.LogCaptureFixture, position: int) -> bool:
    """Whether a warning names this position."""
    return any(f"until position {position} is finished" in said for said in stalled(caplog))


@pytest.mark.anyio
async def test_one_stuck_key_is_named_when_it_stalls_its_partition(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALLED_AFTER", 0.01)
    group = group_of(["stuck", *map(str, range(50))])
    source = GroupSource(group, "m", batch=7)
    handler = Gated(free=[str(number).encode() for number in range(50)])
    with caplog.at_level(logging.WARNING, "lanes"):
        async with started(consumer_of(source, handler, max_ahead=10)) as run:
            consumer = run.consumer
            await until(lambda: len(handler.ended) == 9)
            await turns()
            assert len(handler.ended) == 9
            status = consumer.status()
            assert (status.partitions["memory/0"].ahead, status.partitions["memory/0"].ahead_reached) == (10, True)
            assert (status.partitions["memory/0"].holes, status.partitions["memory/0"].confirmed) == (1, 0)
            (reason,) = consumer.health().reasons
            assert reason.startswith("memory/0 has reached max_ahead=10, held by memory/0 position 0, key ")
            assert "stuck" not in reason
            await until(lambda: named(caplog, 0))
            assert "memory/0 has reached max_ahead=10" in stalled(caplog)[0]
            handler.let(0)
            await until(lambda: group.committed(0) == Committed(51))
            assert consumer.healthy
            assert not consumer.status().partitions["memory/0"].ahead_reached
            assert await run.stop() is None
    assert Counter(handler.ended) == Counter(range(51))


@pytest.mark.anyio
async def test_the_next_stuck_message_is_named_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALLED_AFTER", 0.01)
    keys = [str(number) for number in range(12)]
    handler = Gated(free=[key.encode() for key in keys if key not in ("0", "1")])
    # One run: messages beyond the bound wait, and enter when the first one ends.
    source = GroupSource(group_of(keys), "m", batch=12)
    with caplog.at_level(logging.WARNING, "lanes"):
        async with started(consumer_of(source, handler, max_ahead=4)) as run:
            await until(lambda: named(caplog, 0))
            assert not named(caplog, 1)
            handler.let(0)
            await until(lambda: named(caplog, 1))
            handler.let(1)
            await until(lambda: run.consumer.status().settled == 12)
            assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "behind a slow message"])
async def test_a_missing_confirmation_of_the_broker_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, slow: bool
) -> None:
    monkeypatch.setattr(health, "STALLED_AFTER", 0.01)
    group = group_of("abcdef")
    source = GroupSource(group, "m")
    source.block("settle")
    handler = Gated(free=[key.encode() for key in "abcdef"[slow:]])
    with caplog.at_level(logging.WARNING, "lanes"):
        async with started(consumer_of(source, handler, max_ahead=3)) as run:
            if slow:
                await until(lambda: named(caplog, 0))
                assert not any(UNCONFIRMED in said for said in stalled(caplog))
                handler.let(0)
            # Otherwise a busy machine may have another handler named before.
            await until(lambda: any(UNCONFIRMED in said for said in stalled(caplog)))
            source.unblock("settle")
            await until(lambda: group.unfinished == 0)
            assert await run.stop() is None


@pytest.mark.anyio
async def test_failing_commits_are_named_with_their_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "STALLED_AFTER", 0.2)
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.001, 0.001))
    group = group_of("abcdef")
    source = GroupSource(group, "m")
    source.fail("settle", SourceError("the group is unreachable", retryable=True), times=1_000_000)
    with caplog.at_level(logging.WARNING, "lanes"):
        async with started(consumer_of(source, Gated(free=[b"a", b"b", b"c"]), max_ahead=3)) as run:
            await until(
                lambda: any("position 3 (commits fail: the group is unreachable" in said for said in stalled(caplog))
            )
            why = run.consumer.health().reasons
            assert any("finished messages of memory/0 are not settled for " in reason for reason in why)
            run.scope.cancel()
            await run.end()


@pytest.mark.anyio
async def test_a_partition_at_max_ahead_does_not_stop_another() -> None:
    group = Group(2)
    for number in range(30):
        group.publish(key=f"s{number}" if number else "stuck", partition=0)
        group.publish(key=f"f{number}", partition=1)
    source = GroupSource(group, "m", batch=5)
    free = [f"{kind}{number}".encode() for kind in "sf" for number in range(30)]
    handler = Gated(free=free)
    # The waiting messages of one partition and a batch of the other fill the bound.
    async with started(consumer_of(source, handler, max_ahead=5, max_in_flight=10)) as run:
        await until(lambda: group.committed(1) == Committed(30))
        assert group.committed(0).offset == 0
        handler.let(0)
        await until(lambda: group.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_reaching_max_ahead_commits_at_once() -> None:
    group = group_of(map(str, range(5)))
    source = GroupSource(group, "m", batch=100)
    handler = Gated(free=[str(number).encode() for number in range(5)])
    # Too few for a commit that does not wait for the interval.
    consumer = consumer_of(source, handler, max_ahead=40, commit_interval=3600.0, concurrency=50)
    async with started(consumer) as run:
        await until(lambda: len(handler.ended) == 5)
        await turns()
        assert commits(source) == []
        # All of them hang, so no finished message triggers a check.
        for number in range(40):
            group.publish(key=f"hangs {number}")
        await until(lambda: group.committed(0).offset == 5)
        handler.let(*range(5, 45))
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_commit_at_max_ahead_does_not_wait_for_its_interval() -> None:
    group = group_of(map(str, range(100)))
    source = GroupSource(group, "m", batch=9)
    source.finish()
    handler = Gated(free=[str(number).encode() for number in range(100)])
    consumer = consumer_of(source, handler, max_ahead=4, commit_interval=3600.0)
    with anyio.fail_after(20):
        await consumer.run()
    assert group.unfinished == 0
    assert Counter(handler.ended) == Counter(range(100))
