"""The log of a run shows failed attempts, and the partitions that the run owned."""

from __future__ import annotations

import functools
import logging
import re

import pytest

from lanes import Message, line_limit
from lanes.handlers import handler_name
from memsource import GroupSource
from memsource.memory.source import MemorySource
from tests.fakes.grouped import group_of
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


def ownership(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    """The lines of a source about its partitions, without their times."""
    lines = [line.removeprefix(f"{name}: ") for line in said(caplog, logging.INFO, f"{name}: ")]
    return [re.sub(r"\d+\.\d\d s", "… s", line) for line in lines if "waited for" not in line]


@pytest.mark.anyio
async def test_a_stop_tells_its_cost(caplog: pytest.LogCaptureFixture) -> None:
    broker = published("a", "b", "b", "c")
    handler = Gated(free=[b"c"])
    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(MemorySource(broker), handler, drain_timeout=0.3, concurrency=3)) as run:
            await until(lambda: handler.running == 2 and handler.ended == [3])
            run.consumer.stop()
            await turns()
            handler.let(0)
            assert await run.end() is None
    assert ownership(caplog, "memory") == [
        'joining with order="key", concurrency=3, max_in_flight=2000',
        "joined",
        "assigned 1 partition(s), 1 in all: memory/0",
        "stopping with 1 partition(s), 2 running handler(s) may end within 0.3 s: memory/0",
        "drained 1 partition(s) in … s, 1 message(s) run again, 1 did not start: memory/0",
    ]


@pytest.mark.anyio
async def test_a_rebalance_tells_what_moves(caplog: pytest.LogCaptureFixture) -> None:
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
