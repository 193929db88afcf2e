"""A worker that publishes, and is killed by -9 at a statement: ``python -m … KIND URL SOURCE TARGET AT``.

KIND is ``kafka`` or ``jetstream``. The handler makes two outputs of each message. The process counts the statements of
the modules that handle, publish and settle, in all threads, and dies before statement number AT; 0 = the process runs
until SIGTERM, and then prints the number of statements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

import lanes
from lanes_jetstream import JetStreamPublisher, JetStreamSource, subject_token
from lanes_kafka import KafkaPublisher, KafkaSource

MAX_AHEAD: Final = 16
"""Most messages above the confirmed position on Kafka, which a kill repeats."""

ACK_WAIT: Final = 2.0
"""Seconds after which a server of JetStream redelivers the messages of a killed worker."""

SETTINGS: Final = lanes.Settings(concurrency=8, max_ahead=MAX_AHEAD, commit_interval=0.05)

_ROOT: Final = Path(__file__).parents[2]
_TRACED: Final = frozenset(
    str(_ROOT / name)
    for name in (
        "adapters/lanes_jetstream/publisher.py",
        "adapters/lanes_jetstream/wire/confirmations.py",
        "adapters/lanes_jetstream/wire/acks.py",
        "adapters/lanes_kafka/dead_letters/producer.py",
        "adapters/lanes_kafka/publisher.py",
        "lanes/core/commits.py",
        "lanes/core/engine.py",
        "lanes/core/outbox.py",
        "lanes/core/publishing.py",
        "lanes/runtime/publishing.py",
        "lanes/runtime/settle.py",
        "lanes/workers/outcomes.py",
        "lanes/workers/outputs.py",
        "lanes/workers/tasks.py",
    )
)


class _Doom:
    """Counts statements, and kills this process before statement number ``at``."""

    def __init__(self, at: int) -> None:
        self.at, self.statements = at, 0

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename in _TRACED else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.statements += 1
            if self.statements == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self.line


def _consumer(kind: str, url: str, source: str, target: str) -> lanes.Consumer:
    async def copy(message: lanes.Message) -> None:
        await message.publish(target, message.value, key=message.key)
        await message.publish(target, message.value + b" again", key=message.key)

    if kind == "kafka":
        # As a static member, the next worker takes the place of the killed one at once.
        group = {"group.id": target, "group.instance.id": "one", "auto.offset.reset": "earliest"}
        reading = KafkaSource({"bootstrap.servers": url, "log_level": 0, **group}, topics=source)
        return lanes.Consumer(reading, copy, settings=SETTINGS, publisher=KafkaPublisher({"bootstrap.servers": url}))
    durable = JetStreamSource(url, stream=source, durable="copy", key=subject_token(1), ack_wait=ACK_WAIT)
    return lanes.Consumer(durable, copy, settings=SETTINGS, publisher=JetStreamPublisher(url, "copy"))


async def main(kind: str, url: str, source: str, target: str, at: str) -> None:
    doom = _Doom(int(at))
    consumer = _consumer(kind, url, source, target)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    threading.settrace(doom.called)
    sys.settrace(doom.called)
    await consumer.run()
    sys.settrace(None)
    print(doom.statements)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
