"""A handler that blocks the event loop is logged and counted, and the workers then yield to the loop."""

from __future__ import annotations

import logging
import time
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lanes import GroupEvent, Message
from lanes.workers import loop_watch
from memsource import MemoryBroker, MemorySource
from tests.fakes.support import consumer_of, published, started, until
from tests.fakes.telemetry import Sdk

HELD = 0.6
"""Seconds that a handler holds the loop here, where WARNED_AFTER is shorter than in real life."""


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "WARNED_AFTER", 0.3)


async def charge(message: Message) -> None:
    await anyio.lowlevel.checkpoint()
    time.sleep(HELD)  # noqa: ASYNC251 (the mistake)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "holding the event loop" in one.getMessage()]


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if " held the event loop" in one.getMessage()]


@pytest.mark.anyio
async def test_a_handler_that_holds_the_loop_is_named(caplog: pytest.LogCaptureFixture, sdk: Sdk) -> None:
    caplog.set_level(logging.WARNING)
    broker = published("a")
    async with started(consumer_of(MemorySource(broker), charge)) as run:
        assert run.consumer.status().loop_held == 0.0
        await until(lambda: broker.unfinished == 0)
        await until(lambda: ends(caplog))
        line = f"{charge.__code__.co_firstlineno + 2}"
        place = f"charge at memory/0 position 0 (test_loop_watch.py:{line})"
        assert lines(caplog)[0].startswith(f"memory: {place} has been holding the event loop for 0.")
        assert ends(caplog)[0].startswith(f"memory: {place} held the event loop for 0.")
        assert all("make it a plain function, or await" in one for one in lines(caplog) + ends(caplog))
        assert HELD / 2 < run.consumer.status().loop_held < 2 * HELD
        ((seconds, labels),) = sdk.numbers("lanes.loop.held")
        assert seconds == pytest.approx(run.consumer.status().loop_held)
        assert labels["lanes.consumer"] == "memory"
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        pytest.param({"batch": 4}, "make it a plain function, or await", id="a batch"),
        pytest.param({"sync_handlers": "inline"}, 'leave out sync_handlers="inline"', id="inline"),
    ],
)
async def test_other_handlers_on_the_loop_are_named(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], remedy: str
) -> None:
    def book(message: Message) -> None:
        time.sleep(HELD)

    async def books(batch: list[Message]) -> None:
        time.sleep(HELD)  # noqa: ASYNC251 (the mistake)

    broker = published("a")
    handler = books if "batch" in options else book
    async with started(consumer_of(MemorySource(broker), handler, **options)) as run:
        await until(lambda: ends(caplog))
        assert f"memory: {handler.__name__} at memory/0 position 0" in lines(caplog)[0]
        assert remedy in lines(caplog)[0]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_warnings_are_limited_and_count_the_rest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "WARNED_EVERY", 2.5 * HELD)
    broker = published(*"abcd")
    async with started(consumer_of(MemorySource(broker), charge, concurrency=1)) as run:
        await until(lambda: broker.unfinished == 0 and run.consumer.status().loop_held > 3 * HELD)
        assert len(lines(caplog)) == 2
        assert "since the last such line it was held 2 more time(s), for 1." in lines(caplog)[1]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_function_of_the_program_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    def report() -> None:
        time.sleep(HELD)

    async with started(consumer_of(MemorySource(MemoryBroker()), charge)) as run:
        await until(lambda: run.consumer.ready)
        await anyio.sleep(0.3)
        report()
        await until(lambda: ends(caplog))
        assert "memory: report (test_loop_watch.py:" in lines(caplog)[0]
        assert "await the slow call, or run it in a thread" in lines(caplog)[0]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_handler_that_awaits_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    async def patient(message: Message) -> None:
        await anyio.sleep(HELD)

    broker = published("a")
    async with started(consumer_of(MemorySource(broker), patient)) as run:
        await anyio.sleep(2 * HELD)
        assert broker.unfinished == 0
        assert (lines(caplog), ends(caplog)) == ([], [])
        assert run.consumer.status().loop_held < HELD
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"batch": 1}], ids=["one message", "a batch"])
async def test_a_stop_takes_effect_after_the_handler_that_holds_the_loop(options: dict[str, Any]) -> None:
    """Workers that were woken together would hold the loop one after the other."""
    broker = published(*"abcdefghijkl")
    calls = []

    async def hold(what: object) -> None:
        calls.append(time.monotonic())
        time.sleep(HELD)  # noqa: ASYNC251 (the mistake)

    async with started(consumer_of(MemorySource(broker), hold, concurrency=12, **options)) as run:

        def stop() -> None:
            while not calls:
                time.sleep(0.001)
            time.sleep(HELD / 2)
            run.consumer.stop()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, stop)
        assert await run.end() is None
    assert len(calls) == 1
    assert time.monotonic() - calls[0] - HELD < 0.5


@pytest.mark.anyio
async def test_a_lost_partition_names_the_handler_that_held_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    events: list[GroupEvent] = []
    broker = published(*"ab")
    source = MemorySource(broker)
    async with started(consumer_of(source, charge, on_event=events.append, concurrency=1)) as run:
        await until(lambda: broker.unfinished == 1)
        source.lose(0, "its lease has run out")
        await until(lambda: [one for one in events if one.name == "lost"])
        (lost,) = [one for one in events if one.name == "lost"]
        assert lost.reason is not None
        assert lost.reason.startswith("its lease has run out; charge held the event loop for 0.")
        assert await run.stop() is None
