"""The log of a run: failed attempts."""

from __future__ import annotations

import functools
import logging

import pytest

from lanes import Message
from lanes.handlers import handler_name
from lanes.observe import failures
from memsource.memory.source import MemorySource
from tests.fakes.support import acknowledge, consumer_of, published, started, until


def said(caplog: pytest.LogCaptureFixture, level: int, part: str) -> list[str]:
    """The lines of a level that contain a text."""
    return [each.getMessage() for each in caplog.records if each.levelno == level and part in each.getMessage()]


@pytest.mark.anyio
async def test_failing_messages_are_one_warning_and_one_count(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FOLDED_FOR", 0.05)
    source = MemorySource(published("a", "b", "c"))

    async def charge(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("no such card")

    with caplog.at_level(logging.INFO, "lanes"):
        async with started(consumer_of(source, charge, attempts=2)) as run:
            # The count comes by itself, while nothing else happens.
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


def test_a_handler_is_named_without_its_module() -> None:
    class Shop:
        def __call__(self, message: Message) -> None: ...

    def inner(message: Message) -> None: ...

    assert handler_name(acknowledge) == "acknowledge"
    assert handler_name(functools.partial(inner)) == "inner"
    assert handler_name(Shop()) == "Shop"
    assert handler_name(Shop().__call__) == "Shop.__call__"
