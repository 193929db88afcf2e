"""A member with transactions as a process, which kills itself at one statement of the transactional path.

Run by the tests: `python -m tests.kafka.transactions.killed_member '{"url": …}'`. Prints the executed statements with
`"record"`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import anyio

import lanes
import lanes_kafka
from lanes_kafka import KafkaPublisher, KafkaSource, KafkaTransactions

ROOM = str(Path(lanes_kafka.__file__).parent / "transactions")

Trace = Callable[[FrameType, str, Any], Any]


class Statements:
    """Counts the executed statements of the room, and kills the process at one of them.

    Args:
        at: Name of a file and number of a line; None = never kill.
        times: The execution of this statement that kills.
    """

    def __init__(self, at: tuple[str, int] | None, times: int) -> None:
        self.seen: dict[tuple[str, int], int] = {}
        self._at, self._times = at, times

    def trace(self, frame: FrameType, event: str, argument: Any) -> Trace | None:
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        return self._local

    def _local(self, frame: FrameType, event: str, argument: Any) -> Trace:
        if event == "line":
            place = Path(frame.f_code.co_filename).name, frame.f_lineno
            count = self.seen[place] = self.seen.get(place, 0) + 1
            if place == self._at and count == self._times:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._local


async def main(options: dict[str, Any]) -> None:
    at = options.get("at")
    statements = Statements((at[0], at[1]) if at else None, options.get("times", 1))
    config = {
        "bootstrap.servers": options["url"],
        "auto.offset.reset": "earliest",
        "log_level": 0,
        **options["config"],
    }
    source = KafkaSource(config, topics=options["topic"], transactions=KafkaTransactions(options["name"]))
    chance = random.Random(options.get("seed", 0))
    quiet = anyio.Event()

    async def handler(message: lanes.Message) -> None:
        nonlocal quiet
        quiet.set()
        quiet = anyio.Event()
        # Keys of different speeds leave gaps above the floor.
        await anyio.sleep(chance.choice((0.0, 0.001, 0.03)) if options.get("slow", True) else 0.0)
        await message.publish(options["target"], message.value, key=message.key)

    settings = lanes.Settings(concurrency=100)
    consumer = lanes.Consumer(
        source, handler, settings=settings, publisher=KafkaPublisher({"bootstrap.servers": options["url"]})
    )
    threading.settrace(statements.trace)
    sys.settrace(statements.trace)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        await consumer.until_ready()
        if "seconds" in options:
            await anyio.sleep(options["seconds"])
        else:
            while True:
                with anyio.move_on_after(options.get("idle", 3.0)) as scope:
                    await quiet.wait()
                if scope.cancelled_caught:
                    break
        consumer.stop()
    if options.get("record"):
        print(json.dumps({"seen": [[*place, count] for place, count in statements.seen.items()]}))
    counts = source.transaction_counts
    print(json.dumps({"committed": counts.committed, "aborted": counts.aborted, "unknown": counts.unknown}))


if __name__ == "__main__":
    anyio.run(main, json.loads(sys.argv[1]))
