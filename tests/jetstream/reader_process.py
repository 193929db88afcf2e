"""`python -m tests.jetstream.reader URL STREAM TAKEOVER`: a process of its own that reads a durable, to be killed.

It stays in its takeover: once it has shrunk the consumer's timers, it never restores them.
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
    """Say that it has come so far."""
    print(message.position, flush=True)


def main(url: str, stream: str, takeover: Any) -> None:
    durable.SHRINK_SECONDS = 3_600.0  # type: ignore[misc]
    source = JetStreamSource(url, stream=stream, durable=DURABLE, key=subject_token(1), takeover=takeover)
    anyio.run(lanes.run, source, handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
