"""One member of a cohort as a process of its own, to be killed and frozen: ``python -m … URL STREAM MEMBER ROWS``.

A row for each handler that starts, ends, or is cancelled: what, key, position, epoch, and the time of the clock that
counts suspend, which is one for all processes of a machine. It handles until it is told to stop (SIGTERM).
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
"""Seconds of each handler: with a backlog, one always runs and others wait behind it."""


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
