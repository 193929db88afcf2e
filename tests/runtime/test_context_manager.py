"""A consumer as an async context manager runs concurrently with the block, and raises errors without a group."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import pytest

from lanes import Consumer, HandlerHalted, LanesError, Message, Settings, SourceError
from memsource import MemorySource
from tests.fakes.grouped import ONCE
from tests.fakes.support import Gated, living, published, turns, until


def beside(
    source: MemorySource, handler: Gated, *, grace: float = 2.0, on_cancel: Literal["drain", "stop"] = "stop"
) -> Consumer:
    """A consumer that never retries."""
    settings = Settings(concurrency=4, retry=ONCE, grace=grace, on_cancel=on_cancel)
    return Consumer(source, handler, settings=settings)


async def block(consumer: Consumer, body: Callable[[Consumer], Awaitable[None]]) -> None:
    """Run a body concurrently with a consumer."""
    async with consumer:
        await body(consumer)


async def wait(consumer: Consumer) -> None:
    """Wait until cancelled."""
    await anyio.sleep_forever()


class Failing(Gated):
    """A handler that fails on demand."""

    async def __call__(self, message: Message) -> None:
        await super().__call__(message)
        raise ValueError("poison")


@pytest.mark.anyio
async def test_a_consumer_runs_beside_its_block_and_drains_at_its_end() -> None:
    before = living()
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    async with beside(source, handler) as consumer:
        await until(lambda: broker.acked() == [0] and handler.running == 1)
        assert (consumer.ready, consumer.active) == (True, True)

        async def end() -> None:
            await until(lambda: consumer.status().partitions["memory/0"].draining)
            handler.let(1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end)
            consumer.stop()
    assert broker.unfinished == 0
    assert [call.name for call in source.calls][-2:] == ["release", "aclose"]
    assert living() <= before


@pytest.mark.anyio
async def test_an_empty_block_starts_and_ends_a_run() -> None:
    source = MemorySource(published("a"))
    async with beside(source, Gated(free=[b"a"])):
        pass
    assert source.called("aclose")


@pytest.mark.anyio
async def test_an_error_of_the_block_is_raised_unwrapped() -> None:
    before = living()
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    error = KeyError("of the block")

    async def body(consumer: Consumer) -> None:
        await until(lambda: handler.ended == [0] and handler.running == 1)
        raise error

    with pytest.raises(KeyError) as caught:
        await block(beside(source, handler), body)
    assert caught.value is error
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert handler.cancelled == [1]
    assert broker.acked() == [0]
    assert source.called("aclose")
    assert living() <= before


@pytest.mark.anyio
async def test_an_error_of_the_block_is_raised_after_the_drain() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    error = KeyError("of the block")

    async def body(consumer: Consumer) -> None:
        await until(lambda: handler.ended == [0] and handler.running == 1)
        tasks.start_soon(let_later, consumer)
        raise error

    async def let_later(consumer: Consumer) -> None:
        await until(lambda: consumer.status().partitions["memory/0"].draining)
        handler.let(1)

    async with anyio.create_task_group() as tasks:
        with pytest.raises(KeyError) as caught:
            await block(beside(source, handler, on_cancel="drain"), body)
    assert caught.value is error
    assert handler.cancelled == []
    assert broker.acked() == [0, 1]
    assert source.called("release")


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), ExceptionGroup("own", [ValueError(), OSError()])]
)
async def test_a_base_exception_of_the_block_is_raised_unwrapped(error: BaseException) -> None:
    source = MemorySource(published("a"))

    async def body(consumer: Consumer) -> None:
        await until(lambda: consumer.active)
        raise error

    with pytest.raises(type(error)) as caught:
        await block(beside(source, Gated()), body)
    assert caught.value is error
    assert source.called("aclose")


@pytest.mark.anyio
async def test_an_error_of_the_consumer_cancels_the_block_and_is_raised_unwrapped() -> None:
    before = living()
    source = MemorySource(published("a"))
    handler = Failing(free=[b"a"])
    consumer = beside(source, handler)
    with pytest.raises(HandlerHalted) as caught:
        await block(consumer, wait)
    assert isinstance(caught.value.__cause__, ValueError)
    assert consumer.health().reasons == ("stopped by HandlerHalted",)
    assert living() <= before


@pytest.mark.anyio
async def test_an_error_at_the_start_is_raised_unwrapped() -> None:
    source = MemorySource(published("a"))
    error = SourceError("no server")
    source.fail("open", error)
    with pytest.raises(SourceError) as caught:
        await block(beside(source, Gated()), wait)
    assert caught.value is error


@pytest.mark.anyio
async def test_an_error_during_the_drain_of_a_block_is_raised() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.block("release")
    handler = Gated(free=[b"a"])
    error = RuntimeError("a bug in the adapter")

    async def body(consumer: Consumer) -> None:
        await until(lambda: broker.acked() == [0])
        source.fail("release", error)
        source.unblock("release")

    with pytest.raises(RuntimeError) as caught:
        await block(beside(source, handler), body)
    assert caught.value is error
    assert source.called("aclose")


def halted(consumer: Consumer) -> bool:
    """Whether the consumer has failed. Before its start it is not healthy either."""
    return any("HandlerHalted" in reason for reason in consumer.health().reasons)


@pytest.mark.anyio
async def test_an_error_during_a_shielded_block_is_raised() -> None:
    before = living()
    source = MemorySource(published("a"))
    consumer = beside(source, Failing(free=[b"a"]))

    async def body(consumer: Consumer) -> None:
        with anyio.CancelScope(shield=True):
            await until(lambda: halted(consumer))
            await turns()

    with pytest.raises(HandlerHalted):
        await block(consumer, body)
    assert living() <= before


@pytest.mark.anyio
async def test_the_error_of_the_block_wins_over_that_of_the_consumer(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(published("a"))
    consumer = beside(source, Failing(free=[b"a"]))

    async def body(consumer: Consumer) -> None:
        with anyio.CancelScope(shield=True):
            await until(lambda: halted(consumer))
        raise KeyError("of the block")

    with caplog.at_level(logging.INFO, "lanes"), pytest.raises(KeyError):
        await block(consumer, body)
    assert "stopping: HandlerHalted" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["in the block", "at its end"])
async def test_a_cancelled_block_stops_at_once(where: str) -> None:
    before = living()
    broker = published("a", "b")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    ended = False
    with anyio.CancelScope() as scope:
        async with beside(source, handler) as consumer:
            await until(lambda: handler.ended == [0] and handler.running == 1)

            def cancel() -> None:
                scope.cancel()

            if where == "in the block":
                cancel()
                await anyio.sleep(30)
            else:

                async def later() -> None:
                    await until(lambda: consumer.status().partitions["memory/0"].draining)
                    cancel()

                tasks = anyio.create_task_group()
                await tasks.__aenter__()
                tasks.start_soon(later)
                consumer.stop()
                await tasks.__aexit__(None, None, None)
        ended = True
    assert scope.cancelled_caught
    assert not ended
    assert handler.cancelled == [1]
    assert broker.acked() == [0]
    assert source.called("aclose")
    assert living() <= before


@pytest.mark.anyio
async def test_a_cancelled_scope_inside_the_block_does_not_stop_the_consumer() -> None:
    broker = published("a")
    source = MemorySource(broker)
    async with beside(source, Gated(free=[b"a"])):
        with anyio.move_on_after(0.001):
            await anyio.sleep(30)
        await until(lambda: broker.acked() == [0])


@pytest.mark.anyio
async def test_a_finite_source_may_end_before_the_block() -> None:
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    async with beside(source, Gated(free=[b"a"])) as consumer:
        await until(lambda: broker.unfinished == 0 and not consumer.ready)
        await turns()
    with pytest.raises(LanesError, match="has stopped"):
        await block(consumer, wait)


@pytest.mark.anyio
async def test_a_block_waits_for_the_end_of_its_consumer() -> None:
    broker = published("a")
    source = MemorySource(broker)
    handler = Gated(free=[b"a"])
    async with beside(source, handler) as consumer:
        await until(lambda: broker.acked() == [0])
        consumer.stop()
        await consumer.ended()
        assert source.called("aclose")
        await consumer.ended()
    await consumer.ended()


@pytest.mark.anyio
async def test_the_error_that_ends_a_consumer_ends_the_wait_of_its_block() -> None:
    consumer = beside(MemorySource(published("a")), Failing(free=[b"a"]))
    with pytest.raises(HandlerHalted) as caught:
        await block(consumer, Consumer.ended)
    with pytest.raises(HandlerHalted) as again:
        await consumer.ended()
    assert again.value is caught.value


@pytest.mark.anyio
async def test_a_second_run_in_the_block_is_told_to_wait() -> None:
    source = MemorySource(published("a"))
    said = (
        "this consumer is run by `async with consumer` already: await consumer.ended() in the block to wait for its end"
    )
    async with beside(source, Gated(free=[b"a"])) as consumer:
        # The task of the block has not begun.
        with pytest.raises(LanesError) as refused:
            await consumer.run()
        assert str(refused.value) == said
        await consumer.opened()
        with pytest.raises(LanesError) as refused:
            await consumer.run()
        assert str(refused.value) == said and consumer.healthy
    with pytest.raises(LanesError, match="has stopped: make a new consumer"):
        await consumer.run()
