"""A handler that blocks the event loop is logged and counted, and the workers then yield to the loop."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
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
async def test_the_line_at_the_end_comes_in_a_short_program(caplog: pytest.LogCaptureFixture) -> None:
    """The run ends right after the handler."""
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    consumer = consumer_of(source, charge)
    async with started(consumer) as run:
        assert await run.end() is None
    assert (len(lines(caplog)), len(ends(caplog))) == (1, 1)
    assert HELD / 2 < consumer.status().loop_held < 2 * HELD


@pytest.mark.anyio
async def test_the_last_line_counts_the_holds_without_a_line(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(published(*"abc"))
    source.finish()
    async with started(consumer_of(source, charge, concurrency=1)) as run:
        assert await run.end() is None
    assert len(lines(caplog)) == 1
    assert "memory: since the last such line charge held the event loop 2 more time(s), for 1." in ends(caplog)[-1]


def keep_the_lock(length: int) -> None:
    """Call a C function that keeps the interpreter's lock, for twice as long as with a length that is one less."""
    re.match(r"(a+)+$", "a" * length + "b")


def length_for(seconds: float) -> int:
    """A length with which ``keep_the_lock`` uses a processor for so long, or for up to twice as long."""
    length, took = 16, 0.0
    while took < 0.05:
        length += 1
        began = time.thread_time()
        keep_the_lock(length)
        took = time.thread_time() - began
    return length + math.ceil(math.log2(seconds / took))


@pytest.mark.anyio
@pytest.mark.parametrize("pause", [0.0, 0.15])
async def test_a_handler_that_keeps_the_lock_is_named_afterwards(
    pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    """No thread runs meanwhile, not even the thread that watches."""
    source = MemorySource(published("a"))
    source.finish()
    length = length_for(1.2)

    async def parse(message: Message) -> None:
        # The thread waits for its next question, or for an answer.
        await anyio.sleep(pause)
        keep_the_lock(length)

    consumer = consumer_of(source, parse)
    async with started(consumer) as run:
        assert await run.end() is None
    (line,) = ends(caplog)
    number = f"{parse.__code__.co_firstlineno + 3}"
    assert line.startswith(
        f"memory: parse at memory/0 position 0 (test_loop_watch.py:{number}) held the event loop and "
    )
    assert "the interpreter's lock for " in line
    assert "and no thread of this process ran: run the call in a process of its own" in line
    assert lines(caplog) == []
    assert consumer.status().loop_held > 0.5


FROZEN = """
import logging, os, signal, sys, time
import anyio
from lanes import Consumer
from lanes.workers import loop_watch
from memsource import MemoryBroker, MemorySource

logging.basicConfig(level=logging.WARNING)


async def handle(message):
    print("running", flush=True)
    # Busy before and after the freeze, on the event loop.
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        pass


broker = MemoryBroker()
source = MemorySource(broker)


async def main():
    async with Consumer(source, handle) as consumer:
        await consumer.opened()
        broker.publish("x", key="a")
        while broker.unfinished:
            await anyio.sleep(0.01)
        await anyio.sleep(0.3)
        print(f"held {consumer.status().loop_held:.1f}", flush=True)


anyio.run(main)
"""


@pytest.mark.process
def test_a_frozen_process_is_not_accused() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=30)
    assert err == ""
    assert float(out.split()[1]) < 1.0


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
