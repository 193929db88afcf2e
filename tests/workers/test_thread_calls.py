"""A handler in a thread is called with the decoded message, its span and its context."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from typing import cast

import anyio
import anyio.lowlevel
import pytest
from opentelemetry import trace

from lanes import Consumer, Message, Retry, Settings, Term
from lanes.core.types import Room
from lanes.errors import MessageError
from lanes.source import Delivered, SourceEvent
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import consumer_of, published
from tests.fakes.telemetry import Sdk
from tests.fakes.threaded import Order

# --- decoding and the span


@pytest.mark.anyio
async def test_decode_runs_in_the_thread_before_the_handler() -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()
    seen: list[tuple[object, bool]] = []
    decoded_in: list[threading.Thread] = []

    def decode(message: Message) -> int:
        decoded_in.append(threading.current_thread())
        return int(message.value) + 100 if message.position else int("no number")

    def handler(message: Message) -> None:
        seen.append((message.data, threading.current_thread() in decoded_in))

    settings = Settings(retry=Retry(attempts=5))
    dead_letters = MemoryDeadLetters(broker)
    await Consumer(source, handler, settings=settings, dead_letters=dead_letters, decode=decode).run()
    assert seen == [(101, True)]
    assert threading.current_thread() not in decoded_in
    # One attempt, because another would fail as well.
    assert [(dead_letter.position, dead_letter.attempts) for dead_letter in broker.dead_letters] == [(0, 1)]


class Broken(MemorySource):
    """A source that cannot read the key of position 0."""

    async def receive(self, room: Room) -> Sequence[SourceEvent]:
        events = await super().receive(room)
        for event in events:
            if isinstance(event, Delivered):
                event.run[0].broken = MessageError("no key")
        return events


@pytest.mark.anyio
async def test_a_message_that_the_source_cannot_read_is_not_handled() -> None:
    broker = published("a", "b")
    source = Broken(broker)
    source.finish()
    handler = Order()
    await consumer_of(source, handler, attempts=5, dead_letters=MemoryDeadLetters(broker)).run()
    assert handler.seen == [(0, 1)]
    assert [dead_letter.position for dead_letter in broker.dead_letters] == [0]


@pytest.mark.anyio
async def test_a_handler_runs_in_the_span_of_its_message(sdk: Sdk) -> None:
    broker = published("a", "b")
    source = MemorySource(broker)
    source.finish()
    seen: dict[int, int] = {}

    def handler(message: Message) -> None:
        seen[message.position] = trace.get_current_span().get_span_context().span_id
        if message.position == 0:
            raise Term("never")

    await consumer_of(source, handler, dead_letters=MemoryDeadLetters(broker)).run()
    found: dict[object, object] = {}
    for span in sdk.spans():
        attributes = span.attributes or {}
        assert span.context is not None
        assert seen[cast(int, attributes["lanes.position"])] == span.context.span_id
        found[attributes["lanes.position"]] = (attributes["lanes.outcome"], attributes.get("error.type"))
    assert found == {0: ("dead_letter", "lanes.errors.Term"), 1: ("ack", None)}


# --- the context


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="nothing")


@pytest.mark.anyio
async def test_each_handler_runs_in_a_copy_of_the_context_of_the_start() -> None:
    source = MemorySource(published(*range(20)))
    source.finish()
    seen: list[str] = []

    def handler(message: Message) -> None:
        seen.append(VARIABLE.get())
        VARIABLE.set("of a handler")

    VARIABLE.set("of the start")
    await consumer_of(source, handler, concurrency=2).run()
    assert seen == ["of the start"] * 20
    assert VARIABLE.get() == "of the start"


@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_a_handler_may_run_its_own_event_loop(backend: str) -> None:
    source = MemorySource(published("a"))
    source.finish()
    seen: list[str] = []

    async def sleep() -> None:
        await anyio.lowlevel.checkpoint()
        seen.append("slept")

    await consumer_of(source, lambda message: anyio.run(sleep, backend=backend)).run()
    assert seen == ["slept"]
