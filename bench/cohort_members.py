"""Streams that a cohort divides, and the processes that a benchmark of a cohort starts.

`python -m bench.cohort_members hold URL STREAM MEMBER LEASE` runs a member. The process prints the number of its
partitions after each change. For each input line, the process prints its CPU time since its start, in seconds. With the
lease 0 the process is one consumer of the whole stream, on a separate durable.

`python -m bench.cohort_members feed URL STREAM COUNT KEYS PER_SECOND` publishes at a steady rate. The payload begins
with the time of publishing: 8 bytes, nanoseconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from nats.aio.client import Client

import lanes
from bench.source import SIZE
from lanes import GroupEvent, Message
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_jetstream.cohort.partitioning import partition_of
from lanes_jetstream.wire.stream import Start

COHORT: Final = "bench"
STAMP: Final = struct.Struct("<q")
_PADDING: Final = bytes(SIZE - STAMP.size)

_CONFIRMED: Final = 2_000
"""Number of messages between two waits for their storage. A stream drops messages beyond 10,000 in its queue."""


class DividedStream:
    """A stream whose own subject transform makes ``partitions``. The key is the last token of the stored subject."""

    def __init__(self, url: str, name: str, partitions: int) -> None:
        self.url = url
        self.name = name
        self.partitions = partitions

    async def create(self, client: Client, *, storage: str = "file") -> None:
        """Create the stream on the server."""
        destination = f"{self.name}.{{{{partition({self.partitions},1)}}}}.{{{{wildcard(1)}}}}"
        config = {
            "name": self.name,
            "subjects": [f"{self.name}.*"],
            "subject_transform": {"src": f"{self.name}.*", "dest": destination},
            "storage": storage,
        }
        await self.api(client, f"STREAM.CREATE.{self.name}", config)

    async def delete(self, client: Client) -> None:
        """Delete the stream and its consumers."""
        await self.api(client, f"STREAM.DELETE.{self.name}")

    async def fill(self, client: Client, count: int, keys: int) -> None:
        """Publish ``count`` messages of 100 bytes over ``keys`` keys; blocks until the stream stores all messages."""
        for number in range(1, count + 1):
            subject = f"{self.name}.{key_of(number % keys)}"
            if number % _CONFIRMED and number < count:
                await client.publish(subject, bytes(SIZE))
            else:
                answer = json.loads((await client.request(subject, bytes(SIZE), timeout=60)).data)
                assert answer["seq"] == number, answer

    async def api(self, client: Client, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the server's answer."""
        request = b"" if body is None else json.dumps(body).encode()
        answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{subject}", request, timeout=10)).data)
        assert "error" not in answer, answer
        return answer

    def subjects(self) -> list[str]:
        """Return one subject for each partition."""
        found: dict[int, str] = {}
        number = 0
        while len(found) < self.partitions:
            found.setdefault(partition_of([key_of(number)], self.partitions), f"{self.name}.{key_of(number)}")
            number += 1
        return [found[partition] for partition in range(self.partitions)]

    def durable(self, name: str, *, start: Start = "beginning") -> JetStreamSource:
        """Return a source that reads the whole stream by one durable."""
        return JetStreamSource(self.url, stream=self.name, durable=name, key=subject_token(2), start=start)

    def member(self, name: str, *, namespace: str = "lanes", lease: float = 10.0) -> JetStreamSource:
        """Return a source that is a member of the cohort."""
        cohort = Cohort(COHORT, member=name, namespace=namespace, lease=lease)
        return JetStreamSource(self.url, stream=self.name, cohort=cohort, key=subject_token(2))


def key_of(number: int) -> str:
    """Return the name of a key."""
    return f"key-{number}"


def stamp(payload: bytes) -> int:
    """Return the time of a message's publication, in nanoseconds of the monotonic clock."""
    published: int = STAMP.unpack_from(payload)[0]
    return published


class Holder:
    """A member in a separate process."""

    def __init__(self, stream: DividedStream, member: str, lease: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.cohort_members", "hold", stream.url, stream.name, member, str(lease)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.held = 0
        self._used: list[float] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            what, number = line.split()
            if what == "held":
                self.held = int(number)
            else:
                self._used.append(float(number))

    async def used(self) -> float:
        """Return the seconds of CPU that the process has used since its start."""
        assert self.process.stdin is not None
        self._used.clear()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        await until(lambda: bool(self._used), "the CPU time of a member")
        return self._used[0]

    def kill(self) -> None:
        """End the process by SIGKILL. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def holding(stream: DividedStream, member: str, *, lease: float = 10.0) -> Iterator[Holder]:
    """Run a member in a separate process during the block; with the lease 0, one durable consumer."""
    holder = Holder(stream, member, lease)
    try:
        yield holder
    finally:
        holder.kill()


@contextmanager
def feeding(stream: DividedStream, count: int, keys: int, per_second: float) -> Iterator[None]:
    """Publish in a separate process, which ends with the block."""
    arguments = [stream.url, stream.name, str(count), str(keys), str(per_second)]
    with subprocess.Popen([sys.executable, "-m", "bench.cohort_members", "feed", *arguments]) as process:
        try:
            yield
        finally:
            process.kill()


async def until(condition: Callable[[], bool], what: str, *, within: float = 60.0) -> None:
    """Check a condition repeatedly until the condition is true."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within:g} s for {what}")
        await asyncio.sleep(0.005)


# --- the processes


def hold(url: str, name: str, member: str, lease: str) -> None:
    """Run a member until the process ends."""
    stream = DividedStream(url, name, 0)
    held: set[object] = set()

    def tell(event: GroupEvent) -> None:
        if event.partition is not None:
            (held.add if event.name == "assigned" else held.discard)(event.partition)
            print("held", len(held), flush=True)

    def answer() -> None:
        for _ in sys.stdin:
            print("used", time.process_time(), flush=True)

    async def handler(message: Message) -> None:
        pass

    threading.Thread(target=answer, daemon=True).start()
    source = stream.member(member, lease=float(lease)) if float(lease) else stream.durable(member)
    asyncio.run(lanes.Consumer(source, handler, on_event=tell).run())


def feed(url: str, name: str, count: str, keys: str, per_second: str) -> None:
    """Publish at a steady rate. After too long a sleep, the function publishes several messages at once."""

    async def publish() -> None:
        client = Client()
        await client.connect(url)
        begin = time.monotonic()
        for number in range(int(count)):
            ahead = begin + number / float(per_second) - time.monotonic()
            if ahead > 0:
                await client.flush()
                await asyncio.sleep(ahead)
            payload = STAMP.pack(time.monotonic_ns()) + _PADDING
            await client.publish(f"{name}.{key_of(number % int(keys))}", payload)
        await client.flush()
        await client.close()

    asyncio.run(publish())


if __name__ == "__main__":
    match sys.argv[1:]:
        case "hold", url, stream, member, lease:
            hold(url, stream, member, lease)
        case "feed", url, stream, count, keys, per_second:
            feed(url, stream, count, keys, per_second)
