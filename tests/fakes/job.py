"""A consumer as a process, for test_process.py: ``python -m tests.fakes.job CASE BACKEND``.

The process prints ``running`` when its handler has begun, ``ended N`` after message N, and ``bye`` at an orderly
shutdown of the interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import signal
import sys
import time
from typing import Literal

import anyio
import anyio.to_thread

import lanes
from lanes import ConfigError, Message, SourceError, Term
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def wait_for_a_line(message: Message) -> None:
    """Wait until the test sends a line."""
    say("running")
    await anyio.to_thread.run_sync(sys.stdin.readline)
    say(f"ended {message.position}")


async def wait_for_ever(message: Message) -> None:
    say("running")
    await anyio.sleep_forever()


async def ignore_cancellation(message: Message) -> None:
    say("running")
    while True:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            pass


async def hold_the_loop(message: Message) -> None:
    say("running")
    time.sleep(60)  # noqa: ASYNC251 (the mistake)


async def doze(message: Message) -> None:
    say("running")
    time.sleep(1.5)  # noqa: ASYNC251 (the mistake)
    say(f"ended {message.position}")


async def hold_the_loop_in_c(message: Message) -> None:
    """Wait for a mutex in C. No signal interrupts the wait, so Python calls no signal handler."""
    say("running")
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


async def leave_a_thread(message: Message) -> None:
    """React to the cancellation, but leave a thread that keeps the interpreter running."""
    say("running")
    await anyio.to_thread.run_sync(time.sleep, 60, abandon_on_cancel=True)


async def fail_for_good(message: lanes.Message) -> None:
    raise KeyError("sku")


async def give_up(message: Message) -> None:
    raise Term("never")


async def leave(message: Message) -> None:
    sys.exit(7)


async def acknowledge(message: Message) -> None:
    say(f"ended {message.position}")


async def add_a_signal(message: Message) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, say, "SIGUSR2")
    await wait_for_ever(message)


async def serve_with_signals(source: MemorySource) -> int:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, say, "SIGUSR1")
    return await lanes.serve(lanes.Consumer(source, add_a_signal))


async def leave_or_ignore(message: Message) -> None:
    """One handler ends the run, and the other handler ignores its cancellation."""
    if message.partition.id.number:
        await ignore_cancellation(message)
    await anyio.sleep(0.2)
    raise MemoryError("no memory")


async def exit_or_ignore(message: Message) -> None:
    """One handler exits the program, and the other handler ignores its cancellation."""
    if message.partition.id.number:
        await ignore_cancellation(message)
    await anyio.sleep(0.2)
    sys.exit(7)


HANDLERS = {
    "line": wait_for_a_line,
    "ever": wait_for_ever,
    "ignore": ignore_cancellation,
    "doze": doze,
    "hold": hold_the_loop,
    "hold in C": hold_the_loop_in_c,
    "thread": leave_a_thread,
    "poison": give_up,
    "failing": fail_for_good,
    "leave": leave,
    "hasty": ignore_cancellation,
    "fail beside": leave_or_ignore,
    "leave beside": exit_or_ignore,
}


def main(case: str, backend: Literal["asyncio", "trio"]) -> None:
    broker = MemoryBroker(max_unacked=200)
    if case == "doze":
        for number in range(48):
            broker.publish(key=str(number))
    if case in ("fail beside", "leave beside"):
        broker = MemoryBroker(2)
        broker.publish(key="a", partition=1)
    for _ in range(2):
        broker.publish(key="a", partition=0 if case in ("fail beside", "leave beside") else None)
    source = MemorySource(broker)
    settings = lanes.Settings()
    if case == "finite":
        source.finish()
    elif case == "bound":
        settings = lanes.Settings(max_in_flight=500)
    elif case == "open refused":
        source.fail("open", ConfigError("ack_policy is 'none'; set it to 'explicit'"))
    elif case == "no server":
        source.fail("open", SourceError("no server reached"))
    elif case == "gone":
        source.fail("receive", SourceError("the connection is closed"))
    elif case == "not settled":
        source.fail("settle", SourceError("the connection is closed"), times=100)
    elif case == "poison policy":
        settings = lanes.Settings(poison="skip")
    elif case in ("hasty", "fail beside", "leave beside"):
        settings = lanes.Settings(drain_timeout=0.3, grace=0.3)
    elif case == "failing":
        settings = lanes.Settings(retry=lanes.Retry(attempts=1))
    elif case == "signals":
        sys.exit(anyio.run(serve_with_signals, source))
    elif case == "events":
        source.finish()
        lanes.main(source, acknowledge, settings=settings, on_event=lambda event: say(event.name), backend=backend)
    lanes.main(source, HANDLERS.get(case, acknowledge), settings=settings, backend=backend)


if __name__ == "__main__":
    atexit.register(say, "bye")
    main(sys.argv[1], "trio" if sys.argv[2] == "trio" else "asyncio")
