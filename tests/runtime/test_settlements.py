"""Settlements are repeated until sent, one at a time, even while handlers never suspend."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Literal

import anyio
import pytest

from lanes import Message, Nak, SourceError
from lanes.clock import monotonic
from lanes.core.types import Settlement
from lanes.source import SettlementError
from memsource import Group, GroupSource
from memsource.memory.source import MemorySource
from tests.fakes.grouped import HandClock, commits, group_of
from tests.fakes.support import Gated, consumer_of, published, settled, started, turns, until


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (0.001, 0.002))


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_an_unconfirmed_settlement_is_repeated() -> None:
    broker = published("a", "b", "a")
    source = MemorySource(broker)
    source.finish()
    source.fail("settle", SourceError("no connection", retryable=True), times=4)
    handler = Gated(free=[b"a", b"b"])
    with anyio.fail_after(20):
        await consumer_of(source, handler).run()
    assert sorted(handler.started) == [0, 1, 2]
    assert broker.acked() == [0, 1, 2]
    calls = source.called("settle")
    assert len(calls) >= 5
    # The next call has the messages of the failed one, with the same tokens.
    for before, after in itertools.pairwise(calls[:5]):
        assert set(before.deliveries) <= set(after.deliveries)
    assert broker.stale == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient", "hurried")
async def test_unsettled_messages_stay_in_flight() -> None:
    broker = published(*[None] * 6)
    source = MemorySource(broker)
    source.fail("settle", SourceError("no connection", retryable=True), times=10_000)
    handler = Gated()
    handler.let(*range(6))
    async with started(
        consumer_of(source, handler, concurrency=2, max_in_flight=4, drain_timeout=0.05, grace=0.05)
    ) as run:
        await until(lambda: len(handler.ended) == 4 and len(source.called("settle")) > 3)
        await turns()
        # The bound includes finished, unsettled messages, so no fifth message arrives.
        assert run.consumer.status().in_flight == 4
        assert sorted(handler.started) == [0, 1, 2, 3]
        assert await run.stop() is None
    assert broker.acked() == []


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_a_drain_waits_for_a_settlement_that_is_repeated() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 1)
        run.consumer.stop()
        await turns()
        source.fail("settle", SourceError("no connection", retryable=True), times=5)
        handler.let(0)
        assert await run.end() is None
    assert [call.name for call in source.calls if call.name in ("settle", "release")] == [*["settle"] * 6, "release"]
    assert broker.acked() == [0]


class Refusing(MemorySource):
    """A source whose settlements fail while ``refuses`` is set."""

    refuses = True
    tries = 0

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.tries += 1
        if self.refuses:
            raise SourceError("the stream is away", retryable=True)
        await super().settle(settlements)


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_a_failing_settlement_is_reported_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    source, clock = Refusing(published("a")), HandClock()

    def said() -> list[tuple[int, str]]:
        return [(one.levelno, one.getMessage()) for one in caplog.records if "the stream is away" in one.getMessage()]

    async def tried(count: int = 3) -> None:
        before = source.tries
        await until(lambda: source.tries >= before + count)

    what = "memory: finished messages of memory/0 are not settled%s (the stream is away); retrying"
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(source, Gated(free=[b"a"]), clock=clock)) as run:
            await tried()
            assert said() == [(logging.INFO, what % "")]
            clock.now += 1.0
            await tried()
            clock.now += 29.9
            await tried()
            assert said()[1:] == [(logging.WARNING, what % " for 1.0 s")]
            assert run.consumer.health().reasons == ()
            clock.now += 300.0
            await tried()
            assert said()[2:] == [(logging.WARNING, what % " for 330.9 s")]
            told = "finished messages of memory/0 are not settled for 330.9 s: the stream is away"
            assert told in run.consumer.health().reasons
            source.refuses = False
            await until(lambda: run.consumer.status().settled == 1)
            assert told not in run.consumer.health().reasons
            assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient", "hurried")
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_drain_reports_unsettled_messages(caplog: pytest.LogCaptureFixture, *, hangs: bool) -> None:
    source, handler = MemorySource(published("a")), Gated()
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(source, handler, drain_timeout=0.02)) as run:
            await until(lambda: handler.running == 1)
            if hangs:
                source.block("settle")
            else:
                source.fail("settle", SourceError("the stream is away", retryable=True), times=1_000_000)
            handler.let(0)
            await until(lambda: source.called("settle"))
            assert await run.stop() is None
    (said,) = [line for line in caplog.messages if "is handed over with" in line]
    why = "" if hangs else " (the stream is away)"
    assert said == (
        "memory: memory/0 is handed over with 1 finished message(s) that were not settled within 0.0 s"
        f"{why}; the next owner runs these messages again"
    )
    (drained,) = [line for line in caplog.messages if line.startswith("memory: drained ")]
    assert "1 message(s) run again, 0 did not start" in drained


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient", "hurried")
async def test_a_drain_counts_messages_without_a_confirmed_commit(caplog: pytest.LogCaptureFixture) -> None:
    handler = Gated(free=[b"a", b"b"])
    source = GroupSource(group_of("abc"), "m-1")
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(source, handler, drain_timeout=0.02, commit_interval=0.0)) as run:
            await until(lambda: commits(source)[-1:] == [2] and handler.running == 1)
            await turns()
            source.fail("settle", SourceError("the broker is away", retryable=True), times=1_000_000)
            handler.let(2)
            await until(lambda: len(handler.ended) == 3)
            assert await run.stop() is None
    (drained,) = [line for line in caplog.messages if ": drained " in line]
    assert "1 message(s) run again, 0 did not start" in drained


class Partly(GroupSource):
    """A source that cannot settle partition 0 while ``refuses`` is set."""

    refuses = True

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        failed = [each.partition for each in settlements if self.refuses and each.partition.id.number == 0]
        await super().settle([each for each in settlements if each.partition not in failed])
        if failed:
            raise SettlementError("its row is locked", failed)

    def floors(self) -> dict[int, int | None]:
        """The confirmed floor of each partition."""
        calls = [each for call in self.called("settle") for each in call.commits]
        return {each.partition.id.number: each.floor for each in calls}


def of_both() -> tuple[Partly, Gated]:
    """A source with three messages in each of two partitions, and a handler that waits for no message."""
    group = Group(2)
    for number in range(6):
        group.publish(str(number), key="a", partition=number % 2)
    return Partly(group, "m-1"), Gated(free=[b"a"])


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_a_settlement_that_fails_alone_delays_no_other_partition() -> None:
    source, handler = of_both()
    async with started(consumer_of(source, handler, commit_interval=0.0)) as run:
        await until(lambda: source.floors() == {1: 3})
        source.refuses = False
        await until(lambda: source.floors() == {0: 3, 1: 3})
        assert await run.stop() is None
    assert len(handler.ended) == 6


class Nameless(GroupSource):
    """A source whose error about a settlement names no partition while ``refuses`` is set."""

    refuses = True

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        if self.refuses:
            raise SettlementError("its row is locked", ())
        await super().settle(settlements)


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_an_error_that_names_no_partition_of_the_call_concerns_all_of_them() -> None:
    source, handler = Nameless(group_of("a"), "m-1"), Gated(free=[b"a"])
    async with started(consumer_of(source, handler, commit_interval=0.0)) as run:
        await until(lambda: len(handler.ended) == 1)
        await turns()
        assert commits(source) == []
        source.refuses = False
        await until(lambda: commits(source) == [1])
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("impatient")
async def test_a_drain_does_not_wait_for_the_settlement_of_another_partition() -> None:
    source, handler = of_both()
    async with started(consumer_of(source, handler, commit_interval=0.0)) as run:
        await until(lambda: len(handler.ended) == 6)
        run.consumer.stop()
        await until(lambda: source.called("release"))
        await turns()
        assert {call.partition for call in source.called("release")} == {1}
        source.refuses = False
        assert await run.end() is None
    assert source.floors() == {0: 3, 1: 3}


@pytest.mark.anyio
async def test_a_failed_settlement_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.runtime.settle.SETTLE_RETRY", (3600.0, 3600.0))
    broker = published("a", "b")
    source = MemorySource(broker)
    source.fail("settle", SourceError("no connection", retryable=True))
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: source.called("settle"))
        handler.let(1)
        await until(lambda: len(handler.ended) == 2)
        await turns()
        # A message that finishes meanwhile does not shorten the pause.
        assert len(source.called("settle")) == 1
        run.scope.cancel()
        await run.end()
    # A last attempt is made at the end.
    assert broker.acked() == [0, 1]


@pytest.mark.anyio
async def test_one_settlement_is_under_way_at_a_time() -> None:
    broker = published(*[None] * 8)
    source = MemorySource(broker)
    source.block("settle")
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=8)) as run:
        handler.let(0)
        await until(lambda: source.called("settle"))
        handler.let(*range(8))
        await until(lambda: len(handler.ended) == 8)
        await turns()
        assert len(source.called("settle")) == 1
        source.unblock("settle")
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    # The seven messages that finished meanwhile share a call.
    assert [len(call.deliveries) for call in source.called("settle")] == [1, 7]


@pytest.mark.anyio
async def test_a_settlement_that_can_never_be_sent_stops_with_its_error() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    refused = SourceError("the connection is closed")
    source.fail("settle", refused, times=10_000)
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler, drain_timeout=30.0, grace=0.1)) as run:
        await until(lambda: source.called("settle"))
        handler.let(1)
        # The stop is orderly, but faster than a drain: it does not wait for a settlement that can never be sent.
        assert await run.end() is refused
    assert broker.acked() == []
    assert source.called("aclose")


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["settle", "release", "extend"])
async def test_a_bug_of_a_source_stops_with_its_error(call: Literal["settle", "release", "extend"]) -> None:
    broker = published("a", "b")
    source = MemorySource(broker, extend_interval=0.01)
    mistake = RuntimeError("a bug in the adapter")
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        # Both handlers run before the first call fails, because the failure stops the run.
        await until(lambda: handler.running == 2)
        before = len(source.called(call))
        source.fail(call, mistake, times=10_000)
        if call == "settle":
            handler.let(0)
        elif call == "release":
            run.consumer.stop()
            handler.let(0, 1)
        await until(lambda: len(source.called(call)) > before)
        handler.let(0, 1)
        assert await run.end() is mistake
    assert source.called("aclose")


@pytest.mark.anyio
async def test_a_handler_that_never_suspends_does_not_starve_other_tasks() -> None:
    broker = published(*range(400))
    source = MemorySource(broker)
    source.finish()
    now = 0.0
    waiting: list[int] = []
    ticks = 0

    async def handler(message: Message) -> None:
        nonlocal now
        # A millisecond of work that never suspends.
        now += 0.001
        waiting.append(message.position + 1 - len(broker.acked()))

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.lowlevel.checkpoint()
            ticks += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await consumer_of(source, handler, clock=lambda: now, concurrency=1).run()
        tasks.cancel_scope.cancel()
    assert broker.unfinished == 0
    # A slice is 5 ms. Messages that finish in a slice are settled at most two slices later.
    assert max(waiting) <= 20
    assert ticks >= 400 / 10


@pytest.mark.anyio
async def test_unsettled_messages_are_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = published("a", "a", "held", "done")
    interval = 0.1
    source = MemorySource(broker, extend_interval=interval)
    gated = Gated(free=[b"done"])

    async def handler(message: Message) -> None:
        if message.key == b"held":
            raise Nak(delay=3600.0)
        await gated(message)

    def extensions(position: int) -> int:
        return sum(position in call.positions for call in source.called("extend"))

    pauses: list[float] = []
    sleep = anyio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(anyio, "sleep", noted)
    begin = monotonic()
    async with started(consumer_of(source, handler, attempts=2)) as run:
        await until(lambda: broker.acked() == [3])
        before = extensions(3)
        # A running message, a queued one of its key, and one held for a retry.
        await until(lambda: all(extensions(position) >= 5 for position in (0, 1, 2)))
        elapsed = monotonic() - begin
        assert extensions(3) == before
        # A message is as old as a pause, and waits for the next one: twice a pause is the promised interval.
        assert 2 * max(pauses) <= interval
        calls = [{0, 1, 2} <= set(call.positions) for call in source.called("extend")]
        assert all(calls[calls.index(True) :])
        assert len(calls) <= elapsed / (interval / 2) + 1
        gated.let(0)
        await until(lambda: broker.acked() == [0, 3])
        count = extensions(0)
        await until(lambda: extensions(1) >= 8)
        assert extensions(0) == count
        gated.let(1)
        assert await run.stop() is None
    assert settled(source).count(0) == 1
