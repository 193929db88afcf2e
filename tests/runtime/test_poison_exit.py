"""The poison policy ``exit``: every finished message is settled, and the error names the failed one."""

from __future__ import annotations

import anyio
import pytest

from lanes import HandlerHalted, LanesError, Message, Term
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, consumer_of, published, settled, started, turns, until


class Refused(Exception):
    """The exception of the handler."""


@pytest.mark.anyio
async def test_the_error_names_the_message_and_its_cause() -> None:
    broker = MemoryBroker(name="orders")
    broker.publish(key="a")

    async def handler(message: Message) -> None:
        raise Refused("no stock")

    with pytest.raises(HandlerHalted) as caught:
        await consumer_of(MemorySource(broker, name="shop"), handler, attempts=2).run()
    assert isinstance(caught.value.__cause__, Refused)
    text = str(caught.value)
    for part in ("shop", "2 time(s)", "orders/0", "position 0", "Refused", "no stock", "dead_letters"):
        assert part in text


@pytest.mark.anyio
async def test_a_halt_settles_running_messages_and_starts_none() -> None:
    broker = published("poison", "a", "b", "poison", "a", "b")
    source = MemorySource(broker)
    gated = Gated()

    async def handler(message: Message) -> None:
        await gated(message)
        if message.key == b"poison":
            raise Refused

    async with started(consumer_of(source, handler, concurrency=3)) as run:
        await until(lambda: gated.running == 3)
        gated.let(0)
        await until(lambda: 0 in gated.ended)
        await turns()
        assert sorted(gated.started) == [0, 1, 2]
        gated.let(1, 2)
        assert isinstance(await run.end(), HandlerHalted)
    assert sorted(gated.started) == [0, 1, 2]
    assert sorted(settled(source)) == broker.acked() == [1, 2]
    assert broker.unacked() == [0, 3, 4, 5]
    names = [call.name for call in source.calls]
    assert names.index("release") > max(i for i, name in enumerate(names) if name == "settle")
    assert names[-1] == "aclose"


@pytest.mark.anyio
async def test_no_handler_starts_after_a_halting_failure() -> None:
    broker = published("poison", "a", "b")
    handled: list[int] = []

    async def handler(message: Message) -> None:
        # Without a suspension: the worker asks for the next message before any other task has its turn.
        handled.append(message.position)
        if message.key == b"poison":
            raise Refused

    with pytest.raises(HandlerHalted):
        await consumer_of(MemorySource(broker), handler, concurrency=1).run()
    assert handled == [0]
    assert broker.unacked() == [0, 1, 2]


@pytest.mark.anyio
async def test_the_next_start_redelivers_the_failed_message() -> None:
    broker = published("a", "a", "b")

    async def halting(message: Message) -> None:
        if message.key == b"a":
            raise Term("never")

    with pytest.raises(HandlerHalted):
        await consumer_of(MemorySource(broker), halting).run()
    handled: list[int] = []

    async def mended(message: Message) -> None:
        handled.append(message.position)

    source = MemorySource(broker)
    source.finish()
    await consumer_of(source, mended).run()
    assert [position for position in handled if position != 2] == [0, 1]
    assert broker.unfinished == 0


@pytest.mark.anyio
async def test_the_first_of_two_failures_is_reported() -> None:
    broker = published("a", "b")
    both = anyio.Event()
    waiting = 0

    async def handler(message: Message) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        if message.key == b"b":
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
        raise Refused(message.value.decode())

    with pytest.raises(LanesError) as caught:
        await consumer_of(MemorySource(broker), handler).run()
    assert str(caught.value.__cause__) == "0"
    assert broker.unacked() == [0, 1]
