"""A stop drains: running handlers end, waiting messages are abandoned, and finished messages are settled."""

from __future__ import annotations

import logging
import threading

import anyio
import pytest

from lanes import Message, Nak
from lanes.workers.threads import ThreadWorkers
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, consumer_of, published, settled, started, turns, until


@pytest.mark.anyio
async def test_running_messages_end_and_queued_ones_are_abandoned() -> None:
    broker = published("a", "a", "b", "b", "c")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=2)) as run:
        await until(lambda: handler.running == 2)
        run.consumer.stop()
        run.consumer.stop()
        await turns()
        assert not run.ended.is_set()
        assert source.called("release") == []
        handler.let(0)
        await until(lambda: 0 in handler.ended)
        await turns()
        assert not run.ended.is_set()
        handler.let(2)
        assert await run.end() is None
    assert handler.started == [0, 2]
    assert broker.acked() == [0, 2]
    assert broker.unacked() == [1, 3, 4]
    assert handler.cancelled == []


@pytest.mark.anyio
async def test_finished_messages_are_settled_before_the_release() -> None:
    broker = published(*range(8), partitions=2)
    source = MemorySource(broker)
    source.block("settle")
    handler = Gated()
    async with started(consumer_of(source, handler, concurrency=8)) as run:
        await until(lambda: handler.running == 8)
        handler.let(*range(8))
        run.consumer.stop()
        await until(lambda: len(handler.ended) == 8 and source.called("settle"))
        await turns()
        assert source.called("release") == []
        source.unblock("settle")
        assert await run.end() is None
    assert broker.unfinished == 0
    names = [call.name for call in source.calls if call.name in ("settle", "release", "aclose")]
    assert names == [*["settle"] * names.count("settle"), "release", "release", "aclose"]
    assert sorted(call.partition for call in source.called("release") if call.partition is not None) == [0, 1]


@pytest.mark.anyio
async def test_a_clean_stop_and_start_repeats_no_finished_message() -> None:
    broker = published(*[number % 7 for number in range(60)])
    handled: list[int] = []

    async def handler(message: Message) -> None:
        for _ in range(message.position % 4):
            await anyio.lowlevel.checkpoint()
        handled.append(message.position)

    restarts = 0
    while broker.unfinished:
        goal = len(handled) + 10
        async with started(consumer_of(MemorySource(broker), handler)) as run:
            await until(lambda: len(handled) >= goal or not broker.unfinished)  # noqa: B023 - awaited here
            assert await run.stop() is None
        restarts += 1
    assert restarts >= 3
    assert sorted(handled) == list(range(60))
    for key in range(7):
        of_key = [position for position in handled if position % 7 == key]
        assert of_key == sorted(of_key)


@pytest.mark.anyio
async def test_a_stop_does_not_wait_for_held_messages() -> None:
    broker = published("a", "b")

    async def handler(message: Message) -> None:
        raise Nak(delay=3600.0)

    async with started(consumer_of(MemorySource(broker), handler, attempts=2)) as run:
        await until(lambda: run.consumer.status().held == 2 if broker.unacked() else False)
        assert await run.stop() is None
    assert broker.unacked() == [0, 1]


@pytest.mark.anyio
@pytest.mark.parametrize("drain_timeout", [0.0, 0.02])
async def test_handlers_are_cancelled_after_the_drain_timeout_and_named(
    drain_timeout: float, caplog: pytest.LogCaptureFixture
) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated()
    async with started(consumer_of(source, handler, drain_timeout=drain_timeout)) as run:
        await until(lambda: handler.running == 2)
        if drain_timeout:
            handler.let(0)
        assert await run.stop() is None
    assert sorted(handler.cancelled) == ([1] if drain_timeout else [0, 1])
    assert broker.acked() == ([0] if drain_timeout else [])
    count, positions = (1, "1") if drain_timeout else (2, "0, 1")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        (
            f"memory: Gated did not end within drain_timeout={drain_timeout:g} s and was cancelled for {count} "
            "message(s), which run again. Raise drain_timeout, or let the handler end sooner. Positions: "
            f"memory/0: {positions}"
        ),
    ]


@pytest.mark.anyio
async def test_handlers_of_several_partitions_that_are_cancelled_together_share_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = MemoryBroker(partitions=3)
    for number in range(12):
        broker.publish(key=str(number), partition=number % 3)
    called = 0

    async def charge(message: Message) -> None:
        nonlocal called
        called += 1
        await anyio.sleep_forever()

    async with started(consumer_of(MemorySource(broker), charge, concurrency=12, drain_timeout=0.0)) as run:
        await until(lambda: called == 12)
        assert await run.stop() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("memory: charge did not end within drain_timeout=0 s and was cancelled for 12 message(s), ")
    assert line.endswith(" Positions: memory/0: 0, 1, 2, 3; memory/1: 0, 1, 2, 3; memory/2: 0, 1 and 2 more")


@pytest.mark.anyio
async def test_a_source_that_gives_less_time_than_the_drain_timeout_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = MemorySource(published("a"))
    handler = Gated()
    async with started(consumer_of(source, handler, drain_timeout=600.0)) as run:
        await until(lambda: handler.running == 1)
        source.revoke(0, timeout=0.5e-3)
        await until(lambda: source.owned == [])
        assert await run.stop() is None
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("memory: Gated did not end within the 0.0005 s of the source and was cancelled for 1 ")
    assert "Raise the limit of the source, such as drain_within of a cohort, or let the handler end sooner" in line


@pytest.mark.anyio
async def test_a_handler_in_a_thread_that_fails_after_the_drain_timeout_is_not_called_cancelled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemorySource(published("a"))
    ending = threading.Event()
    monkeypatch.setattr(ThreadWorkers, "cancel", lambda workers, partition: ending.set())

    def handler(message: Message) -> None:
        assert ending.wait(30)
        raise ValueError("declined")

    async with started(consumer_of(source, handler, drain_timeout=0.0, grace=600.0)) as run:
        await until(lambda: run.consumer.status().running)
        assert await run.stop() is None
    (line,) = [record.getMessage() for record in caplog.records if " drain_timeout" in record.getMessage()]
    assert "handler did not end within drain_timeout=0 s and failed for 1 message(s), which run again. " in line


@pytest.mark.anyio
async def test_a_handler_that_swallows_its_cancellation_and_returns_in_time_counts() -> None:
    broker = published("a")
    source = MemorySource(broker)

    async def handler(message: Message) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            pass

    async with started(consumer_of(source, handler, drain_timeout=0.0)) as run:
        await until(lambda: run.consumer.status().running if broker.unacked() else False)
        assert await run.stop() is None
    assert broker.acked() == [0]


@pytest.mark.anyio
async def test_a_handler_that_cleans_up_within_the_grace_is_not_settled() -> None:
    broker = published("a")
    cleaned = False

    async def handler(message: Message) -> None:
        nonlocal cleaned
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(10):
                    await anyio.lowlevel.checkpoint()
            cleaned = True

    async with started(consumer_of(MemorySource(broker), handler, drain_timeout=0.0)) as run:
        await until(lambda: run.consumer.status().running if broker.unacked() else False)
        assert await run.stop() is None
    assert cleaned
    assert broker.unacked() == [0]


@pytest.mark.anyio
async def test_a_handler_that_ignores_its_cancellation_is_reported_and_never_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = published("a", "b", "b")
    source = MemorySource(broker)
    gate = anyio.Event()
    returned: list[int] = []

    async def handler(message: Message) -> None:
        if message.key == b"a":
            with anyio.CancelScope(shield=True):
                await gate.wait()
        returned.append(message.position)

    async with started(consumer_of(source, handler, drain_timeout=0.0, grace=0.02)) as run:
        await until(lambda: broker.acked() == [1, 2])
        run.consumer.stop()
        # The partition is released; only the handler has not ended.
        await until(lambda: source.called("release"))
        assert returned == [1, 2]
        await until(lambda: "did not end within drain_timeout and grace" in caplog.text)
        assert "Positions: memory/0: 0" in caplog.text
        gate.set()
        assert await run.end() is None
        assert run.consumer.status().zombies == 1
    assert returned == [1, 2, 0]
    assert settled(source).count(0) == 0
    assert broker.unacked() == [0]


@pytest.mark.anyio
async def test_a_handler_may_stop_its_consumer_and_no_handler_starts_after() -> None:
    broker = published("a", "a", "b")
    handled: list[int] = []

    async def handler(message: Message) -> None:
        # Without a suspension: the worker asks for the next message before any other task has its turn.
        handled.append(message.position)
        consumer.stop()

    consumer = consumer_of(MemorySource(broker), handler, concurrency=1)
    with anyio.fail_after(20):
        await consumer.run()
    assert handled == broker.acked() == [0]
    assert broker.unacked() == [1, 2]


@pytest.mark.anyio
async def test_a_stop_before_the_start_takes_nothing() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler)
    consumer.stop()
    with anyio.fail_after(20):
        await consumer.run()
    assert handler.started == []
    assert source.called("aclose")


@pytest.mark.anyio
async def test_a_stop_while_the_source_opens_takes_nothing() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.block("open")
    handler = Gated(free=[b"a"])
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: source.called("open"))
        run.consumer.stop()
        source.unblock("open")
        assert await run.end() is None
    assert handler.started == []


@pytest.mark.anyio
async def test_a_stop_without_partitions_and_without_messages_returns() -> None:
    for assigned in ([], [0]):
        source = MemorySource(MemoryBroker(), assigned=assigned)
        async with started(consumer_of(source, Gated())) as run:
            await until(lambda: len(source.called("receive")) > len(assigned))  # noqa: B023 - awaited here
            assert await run.stop() is None
        assert source.called("aclose")


@pytest.mark.anyio
async def test_a_finite_source_is_handled_to_its_end_retries_included() -> None:
    broker = published("a", "b", "a")
    source = MemorySource(broker)
    source.finish()
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise Nak(delay=0.005)

    with anyio.fail_after(20):
        await consumer_of(source, handler, attempts=2).run()
    assert attempts.count(1) == attempts.count(2) == 3
    assert broker.unfinished == 0
