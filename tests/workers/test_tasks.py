"""Tasks of workers start on demand, in the context of the run, and never after its end."""

from __future__ import annotations

import asyncio
import contextvars

import anyio
import anyio.lowlevel
import pytest

from lanes import Message
from lanes.workers.wake_limit import FEW
from memsource import GroupSource, MemoryBroker, MemorySource
from memsource.memory.group import Committed
from tests.fakes.grouped import group_of
from tests.fakes.support import Gated, consumer_of, living, publish, published, started, turns, until

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="nothing")

MANY = 3 * FEW


@pytest.mark.anyio
async def test_tasks_start_only_when_they_are_needed() -> None:
    broker = MemoryBroker()
    handler = Gated()
    async with started(consumer_of(MemorySource(broker), handler, concurrency=50)) as run:
        await until(lambda: run.consumer.ready)
        await turns()
        without = living()
        publish(broker, "abc")
        await until(lambda: handler.running == 3)
        await turns()
        assert living() - without == 3
        handler.let(0, 1, 2)
        await until(lambda: broker.unfinished == 0)
        for position in range(3, 13):
            publish(broker, "d")
            handler.let(position)
            await until(lambda: broker.unfinished == 0)
        await turns()
        assert living() - without == 3
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("concurrency", [1, 4, FEW + 1])
async def test_concurrency_bounds_the_tasks(concurrency: int) -> None:
    broker = MemoryBroker()
    handler = Gated()
    async with started(consumer_of(MemorySource(broker), handler, concurrency=concurrency)) as run:
        await until(lambda: run.consumer.ready)
        await turns()
        without = living()
        publish(broker, range(MANY))
        await until(lambda: handler.running == concurrency)
        await turns()
        assert (handler.running, living() - without) == (concurrency, concurrency)
        handler.let(*range(MANY))
        await until(lambda: broker.unfinished == 0)
        assert await run.stop() is None


@pytest.mark.anyio
async def test_an_unblocked_message_runs_in_the_context_of_the_run() -> None:
    broker = published("a")
    seen: list[str] = []
    fails = True

    async def handler(message: Message) -> None:
        seen.append(VARIABLE.get())
        if fails:
            raise ValueError("not yet")
        await gate.wait()

    gate = anyio.Event()
    VARIABLE.set("of the start")
    async with started(consumer_of(MemorySource(broker), handler, concurrency=2, poison="block")) as run:
        await until(lambda: run.consumer.ready and run.consumer.status().blocked)
        fails = False
        publish(broker, "b")
        await until(lambda: len(seen) == 2)
        VARIABLE.set("of the user's task")
        # The only worker handles b, so a second worker starts.
        assert run.consumer.unblock("a") == 1
        await until(lambda: len(seen) == 3)
        gate.set()
        assert await run.stop() is None
    assert seen == ["of the start"] * 3


def test_a_wake_up_in_a_callback_of_a_plain_loop_starts_a_worker() -> None:
    broker, handler = MemoryBroker(), Gated(free=(b"a", b"b"))

    async def consume() -> None:
        async with started(consumer_of(MemorySource(broker), handler)) as run:
            await until(lambda: run.consumer.ready)
            life = run.consumer._life.run
            assert life is not None
            workers = life.workers
            wake, workers.wake = workers.wake, lambda *, taking=0: None  # type: ignore[method-assign]
            publish(broker, "ab")
            await until(lambda: life.engine.ready == 2)
            workers.wake = wake  # type: ignore[method-assign]
            asyncio.get_running_loop().call_soon(wake)
            await until(lambda: broker.unfinished == 0)
            assert await run.stop() is None

    # Unlike ``anyio.run``, the run of asyncio gives callbacks of the loop no context by which anyio finds the loop.
    asyncio.run(consume())


@pytest.mark.anyio
async def test_no_task_calls_a_handler_after_a_cancellation() -> None:
    broker = published(*range(MANY))
    source = MemorySource(broker)
    handled: list[int] = []

    async def handler(message: Message) -> None:
        # The first worker cancels the run after others were started, but before they run.
        handled.append(message.position)
        run.scope.cancel()
        await anyio.sleep_forever()

    before = living()
    async with started(consumer_of(source, handler, concurrency=MANY)) as run:
        await run.end()
    assert handled == [0]
    assert living() <= before
    assert source.called("aclose")


@pytest.mark.anyio
async def test_the_last_settlement_of_a_cancelled_run_starts_no_task() -> None:
    group = group_of("aaaabcdef")
    source = GroupSource(group, "m-1")
    source.block("settle")
    handled: list[int] = []

    async def handler(message: Message) -> None:
        handled.append(message.position)

    before = living()
    async with started(consumer_of(source, handler, concurrency=50, max_ahead=4)) as run:
        await until(lambda: len(handled) == 4 and source.called("settle"))
        run.scope.cancel()
        source.unblock("settle")
        assert await run.end() is None
        await turns()
        assert living() <= before
    # After the confirmation, more lanes were ready than there were workers.
    assert group.committed(0) == Committed(4)
    assert handled == [0, 1, 2, 3]
    assert run.consumer.status().ready == 4
