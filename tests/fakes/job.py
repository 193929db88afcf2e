"""A consumer as a process, for test_process.py: ``python -m tests.fakes.job CASE BACKEND``.

Says ``running`` on stdout when its handler has begun, ``ended N`` when it has ended with message N, and ``bye`` when
the interpreter shuts down in order.
"""

from __future__ import annotations

import atexit
import sys
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
    """Runs until the test sends a line."""
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


async def give_up(message: Message) -> None:
    raise Term("never")


async def leave(message: Message) -> None:
    sys.exit(7)


async def acknowledge(message: Message) -> None:
    say(f"ended {message.position}")


HANDLERS = {
    "line": wait_for_a_line,
    "ever": wait_for_ever,
    "ignore": ignore_cancellation,
    "poison": give_up,
    "leave": leave,
}


def main(case: str, backend: Literal["asyncio", "trio"]) -> None:
    broker = MemoryBroker(max_unacked=200)
    for _ in range(2):
        broker.publish(key="a")
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
    elif case == "events":
        source.finish()
        lanes.main(source, acknowledge, settings=settings, on_event=lambda event: say(event.name), backend=backend)
    lanes.main(source, HANDLERS.get(case, acknowledge), settings=settings, backend=backend)


if __name__ == "__main__":
    atexit.register(say, "bye")
    main(sys.argv[1], "trio" if sys.argv[2] == "trio" else "asyncio")
