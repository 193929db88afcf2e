"""Threads cannot be cancelled: at the end of a partition or run, running handlers may end, and queued messages never
start."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes import History, LanesError
from lanes.clock import monotonic
from lanes.runtime.run import Run
from lanes.workers.threads import ThreadWorkers
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import TIMEOUT, consumer_of, publish, published, started, turns, until
from tests.fakes.threaded import Gates, Options, Order, assert_kept, threads


class Late(threading.Thread):
    """A thread that starts on demand. ``refused``: number of the thread that cannot start."""

    waiting: list[Late]
    refused: int | None

    def start(self) -> None:
        if len(self.waiting) == self.refused:
            raise RuntimeError("can't start new thread")
        self.waiting.append(self)

    @classmethod
    def start_all(cls) -> None:
        for thread in cls.waiting:
            threading.Thread.start(thread)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[Late]:
    """Threads start late, so queued messages stay queued."""
    Late.waiting = []
    Late.refused = None
    monkeypatch.setattr("lanes.workers.pool.threading", SimpleNamespace(Thread=Late))
    return Late


# --- partitions that are given up


@pytest.mark.anyio
async def test_a_thread_that_outlives_its_partition_keeps_its_key_until_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Gates(free=[b"b"])
    async with started(consumer_of(source, handler, grace=0.01)) as run:
        await until(lambda: broker.acked() == [2])
        source.revoke(0, timeout=0.01)
        await until(lambda: source.owned == [])
        assert "did not end within the 0.01 s of the source and grace and still runs for 1 message(s)" in caplog.text
        source.assign(0)
        broker.publish(key="b")
        # Other keys continue; the key of the running handler waits.
        await until(lambda: 3 in broker.acked())
        assert handler.started.count(0) == 1
        handler.let(0, 1)
        await until(lambda: broker.unfinished == 0)
        assert run.consumer.status().zombies == 1
        assert await run.stop() is None
    # The result of the zombie does not count: the message ran again.
    assert [position for position in handler.started if position < 2] == [0, 0, 1]


@pytest.mark.anyio
async def test_queued_messages_are_taken_back_when_their_partition_is_lost(late: type[Late], tmp_path: Path) -> None:
    broker = MemoryBroker(2)
    for partition in broker.partitions:
        publish(broker, "abc", partition=partition)
    source = MemorySource(broker)
    handler = Order()
    history = History(tmp_path)
    async with started(consumer_of(source, handler, concurrency=6, history=history)) as run:
        await until(lambda: len(late.waiting) == 6)
        source.lose(0)
        await until(lambda: run.consumer.status().running == 3)
        assert run.consumer.status().zombies == 3
        late.start_all()
        await until(lambda: broker.acked(1) == [0, 1, 2])
        assert await run.stop() is None
    # The other messages ran in order, in a single thread.
    assert sorted(handler.seen) == [(1, 0), (1, 1), (1, 2)]
    assert broker.acked(0) == []
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_drain_takes_back_queued_messages(late: type[Late]) -> None:
    broker = MemoryBroker(2)
    for partition in broker.partitions:
        publish(broker, "abc", partition=partition)
    source = MemorySource(broker)
    handler = Order()
    async with started(consumer_of(source, handler, concurrency=6)) as run:
        await until(lambda: len(late.waiting) == 6)
        source.revoke(0, timeout=0.0)
        # Without a grace, because no handler of the partition runs.
        await until(lambda: source.called("release"))
        assert run.consumer.status().zombies == 0
        # A single thread runs the other messages in order.
        threading.Thread.start(late.waiting[0])
        await until(lambda: broker.acked(1) == [0, 1, 2])
        late.waiting = late.waiting[1:]
        late.start_all()
        assert await run.stop() is None
    assert handler.seen == [(1, 0), (1, 1), (1, 2)]


# --- the end of a run


@pytest.mark.anyio
async def test_a_stop_waits_for_the_handlers_and_leaves_no_thread() -> None:
    broker = published("a", "b", "a")
    handler = Gates()
    async with started(consumer_of(MemorySource(broker), handler)) as run:
        await until(lambda: handler.running == 2)
        run.consumer.stop()
        await turns()
        assert not run.ended.is_set()
        handler.let(0, 1)
        assert await run.end() is None
        assert threads() == []
    assert broker.acked() == [0, 1]
    assert broker.unacked() == [2]


@pytest.mark.anyio
async def test_a_cancelled_run_lets_its_handlers_end_within_the_grace(tmp_path: Path) -> None:
    broker = published("a", "b", "a", "b")
    source = MemorySource(broker)
    handler = Gates()
    consumer = consumer_of(source, handler, grace=TIMEOUT, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.running == 2)
        run.scope.cancel()
        await turns()
        assert not run.ended.is_set()
        handler.let(0, 1)
        assert await run.end() is None
        assert threads() == []
    # Finished messages count, and no message started after the cancellation.
    assert broker.acked() == [0, 1]
    assert sorted(handler.started) == [0, 1]
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_partition_cancelled_during_the_end_keeps_no_thread(
    workers: tuple[Options, list[ThreadWorkers]],
) -> None:
    handler = Gates()
    async with started(consumer_of(MemorySource(published("a", "b")), handler, grace=TIMEOUT)) as run:
        await until(lambda: handler.running == 2)
        run.scope.cancel()
        await turns()
        (made,) = workers[1]
        made.cancel(made.stuck(monotonic(), 0.0)[0].partition)
        handler.let(0, 1)
        assert await run.end() is None
        assert threads() == []


@pytest.mark.anyio
async def test_the_result_of_the_last_handler_counts_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = published("a", "b")
    handler = Gates()
    after = Run.after
    async with started(consumer_of(MemorySource(broker), handler, grace=TIMEOUT)) as run:
        await until(lambda: handler.running == 2)
        run.scope.cancel()
        await turns()

        def after_the_first(self: Run, *, taking: int = 0) -> None:
            after(self, taking=taking)
            # The loop has read the first result. At its next read no handler runs.
            handler.let(1)
            handler.join()

        monkeypatch.setattr(Run, "after", after_the_first)
        handler.let(0)
        assert await run.end() is None
    assert broker.acked() == [0, 1]


class Slow(threading.Thread):
    """A thread that ends only when it is joined."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.waited_for = threading.Event()

    def run(self) -> None:
        super().run()
        self.waited_for.wait(TIMEOUT)

    def join(self, timeout: float | None = None) -> None:
        self.waited_for.set()
        super().join(timeout)


@pytest.mark.anyio
async def test_every_thread_has_ended_when_the_run_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.workers.pool.threading", SimpleNamespace(Thread=Slow))
    source = MemorySource(published(*range(5)))
    source.finish()
    await consumer_of(source, Order()).run()
    assert threads() == []


@pytest.mark.anyio
async def test_a_handler_that_does_not_end_is_abandoned_and_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broker = published("a", "b")
    handler = Gates()
    async with started(consumer_of(MemorySource(broker), handler, grace=0.01, history=History(tmp_path))) as run:
        await until(lambda: handler.running == 2)
        handler.let(1)
        await until(lambda: broker.acked() == [1])
        run.scope.cancel()
        await run.end()
        # The idle thread is gone; the other one does not keep the process alive.
        (left,) = threads()
        assert left.daemon
        handler.let(0)
        handler.join()
    (record,) = [record for record in caplog.records if "abandoned" in record.message]
    assert record.levelno == logging.WARNING
    assert "abandoned 1 threads" in record.message and "memory/0 position 0" in record.message
    assert "position 1" not in record.message
    assert broker.unacked() == [0]
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_the_end_of_a_run_does_not_wait_for_a_zombie_again(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a")
    handler = Gates()
    source = MemorySource(broker)
    caplog.set_level(logging.WARNING, "lanes")
    # A second wait would take longer than the test waits.
    async with started(consumer_of(source, handler, grace=TIMEOUT * 3)) as run:
        await until(lambda: handler.running == 1)
        source.lose(0)
        await until(lambda: source.owned == [] and not run.consumer.status().floors)
        assert await run.stop() is None
        handler.let(0)
        handler.join()
    # The line about the loss names the handler.
    (line,) = caplog.messages
    assert "lost (" in line and "Gates still runs for 1 message(s). Their results do not count" in line
    assert line.endswith(" Positions: memory/0: 0")
    assert broker.acked() == []


@pytest.mark.anyio
async def test_a_thread_that_outlives_the_grace_of_a_stop_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a")
    handler = Gates()
    caplog.set_level(logging.WARNING, "lanes")
    async with started(consumer_of(MemorySource(broker), handler, drain_timeout=0.0, grace=0.01)) as run:
        await until(lambda: handler.running == 1)
        assert await run.stop() is None
        handler.let(0)
        handler.join()
    (line,) = caplog.messages
    assert line == (
        "memory: Gates did not end within drain_timeout and grace and still runs for 1 message(s). Its results do not "
        "count, and the messages run again. Raise drain_timeout, or let the handler end sooner. Positions: memory/0: 0"
    )


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_thread_that_outlives_the_loop_ends_silently(backend: str) -> None:
    broker = published("a")
    handler = Gates()
    consumer = consumer_of(MemorySource(broker), handler, drain_timeout=0.0, grace=0.0)

    async def run_until_started() -> None:
        async with started(consumer) as run:
            await until(lambda: handler.running == 1)
            assert await run.stop() is None

    anyio.run(run_until_started, backend=backend)
    # An exception in a thread would be a warning, which fails the test.
    handler.let(0)
    handler.join()
    assert broker.acked() == []


@pytest.mark.anyio
async def test_queued_messages_are_never_begun_after_the_end(late: type[Late], tmp_path: Path) -> None:
    broker = published(*"abc")
    handler = Order()
    async with started(consumer_of(MemorySource(broker), handler, grace=0.0, history=History(tmp_path))) as run:
        await until(lambda: len(late.waiting) == 3)
        run.scope.cancel()
        # The end waits for the threads, which have not even started.
        await turns()
        late.start_all()
        assert await run.end() is None
    assert handler.seen == []
    assert broker.unacked() == [0, 1, 2]
    assert_kept(tmp_path, left=True)


@pytest.mark.anyio
async def test_a_message_taken_by_a_thread_during_the_end_is_not_begun(tmp_path: Path) -> None:
    broker = published("a")
    handler = Order()
    loop = threading.current_thread()
    reached, go_on = threading.Event(), threading.Event()

    def clock() -> float:
        if threading.current_thread() is not loop:
            # The thread has the message, and is about to record its start.
            reached.set()
            assert go_on.wait(TIMEOUT)
        return monotonic()

    history = History(tmp_path)
    async with started(consumer_of(MemorySource(broker), handler, clock=clock, grace=0.0, history=history)) as run:
        await until(reached.is_set)
        run.scope.cancel()
        await turns()
        go_on.set()
        assert await run.end() is None
        assert threads() == []
    assert handler.seen == []
    assert broker.unacked() == [0]
    assert history.path is not None
    assert '"result":"cancelled"' in history.path.read_text()
    assert_kept(tmp_path, left=True)


@pytest.mark.parametrize("refused", [0, 1])
@pytest.mark.anyio
async def test_a_thread_that_the_system_refuses_stops_the_consumer_in_order(late: type[Late], refused: int) -> None:
    late.refused = refused
    broker = published(*"abc")
    handler = Order()
    async with started(consumer_of(MemorySource(broker), handler, concurrency=3)) as run:
        await until(lambda: run.consumer._life.run is not None and run.consumer._life.run.fatal is not None)
        late.start_all()
        error = await run.end()
    assert isinstance(error, LanesError)
    assert f"refused thread {refused + 1} of concurrency=3" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    # A queued message runs if there is a thread for it.
    assert len(handler.seen) == len(broker.acked()) == (0 if refused == 0 else 3)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_closed_loop_ends_the_threads(workers: tuple[Options, list[ThreadWorkers]]) -> None:
    broker = published("a", "b")
    handler = Gates(free=[b"b"])
    async with started(consumer_of(MemorySource(broker), handler)) as run:
        await until(lambda: broker.acked() == [1])
        # As for a task that is dropped with its loop: an await here would make close() raise.
        coroutine = workers[1][0]._pool.run(lambda: None, 0.0, lambda message: True)
        coroutine.send(None)
        coroutine.close()
        handler.let(0)
        handler.join()
        run.scope.cancel()
        assert await run.end() is None
