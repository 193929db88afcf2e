"""One of several processes on a shared durable: ``python -m … URL STREAM PAUSE MAX_IN_FLIGHT``.

Each handler sleeps for PAUSE seconds. The process prints ``ready``, and at the next input line it stops and prints the
positions that it has handled.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Final

import lanes
from lanes_jetstream import JetStreamSource

DURABLE: Final = "sharing"
CONCURRENCY: Final = 10


class SharingProcess:
    """A process on the shared durable of a stream."""

    def __init__(self, url: str, stream: str, pause: float, max_in_flight: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.jetstream.sharing_process", url, stream, str(pause), str(max_in_flight)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self) -> None:
        """Wait until the process has begun to read the durable."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == "ready\n", line

    async def stop(self) -> list[int]:
        """Stop the process in order, and return the positions that it has handled."""
        output, _ = await asyncio.to_thread(self._process.communicate, "\n", timeout=30)
        assert self._process.returncode == 0, self._process.returncode
        positions: list[int] = json.loads(output)
        return positions

    def kill(self) -> None:
        """Kill the process, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


async def main(url: str, stream: str, pause: float, max_in_flight: int) -> None:
    handled: list[int] = []

    async def handle(message: lanes.Message) -> None:
        await asyncio.sleep(pause)
        handled.append(message.position)

    source = JetStreamSource(url, stream=stream, durable=DURABLE, key=None, shared=True)
    settings = lanes.Settings(order="none", concurrency=CONCURRENCY, max_in_flight=max_in_flight)
    async with lanes.Consumer(source, handle, settings=settings) as consumer:
        while not consumer.ready:
            await asyncio.sleep(0.01)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    print(json.dumps(handled), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])))
