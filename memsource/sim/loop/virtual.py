"""A program in virtual time: on a loop of its own, with the guards in place, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.events import _get_running_loop
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, get_args

import anyio

from memsource.sim.errors import SimulationError
from memsource.sim.loop.choosers import Chooser
from memsource.sim.loop.event_loop import SimLoop, Threads
from memsource.sim.loop.guards import installed
from memsource.sim.loop.watch import watching

__all__ = ["Outcome", "run"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Generic[T]):
    """How a run ended. ``result``: what ``main`` returned. ``time``: virtual seconds it took. ``turns``: of the loop;
    ``steps``: of tasks. ``digest``: of every (turn, task number): equal where the runs took the same steps."""

    result: T
    time: float
    turns: int
    steps: int
    digest: int


def run(
    main: Callable[..., Awaitable[T]],
    *args: object,
    chooser: Chooser,
    threads: Threads = "refuse",
    thread_time: Callable[[], float] = lambda: 0.001,
    turns_limit: int = 100_000,
    step_limit: float = 10.0,
) -> Outcome[T]:
    """Run ``main(*args)`` in virtual time, with anyio on asyncio, and what is left of its tasks to their end. Blocks.

    ``threads``: "inline" lets anyio.to_thread, asyncio.to_thread and loop.run_in_executor call the function on the
    loop's own thread, after ``thread_time()`` virtual seconds (0 or more). ``turns_limit``: turns in which no time
    passes, at most. ``step_limit``: seconds by the wall clock that one step may take.

    Raises what ``main`` raises; ``Deadlock``, ``Livelock`` or ``Refused``, whatever the tasks made of it; and
    ``SimulationError`` where an event loop runs already. Afterwards all is as it was, and nothing is left.
    """
    if _get_running_loop() is not None:
        raise SimulationError("a simulation cannot run in an event loop: call run where none is running")
    if turns_limit < 1 or not step_limit > 0:
        raise ValueError(f"turns_limit={turns_limit}, step_limit={step_limit}: both must be above 0")
    if threads not in get_args(Threads):
        raise ValueError(f"threads={threads!r}: use one of {', '.join(get_args(Threads))}")
    loop = SimLoop(chooser, thread_time=thread_time if threads == "inline" else None, turns_limit=turns_limit)

    async def body() -> T:
        task = asyncio.current_task()
        assert task is not None
        task.set_name("main")
        try:
            return await main(*args)
        finally:
            loop.end()

    with installed(SimLoop), contextlib.closing(loop):
        made: list[T] = []
        try:
            with watching(loop, step_limit):
                made.append(anyio.run(body, backend_options={"loop_factory": lambda: loop}))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            loop.abandon()
            if loop.failure is None:
                raise
        if loop.failure is not None:
            raise loop.failure
        return Outcome(result=made[0], time=loop.time(), turns=loop.turns, steps=loop.steps, digest=loop.digest)
