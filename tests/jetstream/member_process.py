"""One cohort member as a process that a test kills or freezes: ``python -m … URL STREAM MEMBER ROWS``.

It writes a row for each handler that starts, ends or is cancelled: event, key, position, epoch, time. The clock counts
suspends and is the same for all processes of a machine. The process runs until SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import lanes
from lanes.clock import monotonic
from lanes_jetstream import Cohort, JetStreamSource, subject_token

PAUSE = 0.02
"""Seconds of each handler: with a backlog, one handler always runs while other messages wait."""


async def main(url: str, stream: str, member: str, path: str) -> None:
    with Path(path).open("a", buffering=1) as rows:

        def row(what: str, message: lanes.Message) -> None:
            key = (message.key or b"").decode()
            rows.write(json.dumps([what, key, message.position, message.epoch, monotonic()]) + "\n")

        async def handle(message: lanes.Message) -> None:
            row("start", message)
            try:
                await asyncio.sleep(PAUSE)
            except asyncio.CancelledError:
                row("cancelled", message)
                raise
            row("done", message)

        source = JetStreamSource(
            url, stream=stream, cohort=Cohort("orders", member=member, lease=3), key=subject_token(2)
        )
        await lanes.run(source, handle, settings=lanes.Settings(max_in_flight=200))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
