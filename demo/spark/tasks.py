"""The handler of the demo in a worker of Spark, with its effect in PostgreSQL.

The resources of a handler belong to its task. ``begin`` opens the resources on the task's event loop, and ``end``
closes the resources.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Any

from psycopg_pool import AsyncConnectionPool
from pyspark import TaskContext

from demo.child import peak_rss_mb
from demo.faults import Faults
from demo.spark.config import ReplayConfig
from demo.spark.tables import Tables
from demo.workers.client import Client
from demo.workers.handler import Approve
from lanes.core.types import Message
from lanes.source import DeadLetters


@dataclass(frozen=True)
class _Task:
    name: str
    faults: Faults
    client: Client
    pool: AsyncConnectionPool[Any]
    tables: Tables

    def say(self, *, ended: bool) -> None:
        context = TaskContext.get()
        self.client.say(
            {
                "task": self.name,
                "pid": os.getpid(),
                "attempt": context.attemptNumber() if context is not None else 0,
                "ended": ended,
                "rss_mb": peak_rss_mb(),
            }
        )


_tasks: list[_Task] = []
"""The current task of this process. A worker runs one task after another."""


async def begin() -> None:
    """Open the resources of a task, before its first message."""
    config = ReplayConfig.load()
    client = Client(config.service, config.token)
    await client.connect()
    pool: AsyncConnectionPool[Any] = AsyncConnectionPool(
        config.postgres, min_size=config.connections, open=False, name=config.schema
    )
    await pool.open()
    task = _Task(uuid.uuid4().hex, config.faults, client, pool, Tables(config.postgres, config.schema))
    _tasks.append(task)
    task.say(ended=False)


async def end() -> None:
    """Close the resources of a task, after its last message."""
    while _tasks:
        task = _tasks.pop()
        await task.pool.close()
        task.say(ended=True)
        await task.client.close()


async def handle(message: Message) -> None:
    """Handle a message with the handler of the demo."""
    task = _tasks[0]
    await Approve(_Effect(task, message), task.faults)(message)


def letters() -> DeadLetters:
    """Return the dead-letter store for events without attempts left."""
    from lanes_kafka import KafkaDeadLetters

    config = ReplayConfig.load()
    return KafkaDeadLetters({"bootstrap.servers": config.kafka, "log_level": 0}, config.dead_topic)


class _Effect:
    """An approval by the service, and an effect in the tables with a fence by the position of its message."""

    __slots__ = ("_message", "_task")

    def __init__(self, task: _Task, message: Message) -> None:
        self._task = task
        self._message = message

    async def approve(self, case: str, step: int) -> None:
        await self._task.client.approve(case, step)

    async def apply(self, case: str, step: int, epoch: int) -> bool:
        del epoch  # The position fences the effect, so the epoch is not used.
        async with self._task.pool.connection() as connection:
            return await self._task.tables.put(connection, self._message, (case, step))
