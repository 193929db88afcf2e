"""Programs whose results depend on the loop. Each returns the visible result of one run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream


async def with_anyio() -> list[str]:
    """Task groups, cancel scopes, shields, timeouts, streams, locks, start(), exception groups."""
    log: list[str] = []
    lock, semaphore, limiter = anyio.Lock(), anyio.Semaphore(2), anyio.CapacityLimiter(2)
    condition, go = anyio.Condition(), anyio.Event()
    send, receive = anyio.create_memory_object_stream[int](2)

    async def worker(number: int) -> None:
        async with limiter, semaphore:
            await anyio.sleep(0.01 * (number % 3))
            async with lock:
                log.append(f"locked {number}")
                await anyio.lowlevel.checkpoint()
        with anyio.move_on_after(0.02 * number) as scope:
            try:
                await go.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.lowlevel.checkpoint()
                log.append(f"gone {number}")
        log.append(f"worker {number} {scope.cancelled_caught}")

    async def producer() -> None:
        async with send:
            for number in range(4):
                await send.send(number)
                log.append(f"sent {number}")

    async def consumer(name: str, mine: MemoryObjectReceiveStream[int]) -> None:
        async with mine:
            log.extend([f"{name} got {number}" async for number in mine])

    async def started(*, task_status: TaskStatus[int]) -> None:
        await anyio.lowlevel.checkpoint()
        task_status.started(7)
        async with condition:
            while not go.is_set():
                await condition.wait()
            log.append("notified")

    async def failing(number: int) -> None:
        try:
            await anyio.sleep(0.03)
            raise ValueError(number)
        finally:
            log.append(f"failing {number} ends")

    async with anyio.create_task_group() as tasks:
        log.append(f"started {await tasks.start(started)}")
        for number in range(4):
            tasks.start_soon(worker, number)
        tasks.start_soon(producer)
        for name in "ab":
            tasks.start_soon(consumer, name, receive.clone())
        receive.close()
        await anyio.sleep(0.025)
        go.set()
        async with condition:
            condition.notify_all()
    try:
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(failing, number)
    except* ValueError as group:
        log.append(f"group of {sorted(str(error) for error in group.exceptions)}")
    try:
        with anyio.fail_after(0.01):
            await anyio.sleep(1)
    except TimeoutError:
        log.append(f"timed out at {anyio.current_time():.3f}")
    return log


async def with_asyncio() -> list[str]:
    """gather, wait, Queue, timeout, TaskGroup, shield, wait_for, as_completed, asynchronous generators."""
    log: list[str] = []
    queue: asyncio.Queue[int] = asyncio.Queue(2)

    async def work(number: int) -> int:
        for _ in range(number % 3):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01 * (number % 2))
        log.append(f"work {number}")
        return number

    async def produce() -> None:
        for number in range(4):
            await queue.put(number)
            log.append(f"put {number}")

    async def consume(name: str) -> None:
        while True:
            log.append(f"{name} got {await queue.get()}")
            queue.task_done()

    async def count() -> AsyncIterator[int]:
        try:
            for number in range(10):
                yield number
                await asyncio.sleep(0)
        finally:
            log.append("generator closed")

    log.append(str(await asyncio.gather(*(work(number) for number in range(4)))))
    done, pending = await asyncio.wait(
        [asyncio.create_task(work(number)) for number in range(5)], return_when=asyncio.FIRST_COMPLETED
    )
    log.extend(f"done {task.result()}" for task in done)
    # The result depends on the order of a set of tasks.
    for late in pending:
        late.cancel()
        await asyncio.sleep(0)
        log.append(f"cancelled {late.get_name()}")
    consumers = [asyncio.create_task(consume(name)) for name in "ab"]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(produce())
        tasks.create_task(work(6))
    await queue.join()
    for task in consumers:
        task.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    try:
        async with asyncio.timeout(0.05):
            await asyncio.shield(asyncio.sleep(0.1))
    except TimeoutError:
        log.append("shielded")
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)
    except TimeoutError:
        log.append(f"waited until {asyncio.get_running_loop().time():.2f}")
    log.extend([f"completed {await coming}" for coming in asyncio.as_completed([work(number) for number in range(3)])])
    async for number in count():
        if number == 2:
            break
    return log


async def scopes() -> list[str]:
    """Cancelled scopes within a scope, whose callbacks run in the order of addresses if no guard sorts them."""
    log: list[str] = []

    async def waits(number: int) -> None:
        with anyio.CancelScope():
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda _: log.append(f"callback {number}"))
            await future

    garbage: list[Any] = []
    async with anyio.create_task_group() as tasks:
        for number in range(12):
            garbage.append(bytearray(number * 37 % 113))
            tasks.start_soon(waits, number)
        await anyio.sleep(1)
        tasks.cancel_scope.cancel()
    return log


async def everything() -> list[str]:
    """Run all programs sequentially."""
    return await with_anyio() + await with_asyncio() + await scopes()


if __name__ == "__main__":
    from memsource.sim.loop.choosers import RandomWalk
    from memsource.sim.loop.virtual import run

    outcome = run(everything, chooser=RandomWalk(int(sys.argv[1])))
    print(outcome.digest, outcome.turns, outcome.result)
