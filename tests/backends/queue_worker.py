"""One worker of a partitioned queue as a process that a test kills: ``python -m tests.backends.queue_worker BROKER URL
QUEUE WIDTH MEMBER FOLDER``.

It writes its history into the folder, and the number of each handled event into a file there. It runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import lanes

PAUSE = 0.002
"""Seconds of each handler."""


def source_of(broker: str, url: str, queue: lanes.PartitionedQueue, member: str) -> Any:
    """The source of a member: a group on Kafka, a cohort on JetStream."""
    if broker == "kafka":
        from lanes_kafka import KafkaSource
        from tests.kafka.members import PROTOCOLS
        from tests.kafka.workload import QUIET

        config = {**QUIET, "bootstrap.servers": url, "group.id": f"g-{queue.name}", "auto.offset.reset": "earliest"}
        return KafkaSource({**config, **PROTOCOLS["cooperative"]}, topics=queue)
    from lanes_jetstream import Cohort, JetStreamSource, header

    cohort = Cohort("work", member=member, lease=3)
    return JetStreamSource(url, stream=queue.name, cohort=cohort, key=header("case"), queue=queue)


def main(broker: str, url: str, name: str, width: str, member: str, folder: str) -> None:
    queue = lanes.PartitionedQueue(name, partitions=int(width))
    with Path(folder, f"{member}.handled").open("ab", buffering=0) as handled:

        async def handle(message: lanes.Message) -> None:
            await asyncio.sleep(PAUSE)
            handled.write(message.value + b"\n")

        settings = lanes.Settings(concurrency=50, max_in_flight=200, commit_interval=0.2)
        history = lanes.History(Path(folder, "history"), member=member)
        lanes.main(source_of(broker, url, queue, member), handle, settings=settings, history=history)


if __name__ == "__main__":
    main(*sys.argv[1:])
