"""No end of a run leaves a task, thread, timer or file descriptor."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes import Consumer, History, Message, Retry, Settings
from lanes.source import Source
from memsource import Group, GroupSource, MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import living, started, turns, until
from tests.fakes.threaded import threads


async def awaited(message: Message) -> None:
    await anyio.lowlevel.checkpoint()
    if message.position % 7 == 3 and message.attempt == 1:
        raise ValueError("once")


def plain(message: Message) -> None:
    if message.position % 7 == 3 and message.attempt == 1:
        raise ValueError("once")


async def awaited_batch(batch: list[Message]) -> None:
    await anyio.lowlevel.checkpoint()


def plain_batch(batch: list[Message]) -> None:
    """A batch handler that succeeds at once."""


KINDS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "async": (awaited, {"timeout": 60.0}),
    "threads": (plain, {"timeout": 60.0}),
    "inline": (plain, {"sync_handlers": "inline"}),
    "batches": (awaited_batch, {"batch": 5, "linger": 0.001, "timeout": 60.0}),
    "batches in threads": (plain_batch, {"batch": 5, "timeout": 60.0}),
}


def acknowledging() -> Source:
    broker = MemoryBroker(3)
    for number in range(60):
        broker.publish(key=number % 7)
    return MemorySource(broker)


def committing() -> Source:
    group = Group(3)
    for number in range(60):
        group.publish(key=number % 7)
    return GroupSource(group, "m")


def descriptors() -> int:
    """Open files, sockets and pipes of this process."""
    gc.collect()
    return len(os.listdir("/dev/fd"))


def timers() -> int:
    """Timers of the asyncio event loop."""
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        return 0
    scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(not timer.cancelled() for timer in scheduled)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("end", ["stop", "cancel", "block", "fail"])
@pytest.mark.parametrize("make", [acknowledging, committing])
@pytest.mark.parametrize("kind", KINDS)
async def test_no_end_leaves_a_task_thread_timer_or_descriptor(
    kind: str, make: Callable[[], Source], end: str, tmp_path: Path
) -> None:
    handler, settings = KINDS[kind]
    before = living(), timers(), descriptors()
    consumer = Consumer(
        make(),
        handler,
        settings=Settings(**{"concurrency": 4, "retry": Retry(attempts=2, backoff=0.0), **settings}),
        dead_letters=MemoryDeadLetters(MemoryBroker()),
        history=History(tmp_path),
    )
    if end == "block":
        async with consumer:
            await until(lambda: consumer.ready and consumer.status().settled > 20)
    else:
        async with started(consumer) as run:
            await until(lambda: consumer.ready and consumer.status().settled > 20)
            if end == "cancel":
                run.scope.cancel()
                await run.end()
            elif end == "fail":
                consumer._life.last_run("stop it").stop_because(RuntimeError("a bug"))
                assert isinstance(await run.end(), RuntimeError)
            else:
                assert await run.stop() is None
    await turns(3)
    assert threads() == []
    assert (living(), timers(), descriptors()) == before
