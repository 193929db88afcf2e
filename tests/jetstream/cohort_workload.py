"""A divided stream, members of a cohort on it, and a record of every handler of any member."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from nats.aio.client import Client

import lanes
from lanes.clock import monotonic
from lanes.core.types import Partition
from lanes_jetstream import Cohort, JetStreamSource, subject_token
from lanes_jetstream.cohort.epoch_consumers import mark_of
from lanes_jetstream.cohort.lease_store import bucket_name, namespace_of
from lanes_jetstream.cohort.partitioning import partition_of
from tests.jetstream.workload import never_called, until

LEASE = 3.0
"""Seconds; the shortest lease, for tests that wait until it ends."""

LASTING = 30.0
"""Seconds; a lease that does not end while a busy machine runs something else."""

FAST = lanes.Settings(concurrency=50, drain_timeout=10)


class CohortStream:
    """A stream of ``partitions`` by its own transform; the key is the last token of the subject.

    Attributes:
        lease: The lease of its members. A test that waits for the end of a lease sets ``LEASE``.
    """

    def __init__(self, url: str, client: Client, name: str, partitions: int = 4) -> None:
        self.url = url
        self.client = client
        self.name = name
        self.partitions = partitions
        self.published = 0
        self.lease = LASTING

    async def create(self, **config: Any) -> None:
        destination = f"{self.name}.{{{{partition({self.partitions},1)}}}}.{{{{wildcard(1)}}}}"
        transform = {"src": f"{self.name}.*", "dest": destination}
        body = {"name": self.name, "subjects": [f"{self.name}.*"], "subject_transform": transform, **config}
        await self.api(f"STREAM.CREATE.{self.name}", body)

    async def delete(self) -> None:
        for bucket in await self.buckets():
            await self.client.request(f"$JS.API.STREAM.DELETE.{bucket}", b"", timeout=5)
        await self.client.request(f"$JS.API.STREAM.DELETE.{self.name}", b"", timeout=5)

    async def buckets(self) -> list[str]:
        names = (await self.api("STREAM.NAMES")).get("streams") or []
        return [name for name in names if namespace_of(name.removeprefix("KV_"), self.name) is not None]

    async def api(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = b"" if body is None else json.dumps(body).encode()
        answer: dict[str, Any] = json.loads((await self.client.request(f"$JS.API.{subject}", request, timeout=5)).data)
        assert "error" not in answer, answer
        return answer

    def key(self, partition: int, number: int = 0) -> str:
        """A key that the server puts into this partition."""
        found = (f"k{n}" for n in range(100_000) if partition_of([f"k{n}"], self.partitions) == partition)
        for _ in range(number):
            next(found)
        return next(found)

    def partition(self, key: str) -> int:
        """The partition of a key."""
        return partition_of([key], self.partitions)

    def a_key_each(self) -> list[str]:
        """One key for each partition."""
        return [self.key(partition) for partition in range(self.partitions)]

    async def publish(self, *keys: str, times: int = 1) -> None:
        """Publish to these keys in turn, and wait until the messages are stored."""
        for _ in range(times):
            for key in keys:
                await self.client.publish(f"{self.name}.{key}", b"x")
        await self.client.flush()
        self.published += len(keys) * times
        while (await self.api(f"STREAM.INFO.{self.name}"))["state"]["last_seq"] < self.published:
            await anyio.sleep(0.005)

    def source(self, member: str, **arguments: Any) -> JetStreamSource:
        where = arguments.pop("where", self.url)
        key = arguments.pop("key", subject_token(2))
        start = arguments.pop("start", "beginning")
        name = arguments.pop("cohort", "orders")
        out_of_range = arguments.pop("out_of_range", "fail")
        cohort = Cohort(name, member=member, **{"lease": self.lease, **arguments})
        return JetStreamSource(where, stream=self.name, cohort=cohort, key=key, start=start, out_of_range=out_of_range)

    async def durables(self) -> list[str]:
        """The consumers of the stream, sorted, without the mark of a work queue's cohort."""
        names = (await self.api(f"CONSUMER.NAMES.{self.name}")).get("consumers") or []
        return sorted(name for name in names if name != mark_of("lanes"))

    async def read(self, key: str, namespace: str = "lanes") -> dict[str, Any] | None:
        """The value of a key in the bucket."""
        kv = await self.client.jetstream().key_value(bucket_name(self.name, namespace))
        entry = await kv.get(key)
        found: dict[str, Any] = json.loads(entry.value or b"null")
        return found


class Run(NamedTuple):
    """One run of a handler. ``ended`` is infinity while it runs; ``outcome`` says how it ended."""

    member: str
    partition: int
    position: int
    key: bytes
    epoch: int
    started: float


class Log:
    """The handler runs of all members in one process."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.ended: list[tuple[Run, str, float]] = []
        self.running: defaultdict[bytes, list[Run]] = defaultdict(list)
        self.violations: list[str] = []
        self._highest: dict[bytes, int] = {}

    @property
    def done(self) -> set[int]:
        """Positions that were handled successfully."""
        return {run.position for run, outcome, _ in self.ended if outcome == "done"}

    @property
    def repeats(self) -> list[int]:
        """Positions that were handled successfully more than once."""
        finished = [run.position for run, outcome, _ in self.ended if outcome == "done"]
        return sorted(position for position in finished if finished.count(position) > 1)

    def of(self, member: str) -> list[Run]:
        return [run for run in self.runs if run.member == member]

    def handler(
        self, member: str, inner: Callable[[lanes.Message], Awaitable[None]] | None = None
    ) -> Callable[[lanes.Message], Awaitable[None]]:
        """A handler of this member that records its runs and calls ``inner``."""

        async def handle(message: lanes.Message) -> None:
            key = message.key or b""
            run = Run(member, message.partition.id.number, message.position, key, message.epoch, monotonic())
            if self.running[key]:
                self.violations.append(f"{run} while {self.running[key]} runs")
            if self._highest.get(key, 0) > run.position:
                self.violations.append(f"{run} after {self._highest[key]} was done")
            self.runs.append(run)
            self.running[key].append(run)
            outcome = "cancelled"
            try:
                await (anyio.lowlevel.checkpoint() if inner is None else inner(message))
                outcome = "done"
            except Exception:
                outcome = "failed"
                raise
            finally:
                self.running[key].remove(run)
                self.ended.append((run, outcome, monotonic()))
                if outcome == "done":
                    self._highest[key] = max(self._highest.get(key, 0), run.position)

        return handle

    async def handled(self, count: int) -> None:
        """Wait until that many different positions are done."""
        await until(lambda: len(self.done) >= count)


class Gate:
    """Handlers of some keys wait here; ``waiting`` counts them."""

    def __init__(self, *keys: str) -> None:
        self._shut = {key.encode() for key in keys}
        self._open = False
        self._waits: list[tuple[bytes, anyio.Event]] = []

    @property
    def waiting(self) -> int:
        return len(self._waits)

    async def __call__(self, message: lanes.Message) -> None:
        if self._open or message.key not in self._shut:
            return
        wait = message.key, anyio.Event()
        self._waits.append(wait)
        try:
            await wait[1].wait()
        finally:
            self._waits.remove(wait)

    def let_one_through(self, keys: Collection[bytes] | None = None) -> None:
        """Release the handler of these keys that has waited longest."""
        next(event for key, event in self._waits if (keys is None or key in keys) and not event.is_set()).set()

    def open(self) -> None:
        self._open = True
        for _, event in self._waits:
            event.set()


class Deadlines:
    """A handler that records the partitions and tokens of its messages, then waits."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.partitions: dict[int, Partition] = {}
        self.tokens: list[str] = []

    async def __call__(self, message: lanes.Message) -> None:
        self.partitions[message.partition.id.number] = message.partition
        self.tokens.append(str(message.token))
        await self._gate(message)


def owned(consumer: lanes.Consumer) -> set[int]:
    """The cohort partitions of a consumer."""
    return {int(name.rpartition("/")[2]) for name in consumer.status().partitions}


async def settled(*consumers: lanes.Consumer, partitions: int) -> None:
    """Wait until each partition has one owner among these, and no member has more than its share."""
    most = -(-partitions // len(consumers))

    def balanced() -> bool:
        shares = [owned(consumer) for consumer in consumers]
        return sum(map(len, shares)) == partitions == len(set().union(*shares)) and max(map(len, shares)) <= most

    await until(lambda: all(consumer.ready for consumer in consumers) and balanced())


async def draining(consumer: lanes.Consumer, count: int) -> set[int]:
    """Wait until that many partitions of a consumer are draining; returns them."""

    def found() -> set[int]:
        return {int(n.rpartition("/")[2]) for n, p in consumer.status().partitions.items() if p.draining}

    await until(lambda: len(found()) == count)
    return found()


class Members:
    """Consumers that run during the block, until a consumer leaves or crashes, or the block ends."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[lanes.Consumer, tuple[anyio.CancelScope, anyio.Event]] = {}

    def join(self, *consumers: lanes.Consumer) -> None:
        for consumer in consumers:
            self._running[consumer] = anyio.CancelScope(), anyio.Event()
            self._tasks.start_soon(self._run, consumer)

    async def hold(
        self, consumer: lanes.Consumer, stream: CohortStream, gate: Gate, *keys: str, times: int = 1
    ) -> None:
        """Let the first member join, publish to these keys, and wait until it holds one message of each at the gate."""
        self.join(consumer)
        await settled(consumer, partitions=stream.partitions)
        await stream.publish(*keys, times=times)
        await until(lambda: gate.waiting == len(keys))

    async def leave(self, consumer: lanes.Consumer) -> None:
        """Stop a member in order and wait until it has left."""
        consumer.stop()
        await self._running.pop(consumer)[1].wait()

    async def crash(self, consumer: lanes.Consumer) -> None:
        """Stop a member at once: it releases nothing, and its leases expire."""
        scope, ended = self._running.pop(consumer)
        consumer.stop(at_once=True)
        scope.cancel()
        await ended.wait()

    async def end(self) -> None:
        for consumer in list(self._running):
            await self.leave(consumer)

    async def _run(self, consumer: lanes.Consumer) -> None:
        scope, ended = self._running[consumer]
        with scope:
            await consumer.run()
        ended.set()


@asynccontextmanager
async def members(*, within: float = 60.0) -> AsyncIterator[Members]:
    """A block with members of a cohort, which all leave at its end; it fails after ``within`` seconds."""
    with anyio.fail_after(within):
        async with anyio.create_task_group() as tasks:
            running = Members(tasks)
            yield running
            await running.end()


async def refused(source: JetStreamSource, *words: str, error: type[Exception] = lanes.ConfigError) -> None:
    """Expect that a consumer of this source does not start, with an error that has these words."""
    with anyio.fail_after(30):
        with pytest.raises(error) as stopped:
            await lanes.run(source, never_called, settings=FAST)
    for word in words:
        assert word in str(stopped.value)
