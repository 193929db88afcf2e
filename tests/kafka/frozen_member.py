"""One member of a group as a process that a test freezes: ``python -m … CONFIG TOPIC ROWS KIND``.

It writes a row for each handler that starts or ends and for each change of ownership: event, partition, position, time.
The clock counts suspends and is the same for all processes of a machine. ``KIND`` is ``async``, ``threads`` or
``batch``. The process runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lanes
from lanes.clock import monotonic
from lanes_kafka import KafkaSource

PAUSE = 0.02
"""Seconds of each handler: with a backlog, some handlers always run while other messages wait."""

CONCURRENCY = 8


async def main(config: str, topic: str, path: str, kind: str) -> None:
    # ``commits`` keeps at most a few finished messages uncommitted, so that repeats are not mistaken for losses.
    settings: dict[str, Any] = {"concurrency": CONCURRENCY, "commit_interval": 0.05, "drain_timeout": 2.0, "grace": 0.2}
    with Path(path).open("a", buffering=1) as rows:

        def row(what: str, partition: int, position: int, at: float | None = None) -> None:
            rows.write(json.dumps([what, partition, position, monotonic() if at is None else at]) + "\n")

        def on_event(event: lanes.GroupEvent) -> None:
            if event.partition is not None:
                row(event.name, event.partition.number, -1)

        async def of_message(message: lanes.Message) -> None:
            row("start", message.partition.id.number, message.position)
            await asyncio.sleep(PAUSE)
            row("end", message.partition.id.number, message.position)

        def in_thread(message: lanes.Message) -> None:
            row("start", message.partition.id.number, message.position)
            time.sleep(PAUSE)
            row("end", message.partition.id.number, message.position)

        async def of_batch(messages: list[lanes.Message]) -> None:
            # One call starts all its messages, even where the freeze falls between two of these rows.
            called = monotonic()
            for message in messages:
                row("start", message.partition.id.number, message.position, called)
            await asyncio.sleep(PAUSE)
            for message in messages:
                row("end", message.partition.id.number, message.position)

        handlers: dict[str, Callable[..., Any]] = {"async": of_message, "threads": in_thread, "batch": of_batch}
        if kind == "batch":
            settings |= {"batch": 2, "linger": 0.0}
        source = KafkaSource(json.loads(config), topics=topic)
        await lanes.run(source, handlers[kind], on_event=on_event, settings=lanes.Settings(**settings))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(main(*sys.argv[1:]))
