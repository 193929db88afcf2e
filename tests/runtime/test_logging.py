"""The log of a run shows failed attempts, and the partitions that the run owned."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any, Literal

import anyio
import pytest

import lanes
from lanes import Consumer, HandlerHalted, Message, Nak, Settings, SourceError, Term, line_limit
from lanes.core.types import Room
from lanes.handlers import handler_name
from lanes.source import Assigned, Lost, SourceEvent, SourceTraits
from memsource import GroupSource, MemoryDeadLetters
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource
from tests.fakes.grouped import HandClock, group_of
from tests.fakes.support import Gated, acknowledge, consumer_of, published, started, turns, until


def said(caplog: pytest.LogCaptureFixture, level: int, part: str) -> list[str]:
    """The lines of a level that contain a text."""
    return [each.getMessage() for each in caplog.records if each.levelno == level and part in each.getMessage()]


@pytest.mark.anyio
async def test_failing_messages_are_one_warning_and_one_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_limit, "FOLDED_FOR", 0.05)
    source = MemorySource(published("a", "b", "c"))

    async def charge(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no such card")

    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(source, charge, attempts=2)) as run:
            # The count is logged without any other event.
            await until(lambda: len(said(caplog, logging.WARNING, "charge failed")) == 2)
            assert await run.stop() is None
    first, more = said(caplog, logging.WARNING, "charge failed")
    assert first == "memory: charge failed at memory/0 position 0 with ValueError, attempt 1; next attempt in 0.00 s"
    assert more.startswith("memory: charge failed with ValueError at 2 more message(s) in 0.")
    assert "card" not in caplog.text


@pytest.mark.anyio
async def test_the_end_of_a_run_tells_the_count(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(published("a", "b", "c"))
    source.finish()

    async def charge(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no such card")

    with caplog.at_level(logging.DEBUG, "lanes"):
        await consumer_of(source, charge, attempts=2).run()
    assert len(said(caplog, logging.WARNING, "charge failed")) == 2
    assert len(said(caplog, logging.DEBUG, "charge failed")) == 3
    assert "no such card" in caplog.text  # in the traceback


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["async", "plain", "batch"])
async def test_unreadable_messages_are_one_error_and_one_count(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_limit, "FOLDED_FOR", 0.05)
    clock = HandClock()
    broker = published("a", "b", "c")
    dead_letters = MemoryDeadLetters(broker)

    def plain(message: Message) -> None: ...

    async def batch(run: list[Message]) -> None: ...

    def decode(message: Message) -> object:
        raise ValueError("no such card")

    handler = {"async": acknowledge, "plain": plain, "batch": batch}[kind]
    size = 2 if kind == "batch" else None
    source = MemorySource(broker)
    async with started(
        consumer_of(source, handler, decode=decode, dead_letters=dead_letters, batch=size, clock=clock)
    ) as run:
        await until(lambda: len(broker.dead_letters) == 3)
        clock.now += 1.0
        # The count is logged without any other event.
        await until(lambda: len(said(caplog, logging.ERROR, "memory: g")) == 2)
        assert await run.stop() is None
    first, more = said(caplog, logging.ERROR, "memory: g")
    why = "MessageError (decode failed with ValueError: correct decode=…, or the producer of such messages)"
    assert f"after 1 attempt(s) with {why}; the message goes" in first
    assert more.startswith("memory: gave up 2 more message(s) in 1.0 s") and f" with {why}, the last at" in more
    info = next(record.exc_info for record in caplog.records if record.exc_info)
    shown = logging.Formatter().formatException(info)
    assert [line.split(", in ")[1] for line in shown.splitlines() if line.startswith("  File ")] == ["decode"]


def ownership(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The lines of a source about its partitions, without their times."""
    lines = [line.removeprefix(f"{name}: ") for line in said(caplog, logging.INFO, f"{name}: ")]
    return [re.sub(r"\d+\.\d\d s", "… s", line) for line in lines if "waited for" not in line]


@pytest.mark.anyio
async def test_the_line_of_a_stop_has_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a", "b", "b", "c")
    handler = Gated(free=[b"c"])
    with caplog.at_level(logging.INFO, "lanes"):
        source = MemorySource(broker)
        async with started(consumer_of(source, handler, drain_timeout=600.0, concurrency=3)) as run:
            await until(lambda: handler.running == 2 and handler.ended == [3])
            run.consumer.stop()
            await turns()
            handler.let(0)
            await until(lambda: 0 in handler.ended)
            # The time of the other handler is over.
            source.revoke(0, timeout=0.0)
            assert await run.end() is None
    assert ownership(caplog, "memory") == [
        'joining with order="key", concurrency=3, max_in_flight=2000',
        "joined",
        "assigned 1 partition(s), 1 in all: memory/0",
        "stopping with 1 partition(s), 2 running handler(s) may end within 600 s: memory/0",
        "drained 1 partition(s) in … s, 1 message(s) run again, 1 did not start: memory/0",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("batch", [None, 1])
async def test_the_line_of_a_stop_by_a_handler_counts_its_message(
    batch: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(messages: Any) -> None:
        message = messages if batch is None else messages[0]
        if message.key == b"b" and message.attempt == 1:
            raise Nak(delay=60)
        if message.key == b"c":
            await anyio.sleep(0.05)
            raise MemoryError

    # The key a is done, b waits for its second attempt, c stops the run, and its second message does not start.
    source = MemorySource(published("a", "b", "c", "c"))
    settings = Settings(batch=batch)
    with caplog.at_level(logging.INFO, "lanes"), pytest.raises(MemoryError):
        await Consumer(source, handler, settings=settings).run()
    assert ownership(caplog, "memory")[-1] == (
        "drained 1 partition(s) in … s, 2 message(s) run again, 1 did not start: memory/0"
    )
    # A MemoryError has no text.
    assert said(caplog, logging.ERROR, "stopping: MemoryError; raised by ")


@pytest.mark.anyio
async def test_the_lines_of_a_rebalance_name_the_moving_partitions(caplog: pytest.LogCaptureFixture) -> None:
    group = group_of("abcd", partitions=4, cooperative=True)
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(GroupSource(group, "one"), acknowledge)) as one:
            await until(lambda: group.unfinished == 0)
            async with started(consumer_of(GroupSource(group, "two"), acknowledge)) as two:
                await until(lambda: two.consumer.active)
                assert await two.stop() is None
            assert await one.stop() is None
    first, second = ownership(caplog, "memory/one"), ownership(caplog, "memory/two")
    assert first[2].startswith("assigned 4 partition(s), 4 in all: memory/0, memory/1, ")
    assert first[3].startswith("revoked 2 partition(s), 0 running handler(s) may end within 30 s: ")
    assert first[4].startswith("drained 2 partition(s) in … s, 0 message(s) run again, 0 did not start: ")
    assert [line.split(" partition")[0] for line in second[2:]] == ["assigned 2", "stopping with 2", "drained 2"]


def test_a_handler_is_named_without_its_module() -> None:
    class Shop:
        def __call__(self, message: Message) -> None: ...

    def inner(message: Message) -> None: ...

    assert handler_name(acknowledge) == "acknowledge"
    assert handler_name(functools.partial(inner)) == "inner"
    assert handler_name(Shop()) == "Shop"
    assert handler_name(Shop().__call__) == "Shop.__call__"


@pytest.mark.anyio
async def test_a_line_break_of_an_exception_stays_inside_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def handle(message: Message) -> None:
        raise Term("connection failed\n\tIs the server running?")

    broker = MemoryBroker()
    broker.publish(b"", key="k")
    with pytest.raises(HandlerHalted, match=r"connection failed\\n\\tIs the server running\?") as halted:
        await Consumer(MemorySource(broker), handle).run()
    assert "\n" not in str(halted.value)
    assert [line for line in caplog.messages if "\n" in line] == []
    assert any("connection failed" in line for line in caplog.messages)


@pytest.mark.anyio
async def test_the_line_of_a_failed_start_begins_with_the_name_of_the_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Away(MemorySource):
        async def open(self) -> SourceTraits:
            raise SourceError("no broker")

        def declared(self) -> SourceTraits:
            return SourceTraits(name="kafka billing/orders")

    with pytest.raises(SourceError):
        await Consumer(Away(MemoryBroker()), acknowledge).run()
    assert caplog.messages[-1].startswith("kafka billing/orders: the consumer has stopped")


@pytest.mark.anyio
async def test_partitions_that_a_source_loses_together_share_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Fenced(MemorySource):
        lost = False

        async def receive(self, room: Room) -> Sequence[SourceEvent]:
            events = await super().receive(room)
            found = [event.partition for event in events if isinstance(event, Assigned)]
            return [*events, *(Lost(partition, "the member was fenced") for partition in found)]

    async with started(consumer_of(Fenced(MemoryBroker(partitions=3)), acknowledge)):
        await until(lambda: said(caplog, logging.WARNING, "the member was fenced"))
    (line,) = said(caplog, logging.WARNING, "the member was fenced")
    assert ": 3 partitions lost (the member was fenced) while no handler ran: " in line


@pytest.mark.anyio
@pytest.mark.parametrize("poison", ["skip", "block"])
@pytest.mark.parametrize("decision", [True, False])
async def test_the_line_of_a_decision_has_its_reason_and_no_traceback(
    poison: Literal["skip", "block"], decision: bool, caplog: pytest.LogCaptureFixture
) -> None:
    broker = published("a")

    async def handler(message: Message) -> None:
        raise lanes.Term("no such item\x1b") if decision else ValueError("secret")

    settings = lanes.Settings(poison=poison, retry=lanes.Retry(attempts=1))
    consumer = lanes.Consumer(MemorySource(broker), handler, dead_letters=MemoryDeadLetters(broker), settings=settings)
    async with started(consumer) as run:
        await until(lambda: any(record.levelname == "ERROR" for record in caplog.records))
        run.consumer.stop(at_once=True)
        await run.end()
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    what = r"Term (no such item\x1b)" if decision else "ValueError"
    assert f"with {what}; " in line.message
    assert (line.exc_info is None) is decision
    assert "secret" not in line.message
