"""The simulator's loop: task steps a second of CPU, one step a turn, compared with the same program on bare asyncio.

Steps: tasks only yield; the choosers are first in, first out and a random walk. Streams: tasks pass messages through
anyio's memory streams, each with a timeout. On both loops the streams cost more than the loop itself. The goals of the
steps are rates. The streams have no goal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio

from bench import simulate
from bench.figures import Effort, Figure, interleaved, rate
from memsource.sim.loop.choosers import Chooser, Fifo, RandomWalk
from memsource.sim.loop.virtual import run

GOAL: Final = 100_000
TASKS, STEPS, MESSAGES = 20, 100_000, 10_000

Program = Callable[[], Awaitable[None]]


def figures(effort: Effort) -> list[Figure]:
    """Measure the cases, each with its baseline."""
    steps = partial(_yielding, max(1, effort.messages(STEPS) // TASKS))
    streams = partial(_streaming, max(1, effort.messages(MESSAGES) // TASKS))
    bare, first, walk, bare_streams, in_streams = interleaved(
        [
            partial(_bare, steps),
            partial(_simulated, steps, Fifo),
            partial(_simulated, steps, partial(RandomWalk, 1)),
            partial(_bare, streams),
            partial(_simulated, streams, partial(RandomWalk, 1)),
        ],
        effort.repeats,
    )
    return [
        rate("simloop steps", "steps/s of CPU", first, bare).at_least(GOAL),
        rate("simloop steps, random walk", "steps/s of CPU", walk, bare).at_least(GOAL),
        rate("simloop streams, random walk", "steps/s of CPU", in_streams, bare_streams),
        *simulate.figures(effort),
    ]


def _simulated(program: Program, make: Callable[[], Chooser]) -> float:
    chooser = make()
    begin = time.thread_time()
    outcome = run(program, chooser=chooser, turns_limit=10 * STEPS)
    return outcome.steps / (time.thread_time() - begin)


def _bare(program: Program) -> float:
    # Both loops take the same steps, first in, first out, so the number of the simulator holds for the bare loop.
    steps = run(program, chooser=Fifo(), turns_limit=10 * STEPS).steps
    begin = time.thread_time()
    anyio.run(program)
    return steps / (time.thread_time() - begin)


async def _yielding(steps: int) -> None:
    async def yields() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(TASKS):
            tasks.create_task(yields())


async def _streaming(messages: int) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(TASKS // 2):
            send, receive = anyio.create_memory_object_stream[int](1)
            tasks.start_soon(_send, send, messages)
            tasks.start_soon(_receive, receive)


async def _send(stream: anyio.abc.ObjectSendStream[int], messages: int) -> None:
    async with stream:
        for number in range(messages):
            with anyio.move_on_after(1_000):
                await stream.send(number)


async def _receive(stream: anyio.abc.ObjectReceiveStream[int]) -> None:
    async with stream:
        async for _ in stream:
            pass
