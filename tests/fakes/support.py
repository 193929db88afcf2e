"""Runs a consumer concurrently with its test: helpers that start the consumer, wait for a condition, and read its
error."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes import Attempts, Consumer, Message, PartitionKey, Retry, Settings
from lanes.core.types import Room
from lanes.errors import MessageError
from lanes.source import Assigned, Delivered, SourceEvent
from memsource.memory.broker import MemoryBroker
from memsource.memory.source import MemorySource

TIMEOUT = 30.0
"""Seconds after which a condition that has not come true is a failure, not a slow machine."""


class Run:
    """A consumer that runs in a separate task. ``error`` is the error of ``run``, and ``scope`` cancels ``run``."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.error: BaseException | None = None
        self.ended = anyio.Event()
        self.scope = anyio.CancelScope()

    async def run(self) -> None:
        try:
            with self.scope:
                await self.consumer.run()
        except BaseException as error:
            self.error = error
            if isinstance(error, anyio.get_cancelled_exc_class()) and _is_cancelled():
                raise
        finally:
            self.ended.set()

    async def end(self) -> BaseException | None:
        """Wait for the end of ``run``, and return its error."""
        with anyio.fail_after(TIMEOUT):
            await self.ended.wait()
        return self.error

    async def stop(self) -> BaseException | None:
        """Stop the consumer in order, and wait for its end."""
        self.consumer.stop()
        return await self.end()


def _is_cancelled() -> bool:
    return anyio.current_effective_deadline() == float("-inf")


@asynccontextmanager
async def started(consumer: Consumer) -> AsyncIterator[Run]:
    """Run a consumer during the block; the end of the block cancels a consumer that still runs."""
    run = Run(consumer)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.run)
            yield run
            consumer.stop(at_once=True)
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        # The failed assertion, not a group around it.
        raise group.exceptions[0] from None


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition, which each turn of the loop checks."""
    with anyio.fail_after(TIMEOUT):
        while not condition():
            await anyio.lowlevel.checkpoint()


def wait_without_the_loop(condition: Callable[[], object]) -> None:
    """Wait for threads while the loop is blocked."""
    ever = threading.Event()
    for _ in range(int(TIMEOUT / 0.001)):
        if condition():
            return
        ever.wait(0.001)
    raise AssertionError("the threads did not meet the condition in time; see the threads that still run")


async def turns(count: int = 50) -> None:
    """Let every task that is ready run."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


def living() -> int:
    """Number of tasks of this loop, and of threads of this process. A thread of another test may end meanwhile."""
    if anyio.get_cancelled_exc_class() is asyncio.CancelledError:
        tasks = len(asyncio.all_tasks())
    else:
        import trio

        tasks = trio.lowlevel.current_statistics().tasks_living
    # Under trio's guest mode, a thread of trio waits for I/O.
    return tasks + sum(not thread.name.startswith("Trio thread") for thread in threading.enumerate())


async def acknowledge(message: Message) -> None:
    """A handler that succeeds at once."""


async def acknowledge_all(batch: list[Message]) -> None:
    """A batch handler that succeeds at once."""


async def fail(message: Message) -> None:
    """A handler that always fails."""
    raise ValueError("poison")


def consumer_of(
    source: Any,
    handler: Any,
    *,
    attempts: int = 1,
    backoff: float = 0.0,
    store: Attempts | None = None,
    **arguments: Any,
) -> Consumer:
    """A consumer that by default does not retry, commits at once, and stops at once after a cancellation.

    ``store`` keeps its attempts. ``arguments`` are settings, or arguments of ``Consumer``.
    """
    names = {field.name for field in dataclasses.fields(Settings)}
    settings: dict[str, Any] = {name: arguments.pop(name) for name in list(arguments) if name in names}
    defaults = {
        "concurrency": 4,
        "max_in_flight_bytes": 1 << 20,
        "retry": Retry(attempts=attempts, backoff=backoff),
        "commit_interval": 0.0,
        "on_cancel": "stop",
    }
    return Consumer(source, handler, settings=Settings(**{**defaults, **settings}), attempts=store, **arguments)


def published(*keys: PartitionKey | None, partitions: int = 1, partition: int | None = None) -> MemoryBroker:
    """A broker with a message for each key, in this order; values are ``0``, ``1``, …"""
    broker = MemoryBroker(partitions)
    publish(broker, keys, partition=partition)
    return broker


def publish(broker: MemoryBroker, keys: Iterable[PartitionKey | None], *, partition: int | None = None) -> None:
    """Publish a message for each key."""
    for number, key in enumerate(keys):
        broker.publish(str(number), key=key, partition=partition)


class Gated:
    """A handler whose messages end on demand.

    ``started`` and ``ended`` are positions, in order; ``cancelled`` has the positions of cancelled handlers. A message
    whose key is in ``free`` ends by itself.
    """

    def __init__(self, *, free: Iterable[bytes] = ()) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []
        self.cancelled: list[int] = []
        self.attempts: list[int] = []
        self.free = set(free)
        self._gates: dict[int, anyio.Event] = {}

    async def __call__(self, message: Message) -> None:
        position = message.position
        self.started.append(position)
        self.attempts.append(message.attempt)
        if message.key not in self.free:
            try:
                await self._gate(position).wait()
            except BaseException:
                self.cancelled.append(position)
                raise
        self.ended.append(position)

    @property
    def running(self) -> int:
        """Number of handlers that run."""
        return len(self.started) - len(self.ended) - len(self.cancelled)

    def let(self, *positions: int) -> None:
        """Let the handlers of these positions end, now or when they start."""
        for position in positions:
            self._gate(position).set()

    def _gate(self, position: int) -> anyio.Event:
        return self._gates.setdefault(position, anyio.Event())


def settled(source: MemorySource) -> list[int]:
    """The settled positions, in order, repetitions included."""
    return [position for call in source.called("settle") for position in call.positions]


def starts_by_write(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of ``started`` rows in each later write to a history with such a row."""
    writes: list[int] = []
    write = os.write

    def counting(fd: int, data: bytes) -> int:
        if b'"event":"started"' in data:
            writes.append(data.count(b'"event":"started"'))
        return write(fd, data)

    monkeypatch.setattr("lanes.history.writer.os.write", counting)
    return writes


def deliver_beside_the_assignment(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the first messages by the call of ``receive`` that returns their assignment."""
    receive = source.receive

    async def at_once(room: Room) -> list[SourceEvent]:
        events = list(await receive(room))
        if any(isinstance(one, Assigned) for one in events):
            while not any(isinstance(one, Delivered) for one in events):
                events += await receive(room)
        return events

    monkeypatch.setattr(source, "receive", at_once)


def break_positions(source: MemorySource, positions: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a source deliver these positions as unreadable."""
    receive = source.receive

    async def broken(room: Any) -> Any:
        events = await receive(room)
        for event in events:
            for message in getattr(event, "run", ()):
                if message.position in positions:
                    message.broken = MessageError("no key")
        return events

    monkeypatch.setattr(source, "receive", broken)
