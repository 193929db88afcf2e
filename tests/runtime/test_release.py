"""The release of a drained partition has a time limit, and a late or failed release is a loss."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from lanes import Consumer, Message, Settings, SourceError
from lanes.core.types import Partition
from memsource import MemoryBroker, MemorySource
from tests.fakes.support import Gated, published, started, turns, until


async def told_of(source: MemorySource, *, grace: float, release: float | None = None) -> list[str]:
    """The events of an idle partition during a stop. ``release``: seconds that its release takes."""
    told: list[str] = []
    settings = Settings(concurrency=1, grace=grace)
    consumer = Consumer(source, Gated(), settings=settings, on_event=lambda event: told.append(event.name))
    async with started(consumer) as run:
        await until(lambda: told == ["assigned"])
        run.consumer.stop()
        if release is not None:
            await until(lambda: source.called("release"))
            await anyio.sleep(release)
            source.unblock("release")
        assert await run.end() is None
    return told


@pytest.mark.anyio
@pytest.mark.parametrize("grace", [0.0, 0.01])
async def test_the_grace_of_handlers_does_not_bound_a_release(grace: float) -> None:
    source = MemorySource(MemoryBroker(1))
    source.block("release")
    assert await told_of(source, grace=grace, release=0.05) == ["assigned", "revoked"]
    assert source.owned == []


@pytest.mark.anyio
async def test_a_release_that_takes_too_long_is_a_loss(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.runtime.handover.RELEASE_WITHIN", 0.02)
    source = MemorySource(MemoryBroker(1))
    source.block("release")
    assert await told_of(source, grace=3_600.0) == ["assigned", "lost"]
    assert ", so its next owner may run finished messages again (no answer within 0.0 s)" in caplog.text


@pytest.mark.anyio
async def test_a_failed_release_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(MemoryBroker(1))
    source.fail("release", SourceError("not flushed"))
    assert await told_of(source, grace=1.0) == ["assigned", "lost"]
    assert "may run finished messages again (not flushed)" in caplog.text


@pytest.mark.anyio
async def test_releases_that_fail_together_share_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemorySource(MemoryBroker(4))
    asked: list[Partition] = []
    answered = anyio.Event()

    async def refuse(partition: Partition) -> None:
        asked.append(partition)
        await answered.wait()
        raise SourceError("not flushed")

    monkeypatch.setattr(source, "release", refuse)
    consumer = Consumer(source, Gated())
    async with started(consumer) as run:
        await until(lambda: consumer.ready and len(consumer.status().partitions) == 4)
        consumer.stop()
        await until(lambda: len(asked) == 4)
        answered.set()
        assert await run.end() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "did not confirm the release of 4 partitions" in line
    assert line.endswith("(the last: not flushed): memory/0, memory/1, memory/2, memory/3")


@pytest.mark.anyio
async def test_a_loss_during_a_release_is_no_handover() -> None:
    told: list[str] = []
    source = MemorySource(MemoryBroker(1))
    source.block("release")
    async with started(Consumer(source, Gated(), on_event=lambda event: told.append(event.name))) as run:
        await until(lambda: told == ["assigned"])
        source.revoke(0)
        await until(lambda: source.called("release"))
        source.lose(0)
        await until(lambda: told[1:])
        source.unblock("release")
        await turns()
        assert await run.stop() is None
    assert told == ["assigned", "lost"]
    assert len(source.called("release")) == 1


@pytest.mark.anyio
async def test_a_loss_ends_a_drain_without_a_limit() -> None:
    told: list[str] = []
    let = anyio.Event()

    async def deaf(message: Message) -> None:
        with anyio.CancelScope(shield=True):
            await let.wait()

    source = MemorySource(published("a"))
    async with started(Consumer(source, deaf, on_event=lambda event: told.append(event.name))) as run:
        await until(lambda: run.consumer.status().running == 1)
        source.revoke(0, timeout=math.inf)
        await until(lambda: len(drains_of(run.consumer)) == 1)
        source.lose(0)
        try:
            await until(lambda: "lost" in told)
            # The handler cannot be cancelled and still runs.
            await until(lambda: not drains_of(run.consumer))
        finally:
            let.set()
        assert await run.stop() is None


def drains_of(consumer: Consumer) -> dict[Partition, Any]:
    assert consumer._life.run is not None
    return consumer._life.run._handover._drains


def test_a_drain_in_which_everything_hangs_takes_longest_drain() -> None:
    settings = Settings(drain_timeout=7.0, grace=3.0)
    told: list[tuple[str, float]] = []

    async def deaf(message: Message) -> None:
        if message.key == b"a":
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100.0)

    async def drained() -> None:
        source = MemorySource(published("a", "b"))
        source.block("settle")
        source.block("release")
        clock, told_at = trio.current_time, trio.current_time() + 1.0
        consumer = Consumer(
            source, deaf, settings=settings, clock=clock, on_event=lambda event: told.append((event.name, clock()))
        )
        async with started(consumer):
            await anyio.sleep_until(told_at)
            consumer.stop()
            await anyio.sleep_until(told_at + settings.longest_drain + 1.0)
            source.unblock("settle")
        ((name, at),) = told[1:]
        assert name == "lost" and at - told_at == pytest.approx(settings.longest_drain)

    trio.run(drained, clock=trio.testing.MockClock(autojump_threshold=0))
    assert settings.longest_drain == 25.0
