"""A handler that blocks the event loop is logged and counted, and the workers then yield to the loop."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from lanes import GroupEvent, Message
from lanes.workers import loop_watch
from lanes.workers.loop_watch import LoopWatch
from memsource import MemoryBroker, MemorySource
from tests.fakes.grouped import RunClock
from tests.fakes.support import TIMEOUT, consumer_of, published, started, until
from tests.fakes.telemetry import Sdk

HELD = 0.6
"""Seconds of a hold here, at least; WARNED_AFTER is shorter than in real life."""

SECONDS = r"\d+\.\d s"
"""Seconds in a log line. A busy machine makes a hold longer."""


class Watched:
    """The newest watch."""

    watch: loop_watch.LoopWatch


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "WARNED_AFTER", 0.3)
    monkeypatch.setattr(loop_watch, "REMEMBERED_FOR", 3_600.0)
    monkeypatch.setattr(loop_watch, "_JOINED_WITHIN", 30.0)
    start = LoopWatch.start

    def noted(watch: LoopWatch, message_in: Any) -> bool:
        Watched.watch = watch
        return start(watch, message_in)

    monkeypatch.setattr(LoopWatch, "start", noted)


@pytest.fixture
def no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gets no processor for a moment would count as frozen, and the hold would not be reported."""
    monkeypatch.setattr(loop_watch, "_LATE_AFTER", 3_600.0)


def hold() -> None:
    """Hold the loop until the thread that watches has found the handler."""
    time.sleep(HELD)
    end = time.monotonic() + TIMEOUT
    while not (Watched.watch._since and Watched.watch._by) and time.monotonic() < end:
        time.sleep(0.01)


async def charge(message: Message) -> None:
    await anyio.lowlevel.checkpoint()
    hold()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "holding the event loop" in one.getMessage()]


def ends(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if " held the event loop" in one.getMessage()]


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_a_handler_that_holds_the_loop_is_named(caplog: pytest.LogCaptureFixture, sdk: Sdk) -> None:
    caplog.set_level(logging.WARNING)
    broker = published("a")
    began = time.monotonic()
    async with started(consumer_of(MemorySource(broker), charge)) as run:
        assert run.consumer.status().loop_held == 0.0
        await until(lambda: broker.unfinished == 0)
        await until(lambda: ends(caplog))
        line = f"{charge.__code__.co_firstlineno + 2}"
        place = f"charge at memory/0 position 0 (test_loop_watch.py:{line})"
        assert re.match(re.escape(f"memory: {place} has been holding the event loop for ") + SECONDS, lines(caplog)[0])
        assert re.match(re.escape(f"memory: {place} held the event loop for ") + SECONDS, ends(caplog)[0])
        assert all("make it a plain function, or await" in one for one in lines(caplog) + ends(caplog))
        assert HELD / 2 < run.consumer.status().loop_held < time.monotonic() - began
        ((seconds, labels),) = sdk.numbers("lanes.loop.held")
        assert seconds == pytest.approx(run.consumer.status().loop_held)
        assert labels["lanes.consumer"] == "memory"
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        pytest.param({"batch": 4}, "make it a plain function, or await", id="a batch"),
        pytest.param({"sync_handlers": "inline"}, 'leave out sync_handlers="inline"', id="inline"),
    ],
)
async def test_each_handler_that_holds_the_loop_is_named(
    caplog: pytest.LogCaptureFixture, options: dict[str, Any], remedy: str
) -> None:
    def book(message: Message) -> None:
        hold()

    async def books(batch: list[Message]) -> None:
        hold()

    broker = published("a")
    handler = books if "batch" in options else book
    async with started(consumer_of(MemorySource(broker), handler, **options)) as run:
        await until(lambda: ends(caplog))
        assert f"memory: {handler.__name__} at memory/0 position 0" in lines(caplog)[0]
        assert remedy in lines(caplog)[0]
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_the_warnings_about_a_held_loop_are_limited_and_count_the_rest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "WARNED_EVERY", 3600.0)
    broker = published(*"abc")
    async with started(consumer_of(MemorySource(broker), charge, concurrency=1)) as run:
        await until(lambda: broker.unfinished == 0 and run.consumer.status().loop_held > 2 * HELD)
        assert run.consumer._life.run is not None
        # The time for a second line has come.
        run.consumer._life.run.loop_watch._warn_at = 0.0
        broker.publish("d", key="d")
        await until(lambda: len(lines(caplog)) > 1)
        more = "Since the last such warning, the loop was held 2 more time(s), for " + SECONDS
        assert re.search(more.replace("(s)", r"\(s\)"), lines(caplog)[1])
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_the_line_at_the_end_comes_in_a_short_program(caplog: pytest.LogCaptureFixture) -> None:
    """The run ends right after the handler."""
    broker = published("a")
    source = MemorySource(broker)
    source.finish()
    consumer = consumer_of(source, charge)
    began = time.monotonic()
    async with started(consumer) as run:
        assert await run.end() is None
    assert (len(lines(caplog)), len(ends(caplog))) == (1, 1)
    assert HELD / 2 < consumer.status().loop_held < time.monotonic() - began


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_the_last_line_counts_the_holds_without_a_line(caplog: pytest.LogCaptureFixture) -> None:
    source = MemorySource(published(*"abc"))
    source.finish()
    async with started(consumer_of(source, charge, concurrency=1)) as run:
        assert await run.end() is None
    assert len(lines(caplog)) == 1
    more = r"memory: charge has held the event loop 2 more time\(s\) since the last such warning, for " + SECONDS
    assert re.match(more, ends(caplog)[-1])


def keep_the_lock(length: int, then: Callable[[], None] = lambda: None) -> None:
    """Call a C function that keeps the interpreter's lock, for twice as long as with a length that is one less."""
    re.match(r"(a+)+$", "a" * length + "b")
    then()


def found(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until the thread that watches has run again, which a busy machine may delay, and has found the caller."""
    end = time.monotonic() + TIMEOUT
    while not (Watched.watch._locked_by or ends(caplog)) and time.monotonic() < end:
        time.sleep(0.001)


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
    pause: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread runs meanwhile, not even the thread that watches."""
    # The handler may get a small part of a busy machine.
    monkeypatch.setattr(loop_watch, "_COMPUTED_SHARE", 0.01)
    source = MemorySource(published("a"))
    source.finish()
    length = length_for(0.8)

    async def parse(message: Message) -> None:
        # The thread waits for its next question, or for an answer.
        await anyio.sleep(pause)
        keep_the_lock(length, lambda: found(caplog))

    consumer = consumer_of(source, parse)
    # The handler uses a processor for a fixed time, which may take long on a busy machine.
    await consumer.run()
    (line,) = ends(caplog)
    number = f"{parse.__code__.co_firstlineno + 3}"
    assert line.startswith(
        f"memory: parse at memory/0 position 0 (test_loop_watch.py:{number}) held the event loop and "
    )
    assert "the interpreter's lock for " in line
    assert "and no thread of this process ran. Run the call in a process of its own" in line
    assert lines(caplog) == []
    assert consumer.status().loop_held > 0.5


class _Starved(threading.Event):
    """An event whose waiter gets the interpreter's lock late."""

    def __init__(self, late: float) -> None:
        super().__init__()
        self.late = late
        self.waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(self.late)
        self.waits += 1
        return super().wait(timeout)


@pytest.mark.anyio
async def test_many_short_handlers_that_keep_the_lock_from_the_watch_are_not_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other threads of a busy machine may keep a processor from the loop, which counts as a hold.
    monkeypatch.setattr(loop_watch, "_LATE_AFTER", 0.3)
    start, starved = LoopWatch.start, _Starved(0.6)

    def late(watch: LoopWatch, message_in: Any) -> bool:
        watch._over = starved
        return start(watch, message_in)

    monkeypatch.setattr(LoopWatch, "start", late)
    source = MemorySource(published(*"a" * 200))

    def compute(message: Message) -> None:
        end = time.monotonic() + 0.02
        while time.monotonic() < end and starved.waits < 2:
            pass

    async with started(consumer_of(source, compute, sync_handlers="inline")) as run:
        await until(lambda: starved.waits >= 2)
        assert ends(caplog) == lines(caplog) == []
        assert run.consumer.status().loop_held == 0.0


FROZEN = """
import logging, os, signal, sys, time
import anyio
from lanes import Consumer
from lanes.workers import loop_watch
from memsource import MemoryBroker, MemorySource

logging.basicConfig(level=logging.WARNING)


busy = 0.0


def be_busy():
    global busy
    begin = time.monotonic()
    while time.monotonic() < begin + 0.2:
        pass
    busy += time.monotonic() - begin


async def handle(message):
    # Busy before and after the freeze, on the event loop, and for more than 0.2 s each on a busy machine.
    be_busy()
    os.kill(os.getpid(), signal.SIGSTOP)
    be_busy()


broker = MemoryBroker()
source = MemorySource(broker)


async def main():
    async with Consumer(source, handle) as consumer:
        await consumer.opened()
        broker.publish("x", key="a")
        while broker.unfinished:
            await anyio.sleep(0.01)
        await anyio.sleep(0.3)
        print(f"held {consumer.status().loop_held:.1f} busy {busy:.1f}", flush=True)


anyio.run(main)
"""


@pytest.mark.process
def test_a_frozen_process_is_not_reported_as_a_held_loop() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=30)
    assert err == ""
    held, busy = map(float, out.split()[1::2])
    assert held - busy < 1.0


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_a_function_of_the_program_that_holds_the_loop_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    def report() -> None:
        time.sleep(HELD)
        while not (Watched.watch._since and Watched.watch._by):
            time.sleep(0.01)

    async with started(consumer_of(MemorySource(MemoryBroker()), charge)) as run:
        await until(lambda: run.consumer.ready)
        await anyio.sleep(0.3)
        report()
        await until(lambda: ends(caplog))
        assert "memory: report (test_loop_watch.py:" in lines(caplog)[0]
        assert "await the slow call, or run it in a thread" in lines(caplog)[0]
        assert await run.stop() is None


@pytest.mark.anyio
async def test_a_handler_that_awaits_is_not_reported_as_holding_the_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In real time, a process that gets no processor for a moment would hold its own loop.
    clock = RunClock()
    monkeypatch.setattr(loop_watch, "monotonic", clock)

    async def patient(message: Message) -> None:
        for _ in range(12):
            clock.now += HELD / 12
            await clock.looked()

    broker = published("a")
    async with started(consumer_of(MemorySource(broker), patient, clock=clock)) as run:
        await until(lambda: broker.unfinished == 0)
        assert (lines(caplog), ends(caplog)) == ([], [])
        assert run.consumer.status().loop_held < HELD
        assert await run.stop() is None


@pytest.mark.anyio
@pytest.mark.parametrize("options", [{}, {"batch": 1}], ids=["one message", "a batch"])
async def test_a_stop_takes_effect_after_the_handler_that_holds_the_loop(options: dict[str, Any]) -> None:
    """Workers that were woken together would hold the loop one after the other."""
    broker = published(*"abcdefghijkl")
    calls: list[object] = []
    held, stopped = threading.Event(), threading.Event()

    async def hold(what: object) -> None:
        calls.append(what)
        time.sleep(HELD)  # noqa: ASYNC251 (the mistake)
        held.set()
        stopped.wait(TIMEOUT)

    async with started(consumer_of(MemorySource(broker), hold, concurrency=12, **options)) as run:

        def stop() -> None:
            held.wait(TIMEOUT)
            run.consumer.stop()
            stopped.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, stop)
        assert await run.end() is None
    assert len(calls) == 1


@pytest.mark.anyio
@pytest.mark.usefixtures("no_freeze")
async def test_the_reason_of_a_loss_names_the_handler_that_held_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    events: list[GroupEvent] = []
    broker = published(*"ab")
    source = MemorySource(broker)
    async with started(consumer_of(source, charge, on_event=events.append, concurrency=1)) as run:
        await until(lambda: broker.unfinished == 1)
        source.lose(0, "its lease has run out")
        await until(lambda: [one for one in events if one.name == "lost"])
        (lost,) = [one for one in events if one.name == "lost"]
        assert lost.reason is not None
        assert re.match("its lease has run out; charge held the event loop for " + SECONDS, lost.reason)
        assert await run.stop() is None


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_idle_loop_is_not_woken_and_a_hold_after_it_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, backend: str
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(loop_watch, "_LATE_AFTER", 3_600.0)
    monkeypatch.setattr(loop_watch, "INTERVAL", 0.01)
    questions = looks = 0
    answer, loop_waits = LoopWatch._answer, LoopWatch._loop_waits

    def counted(watch: LoopWatch) -> None:
        nonlocal questions
        questions += 1
        answer(watch)

    def looked(watch: LoopWatch) -> bool:
        nonlocal looks
        looks += 1
        return loop_waits(watch)

    monkeypatch.setattr(LoopWatch, "_answer", counted)
    monkeypatch.setattr(LoopWatch, "_loop_waits", looked)

    async def run_idle() -> None:
        broker = MemoryBroker()
        async with started(consumer_of(MemorySource(broker), charge)) as run:
            await until(lambda: run.consumer.ready)
            before = questions
            await anyio.sleep(1.0)
            # The watch finds the loop between two waits at the most a few times, and looks more rarely at an idle loop.
            assert questions - before < 20
            assert looks < 50
            broker.publish("a")
            await until(lambda: broker.unfinished == 0)
            await until(lambda: ends(caplog))
            assert await run.stop() is None

    anyio.run(run_idle, backend=backend)
