"""A process that reads a durable, for a kill in its takeover: ``python -m tests.jetstream.reader_process URL STREAM
TAKEOVER``.

It never leaves the takeover: after the shrink of the consumer's timers it never restores them.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio

import lanes
from lanes_jetstream import JetStreamSource, subject_token
from lanes_jetstream.durable import consumer as durable
from tests.jetstream.workload import DURABLE


async def handle(message: lanes.Message) -> None:
    """Report that a message arrived."""
    print(message.position, flush=True)


def main(url: str, stream: str, takeover: Any) -> None:
    durable.SHRINK_SECONDS = 3_600.0  # type: ignore[misc]
    source = JetStreamSource(url, stream=stream, durable=DURABLE, key=subject_token(1), takeover=takeover)
    anyio.run(lanes.run, source, handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
