"""Plain batch handlers run in threads or on the event loop, with order within each key."""

from __future__ import annotations

import contextvars
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from lanes import ConfigError, Consumer, HandlerHalted, History, Message, Retry, Settings
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.batches import batching
from tests.fakes.grouped import ONCE, HandClock
from tests.fakes.support import TIMEOUT, living, published, started, turns, until
from tests.fakes.threaded import assert_kept, threads


class Calls:
    """A plain handler of batches that ends on demand; ``started`` and ``ended`` are positions."""

    def __init__(self, *, gated: bool = True) -> None:
        self.started: list[list[int]] = []
        self.ended: list[list[int]] = []
        self.threads: set[threading.Thread] = set()
        self.gate = threading.Event()
        if not gated:
            self.gate.set()

    def __call__(self, batch: list[Message]) -> None:
        positions = [message.position for message in batch]
        self.threads.add(threading.current_thread())
        self.started.append(positions)
        if not self.gate.wait(TIMEOUT):
            raise AssertionError(f"{positions} were never let through")
        self.ended.append(positions)


def pairing(source: MemorySource, handler: Any, **arguments: Any) -> Consumer:
    """A consumer of batches of up to 2 messages that does not retry, unless told so."""
    return batching(source, handler, **{"batch": 2, **arguments})


@pytest.mark.anyio
async def test_batches_run_concurrently_in_threads(tmp_path: Path) -> None:
    before = living()
    broker = published(*"aabbccdd")
    handler = Calls()
    async with started(pairing(MemorySource(broker), handler, history=History(tmp_path))) as run:
        await until(lambda: len(handler.started) == 2)
        await turns()
        # The loop continues, and no more than ``concurrency`` calls run.
        assert sorted(handler.started) == [[0, 1], [2, 3]]
        assert len(threads()) == 2
        handler.gate.set()
        await until(lambda: broker.unfinished == 0)
        assert len(handler.threads) == 2
        assert threading.current_thread() not in handler.threads
        assert await run.stop() is None
    assert threads() == []
    assert living() <= before
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_an_inline_batch_handler_runs_on_the_event_loop() -> None:
    source = MemorySource(published(*"aabb"))
    source.finish()
    handler = Calls(gated=False)
    await pairing(source, handler, sync_handlers="inline").run()
    assert handler.threads == {threading.current_thread()}
    assert source.broker.unfinished == 0


@pytest.mark.anyio
async def test_messages_are_decoded_in_the_thread_of_their_handler() -> None:
    broker = published(*"abc")
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    where: list[tuple[object, threading.Thread]] = []

    def decode(message: Message) -> int:
        where.append((message.position, threading.current_thread()))
        return 6 // message.position

    def handler(batch: list[Message]) -> None:
        where.extend((message.data, threading.current_thread()) for message in batch)

    consumer = Consumer(
        source,
        handler,
        settings=Settings(concurrency=1, retry=ONCE, batch=3, linger=0.1),
        decode=decode,
        dead_letters=dead_letters,
    )
    await consumer.run()
    assert [what for what, _ in where] == [0, 1, 2, 6, 3]
    assert threading.current_thread() not in {thread for _, thread in where}
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]
    assert broker.unfinished == 0


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["threads", "inline"])
async def test_results_and_exceptions_of_a_batch_in_a_thread_count(where: str) -> None:
    broker = published(*"abc")
    source = MemorySource(broker)
    source.finish()
    attempts: list[tuple[int, int]] = []

    def handler(batch: list[Message]) -> list[BaseException | None]:
        attempts.extend((message.position, message.attempt) for message in batch)
        if any(message.position == 2 and message.attempt == 1 for message in batch):
            raise StopIteration
        return [ValueError("once") if (m.position, m.attempt) == (0, 1) else None for m in batch]

    await pairing(source, handler, retry=Retry(attempts=2, backoff=0.0), sync_handlers=where).run()
    assert sorted(attempts) == [(0, 1), (0, 2), (1, 1), (2, 1), (2, 2)]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_call_has_the_context_of_the_consumer_and_may_run_a_loop() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    who.set("the consumer")
    seen: list[str] = []
    source = MemorySource(published("a"))
    source.finish()

    def handler(batch: list[Message]) -> None:
        seen.append(who.get())
        anyio.run(anyio.sleep, 0)

    await pairing(source, handler).run()
    assert seen == ["the consumer"]


@pytest.mark.anyio
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_an_exception_that_is_no_attempt_stops_the_consumer(error: type[BaseException]) -> None:
    broker = published("a")

    def handler(batch: list[Message]) -> None:
        raise error

    consumer = pairing(MemorySource(broker), handler, dead_letters=MemoryDeadLetters(broker))
    with pytest.raises(error):
        await consumer.run()
    assert (broker.unacked(), broker.dead_letters) == ([0], [])


@pytest.mark.anyio
async def test_a_batch_in_a_thread_over_its_timeout_is_reported_and_keeps_its_lanes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = HandClock()
    broker = published("a", "a", "a")
    handler = Calls()
    consumer = pairing(MemorySource(broker), handler, clock=clock, timeout=0.02, unhealthy_after=3600.0, concurrency=2)
    async with started(consumer) as run:
        await until(lambda: handler.started)
        clock.now += 1.0
        await until(lambda: "longer than timeout=0.02 s" in caplog.text)
        assert handler.started == [[0, 1]]
        assert consumer.healthy
        broker.publish(key="b")
        await until(lambda: len(handler.started) == 2)
        clock.now += 1.0
        (reason,) = consumer.health().reasons
        assert reason.startswith("all 2 thread(s) are stuck, the first: memory/0 position 0")
        handler.gate.set()
        # The call has succeeded, although late.
        await until(lambda: broker.unfinished == 0)
        assert consumer.healthy
        assert await run.stop() is None
    assert caplog.text.count("memory/0 position 0 attempt 1: the handler has been running") == 1


@pytest.mark.anyio
async def test_a_batch_in_a_thread_that_outlives_its_partition_does_not_count(tmp_path: Path) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Calls()
    consumer = pairing(source, handler, grace=0.02, history=History(tmp_path))
    async with started(consumer) as run:
        await until(lambda: handler.started)
        source.revoke(0, timeout=0.02)
        await until(lambda: source.owned == [])
        source.assign(0)
        await until(lambda: consumer.active)
        await turns()
        # The keys of the call's messages wait for its end.
        assert handler.started == [[0, 1]]
        handler.gate.set()
        await until(lambda: broker.unfinished == 0)
        assert consumer.status().zombies == 2
        assert sorted(position for call in handler.started[1:] for position in call) == [0, 1]
        assert await run.stop() is None
    assert_kept(tmp_path)


@pytest.mark.anyio
async def test_a_batch_in_a_thread_that_ends_within_the_grace_counts() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Calls()
    async with started(pairing(source, handler, grace=3600.0, drain_timeout=0.0)) as run:
        await until(lambda: handler.started)
        run.consumer.stop()
        await turns()
        assert not run.ended.is_set()
        handler.gate.set()
        assert await run.end() is None
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_batch_in_a_thread_that_never_ends_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a", "a", "b")
    source = MemorySource(broker)
    handler = Calls()
    async with started(pairing(source, handler, grace=0.02, drain_timeout=0.01, concurrency=1)) as run:
        await until(lambda: handler.started == [[0, 1]])
        assert await run.stop() is None
    assert "did not end within drain_timeout and grace and still runs for 2 message(s)" in caplog.text
    assert caplog.text.rstrip().endswith("Positions: memory/0: 0, 1")
    assert broker.acked() == []
    assert len(threads()) == 1
    handler.gate.set()
    for thread in threads():
        thread.join(TIMEOUT)
    assert broker.acked() == []


@pytest.mark.anyio
async def test_a_cancelled_run_waits_for_batches_in_threads_within_the_grace() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Calls()
    async with started(pairing(source, handler, grace=3600.0)) as run:
        await until(lambda: handler.started)
        run.scope.cancel()
        await turns()
        assert not run.ended.is_set()
        handler.gate.set()
        await run.end()
    assert threads() == []
    # The call had ended before the last settlement.
    assert broker.acked() == [0]


class Late(threading.Thread):
    """A thread that starts on demand."""

    def start(self) -> None:
        """Wait for the test."""


@pytest.mark.anyio
async def test_a_queued_batch_does_not_start_after_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Late] = []

    def late(**arguments: Any) -> Late:
        made.append(Late(**arguments))
        return made[-1]

    monkeypatch.setattr("lanes.workers.pool.threading", SimpleNamespace(Thread=late))
    broker = published("a")
    handler = Calls(gated=False)
    async with started(pairing(MemorySource(broker), handler, grace=0.01)) as run:
        await until(lambda: made)
        run.scope.cancel()
        await turns()
        assert not run.ended.is_set()
        threading.Thread.start(made[0])
        await run.end()
    assert (handler.started, broker.acked(), threads()) == ([], [], [])


@pytest.mark.anyio
async def test_a_thread_that_the_system_refuses_stops_the_consumer_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    broker = published("a")
    monkeypatch.setattr("threading.Thread.start", refuse)
    consumer = pairing(MemorySource(broker), Calls(), dead_letters=MemoryDeadLetters(broker))
    with pytest.raises(ConfigError, match=r"refused thread 1 of concurrency=2 .*: lower concurrency, or raise"):
        await consumer.run()
    assert (broker.unacked(), broker.dead_letters) == ([0], [])


@pytest.mark.anyio
async def test_a_batch_in_a_thread_that_fails_under_exit_stops_the_consumer_in_order() -> None:
    broker = MemoryBroker()
    for key in "aab":
        broker.publish(key=key)

    def handler(batch: list[Message]) -> None:
        if batch[0].key == b"a":
            raise ValueError("poison")

    consumer = pairing(MemorySource(broker), handler)
    with pytest.raises(HandlerHalted):
        await consumer.run()
    assert 0 in broker.unacked()
