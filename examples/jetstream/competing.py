"""Two competing processes share independent jobs. The slow process takes fewer jobs.

Needs a server: NATS_URL=nats://127.0.0.1:4222 python examples/jetstream/competing.py
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import nats

import lanes
from lanes_jetstream import JetStreamSource

STREAM, JOBS, CONCURRENCY = "EXAMPLE_JOBS", 2_000, 10
SECONDS = {"fast": 0.005, "slow": 0.02}
DONE = "done.txt"


def worker(name: str) -> None:
    """The program of one process. The program may run in any number of processes. The server divides the jobs among the
    processes.
    """

    def resize(message: lanes.Message) -> None:
        time.sleep(SECONDS[name])  # any work that needs no other job
        with open(DONE, "a") as done:
            done.write(f"{message.value.decode()} {name}\n")

    # shared=True permits several processes on one durable. Such processes cannot keep an order, so order="none" is
    # required.
    source = JetStreamSource(os.environ["NATS_URL"], stream=STREAM, durable="resizer", key=None, shared=True)
    # A process keeps the jobs in flight for itself, so a slow process must not take many more than it can run.
    settings = lanes.Settings(order="none", concurrency=CONCURRENCY, max_in_flight=2 * CONCURRENCY)
    lanes.main(source, resize, settings=settings)


def start(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, name])


def jobs() -> list[list[str]]:
    if not os.path.exists(DONE):
        return []
    with open(DONE) as done:
        return [line.split() for line in done.read().splitlines()]


async def main(stream: nats.js.JetStreamContext) -> None:
    """Start both processes, publish the jobs, and count the jobs of each process."""
    workers, until = [start(name) for name in SECONDS], time.monotonic() + 40
    try:
        for number in range(JOBS):
            await stream.publish("jobs.resize", str(number).encode())
        while len(jobs()) < JOBS:
            assert time.monotonic() < until, "the processes do not progress: read their output"
            await asyncio.sleep(0.05)
    finally:
        for process in workers:
            process.terminate()  # SIGTERM: finish the running jobs, leave
        for process in workers:
            await asyncio.to_thread(process.wait)
    assert sorted(int(number) for number, _ in jobs()) == list(range(JOBS)), "each job in exactly one process"
    names = [name for _, name in jobs()]
    print(f"{JOBS} jobs, each once: " + ", ".join(f"{names.count(name)} by the {name} process" for name in SECONDS))


async def example() -> None:
    client = await nats.connect(os.environ["NATS_URL"])
    stream = client.jetstream()
    await stream.add_stream(name=STREAM, subjects=["jobs.*"])
    try:
        await main(stream)
    finally:
        await stream.delete_stream(STREAM)
        await client.close()
        os.remove(DONE)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(sys.argv[1])
    else:
        asyncio.run(example())
