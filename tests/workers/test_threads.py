"""Plain handlers run in threads with order within each key, and the loop gets their results."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lanes import ConfigError, Consumer, HandlerHalted, Message, Nak, Retry, Settings, Term
from lanes.clock import monotonic
from lanes.handlers import Handler, is_async
from lanes.loops import entry_of_loop
from lanes.runtime.run import Run
from lanes.workers.threads import ThreadWorkers
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import (
    consumer_of,
    publish,
    published,
    settled,
    started,
    turns,
    until,
    wait_without_the_loop,
)
from tests.fakes.threaded import Gates, Options, threads


def nothing(message: Message) -> None:
    """A plain handler that succeeds at once."""


# --- kinds of handlers


class Called:
    """Methods of every kind, which a consumer may get as its handler."""

    async def __call__(self, message: Message) -> None: ...

    async def method(self, message: Message) -> None: ...

    def plain(self, message: Message) -> None: ...

    @staticmethod
    async def static(message: Message) -> None: ...


async def with_more(more: int, message: Message) -> None: ...


def test_async_handlers_are_told_from_plain_ones() -> None:
    asynchronous: list[Handler] = [
        Called(),
        Called().method,
        Called.static,
        functools.partial(with_more, 1),
        functools.partial(functools.partial(with_more, 1)),
        functools.partial(Called()),
        functools.partial(Called().method),
    ]
    assert [is_async(handler) for handler in asynchronous] == [True] * 7
    plain: list[Handler] = [
        nothing,
        Called().plain,
        functools.partial(nothing),
        Gates(),
        functools.partial(Gates()),
        print,
    ]
    assert [is_async(handler) for handler in plain] == [False] * 6


@pytest.mark.anyio
async def test_an_async_object_runs_on_the_loop() -> None:
    source = MemorySource(published("a"))
    source.finish()
    seen: list[threading.Thread] = []

    class Handles:
        async def __call__(self, message: Message) -> None:
            seen.append(threading.current_thread())

    await consumer_of(source, Handles()).run()
    assert seen == [threading.current_thread()]


@pytest.mark.anyio
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("kind", ["coroutine", "other"])
async def test_a_plain_function_that_returns_an_awaitable_stops_the_consumer(kind: str, decoding: bool) -> None:
    broker = published("a", "a")

    class Awaitable:
        def __await__(self) -> Any: ...

    def handler(message: Message) -> object:
        return with_more(1, message) if kind == "coroutine" else Awaitable()

    decode = nothing if decoding else None
    settings = Settings(retry=Retry(attempts=5))
    async with started(Consumer(MemorySource(broker), handler, settings=settings, decode=decode)) as run:
        error = await run.end()
    # Not a failed attempt, because a retry would fail alike; and Python warns of no coroutine.
    assert isinstance(error, ConfigError)
    assert (
        ".<locals>.handler is a plain function" in str(error)
        and "memory/0 position 0" in str(error)
        and "async def" in str(error)
    )
    assert broker.unacked() == [0, 1]


# --- order and bounds


@pytest.mark.anyio
async def test_keys_run_concurrently_and_each_in_order() -> None:
    broker = published("a", "b", "a", "b")
    source = MemorySource(broker)
    source.finish()
    handler = Gates()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 2)
        handler.let(1)
        await until(lambda: broker.acked() == [1])
        await until(lambda: handler.started[2:] == [3])
        handler.let(0, 2, 3)
        assert await run.end() is None
    assert sorted(handler.started[:2]) == [0, 1]
    assert handler.ended[0] == 1
    assert handler.ended.index(0) < handler.ended.index(2)
    assert broker.unfinished == 0
    assert sorted(settled(source)) == [0, 1, 2, 3]
    assert threading.current_thread() not in handler.threads


@pytest.mark.anyio
async def test_threads_handle_many_messages_once_and_in_order() -> None:
    broker = published(*[number % 13 for number in range(1_000)], partitions=2)
    source = MemorySource(broker)
    source.finish()
    seen: dict[tuple[int, bytes | None], list[int]] = {}
    running: set[tuple[int, bytes | None]] = set()

    def handler(message: Message) -> None:
        lane = (message.partition.id.number, message.key)
        assert lane not in running
        running.add(lane)
        seen.setdefault(lane, []).append(message.position)
        # Let other threads run.
        os.sched_yield()
        running.remove(lane)

    await consumer_of(source, handler, concurrency=5).run()
    assert len(seen) == 13
    assert all(positions == sorted(set(positions)) for positions in seen.values())
    assert sum(map(len, seen.values())) == 1_000
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_concurrency_bounds_the_threads_and_threads_start_on_demand() -> None:
    broker = published(None)
    source = MemorySource(broker)
    handler = Gates()
    async with started(consumer_of(source, handler, concurrency=3)) as run:
        await until(lambda: handler.running == 1)
        assert len(threads()) == 1
        publish(broker, [None] * 5)
        await until(lambda: handler.running == 3)
        await turns()
        assert (handler.running, len(threads())) == (3, 3)
        handler.let(*range(6))
        await until(lambda: broker.unfinished == 0)
        # Idle threads are used again.
        publish(broker, [None] * 9)
        handler.let(*range(6, 15))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None
    assert handler.peak == 3
    assert len(handler.threads) == 3


@pytest.mark.anyio
async def test_the_event_loop_sleeps_while_all_threads_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = published(*range(5))
    handler = Gates()
    calls: list[int] = []
    after = Run.after

    def counting(self: Run, *, taking: int = 0) -> None:
        calls.append(1)
        after(self, taking=taking)

    monkeypatch.setattr(Run, "after", counting)
    async with started(consumer_of(MemorySource(broker), handler, concurrency=2)) as run:
        await until(lambda: handler.running == 2)
        assert run.consumer.status().ready == 3
        await turns()
        calls.clear()
        await turns()
        assert calls == []
        handler.let(*range(5))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_several_results_wake_the_loop_once(
    monkeypatch: pytest.MonkeyPatch, workers: tuple[Options, list[ThreadWorkers]]
) -> None:
    calls: list[int] = []

    def counting() -> Callable[[Callable[[], None]], object]:
        call_on_loop = entry_of_loop()

        def count(function: Callable[[], None]) -> object:
            calls.append(1)
            return call_on_loop(function)

        return count

    monkeypatch.setattr("lanes.workers.pool.entry_of_loop", counting)
    broker = published(*"abcdef")
    source = MemorySource(broker)
    source.finish()
    handler = Gates()
    async with started(consumer_of(source, handler, concurrency=6)) as run:
        await until(lambda: handler.running == 6)
        # From here on the loop is blocked, so results pile up.
        handler.let(0)
        wait_without_the_loop(lambda: len(calls) == 1)
        handler.let(1, 2, 3, 4, 5)
        (made,) = workers[1]
        wait_without_the_loop(lambda: len(made._pool.results) == 6 and made.stuck(monotonic(), 0.0) == [])
        assert len(calls) == 1
        assert await run.end() is None
    assert broker.unfinished == 0


# --- exceptions of a handler


@pytest.mark.anyio
@pytest.mark.parametrize("make", [lambda: ValueError("no"), lambda: StopIteration(7), lambda: Nak(delay=0.001)])
async def test_an_exception_is_a_failed_attempt_and_is_retried(make: Callable[[], Exception]) -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    source.finish()
    attempts: list[tuple[int, int]] = []

    def handler(message: Message) -> None:
        attempts.append((message.position, message.attempt))
        if message.attempt < 3:
            raise make()

    await consumer_of(source, handler, attempts=3, backoff=0.001).run()
    assert attempts == [(position, attempt) for position in (0, 1) for attempt in (1, 2, 3)]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_message_that_is_given_up_goes_to_the_dead_letters() -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    source.finish()

    def handler(message: Message) -> None:
        if message.position == 0:
            raise Term("never")

    await consumer_of(source, handler, attempts=3, dead_letters=MemoryDeadLetters(broker)).run()
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_message_that_is_given_up_without_dead_letters_halts() -> None:
    broker = published("a")

    def handler(message: Message) -> None:
        raise StopIteration

    async with started(consumer_of(MemorySource(broker), handler)) as run:
        error = await run.end()
    assert isinstance(error, HandlerHalted)
    assert isinstance(error.__cause__, StopIteration)
    assert broker.unacked() == [0]


class OwnBase(BaseException):
    """A base exception that lanes does not know."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        lambda: KeyboardInterrupt(),
        lambda: SystemExit(7),
        lambda: MemoryError("no memory"),
        lambda: GeneratorExit(),
        lambda: OwnBase("own"),
    ],
    ids=lambda make: type(make()).__name__,
)
async def test_a_base_exception_stops_in_order_and_is_raised(make: Callable[[], BaseException]) -> None:
    broker = published("a", "b", "c", "a")
    source = MemorySource(broker)
    gates = Gates()

    def handler(message: Message) -> None:
        gates(message)
        if message.position == 0:
            raise make()

    async with started(consumer_of(source, handler, attempts=5)) as run:
        await until(lambda: gates.running == 3)
        gates.let(0)
        await until(lambda: 0 in gates.ended)
        # The other handlers may end, and their results count.
        gates.let(1, 2)
        error = await run.end()
    assert type(error) is type(make())
    # The exception is no failed attempt.
    assert run.consumer.status().retries == 0
    assert sorted(gates.started) == [0, 1, 2]
    assert broker.acked() == [1, 2]
    assert broker.unacked() == [0, 3]
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancellation_in_a_thread_is_not_one_of_the_loop() -> None:
    broker = published("a")

    def handler(message: Message) -> None:
        raise asyncio.CancelledError("of a loop of its own")

    async with started(consumer_of(MemorySource(broker), handler)) as run:
        error = await run.end()
    assert isinstance(error, HandlerHalted)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    assert broker.unacked() == [0]
