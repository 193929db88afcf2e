"""A worker of the demo: one consumer under ``lanes.serve`` in a separate process.

The demo's parent runs ``python -m demo.workers.worker`` with a ``WorkerConfig`` in the environment. The worker ends
with its parent, because its stdin is a pipe that the parent holds open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any, Final

from blake3 import blake3

import lanes
from demo.brokers.backends import dead_letters_of, source_of
from demo.child import end_with_parent, peak_rss_mb
from demo.config import WorkerConfig, settings
from demo.lateness import Lateness
from demo.workers.client import Client
from demo.workers.handler import Approve
from lanes.process import EXIT_FAILED

REPORT_EVERY: Final = 0.2
"""Seconds between two reports of the status."""


def main() -> int:
    """Run the worker until its stop, and return its exit status. Blocks."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    try:
        return asyncio.run(_work(WorkerConfig.load()))
    except lanes.LanesError as error:
        print(f"lanes: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED


async def _work(config: WorkerConfig) -> int:
    client = Client(config.service, config.token)
    await client.connect()
    consumer = lanes.Consumer(
        source_of(config),
        Approve(client, config.faults),
        settings=settings(config.concurrency, config.max_in_flight),
        dead_letters=dead_letters_of(config),
        history=lanes.History(config.history, member=config.member),
    )
    lateness = Lateness(starved=True)
    measurement = asyncio.create_task(lateness.measure())
    reporter = asyncio.create_task(_report(consumer, client, config.member, lateness))
    try:
        return await lanes.serve(consumer)
    finally:
        measurement.cancel()
        reporter.cancel()
        # The last report has the peaks of the whole run.
        _say(consumer, client, config.member, lateness)
        await client.close()


async def _report(consumer: lanes.Consumer, client: Client, member: str, lateness: Lateness) -> None:
    while True:
        _say(consumer, client, member, lateness)
        await asyncio.sleep(REPORT_EVERY)


def _say(consumer: lanes.Consumer, client: Client, member: str, lateness: Lateness) -> None:
    # Before the source is open, the consumer has no status.
    with contextlib.suppress(lanes.LanesError, AttributeError):
        client.say({"member": member, **numbers(consumer.status()), "late": lateness.take()})


def numbers(status: lanes.Status) -> dict[str, Any]:
    """Return the counts for the parent, and a hash of the oldest key."""
    oldest = status.oldest
    return {
        "in_flight": status.in_flight,
        "max_in_flight": status.max_in_flight,
        "peak_in_flight": status.peak_in_flight,
        "running": status.running,
        "ready": status.ready,
        "held": status.held,
        "retries": status.retries,
        "dead_lettered": status.dead_lettered,
        "settled": status.settled,
        "floor": min(status.floors.values(), default=None),
        "oldest_age": oldest.age if oldest is not None else 0.0,
        "oldest_key": key_hash(oldest.key) if oldest is not None else "",
        "oldest_attempt": oldest.attempt if oldest is not None else 0,
        "rss_mb": peak_rss_mb(),
    }


def key_hash(key: bytes | None) -> str:
    """Return the first 8 of the 16 hex digits of a key's hash in the history; ``-`` without a key."""
    return "-" if key is None else blake3(key).hexdigest(length=4)


if __name__ == "__main__":
    sys.exit(main())
