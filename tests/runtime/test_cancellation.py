"""A cancelled run drains first, for at most ``longest_drain``, unless the settings or a second request stop it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
import trio.testing

import lanes
from lanes import Consumer, LanesError, Message, Settings
from memsource import MemorySource
from tests.fakes.support import Gated, acknowledge, consumer_of, living, published, started, turns, until

Cancel = Callable[[], None]


async def cancelled_by_scope(run: Callable[[], Awaitable[None]], body: Callable[[Cancel], Awaitable[None]]) -> bool:
    """Run in a scope that the body can cancel, and return whether the scope caught a cancellation."""
    scope = anyio.CancelScope()

    async def consume() -> None:
        with scope:
            await run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        await body(scope.cancel)
    return scope.cancelled_caught


@pytest.mark.anyio
@pytest.mark.parametrize("whole", [False, True], ids=["consumer", "lanes.run"])
async def test_a_cancelled_run_drains(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    before = living()
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Gated()
    settings = Settings(concurrency=4, commit_interval=0.0)
    consumer = Consumer(source, handler, settings=settings)

    async def run() -> None:
        if whole:
            await lanes.run(source, handler, settings=settings)
        else:
            await consumer.run()

    async def body(cancel: Cancel) -> None:
        await until(lambda: handler.running == 2)
        cancel()
        await turns()
        assert handler.running == 2 and handler.cancelled == []
        handler.let(0, 2)

    with caplog.at_level(logging.INFO, "lanes"), anyio.fail_after(20):
        assert await cancelled_by_scope(run, body)
    # The second message of the key "a" did not start.
    assert handler.started == [0, 2] and broker.acked() == [0, 2]
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]
    assert f"the run is cancelled; it drains for at most {settings.longest_drain:g} s" in caplog.text
    assert living() <= before


def test_the_drain_of_a_cancelled_scope_takes_at_most_longest_drain() -> None:
    settings = Settings(drain_timeout=7.0, grace=3.0)
    took = 0.0

    async def never(message: Message) -> None:
        await trio.sleep_forever()

    async def job() -> None:
        nonlocal took
        source = MemorySource(published("a", "b"))
        source.block("release")
        consumer = Consumer(source, never, settings=settings, clock=trio.current_time)

        async def drained(cancel: Cancel) -> None:
            nonlocal took
            await trio.sleep(1.0)
            assert consumer.active
            took = trio.current_time()
            cancel()
            # Only the first cancellation counts.
            cancel()

        assert await cancelled_by_scope(consumer.run, drained)
        took = trio.current_time() - took

    trio.run(job, clock=trio.testing.MockClock(autojump_threshold=0))
    # The handler never ends, and the source never confirms.
    assert took == pytest.approx(settings.drain_timeout + 10.0)


@pytest.mark.anyio
async def test_a_drain_that_exceeds_the_limit_stops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Settings, "longest_drain", 0.05)
    broker = published("a", "b")
    handler = Gated(free=[b"a"])
    consumer = consumer_of(MemorySource(broker), handler, on_cancel="drain")

    async def body(cancel: Cancel) -> None:
        await until(lambda: broker.acked() == [0] and handler.running == 1)
        cancel()

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert handler.cancelled == [1] and broker.acked() == [0]
    assert "the run stops at once, because the drain took longer than 0.05 s" in caplog.text


@pytest.mark.anyio
async def test_a_second_cancellation_of_a_scope_does_not_end_the_drain() -> None:
    broker = published("a")
    handler = Gated()
    consumer = consumer_of(MemorySource(broker), handler, on_cancel="drain")

    async def body(cancel: Cancel) -> None:
        await until(lambda: handler.running == 1)
        for _ in range(3):
            cancel()
            await turns()
        assert handler.running == 1
        handler.let(0)

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert broker.acked() == [0]


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["loop", "thread"])
async def test_stop_at_once_ends_the_drain_of_a_cancelled_scope(where: str) -> None:
    before = living()
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, on_cancel="drain")

    async def body(cancel: Cancel) -> None:
        await until(lambda: broker.acked() == [0] and handler.running == 1)
        cancel()
        await turns()
        if where == "loop":
            consumer.stop(at_once=True)
        else:
            thread = threading.Thread(target=consumer.stop, kwargs={"at_once": True})
            thread.start()
            thread.join()

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert handler.cancelled == [1] and broker.acked() == [0]
    assert not source.called("release") and source.called("aclose")
    assert living() <= before


@pytest.mark.anyio
@pytest.mark.parametrize("when", ["before run", "while opening", "running"])
async def test_stop_at_once_cancels_the_handlers(when: str) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler)
    if when == "while opening":
        source.block("open")
    elif when == "before run":
        consumer.stop(at_once=True)
    async with started(consumer) as run:
        if when == "running":
            await until(lambda: broker.acked() == [0] and handler.running == 1)
        if when != "before run":
            await until(lambda: source.called("open"))
            consumer.stop(at_once=True)
            consumer.stop(at_once=True)
        source.unblock("open")
        assert await run.end() is None
    assert handler.cancelled == ([1] if when == "running" else [])
    assert source.called("aclose")


@pytest.mark.anyio
async def test_on_cancel_stop_cancels_the_handlers() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, on_cancel="stop")

    async def body(cancel: Cancel) -> None:
        await until(lambda: broker.acked() == [0] and handler.running == 1)
        cancel()

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert handler.cancelled == [1] and broker.acked() == [0] and not source.called("release")


@pytest.mark.anyio
async def test_a_cancellation_before_the_source_is_open_does_not_drain() -> None:
    source = MemorySource(published("a"))
    source.block("open")
    consumer = consumer_of(source, acknowledge, on_cancel="drain")

    async def body(cancel: Cancel) -> None:
        await until(lambda: source.called("open"))
        cancel()

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert source.called("aclose")


def test_a_second_cancel_of_the_task_stops() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, on_cancel="drain")

    async def job() -> None:
        task = asyncio.create_task(consumer.run())
        await until(lambda: broker.acked() == [0] and handler.running == 1)
        task.cancel()
        await turns()
        assert not task.done() and consumer.status().partitions["memory/0"].draining
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)

    asyncio.run(job())
    assert handler.cancelled == [1] and broker.acked() == [0]
    assert not source.called("release") and source.called("aclose")


@pytest.mark.parametrize("where", ["in the block", "at its end", "after an error"])
def test_a_second_cancel_of_the_task_stops_its_block(where: str) -> None:
    """After an error of the block the drain has begun, and still two cancellations of the task end it."""
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, on_cancel="drain")

    async def block() -> None:
        async with consumer:
            await until(lambda: broker.acked() == [0] and handler.running == 1)
            if where == "in the block":
                await anyio.sleep(30)
            elif where == "after an error":
                raise KeyError("of the block")

    async def job() -> None:
        task = asyncio.create_task(block())
        await until(lambda: handler.running == 1)
        await turns()
        task.cancel()
        await turns()
        assert not task.done() and consumer.status().partitions["memory/0"].draining
        task.cancel()
        with pytest.raises(KeyError if where == "after an error" else asyncio.CancelledError):
            await asyncio.wait_for(task, 20)

    asyncio.run(job())
    assert handler.cancelled == [1] and broker.acked() == [0]
    assert not source.called("release") and source.called("aclose")


def test_the_end_of_asyncio_run_ends_a_forgotten_task() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    consumer = consumer_of(source, handler, on_cancel="drain")
    tasks: list[asyncio.Task[None]] = []

    async def job() -> None:
        tasks.append(asyncio.create_task(consumer.run()))
        await until(lambda: broker.acked() == [0] and handler.running == 1)

    # The end of the loop cancels every task, the tasks of the run too.
    asyncio.run(job())
    assert tasks[0].done()
    assert handler.cancelled == [1] and broker.acked() == [0]
    assert source.called("aclose")
    assert consumer._life.run is not None and consumer._life.run.ending != "drained"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("after", range(6))
def test_the_end_of_asyncio_run_ends_a_run_that_just_begins(after: int) -> None:
    """The end of the loop also cancels tasks that have not begun, and such a task never runs."""
    consumer = consumer_of(MemorySource(published("a")), Gated(), on_cancel="drain")

    async def job() -> None:
        task = asyncio.create_task(consumer.run())
        for _ in range(after):
            await asyncio.sleep(0)
        assert not task.done()

    thread = threading.Thread(target=asyncio.run, args=(job(),), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    # Python warns about a task that never ran when its coroutine is collected.
    gc.collect()


def test_a_cancel_during_the_closing_waits_for_the_closing() -> None:
    """A late ``Task.cancel`` leaves no source half closed, and ``drain`` ends."""
    source = MemorySource(published("a"))
    source.block("aclose")
    consumer = consumer_of(source, acknowledge, on_cancel="drain")

    async def job() -> None:
        task = asyncio.create_task(consumer.run())
        await until(lambda: consumer.active)
        task.cancel()
        await until(lambda: source.called("aclose"))
        task.cancel()
        await turns()
        assert not task.done()
        source.unblock("aclose")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)
        await asyncio.wait_for(consumer.drain(), 20)

    asyncio.run(job())


@pytest.mark.anyio
async def test_a_stop_during_a_drain_is_no_drain() -> None:
    """The history of a run whose drain was cancelled does not say that the run has drained."""
    handler = Gated()
    consumer = consumer_of(MemorySource(published("a")), handler, on_cancel="stop")

    async def body(cancel: Cancel) -> None:
        await until(lambda: handler.running == 1)
        consumer.stop()
        await turns()
        cancel()

    with anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert consumer._life.run is not None and consumer._life.run.ending == "stopped"


@pytest.mark.anyio
async def test_an_error_during_the_drain_of_a_cancelled_run_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """``run`` raises the cancellation, so the log and ``health`` name the error."""
    handler = Gated()
    source = MemorySource(published("a"))
    source.fail("settle", lanes.SourceError("no permission to settle"))
    consumer = consumer_of(source, handler, on_cancel="drain", drain_timeout=0.1, grace=0.0)

    async def body(cancel: Cancel) -> None:
        await until(lambda: handler.running == 1)
        cancel()
        await turns()
        handler.let(0)

    with caplog.at_level(logging.ERROR, "lanes"), anyio.fail_after(20):
        assert await cancelled_by_scope(consumer.run, body)
    assert "the consumer has stopped and handles no more messages (SourceError: no permission" in caplog.text
    assert consumer.health().reasons == ("stopped by SourceError",)


@pytest.mark.anyio
async def test_a_cancellation_after_the_last_message_drains_nothing() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    with anyio.CancelScope() as scope:
        await consumer_of(source, acknowledge, on_cancel="drain").run()
        scope.cancel()
    assert broker.acked() == [0]


# --- readiness


class Planned(MemorySource):
    """A source whose group has a plan after ``plan`` was called."""

    async def open(self) -> lanes.SourceTraits:
        return dataclasses.replace(await super().open(), plans=True)


@pytest.mark.anyio
async def test_until_ready_waits_for_the_plan() -> None:
    source = Planned(published("a"))
    consumer = consumer_of(source, acknowledge)
    waited: list[bool] = []

    async def wait() -> None:
        await consumer.until_ready()
        waited.append(consumer.ready)

    async with anyio.create_task_group() as tasks, started(consumer) as run:
        tasks.start_soon(wait)
        tasks.start_soon(wait)
        await consumer.opened()
        await turns()
        assert waited == [] and not consumer.ready
        source.plan(1, standby=True)
        await until(lambda: waited == [True, True])
        assert await run.stop() is None
    await consumer.until_ready()


@pytest.mark.anyio
async def test_until_ready_returns_when_a_source_without_plans_is_open() -> None:
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    async with started(consumer):
        await consumer.until_ready()
        assert consumer.ready


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["stopped", "failed", "before the source is open"])
async def test_until_ready_ends_with_the_run(how: str) -> None:
    source = Planned(published("a"))
    error = lanes.SourceError("no server")
    if how == "before the source is open":
        source.fail("open", error)
    consumer = consumer_of(source, acknowledge)
    caught: list[BaseException] = []

    async def wait() -> None:
        try:
            await consumer.until_ready()
        except LanesError as raised:
            caught.append(raised)

    async with anyio.create_task_group() as tasks, started(consumer) as run:
        tasks.start_soon(wait)
        await turns()
        if how == "stopped":
            assert await run.stop() is None
        elif how == "failed":
            assert consumer._life.run is not None
            consumer._life.run.stop_because(error)
            assert await run.end() is error
        await until(lambda: caught)
    if how == "stopped":
        assert "run() ended before the group had answered" in str(caught[0])
    else:
        assert caught == [error]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_until_ready_ends_with_a_run_that_is_cancelled_before_its_first_step() -> None:
    class Slow(Planned):
        async def open(self) -> lanes.SourceTraits:
            await reachable.wait()
            return await super().open()

    reachable = anyio.Event()
    consumer = consumer_of(Slow(published("a")), acknowledge, on_cancel="drain")
    caught: list[BaseException] = []

    async def wait() -> None:
        with pytest.raises(LanesError) as raised:
            await consumer.until_ready()
        caught.append(raised.value)

    async def job() -> None:
        mine = asyncio.current_task()

        async def cancel_all() -> None:
            await consumer.opened()
            assert consumer._life.run is not None and not consumer._life.run._active
            # The end of ``asyncio.run`` also cancels every task.
            for task in asyncio.all_tasks() - {mine, waiting, asyncio.current_task()}:
                task.cancel()

        run = asyncio.create_task(consumer.run())
        cancelling = asyncio.create_task(cancel_all())
        waiting = asyncio.create_task(wait())
        await turns()
        reachable.set()
        await until(lambda: run.done() and waiting.done())
        await cancelling
        assert run.cancelled()

    asyncio.run(job())
    assert "run() ended before the group had answered" in str(caught[0])
    # Python warns about a task that never ran when its coroutine is collected.
    gc.collect()
