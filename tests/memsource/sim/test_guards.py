"""Calls without virtual time are refused by name inside a simulation only, and the guards are removed after it."""

from __future__ import annotations

import _thread
import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from memsource.sim.errors import Refused
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.guards import LOOP_CALLS
from memsource.sim.loop.virtual import run


def pool() -> object:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(int)


def nothing() -> int:
    return 0


REFUSED: dict[str, Callable[[], Any]] = {
    "threading.Thread.start": lambda: threading.Thread(target=int).start(),
    "threading.Thread.start of a pool": pool,
    "_thread.start_new_thread": lambda: _thread.start_new_thread(int, ()),
    "time.sleep": lambda: time.sleep(0.01),
    "socket.socket": socket.socket,
    "socket.socketpair": lambda: socket.socketpair(),
    "socket.create_connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "socket.getaddrinfo": lambda: socket.getaddrinfo("localhost", 80),
    "subprocess.Popen": lambda: subprocess.run(["true"], check=False),
    "os.fork": lambda: os._exit(0) if os.fork() == 0 else None,
    "os.posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "os.system": lambda: os.system("true"),
    "signal.signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL),
    "signal.setitimer": lambda: signal.setitimer(signal.ITIMER_REAL, 0),
    "asyncio.new_event_loop": lambda: asyncio.new_event_loop().close(),
}
AWAITED: dict[str, Callable[[], Awaitable[Any]]] = {
    "anyio.to_thread.run_sync": lambda: anyio.to_thread.run_sync(int),
    "loop.run_in_executor": lambda: asyncio.to_thread(int),
    "loop.getaddrinfo": lambda: anyio.connect_tcp("localhost", 9),
    "loop.subprocess_exec": lambda: asyncio.create_subprocess_exec("true"),
    "loop.create_server": lambda: asyncio.start_server(lambda *_: None, port=0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_is_named_even_if_its_error_is_swallowed(name: str) -> None:
    async def main() -> None:
        try:
            REFUSED[name]()
        except Exception:
            await anyio.sleep(1)
        went_on.append(True)

    went_on: list[bool] = []
    with pytest.raises(Refused) as caught:
        run(main, chooser=Fifo())
    said = str(caught.value)
    assert said.startswith(f"{name.split(' ')[0]}, called at {__file__}:")
    assert " has no virtual time; " in said
    assert not went_on


@pytest.mark.parametrize("name", AWAITED)
def test_an_awaited_call_is_refused_by_name(name: str) -> None:
    async def child() -> None:
        await AWAITED[name]()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)

    with pytest.raises(Refused, match=f"^{name}, called at {__file__}:"):
        run(main, chooser=Fifo())


@pytest.mark.parametrize("name", LOOP_CALLS)
def test_every_call_of_a_loop_that_needs_the_system_is_refused(name: str) -> None:
    async def main() -> None:
        getattr(asyncio.get_running_loop(), name)()

    with pytest.raises(Refused, match=rf"^loop\.{name}, called at"):
        run(main, chooser=Fifo())


def test_every_method_of_a_loop_is_refused_or_simulated() -> None:
    base = asyncio.AbstractEventLoop
    system = {name for name in vars(base) if name.startswith(("create_", "connect_", "sock_", "subprocess_", "add_"))}
    assert system - {"create_future", "create_task"} <= set(LOOP_CALLS)


def test_calls_of_other_threads_are_allowed() -> None:
    done: list[Any] = []
    begun, go = threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        go.wait()
        time.sleep(0)
        socket.socket().close()
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        done.append(asyncio.run(asyncio.to_thread(int)))
        done.append(anyio.run(anyio.to_thread.run_sync, nothing))
        done.append(anyio.run(in_scopes))

    async def in_scopes() -> list[int]:
        scope = anyio.CancelScope()
        scope.cancel()
        with scope:
            await anyio.sleep(1)
        return [await coming for coming in asyncio.as_completed([asyncio.sleep(0, 5)])]

    async def main() -> None:
        go.set()
        # This call waits by the wall clock for the other thread, which is unknown to the loop.
        thread.join()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    run(main, chooser=Fifo())
    assert done == [0, 0, [5]]


def test_another_thread_cannot_call_into_the_loop() -> None:
    caught: list[BaseException] = []
    begun, go = threading.Event(), threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def other() -> None:
        begun.set()
        go.wait()
        try:
            loops[0].call_soon_threadsafe(print, "never")
        except Refused as error:
            caught.append(error)

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        go.set()
        thread.join()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    with pytest.raises(Refused, match=r"^loop\.call_soon_threadsafe from another thread"):
        run(main, chooser=Fifo())
    assert len(caught) == 1


def test_inline_threads_take_virtual_time_and_run_here() -> None:
    def function(name: str) -> tuple[str, bool]:
        anyio.from_thread.check_cancelled()
        return name, threading.current_thread() is threading.main_thread()

    async def main() -> list[Any]:
        got: list[Any] = [await anyio.to_thread.run_sync(function, "anyio"), anyio.current_time()]
        with pytest.raises(RuntimeError):
            anyio.from_thread.check_cancelled()
        loop = asyncio.get_running_loop()
        return [*got, await loop.run_in_executor(None, len, "executor"), anyio.current_time()]

    outcome = run(main, chooser=Fifo(), threads="inline", thread_time=lambda: 2.0)
    assert outcome.result == [("anyio", True), 2.0, 8, 4.0]


def test_inline_threads_are_cancelled_and_keep_to_their_limiter() -> None:
    async def main() -> tuple[list[float], list[str]]:
        times: list[float] = []
        log: list[str] = []
        limiter = anyio.CapacityLimiter(1)

        async def one() -> None:
            await anyio.to_thread.run_sync(int, limiter=limiter)
            times.append(anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)

        def asks() -> None:
            try:
                anyio.from_thread.check_cancelled()
            except asyncio.CancelledError:
                log.append("cancelled")
                raise

        with anyio.move_on_after(0.5):
            await anyio.to_thread.run_sync(asks)
        with anyio.move_on_after(0.5):
            await anyio.to_thread.run_sync(log.append, "never", abandon_on_cancel=True)
        return times, log

    assert run(main, chooser=Fifo(), threads="inline", thread_time=lambda: 1.0).result == ([1.0, 2.0], ["cancelled"])


def test_calling_back_from_an_inline_thread_is_refused_by_name() -> None:
    async def main() -> None:
        await anyio.to_thread.run_sync(anyio.from_thread.run_sync, nothing)

    with pytest.raises(Refused, match=r"^anyio\.from_thread, called at .*: return a value"):
        run(main, chooser=Fifo(), threads="inline")


def test_all_guards_are_removed_after_a_run() -> None:
    from anyio._backends import _asyncio as backend

    owners = [threading.Thread, _thread, time, socket, socket.socket, subprocess.Popen, os, signal]
    owners += [asyncio, asyncio.tasks, asyncio.events, backend, backend.AsyncIOBackend]
    before = [dict(vars(owner)) for owner in owners]

    async def main() -> int:
        return sum(dict(vars(owner)) != values for owner, values in zip(owners, before, strict=True))

    assert run(main, chooser=Fifo()).result == len(owners)
    with pytest.raises(Refused):
        run(anyio.to_thread.run_sync, nothing, chooser=Fifo())
    assert [dict(vars(owner)) for owner in owners] == before


def test_a_refusal_in_a_library_task_names_a_line_of_that_library() -> None:
    async def main() -> None:
        await anyio.connect_tcp("127.0.0.1", 9)

    with pytest.raises(Refused, match=r"^loop\.create_connection, called at .*/anyio/.*\.py:\d+ in "):
        run(main, chooser=Fifo())
