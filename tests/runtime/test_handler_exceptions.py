"""Exceptions that do not count as a failed attempt stop the consumer in order."""

from __future__ import annotations

import asyncio
import logging
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import anyio
import pytest

from lanes import Consumer, GroupEvent, Message, Term
from memsource import MemoryDeadLetters
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, consumer_of, published, settled, started, until


class OwnBase(BaseException):
    """A base exception that lanes does not know."""


FATAL: list[Callable[[], BaseException]] = [
    lambda: MemoryError("no memory"),
    lambda: KeyboardInterrupt(),
    lambda: SystemExit(7),
    lambda: GeneratorExit(),
    lambda: OwnBase("own"),
    lambda: BaseExceptionGroup("mixed", [ValueError("one"), KeyboardInterrupt()]),
]


async def assert_stopped_in_order(broker: MemoryBroker, make: Callable[[], BaseException]) -> BaseException | None:
    """One handler of four raises; returns what ``run`` raised."""
    source = MemorySource(broker)
    gated = Gated()

    async def handler(message: Message) -> None:
        await gated(message)
        if message.position == 0:
            raise make()

    async with started(consumer_of(source, handler, attempts=5, backoff=0.001)) as run:
        await until(lambda: gated.running == 4)
        gated.let(0)
        await until(lambda: 0 in gated.ended)
        # The other handlers may end, and their results count.
        gated.let(1, 2, 3)
        error = await run.end()
    assert sorted(gated.ended) == [0, 1, 2, 3]
    assert gated.cancelled == []
    assert sorted(settled(source)) == broker.acked() == [1, 2, 3]
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]
    return error


async def assert_nothing_is_lost(broker: MemoryBroker) -> None:
    """Assert that the next start handles the other messages in order."""
    source = MemorySource(broker)
    source.finish()
    handler = Gated(free=[b"a", b"b", b"c", b"d"])
    await consumer_of(source, handler).run()
    assert handler.ended == [0, 4]
    assert broker.unfinished == 0


@pytest.mark.anyio
@pytest.mark.parametrize("make", FATAL, ids=lambda make: type(make()).__name__)
async def test_a_base_exception_stops_in_order_and_is_raised(
    make: Callable[[], BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    broker = published("a", "b", "c", "d", "a")
    error = await assert_stopped_in_order(broker, make)
    assert type(error) is type(make())
    assert str(error) == str(make())
    assert f"stopping: {type(error).__name__}" in caplog.text
    await assert_nothing_is_lost(broker)


@pytest.mark.anyio
async def test_the_line_about_a_handler_that_exits_names_handler_message_and_lines_of_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def exiting(message: Message) -> None:
        _leave()

    with pytest.raises(SystemExit, match="7"):
        await consumer_of(MemorySource(published("a")), exiting).run()
    [line] = [record for record in caplog.records if "stopping: " in record.getMessage()]
    assert line.getMessage().startswith("memory: stopping: SystemExit: 7; raised by ")
    assert line.getMessage().endswith("exiting at memory/0 position 0")
    assert _functions(line) == ["exiting", "_leave"]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [KeyError, SystemExit])
async def test_the_line_about_an_on_event_that_raises_names_it_and_lines_of_code(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def on_event(event: GroupEvent) -> None:
        raise kind(7)

    with pytest.raises(kind):
        await Consumer(MemorySource(published("a")), Gated(free=[b"a"]), on_event=on_event).run()
    [line] = [record for record in caplog.records if "stopping: " in record.getMessage()]
    assert line.getMessage() == (f"memory: stopping: {kind.__name__}: 7; raised by on_event, called with 'assigned'")
    assert _functions(line) == ["on_event"]


def _leave() -> NoReturn:
    sys.exit(7)


def _functions(line: logging.LogRecord) -> list[str]:
    """Return the functions in the traceback of a line."""
    assert line.exc_info is not None
    return [frame.name for frame in traceback.extract_tb(line.exc_info[2])]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_unexpected_cancellation_stops_in_order() -> None:
    broker = published("a", "b", "c", "d", "a")
    error = await assert_stopped_in_order(broker, lambda: asyncio.CancelledError("from somewhere"))
    # A task group drops a CancelledError of its tasks, so it must not be raised unwrapped.
    assert isinstance(error, Exception)
    assert "CancelledError" in str(error)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    await assert_nothing_is_lost(broker)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_awaiting_a_cancelled_task_stops_in_order() -> None:
    broker = published("a")

    async def handler(message: Message) -> None:
        task = asyncio.get_running_loop().create_task(asyncio.sleep(3600))
        task.cancel()
        await task

    async with started(consumer_of(MemorySource(broker), handler)) as run:
        assert isinstance(await run.end(), Exception)
    assert broker.unacked() == [0]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_of_the_handlers_own_may_be_cancelled() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()

    async def handler(message: Message) -> None:
        with anyio.move_on_after(0.001):
            await anyio.sleep_forever()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(3600)

    await consumer_of(source, handler).run()
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_failing_task_group_in_the_handler_is_a_failed_attempt() -> None:
    broker = published("a", "a")
    source = MemorySource(broker)
    source.finish()

    async def fail() -> None:
        raise ValueError("in a task")

    async def handler(message: Message) -> None:
        if message.attempt == 1:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail)
                tasks.start_soon(anyio.sleep_forever)

    await consumer_of(source, handler, attempts=2, backoff=0.001).run()
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_a_cancelled_handler_with_tasks_of_its_own_is_only_cancelled() -> None:
    """trio wraps the cancellation of a nursery into a group, which is still a cancellation."""
    broker = published("a", "b")
    source = MemorySource(broker)
    handled = Gated(free=[b"b"])

    async def nested(message: Message) -> None:
        if message.key == b"b":
            await handled(message)
            return
        if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(asyncio.sleep(3600))
                tasks.create_task(asyncio.sleep(3600))
        else:
            import trio

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                nursery.start_soon(trio.sleep_forever)

    async with started(consumer_of(source, nested, drain_timeout=0.0)) as run:
        await until(lambda: broker.acked() == [1])
        assert await run.stop() is None
    assert broker.unacked() == [0]


@pytest.mark.anyio
async def test_a_handler_that_fails_while_it_is_cancelled_is_only_abandoned() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler_started = anyio.Event()

    async def handler(message: Message) -> None:
        handler_started.set()
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("while cleaning up")

    async with started(consumer_of(source, handler, drain_timeout=0.0)) as run:
        await handler_started.wait()
        assert await run.stop() is None
    assert broker.unacked() == [0]


@pytest.mark.anyio
@pytest.mark.parametrize("worst", [MemoryError(), Term("never")])
async def test_the_worst_member_of_a_group_decides(worst: Exception) -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    dead_letters = MemoryDeadLetters(broker)
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.attempt)
        raise ExceptionGroup("all of it", [ValueError("no"), worst])

    consumer = consumer_of(source, handler, dead_letters=dead_letters, attempts=3, backoff=0.001)
    if isinstance(worst, Term):
        await consumer.run()
        assert len(broker.dead_letters) == 1
    else:
        with pytest.raises(ExceptionGroup):
            await consumer.run()
        assert (broker.dead_letters, broker.unacked()) == ([], [0])
    assert attempts == [1]
