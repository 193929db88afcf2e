"""Tasks, callbacks of the loop, signal handlers and other threads may call ``stop``."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import pytest

from lanes import Message
from lanes.loops import ThreadSafeCall
from memsource import GroupSource, MemorySource
from memsource.memory.group import Committed
from tests.fakes.grouped import HandClock, group_of
from tests.fakes.support import Gated, consumer_of, published, started, turns, until

Stop = Callable[[], None]


def on_asyncio() -> bool:
    return anyio.get_cancelled_exc_class() is asyncio.CancelledError


def in_a_callback(stop: Stop) -> None:
    """Call it in a callback of the idle loop."""
    if on_asyncio():
        asyncio.get_running_loop().call_soon(stop)
    else:
        import trio

        trio.lowlevel.current_trio_token().run_sync_soon(stop)


def in_a_thread(stop: Stop) -> None:
    """Call it in a thread without an event loop."""
    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()


def in_a_thread_with_a_loop(stop: Stop) -> None:
    """Call it in a task of another event loop."""

    async def elsewhere() -> None:
        stop()

    def run() -> None:
        anyio.run(elsewhere)

    in_a_thread(run)


@pytest.mark.anyio
@pytest.mark.parametrize("where", [in_a_callback, in_a_thread, in_a_thread_with_a_loop])
async def test_stop_may_be_called_outside_of_tasks(where: Callable[[Stop], None]) -> None:
    broker = published("a", "a", "b")
    source, handler = MemorySource(broker), Gated()
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: handler.running == 2)
        where(run.consumer.stop)
        where(run.consumer.stop)
        await turns()
        # The running handler ends, and no other handler starts.
        assert not run.ended.is_set()
        handler.let(0, 1, 2)
        assert await run.end() is None
        where(run.consumer.stop)
    assert broker.acked() == [0, 2]
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]


@pytest.mark.anyio
@pytest.mark.parametrize("at_once", [False, True], ids=["drain", "at once"])
@pytest.mark.parametrize(
    ("plain", "options"),
    [
        pytest.param(False, {}, id="tasks"),
        pytest.param(False, {"batch": 1}, id="batches"),
        pytest.param(True, {"sync_handlers": "inline"}, id="inline"),
        pytest.param(True, {}, id="threads"),
        pytest.param(True, {"batch": 1}, id="batches in threads"),
    ],
)
async def test_no_message_starts_after_a_thread_has_called_stop(
    options: dict[str, Any], *, plain: bool, at_once: bool
) -> None:
    """A process may answer "draining" as soon as the call has returned, although the loop has had no turn since."""
    broker = published("a", "a", "b")
    calls: list[object] = []

    def handle(what: object) -> None:
        calls.append(what)
        in_a_thread(lambda: consumer.stop(at_once=at_once))

    async def await_it(what: object) -> None:
        handle(what)

    # The clock stands still, so the worker takes its next message before the loop has a turn.
    consumer = consumer_of(
        MemorySource(broker), handle if plain else await_it, concurrency=1, clock=HandClock(), **options
    )
    async with started(consumer) as run:
        assert await run.end() is None
    assert len(calls) == 1
    assert broker.unacked()[-2:] == [1, 2]


@pytest.mark.anyio
@pytest.mark.parametrize("draining", [False, True], ids=["at the stop", "before the stop"])
async def test_a_stop_by_a_thread_still_closes_the_prefix(*, draining: bool) -> None:
    group = group_of("aab")
    handler = Gated()
    async with started(consumer_of(GroupSource(group, "first", hands_over=False), handler, concurrency=2)) as run:
        await until(lambda: sorted(handler.started) == [0, 2])
        if draining:
            group.revoke(0)
            await until(lambda: all(each.draining for each in run.consumer.status().partitions.values()))
        in_a_thread(run.consumer.stop)
        # Both workers find that no message may start, before the run has its turn.
        handler.let(0, 2)
        await until(lambda: sorted(handler.started) == [0, 1, 2])
        handler.let(1)
        assert await run.end() is None
    assert group.committed(0) == Committed(3)


@pytest.mark.anyio
async def test_a_thread_may_call_stop_while_the_source_opens() -> None:
    broker = published("a")
    source, handler = MemorySource(broker), Gated()
    source.block("open")
    async with started(consumer_of(source, handler)) as run:
        await until(lambda: source.called("open"))
        in_a_thread(run.consumer.stop)
        source.unblock("open")
        assert await run.end() is None
    assert handler.started == []
    assert broker.acked() == []


@pytest.mark.anyio
async def test_a_stop_from_a_task_of_the_loop_acts_at_once() -> None:
    broker = published("a", "a", "a")
    source = MemorySource(broker)

    async def handler(message: Message) -> None:
        if message.position == 1:
            consumer.stop()

    consumer = consumer_of(source, handler)
    async with started(consumer) as run:
        assert await run.end() is None
    # The worker takes no more messages, although it has not suspended since.
    assert broker.acked() == [0, 1]


@pytest.mark.parametrize("run_job", [lambda job: asyncio.run(job()), anyio.run], ids=["asyncio.run", "anyio.run"])
def test_a_signal_handler_may_call_stop(run_job: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
    """Also where sniffio cannot detect the loop."""
    broker = published("a", "a")
    source, handler = MemorySource(broker), Gated()

    async def job() -> None:
        consumer = consumer_of(source, handler)
        loop, heard = asyncio.get_running_loop(), asyncio.Event()

        def hear() -> None:
            consumer.stop()
            heard.set()

        loop.add_signal_handler(signal.SIGUSR1, hear)
        try:
            async with started(consumer) as run:
                await until(lambda: handler.running == 1)
                os.kill(os.getpid(), signal.SIGUSR1)
                await heard.wait()
                await turns()
                handler.let(0, 1)
                assert await run.end() is None
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    run_job(job)
    assert broker.acked() == [0]


@pytest.mark.anyio
async def test_no_call_happens_after_the_loop_is_closed() -> None:
    called: list[int] = []

    async def make() -> ThreadSafeCall:
        return ThreadSafeCall(lambda: called.append(1), lambda: called.append(2))

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(anyio.run, make).result()
    gone()
    in_a_thread(gone)
    assert called == []


@pytest.mark.anyio
async def test_a_thread_safe_call_runs_its_first_function_in_the_calling_thread() -> None:
    called: list[str] = []
    first, wake, function = (partial(called.append, name) for name in ("first", "wake", "function"))
    call = ThreadSafeCall(function, wake, first)
    in_a_thread(call)
    assert called == ["first"]
    await until(lambda: called == ["first", "wake"])
    call.serve()
    call()
    # A task of the loop needs no such call.
    assert called == ["first", "wake", "function", "function"]
