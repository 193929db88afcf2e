"""A run ends its work although a handler ignores its cancellation, and closes the source for the next owner."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from lanes import LanesError, Message
from memsource import MemorySource
from tests.fakes.support import consumer_of, published, started, turns, until


class Stubborn:
    """A handler that ignores every cancellation until ``let_go``."""

    def __init__(self) -> None:
        self.running = 0
        self.started: list[int] = []
        self._over = False

    def let_go(self) -> None:
        self._over = True

    async def one(self, message: Message) -> None:
        self.running += 1
        self.started.append(message.position)
        while not self._over:
            try:
                await anyio.sleep(0.001)
            except anyio.get_cancelled_exc_class():
                pass
        self.running -= 1

    async def batch(self, messages: list[Message]) -> None:
        await self.one(messages[0])


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["one", "batch"])
@pytest.mark.parametrize("at_once", [False, True], ids=["drain", "at once"])
async def test_the_source_closes_beside_a_handler_that_ignores_its_cancellation(
    kind: str, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker, handler = published("a", "b"), Stubborn()
    source = MemorySource(broker)
    settings: dict[str, Any] = {"drain_timeout": 0.0, "grace": 0.05, "concurrency": 2}
    if kind == "batch":
        settings["batch"] = 1
    async with started(consumer_of(source, getattr(handler, kind), **settings)) as run:
        await until(lambda: handler.running == 2)
        run.consumer.stop(at_once=at_once)
        await until(lambda: source.called("aclose"))
        await turns()
        assert not run.ended.is_set()
        assert not run.consumer.ready
        handler.let_go()
        assert await run.end() is None
    assert broker.acked() == []
    assert len(source.called("aclose")) == 1
    assert len(source.called("release")) == (0 if at_once else 1)
    (line,) = [line for line in caplog.messages if "ignores its cancellation" in line]
    assert line.startswith(
        f"memory: Stubborn.{kind} ignores its cancellation and still runs for 2 message(s), so the source is "
    )
    assert line.endswith("Positions: memory/0: 0, 1")


@pytest.mark.anyio
async def test_no_handler_starts_after_the_source_has_closed_beside_a_stubborn_one() -> None:
    broker, handler = published("a", "b", "a", "b"), Stubborn()
    source = MemorySource(broker)
    async with started(consumer_of(source, handler.one, grace=0.05, concurrency=2)) as run:
        await until(lambda: handler.running == 2)
        run.consumer.stop(at_once=True)
        await until(lambda: source.called("aclose"))
        handler.let_go()
        assert await run.end() is None
    assert handler.started == [0, 1]


@pytest.mark.anyio
async def test_a_handler_of_a_partition_lost_in_the_drain_gets_its_grace(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(published("a"))
    cleaned: list[bool] = []

    async def handle(message: Message) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.4)
            cleaned.append(not source.called("aclose"))

    async with started(consumer_of(source, handle, drain_timeout=60.0, grace=30.0)) as run:
        await until(lambda: run.consumer.status().running == 1)
        run.consumer.stop()
        await turns()
        source.lose(0)
        assert await run.end() is None
    assert cleaned == [True]
    assert [line for line in caplog.messages if "goes on" in line] == []


@pytest.mark.anyio
async def test_a_stop_at_once_waits_for_the_cleanup_of_handlers(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    cleaned: list[bool] = []

    async def handle(message: Message) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.1)
            cleaned.append(not source.called("aclose"))

    async with started(consumer_of(source, handle, grace=30.0)) as run:
        await until(lambda: run.consumer.status().running == 2)
        run.consumer.stop(at_once=True)
        assert await run.end() is None
    assert cleaned == [True, True]
    assert [line for line in caplog.messages if "goes on" in line] == []


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["drain", "ended"])
@pytest.mark.parametrize("batch", [None, 1])
async def test_a_handler_that_waits_for_the_end_of_its_consumer_is_refused(call: str, batch: int | None) -> None:
    broker = published("a")
    raised: list[LanesError] = []

    async def handle(message: Any) -> None:
        try:
            await getattr(run.consumer, call)()
        except LanesError as error:
            raised.append(error)
        run.consumer.stop()

    async with started(consumer_of(MemorySource(broker), handle, batch=batch)) as run:
        assert await run.end() is None
    (error,) = raised
    assert str(error) == (
        f"a handler of this consumer awaits Consumer.{call}, which waits for the end of the handler: call "
        "consumer.stop() in the handler, which does not wait, and return"
    )
    assert broker.acked() == [0]


@pytest.mark.anyio
async def test_a_task_of_a_handler_may_drain_the_consumer() -> None:
    broker = published("a")

    async with anyio.create_task_group() as tasks:

        async def handle(message: Message) -> None:
            tasks.start_soon(run.consumer.drain)

        async with started(consumer_of(MemorySource(broker), handle)) as run:
            assert await run.end() is None
    assert broker.acked() == [0]
