"""Deadlocks, livelocks and endless steps end a run of the loop with an error, and a run leaves no trace."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from memsource.sim.errors import Deadlock, Livelock, SimulationError
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import GROUP, SimLoop, current
from memsource.sim.loop.virtual import run
from tests.memsource.sim import programs

# --- the errors that end a run


def test_a_deadlock_names_tasks_and_where_they_wait() -> None:
    async def waits_for_nobody() -> None:
        await anyio.Event().wait()

    ended: list[str] = []

    async def main() -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waits_for_nobody, name="lonely")
                tasks.start_soon(anyio.sleep_forever)
        finally:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            ended.append("main")

    with pytest.raises(Deadlock) as caught:
        run(main, chooser=Fifo())
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("every task waits for another task, and no task waits for a time")
    assert f"  task 2 'lonely' waits at {__file__}:" in lines[1]
    assert lines[1].endswith("in waits_for_nobody")
    assert len(lines) == 3
    assert ended == ["main"]


def test_a_livelock_names_the_tasks_that_take_the_steps() -> None:
    async def polls() -> None:
        while True:
            await anyio.lowlevel.checkpoint()

    async def main() -> None:
        await asyncio.sleep(1)
        await asyncio.create_task(polls(), name="poller")

    with pytest.raises(
        Livelock,
        match=r"time 1: no time has passed in 1000 turns; most steps: task 2 'poller' \(\d+ steps, now at .*\.py:\d+",
    ):
        run(main, chooser=Fifo(), turns_limit=1_000)


def test_polling_with_a_pause_is_no_livelock() -> None:
    async def main() -> None:
        for _ in range(3_000):
            await anyio.sleep(0.001)

    run(main, chooser=Fifo(), turns_limit=100)


def test_a_task_that_survives_its_cancellation_is_a_livelock() -> None:
    async def stays() -> None:
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue

    async def main() -> None:
        tasks.append(asyncio.create_task(stays(), name="stays"))
        await asyncio.sleep(3)

    tasks: list[asyncio.Task[None]] = []
    # The garbage collector does not continue the coroutine either.
    with pytest.raises(Livelock, match="the cancelled tasks have not ended in 500 turns; most steps: task 2 'stays'"):
        run(main, chooser=Fifo(), turns_limit=500)
    coroutine = tasks[0].get_coro()
    assert inspect.iscoroutine(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


async def spins() -> None:
    while True:
        pass


async def swallows() -> None:
    lock = threading.Lock()
    while True:
        try:
            lock.acquire()
        except Exception:
            continue


@pytest.mark.parametrize("handler", [spins, swallows])
def test_a_step_of_a_task_that_does_not_end_is_interrupted(handler: Callable[[], Any]) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(handler, name="handler")

    with pytest.raises(Livelock, match=f"task 2 'handler' does not yield: turn .*{__file__}:.* in {handler.__name__}"):
        run(main, chooser=Fifo(), step_limit=0.2)


def test_a_step_in_another_thread_is_interrupted_too() -> None:
    caught: list[BaseException] = []

    def simulate() -> None:
        try:
            run(spins, chooser=Fifo(), step_limit=0.2)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=simulate)
    thread.start()
    thread.join()
    (error,) = caught
    assert isinstance(error, Livelock)
    assert "in spins" in str(error)


def test_an_alarm_of_other_code_still_rings() -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before, (delay, interval) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Alarm):
            # The step catches the error and is interrupted later, because the alarm came first.
            run(swallows, chooser=Fifo(), step_limit=0.4)
        assert signal.getsignal(signal.SIGALRM) is ring
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, delay, interval)


# --- the state before and after a run


def test_an_error_of_main_is_raised() -> None:
    async def main() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(main, chooser=Fifo())


def test_remaining_tasks_are_cancelled_and_generators_closed() -> None:
    log: list[str] = []

    async def stays() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            log.append("task")

    async def numbers() -> Any:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            log.append("generator")

    async def main() -> int:
        kept.append(asyncio.create_task(stays()))
        kept.append(numbers())
        return int(await anext(kept[-1]))

    kept: list[Any] = []
    assert run(main, chooser=Fifo()).result == 1
    assert log == ["task", "generator"]


def test_a_run_leaves_everything_as_it_was() -> None:
    async def main() -> SimLoop:
        assert not gc.isenabled()
        return current()

    # Cycles of other tests may be collected meanwhile.
    gc.collect()
    open_files = len(os.listdir("/dev/fd"))
    before = signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT), threading.active_count()
    alarm = signal.getitimer(signal.ITIMER_REAL)
    loop = run(main, chooser=Fifo()).result
    assert loop.is_closed()
    assert gc.isenabled()
    assert before == (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGINT), threading.active_count())
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (alarm[0] > 0)
    assert len(os.listdir("/dev/fd")) == open_files
    with pytest.raises(SimulationError, match="no simulation is running in this thread"):
        current()


def test_a_simulation_within_a_simulation_is_refused() -> None:
    async def main() -> None:
        run(programs.scopes, chooser=Fifo())

    with pytest.raises(SimulationError, match="an event loop is running in this thread"):
        run(main, chooser=Fifo())
    with pytest.raises(SimulationError, match="an event loop is running in this thread"):
        asyncio.run(main())


@pytest.mark.parametrize("wrong", [{"turns_limit": 0}, {"step_limit": 0.0}, {"threads": "allow"}])
def test_an_impossible_setting_is_named(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        run(programs.scopes, chooser=Fifo(), **wrong)


def test_a_task_of_another_factory_has_a_number_and_a_group() -> None:
    async def main() -> list[str]:
        asyncio.get_running_loop().set_task_factory(
            lambda loop, coro, **options: asyncio.Task(coro, loop=loop, **options)
        )
        return await programs.with_asyncio()

    async def frozen() -> float:
        asyncio.get_running_loop().set_task_factory(lambda loop, coro, **options: asyncio.Task(coro, loop=loop))
        GROUP.set("a")
        task = asyncio.create_task(asyncio.sleep(1))
        GROUP.set(None)
        current().freeze("a", 4)
        await task
        return anyio.current_time()

    assert run(main, chooser=Fifo()).result
    assert run(frozen, chooser=Fifo()).result == 5


WATCHED = """
import contextlib, sys, threading
from types import SimpleNamespace
from memsource.sim.loop.watch import Interrupted, watching

def simulate():
    loop = SimpleNamespace(turns=0, overdue=lambda frame: None)
    with watching(loop, 60.0):
        pass
    with contextlib.suppress(Interrupted), watching(loop, 0.02):
        while True:
            pass

thread = threading.Thread(target=simulate)
thread.start()
thread.join()
sys.settrace(lambda frame, event, argument: None)
simulate.__str__()
contextlib.suppress()
print("traced")
"""


@pytest.mark.process
def test_a_debugger_works_after_a_simulation_in_a_thread() -> None:
    """On Python 3.11 an interrupt that was cancelled hangs every later function under ``sys.settrace``."""
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("traced\n", "")
