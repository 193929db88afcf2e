"""The run of a program in virtual time, on a new loop and under guards."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.events import _get_running_loop
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, get_args

import anyio

from memsource.sim.errors import SimulationError
from memsource.sim.loop.choosers import Chooser
from memsource.sim.loop.event_loop import SimLoop, Threads
from memsource.sim.loop.guards import installed
from memsource.sim.loop.watch import watching

_POLL: Final = (0.2, 5.0)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult(Generic[T]):
    """The result of a run.

    Attributes:
        result: Return value of ``main``.
        time: Virtual seconds of the run.
        turns: Turns of the loop.
        steps: Steps of all tasks.
        digest: Hash of all pairs (turn, task number); equal for runs with the same steps.
    """

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
) -> LoopResult[T]:
    """Run ``main(*args)`` in virtual time, with anyio on asyncio, then cancel the remaining tasks. Blocks.

    Args:
        main: The program. ``run`` raises an error of ``main``.
        *args: Arguments of ``main``.
        chooser: Decides which ready task takes the next step.
        threads: ``"inline"`` calls the functions of anyio.to_thread, asyncio.to_thread and loop.run_in_executor on the
            loop's own thread. ``"refuse"`` refuses these functions.
        thread_time: Returns the virtual seconds to wait before each function of a thread, 0 or more.
        turns_limit: Maximum number of turns while no time passes, 1 or more.
        step_limit: The longest step, in seconds by the wall clock, above 0.

    Returns:
        The result of ``main``, and the figures of the run.

    Raises:
        Deadlock: Every task waits for another task; raised even when a task caught the error.
        Livelock: No time passed in ``turns_limit`` turns; raised even when a task caught the error.
        NeverYields: A step took longer than ``step_limit``; raised even when a task caught the error.
        Refused: The program used something without virtual time; raised even when a task caught the error.
        SimulationError: An event loop is running in this thread.
        ValueError: An argument is out of its range.
    """
    if _get_running_loop() is not None:
        raise SimulationError("an event loop is running in this thread: call run outside of an event loop")
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
        return LoopResult(result=made[0], time=loop.time(), turns=loop.turns, steps=loop.steps, digest=loop.digest)


async def until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until a condition is true.

    Args:
        condition: The condition, which the function checks every 0.2 to 5 virtual seconds.
        timeout: The longest wait, in virtual seconds.

    Returns:
        Whether the condition is true.
    """
    with anyio.move_on_after(timeout):
        pause = _POLL[0]
        while not condition():
            await anyio.sleep(pause)
            pause = min(pause * 1.5, _POLL[1])
    return condition()
