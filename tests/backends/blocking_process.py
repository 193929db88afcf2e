"""A consumer whose handler blocks the event loop, as a process: ``python -m … KIND URL NAME SECONDS``.

The handler blocks for this time, or with ``line`` until a line of the input.
Prints ``running`` when a handler begins, and ``ended`` with the time on ``time.monotonic`` when the handler returns.
"""

from __future__ import annotations

import sys
import time

import lanes
from lanes.source import Source
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_kafka import KafkaSource


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def charge(message: lanes.Message) -> None:
    say("running")
    if sys.argv[4] == "line":
        sys.stdin.readline()
    else:
        time.sleep(float(sys.argv[4]))  # noqa: ASYNC251 (the mistake)
    say(f"ended {time.monotonic()}")


def source(kind: str, url: str, name: str) -> Source:
    if kind == "kafka":
        config = {"bootstrap.servers": url, "group.id": name, "auto.offset.reset": "earliest"}
        return KafkaSource(config, topics=name)
    if kind == "cohort":
        return JetStreamSource(url, stream=name, cohort=Cohort("charges", lease=3), key=subject_token(2))
    return JetStreamSource(url, stream=name, durable="charges", key=subject_token(2))


if __name__ == "__main__":
    lanes.main(source(*sys.argv[1:4]), charge)
