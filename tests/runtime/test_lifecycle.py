"""A run closes everything that it opened, and raises the first error, also after a failed start or a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Literal

import anyio
import pytest

import lanes
from lanes import ConfigError, Consumer, HandlerHalted, LanesError, Message, Retry, Settings, SourceError
from lanes.core.types import Room
from lanes.source import Delivered, SourceEvent
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import (
    Gated,
    acknowledge,
    acknowledge_all,
    consumer_of,
    fail,
    living,
    published,
    started,
    turns,
    until,
)

# --- errors of the source


@pytest.mark.anyio
@pytest.mark.parametrize("error", [ConfigError("max_ack_pending is 5"), SourceError("no server"), RuntimeError("bug")])
async def test_an_error_at_the_start_is_raised_before_the_first_message(error: Exception) -> None:
    broker = published("a")
    source = MemorySource(broker)
    dead_letters = MemoryDeadLetters(broker)
    source.fail("open", error)
    before = living()
    consumer = consumer_of(source, acknowledge, dead_letters=dead_letters)
    with pytest.raises(type(error)) as caught:
        await consumer.run()
    assert caught.value is error
    assert broker.deliveries(0) == 0
    assert [call.name for call in source.calls] == ["open", "aclose"]
    assert [call.name for call in dead_letters.calls] == ["open", "aclose"]
    assert living() <= before


@pytest.mark.anyio
@pytest.mark.parametrize("error", [SourceError("gone for good"), RuntimeError("bug")])
async def test_an_error_of_receive_stops_in_order_and_is_raised(error: Exception) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 2)
        source.fail("receive", error)
        await turns()
        assert not run.ended.is_set()
        handler.let(0, 2)
        assert await run.end() is error
    assert broker.acked() == [0, 2]
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]


@pytest.mark.anyio
async def test_an_error_of_closing_does_not_hide_why_the_run_ended() -> None:
    broker = published("a")
    source = MemorySource(broker)
    dead_letters = MemoryDeadLetters(broker)
    source.fail("aclose", SourceError("not closed"))

    async def handler(message: Message) -> None:
        raise ValueError("poison")

    with pytest.raises(HandlerHalted):
        await consumer_of(source, handler, dead_letters=dead_letters, poison="exit").run()
    assert dead_letters.called("aclose")


@pytest.mark.anyio
async def test_an_error_of_closing_leaves_nothing_else_open() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    source.fail("aclose", SourceError("not closed"))
    before = living()
    # The run may raise the error or not.
    with contextlib.suppress(SourceError):
        await consumer_of(source, acknowledge, dead_letters=dead_letters).run()
    assert dead_letters.called("aclose")
    assert broker.unfinished == 0
    assert living() <= before


@pytest.mark.anyio
async def test_closing_a_hanging_source_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.consumer.CLOSE_TIMEOUT", 0.02)
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    source.block("aclose")
    with anyio.fail_after(20):
        await consumer_of(source, acknowledge).run()
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_failed_release_does_not_fail_the_run(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    source.fail("release", SourceError("not flushed", retryable=True))
    await consumer_of(source, acknowledge).run()
    assert broker.unfinished == 0
    assert "not flushed" in caplog.text


@pytest.mark.anyio
async def test_an_unknown_event_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = MemorySource(published("a"))

    async def receive(room: object) -> list[SourceEvent]:
        return ["surprise"]  # type: ignore[list-item]

    monkeypatch.setattr(source, "receive", receive)
    with pytest.raises(lanes.ContractError, match="delivered a str, which is no event"):
        await consumer_of(source, acknowledge).run()


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 4])
async def test_a_message_whose_broken_is_no_message_error_stops_the_consumer(
    batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    handled: list[object] = []
    delivered = source.receive

    async def receive(room: Room) -> Sequence[SourceEvent]:
        events = await delivered(room)
        for event in events:
            if isinstance(event, Delivered):
                event.run[0].broken = ValueError("no key")  # type: ignore[assignment]
        return events

    async def handler(message: object) -> None:
        handled.append(message)

    monkeypatch.setattr(source, "receive", receive)
    settings = Settings(batch=batch, retry=Retry(attempts=1), poison="skip")
    with pytest.raises(
        lanes.ContractError, match=r"memory/0 position 0 with broken=ValueError; .* MessageError; please report"
    ):
        await Consumer(source, handler, settings=settings, dead_letters=dead_letters).run()
    # The other messages of the run are not reported.
    assert (handled, broker.dead_letters) == ([], [])


# --- run, status


@pytest.mark.anyio
async def test_a_second_run_is_refused() -> None:
    source = MemorySource(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running)
        with pytest.raises(LanesError, match="running already"):
            await run.consumer.run()
        handler.let(0)
        assert await run.stop() is None
        with pytest.raises(LanesError, match="has stopped"):
            await run.consumer.run()
    assert len(source.called("open")) == len(source.called("aclose")) == 1


@pytest.mark.anyio
async def test_status_is_empty_before_the_start_and_kept_after_the_end() -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Gated()
    consumer = consumer_of(source, handler, concurrency=3, max_in_flight=5)
    source.block("open")
    before = [consumer.status()]
    async with started(consumer) as run:
        await until(lambda: source.called("open"))
        consumer.pause()
        before.append(consumer.status())
        assert [each.paused for each in before] == [False, True]
        for empty in before:
            assert (empty.in_flight, empty.max_in_flight, empty.concurrency, empty.settled) == (0, 5, 3, 0)
            assert (empty.partitions, empty.floors, empty.oldest) == ({}, {}, None)
        consumer.resume()
        source.unblock("open")
        await until(lambda: handler.running == 2)
        status = consumer.status()
        assert (status.in_flight, status.max_in_flight, status.peak_in_flight) == (3, 5, 3)
        assert (status.running, status.concurrency, status.ready, status.held, status.parking) == (2, 3, 0, 0, 0)
        assert (status.in_flight_bytes, status.max_in_flight_bytes) == (6, 1 << 20)
        assert (status.settled, status.retries, status.dead_lettered, status.zombies) == (0, 0, 0, 0)
        assert status.taking
        assert status.floors == {"memory/0": 0}
        assert status.oldest is not None
        assert (status.oldest.partition, status.oldest.position, status.oldest.attempt) == ("memory/0", 0, 1)
        assert status.oldest.age >= 0
        handler.let(0, 1)
        await until(lambda: broker.acked() == [0, 1])
        await until(lambda: consumer.status().floors == {"memory/0": 2})
        handler.let(2)
        assert await run.stop() is None
    status = consumer.status()
    assert (status.settled, status.in_flight, status.running, status.oldest) == (3, 0, 0, None)


@pytest.mark.anyio
async def test_status_after_a_failed_start_is_refused() -> None:
    source = MemorySource(MemoryBroker())
    source.fail("open", SourceError("no server"))
    consumer = consumer_of(source, acknowledge)
    with pytest.raises(SourceError):
        await consumer.run()
    with pytest.raises(LanesError):
        consumer.status()


@pytest.mark.anyio
async def test_lanes_run_handles_a_finite_source() -> None:
    broker = published("a", "b", "a")
    source = MemorySource(broker)
    source.finish()
    await lanes.run(source, acknowledge)
    assert broker.unfinished == 0


# --- cancellation from outside


@pytest.mark.anyio
async def test_a_cancelled_run_ends_at_once_and_settles_finished_messages() -> None:
    broker = published("a", "b", "c", "c")
    source = MemorySource(broker)
    source.block("settle")
    handler = Gated(free=[b"a"])
    before = living()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: source.called("settle") and handler.running == 2)
        run.scope.cancel()
        source.unblock("settle")
        await run.end()
    assert sorted(handler.cancelled) == [1, 2]
    assert broker.acked() == [0]
    assert source.called("aclose")
    assert source.called("release") == []
    assert living() <= before


@pytest.mark.anyio
async def test_a_run_cancelled_during_its_start_is_closed() -> None:
    source = MemorySource(published("a"))
    source.block("open")
    before = living()
    async with started(consumer_of(source, acknowledge)) as run:
        await until(lambda: source.called("open"))
        run.scope.cancel()
        await run.end()
    assert [call.name for call in source.calls] == ["open", "aclose"]
    assert living() <= before


@pytest.mark.anyio
async def test_a_run_cancelled_during_its_drain_ends_at_once() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 1)
        run.consumer.stop()
        await turns()
        run.scope.cancel()
        await run.end()
    assert handler.cancelled == [0]
    assert broker.unacked() == [0]
    assert source.called("aclose")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("how", ["task", "timeout"])
async def test_every_cancellation_of_asyncio_stops_the_run(how: Literal["task", "timeout"]) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    before = living()
    consumer = consumer_of(source, handler)

    async def run() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await consumer.run()

    limits: list[asyncio.Timeout] = []
    task = asyncio.create_task(run())
    await until(lambda: broker.acked() == [0])
    if how == "task":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        limits[0].reschedule(asyncio.get_running_loop().time())
        with pytest.raises(TimeoutError):
            await task
    assert handler.cancelled == [1]
    assert (broker.acked(), broker.unacked()) == ([0], [1])
    assert source.called("aclose")
    assert living() <= before


@pytest.mark.anyio
async def test_a_bug_in_the_last_settlement_leaves_nothing_open() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    dead_letters = MemoryDeadLetters(broker)
    source.block("settle")
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler, dead_letters=dead_letters)) as run:
        await until(lambda: source.called("settle") and handler.running == 1)
        source.fail("settle", RuntimeError("a bug in the adapter"), times=10)
        run.scope.cancel()
        source.unblock("settle")
        await run.end()
    assert source.called("aclose")
    assert dead_letters.called("aclose")


@pytest.mark.anyio
@pytest.mark.parametrize("poison", [None, 5], ids=["to its end", "halted"])
async def test_nothing_is_left_after_a_run(poison: int | None) -> None:
    before = living()
    source = MemorySource(published(*range(50), partitions=3))
    source.finish()

    async def handler(message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if message.position == poison:
            raise ValueError("poison")

    with contextlib.suppress(HandlerHalted):
        await consumer_of(source, handler, attempts=2, backoff=0.001).run()
    assert (source.broker.unfinished == 0) == (poison is None)
    assert living() <= before


@pytest.mark.anyio
async def test_several_consumers_run_in_one_process() -> None:
    before = living()
    brokers = [published(*"abcabc") for _ in range(3)]
    sources = [MemorySource(broker) for broker in brokers]
    halted = published("a", "b")
    async with (
        started(consumer_of(MemorySource(halted), fail)) as failing,
        started(consumer_of(sources[0], acknowledge)) as one,
        started(consumer_of(sources[1], lambda message: None)) as two,
        started(consumer_of(sources[2], acknowledge_all, batch=3)) as three,
    ):
        # A failing consumer does not affect the others.
        assert isinstance(await failing.end(), HandlerHalted)
        await until(lambda: not any(broker.unfinished for broker in brokers))
        for run in (one, two, three):
            await until(lambda run=run: run.consumer.status().settled == 6)  # type: ignore[misc]
            assert await run.stop() is None
    assert [broker.acked() for broker in brokers] == [[0, 1, 2, 3, 4, 5]] * 3
    assert living() <= before
