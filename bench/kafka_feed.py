"""Produce at a steady rate, in a separate process: `python -m bench.kafka_feed URL TOPIC COUNT KEYS PER_SECOND`.

The value of a message begins with the time of producing: 8 bytes, nanoseconds of the monotonic clock, which all
processes of a machine share.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from confluent_kafka import Producer

from bench.source import SIZE, keys_of

STAMP: Final = struct.Struct("<q")
_PADDING: Final = bytes(SIZE - STAMP.size)


@contextmanager
def feeding(url: str, topic: str, count: int, keys: int, per_second: float) -> Iterator[None]:
    """Produce in a separate process, which ends with the block."""
    arguments = [url, topic, str(count), str(keys), str(per_second)]
    with subprocess.Popen([sys.executable, "-m", "bench.kafka_feed", *arguments]) as process:
        try:
            yield
        finally:
            process.kill()


def stamp(value: bytes) -> int:
    """Return the time of a message's production, in nanoseconds of the monotonic clock."""
    produced: int = STAMP.unpack_from(value)[0]
    return produced


def main(url: str, topic: str, count: str, keys: str, per_second: str) -> None:
    producer = Producer({"bootstrap.servers": url, "linger.ms": 1, "enable.idempotence": True})
    begin = time.monotonic()
    for number, key in enumerate(keys_of(int(count), int(keys), "uniform")):
        # After a sleep that took too long, several messages follow at once.
        ahead = begin + number / float(per_second) - time.monotonic()
        if ahead > 0:
            producer.poll(0)
            time.sleep(ahead)
        producer.produce(topic, STAMP.pack(time.monotonic_ns()) + _PADDING, b"key-%d" % key)
        if number == 0:
            # An idempotent client first requests a producer id, which takes up to half a second. Only the first message
            # waits for the id.
            producer.flush()
            begin = time.monotonic()
    producer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
