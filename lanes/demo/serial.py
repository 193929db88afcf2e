"""One at a time: the ordinary loop over a pull consumer, with the same handler, to compare with.

``python -m lanes.demo.serial``, told by ``WorkerConfig`` in its environment. Prints one JSON object: how many
events it handled in how many seconds.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Final

import nats
import nats.errors
from nats.js.api import AckPolicy, ConsumerConfig

from lanes.demo.child import end_with_parent
from lanes.demo.client import Client
from lanes.demo.config import ATTEMPTS, WorkerConfig
from lanes.demo.handler import Approve, Declined
from lanes.errors import LanesError

_BATCH: Final = 50
_FETCH_TIMEOUT: Final = 2.0


def main() -> int:
    """Run the loop; returns an exit status. Blocks for the seconds configured."""
    end_with_parent()
    try:
        config = WorkerConfig.load()
        events, seconds = asyncio.run(_loop(config))
    except (LanesError, nats.errors.Error, OSError) as error:
        print(f"lanes: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"events": events, "seconds": seconds}), flush=True)
    return 0


async def _loop(config: WorkerConfig) -> tuple[int, float]:
    client = Client(config.service, config.token)
    await client.connect()
    handler = Approve(client, config.faults)
    connection = await nats.connect(config.server)
    subscription = await connection.jetstream().pull_subscribe(
        "", stream=config.stream, config=ConsumerConfig(ack_policy=AckPolicy.EXPLICIT)
    )
    events = 0
    begun = last = time.monotonic()
    end = begun + config.seconds
    try:
        while last < end:
            for message in await subscription.fetch(_BATCH, timeout=_FETCH_TIMEOUT):
                await _handle(handler, message.data)
                await message.ack()
                events += 1
                last = time.monotonic()
                if last >= end:
                    break
    except nats.errors.TimeoutError:
        pass  # the log is shorter than the sample
    await connection.close()
    await client.close()
    return events, last - begun


async def _handle(handler: Approve, payload: bytes) -> None:
    """In order, and without a pause between attempts: as fast as one at a time can be."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            await handler.handle(payload, attempt, 0)
        except Declined:
            continue
        return


if __name__ == "__main__":
    sys.exit(main())
