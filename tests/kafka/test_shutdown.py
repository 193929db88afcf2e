"""A source ends its client at a close, after a callback that raises, and after the end of the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.source import Revoking
from lanes_kafka import KafkaSource
from lanes_kafka.bridge import Bridge
from lanes_kafka.client import thread
from lanes_kafka.client.last_callbacks import serve_last_callbacks
from tests.components import wait_until
from tests.kafka.members import PROTOCOLS
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import NOTHING, WITHIN, Reader, reading, topic_of
from tests.kafka.workload import QUIET, produce, until

pytestmark = pytest.mark.anyio


async def test_a_callback_that_raises_system_exit_ends_the_source(cluster: MockCluster, name: str) -> None:
    topic_of(cluster, name, 1)

    def leave(text: str) -> None:
        raise SystemExit(3)

    settings = {"bootstrap.servers": cluster.url, "group.id": f"g-{name}", "statistics.interval.ms": 50}
    source = KafkaSource({**QUIET, **settings, "stats_cb": leave}, topics=name)

    async def ended() -> None:
        while True:
            await source.receive(NOTHING)

    await source.open()
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError, match="SystemExit"):
            await ended()
        await source.aclose()


def test_a_loop_that_ended_is_noticed() -> None:
    async def made() -> Bridge:
        return Bridge()

    bridge = asyncio.run(made())
    bridge.post(lambda: None)
    assert not bridge.is_alive()
    loop = asyncio.new_event_loop()
    bridge = loop.run_until_complete(made())
    assert bridge.is_alive()
    bridge.post(lambda: None)
    # The last call is still pending.
    loop.close()
    assert not bridge.is_alive()


async def test_a_close_during_a_poll_is_served_at_once(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "PAUSE_AFTER", 3_600.0)
    polled, sent = threading.Event(), threading.Event()

    def hold(raws: list[Raw]) -> list[Raw]:
        if raws:
            polled.set()
            assert sent.wait(WITHIN)
        return raws

    async with reading(cluster, "848", name) as reader:
        await reader.assigned()
        reader.client.change = hold
        produce(reader.topic, 1)
        with anyio.fail_after(WITHIN):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader.take, 1)
                await until(polled.is_set)
                assert reader.source._client_thread is not None
                mailbox = reader.source._client_thread._mailbox
                tasks.start_soon(reader.source.aclose)
                await until(lambda: bool(mailbox))
                sent.set()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_callback_runs_while_the_client_closes(cluster: MockCluster, name: str, protocol: str) -> None:
    """During a close, librdkafka may never answer a callback's request, and it holds the interpreter's lock."""
    async with reading(cluster, protocol, name, 2) as reader:
        await reader.assigned(2)
    assert reader.client.called_back == {"before": ["on_assign", "on_revoke"], "in close": []}
    # Close before the first rebalance: all callbacks come before the close.
    async with reading(cluster, protocol, name) as reader:
        pass
    assert reader.client.called_back["in close"] == []


@pytest.mark.parametrize("static", [True, False])
def test_a_queued_rebalance_is_served_before_the_client_closes(static: bool) -> None:
    heard = SimpleNamespace(rebalances=0)

    class Queued:
        """A client with a rebalance queued after messages; paused partitions bring no further messages."""

        queue: ClassVar = [b"1", b"2", b"3", "rebalance"]
        has: ClassVar = [TopicPartition("t", 0)]

        def unsubscribe(self) -> None:
            assert not static, "the close would leave the group"

        def assignment(self) -> list[TopicPartition]:
            return self.has

        def pause(self, partitions: list[TopicPartition]) -> None:
            assert static and partitions == self.has

        def consume(self, count: int, timeout: float) -> list[bytes]:
            while self.queue:
                first = self.queue.pop(0)
                if isinstance(first, bytes):
                    return [first]
                heard.rebalances += 1
                if not static:
                    self.has.clear()
            return []

    client = Queued()
    serve_last_callbacks(cast(Consumer, client), cast(Any, heard), time.monotonic, static=static)
    assert (heard.rebalances, client.queue) == (1, [])


def test_a_member_whose_loop_ended_leaves_its_group(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    peer = Consumer({**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{name}", "group.protocol": "consumer"})
    readers: list[Reader] = []

    async def left_behind(*, revoked: bool) -> None:
        """Leave a reader open, with a revoke that is never answered."""
        reader = Reader(topic, "848")
        readers.append(reader)
        await reader.source.open()
        await reader.assigned(2)
        if revoked:
            peer.subscribe([name])
            peer.poll(0.1)
            assert isinstance(await reader.next_event(), Revoking)

    def has_all() -> bool:
        peer.poll(0.05)
        return len(peer.assignment()) == 2

    try:
        asyncio.run(left_behind(revoked=False))
        asyncio.run(left_behind(revoked=True))
        # A drain may take 16 s here.
        wait_until(has_all, "the peer to have all partitions", seconds=10)
    finally:
        peer.close()
    wait_until(lambda: not any(one.name == "lanes-kafka" for one in threading.enumerate()), "the threads to end")


async def test_a_stop_closes_the_client_after_all_partitions_are_drained(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    for number in range(2):
        produce(topic, 3, partition=number)
    async with reading(cluster, "848", name, 2) as reader:
        partitions = await reader.assigned(2)
        await reader.take(6)
        for partition in partitions:
            await reader.settle(partition, 3)
            await reader.source.release(partition)
    assert await reader.committed() == [3, 3]


FIND_COORDINATOR = 10


async def test_a_permanent_error_ends_the_source(cluster: MockCluster, name: str) -> None:
    topic_of(cluster, name, 1)
    cluster.fail(FIND_COORDINATOR, [KafkaError.GROUP_AUTHORIZATION_FAILED] * 100)
    try:
        async with reading(cluster, "848", name) as reader:
            with pytest.raises(lanes.SourceError, match="GROUP_AUTHORIZATION_FAILED") as failed:
                await reader.receive()
    finally:
        cluster.calm(FIND_COORDINATOR)
    assert not failed.value.retryable and f"g-{name}" in str(failed.value)
