"""Messages that a cohort handles twice after `kill -9`, at 300 messages a second, while some keys are stuck.

A member handles the messages of four partitions until its kill, and the next member takes over. The handler of one key
of each partition hangs, so finished messages are above an unfinished message. The figure is the median number of
messages that the next member repeats. The baseline is the same with a `commit_interval` of an hour, with which a member
stores its ledger only after `max_in_flight` finished messages.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from nats.aio.client import Client

import lanes
from bench.cohort_members import DividedStream, feeding, key_of
from bench.figures import Effort, Figure, cost
from lanes import Message, Settings
from lanes_jetstream.cohort.partitioning import partition_of
from tests.components import running

GOAL: Final = 20.0
KILLS: Final = 10
PARTITIONS, PER_SECOND, KEYS, LEASE = 4, 300.0, 1_000, 3.0
RUNS_FOR: Final = 2.0
"""Seconds from the first message of a process to its kill, which is up to a second later."""

_TIMEOUT: Final = 60.0
_MINUTES: Final = 10
_HOUR: Final = 3600.0


def figures(effort: Effort) -> list[Figure]:
    """Kill members with early stores of their ledgers, and members with rare stores, on a new server."""
    kills = max(1, effort.messages(KILLS))
    with running("nats") as urls, TemporaryDirectory() as folder:
        soon, rarely = (
            float(median(_repeats(urls["nats"], f"repeats-{number}", interval, kills, Path(folder))))
            for number, interval in enumerate((Settings().commit_interval, _HOUR))
        )
    # A kill may repeat no message at all, and a ratio needs a baseline.
    return [cost("cohort-repeats kill -9", "messages, at least 1", max(1.0, soon), max(1.0, rarely), GOAL)]


def _repeats(url: str, name: str, interval: float, kills: int, folder: Path) -> list[int]:
    """Return the number of repeated messages after each kill."""
    asyncio.run(_create(url, name))
    chance = random.Random(0)
    repeats: list[int] = []
    seen: set[str] = set()
    with feeding(DividedStream(url, name, PARTITIONS), round(PER_SECOND * 60 * _MINUTES), KEYS, PER_SECOND):
        for number in range(kills + 1):
            file = folder / f"{name}-{number}"
            file.touch()
            arguments = [url, name, f"member-{number}", str(interval), str(file)]
            process = subprocess.Popen([sys.executable, "-m", "bench.cohort_repeats", *arguments])
            try:
                end = time.monotonic() + _TIMEOUT
                while not file.stat().st_size:
                    assert time.monotonic() < end, "the process has handled no message"
                    time.sleep(0.01)
                time.sleep(RUNS_FOR + chance.random())
            finally:
                process.kill()
                process.wait()
            handled = file.read_text().splitlines()
            if number:
                repeats.append(len(seen.intersection(handled)))
            seen.update(handled)
    return repeats


async def _create(url: str, name: str) -> None:
    client = Client()
    await client.connect(url)
    await DividedStream(url, name, PARTITIONS).create(client)
    await client.close()


def member(url: str, name: str, member: str, interval: str, path: str) -> None:
    """Run a member, and write the position of each handled message."""
    stuck: dict[int, bytes] = {}
    for number in range(KEYS):
        stuck.setdefault(partition_of([key_of(number)], PARTITIONS), key_of(number).encode())
    keys = set(stuck.values())
    file = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def handler(message: Message) -> None:
        if message.key in keys:
            await asyncio.Event().wait()
        os.write(file, b"%d\n" % message.position)

    source = DividedStream(url, name, PARTITIONS).member(member, lease=LEASE)
    lanes.main(source, handler, settings=Settings(commit_interval=float(interval)))


if __name__ == "__main__":
    member(*sys.argv[1:])
