"""The JetStream source keeps the contract of a source, on a real server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Final

import anyio
import nats
import pytest
from nats.js import JetStreamContext
from nats.js.api import StreamConfig

from lanes.core.types import Partition
from lanes.errors import SourceError
from lanes.queues.partitioned import PartitionedQueue
from lanes.source import Source
from lanes_jetstream import JetStreamSource, header
from lanes_jetstream.wire.connection import Connection
from memsource.contract.source import Ability, Check, Sample, checks
from tests.components import NatsServer
from tests.conftest import NatsFactory

ABILITIES: Final[tuple[Ability, ...]] = ("ack wait",)

WAITING: Final = frozenset(checks(ABILITIES)) - frozenset(checks(()))
"""Checks that wait for an ``ack_wait``. Any other may take longer than a short one on a busy machine, and then the
server would rightly deliver again."""


class JetStreamHarness:
    """A separate stream with one durable, on the session's server."""

    can: Collection[Ability] = ABILITIES
    patience = 0.3
    ack_wait = 30.0

    def __init__(self, context: JetStreamContext, url: str, name: str) -> None:
        self._context = context
        self._url = url
        self._name = name

    async def publish(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            headers = {name: value.decode() for name, value in sample.headers}
            await self._context.publish(
                f"{self._name}.message", sample.value, headers={**headers, "Key": sample.key.decode()}
            )

    def source(self) -> Source:
        return JetStreamSource(
            self._url, stream=self._name, durable="contract", key=header("Key"), ack_wait=self.ack_wait
        )

    async def unsettled(self) -> int:
        return (await self._context.consumer_info(self._name, "contract")).num_ack_pending or 0

    async def elapse(self, seconds: float) -> None:
        # The server has its own clock, so a test can only wait.
        await anyio.sleep(seconds)

    async def revoke(self, partition: Partition) -> None:
        raise NotImplementedError("one process owns the whole stream")

    async def lose(self, partition: Partition) -> None:
        raise NotImplementedError("one process owns the whole stream")

    async def finish(self) -> None:
        raise NotImplementedError("a stream has no end")


class QueueHarness(JetStreamHarness):
    """A partitioned queue of two partitions in the stream; all messages are in the last one."""

    @property
    def _queue(self) -> PartitionedQueue:
        return PartitionedQueue.of(self._name, [f"{self._name}.other", f"{self._name}.message"])

    def source(self) -> Source:
        return JetStreamSource(
            self._url,
            stream=self._name,
            durable="contract",
            key=header("Key"),
            ack_wait=self.ack_wait,
            queue=self._queue,
        )

    async def unsettled(self) -> int:
        return (await self._context.consumer_info(self._name, "contract__p1")).num_ack_pending or 0


@pytest.fixture
async def harness(nats_server: NatsServer) -> AsyncIterator[JetStreamHarness]:
    name = f"contract-{uuid.uuid4().hex[:12]}"
    client = await nats.connect(nats_server.url)
    context = client.jetstream()
    await context.add_stream(StreamConfig(name=name, subjects=[f"{name}.message", f"{name}.other"]))
    try:
        yield JetStreamHarness(context, nats_server.url, name)
    finally:
        await context.delete_stream(name)
        await client.close()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("check", checks(ABILITIES), ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_jetstream_source_keeps_the_contract(check: Check, harness: JetStreamHarness) -> None:
    if check in WAITING:
        harness.ack_wait = 1.0  # the least a source allows
    await check(harness)


@pytest.mark.long
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("check", checks(ABILITIES), ids=lambda check: check.__name__.removeprefix("check_"))
async def test_the_source_of_a_queue_keeps_the_contract(check: Check, harness: JetStreamHarness) -> None:
    queued = QueueHarness(harness._context, harness._url, harness._name)
    if check in WAITING:
        queued.ack_wait = 1.0
    await check(queued)


@pytest.mark.process
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_source_recovers_from_a_server_frozen_longer_than_a_flush(fresh_nats: NatsFactory) -> None:
    server = fresh_nats()
    connection = Connection(server.url)
    await connection.open()
    try:
        server.pause()
        with pytest.raises(SourceError, match="did not confirm a flush") as caught:
            await connection.flush(timeout=1)
        assert caught.value.retryable
        server.resume()
        # The late answer to the first flush must not be the last data that the client reads.
        assert "type" in await connection.api("INFO")
        await connection.flush()
    finally:
        await connection.close()
