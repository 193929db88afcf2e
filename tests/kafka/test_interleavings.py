"""What comes in the midst of something else: an error among messages, a loss under a commit, an end of the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Partition, PartitionId, Settlement
from lanes.source import Revoking
from lanes_kafka import KafkaSource
from lanes_kafka.bridge import Bridge
from lanes_kafka.client import group, thread
from lanes_kafka.client.commits import COMMIT_TIMEOUT, Commit, Commits
from lanes_kafka.client.records import READER
from lanes_kafka.client.thread import serve_last_callbacks
from lanes_kafka.client.topics import Topic, Topics
from lanes_kafka.config import client_config
from lanes_kafka.dead_letters.producer import ConfirmedProducer
from tests.components import wait_until
from tests.kafka.fakes import FakeAdmin, FakeAnswer
from tests.kafka.members import PROTOCOLS
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.sourced import NOTHING, WITHIN, Reader, reading, topic_of
from tests.kafka.workload import QUIET, produce, until

# --- an error among messages


def out_of_range(topic: str, number: int, offset: int) -> Raw:
    return Raw(topic=topic, partition=number, offset=offset, error=KafkaError(KafkaError._AUTO_OFFSET_RESET))


@pytest.mark.anyio
async def test_what_was_read_before_a_gap_is_delivered(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(topic_of(cluster, name, 1), 10)
    ids = {PartitionId(name, 0)}
    monkeypatch.setattr(group, "log_bounds", lambda client, asked: (dict.fromkeys(ids, 8), dict.fromkeys(ids, 10)))
    async with reading(cluster, "848", name, out_of_range="earliest") as reader:

        def deleted(raws: list[Raw]) -> list[Raw]:
            """From 5 up to 8, while it is read."""
            before = [raw for raw in raws if (raw.offset() or 0) < 5]
            if len(before) == len(raws):
                return raws
            reader.client.change = lambda raws: raws
            return [*before, out_of_range(name, 0, 5)]

        await reader.assigned()
        reader.client.change = deleted
        assert [message.position for message in await reader.take(7)] == [0, 1, 2, 3, 4, 8, 9]


@pytest.mark.anyio
async def test_what_is_finished_is_committed_although_another_partition_has_failed(
    cluster: MockCluster, name: str
) -> None:
    produce(topic_of(cluster, name, 2), 3, partition=0)
    async with reading(cluster, "848", name, 2, out_of_range="fail") as reader:
        partitions = {each.id.number: each for each in await reader.assigned(2)}
        await reader.take(3)
        reader.client.change = lambda raws: [*raws, out_of_range(name, 1, 99)]
        with pytest.raises(lanes.SourceError, match=f"{name}/1: offset 99 is out of range"):
            await reader.receive()
        await reader.settle(partitions[0], 3)
        assert await reader.committed() == [3, 0]


# --- commits


class Sent:
    """A client that only takes commits."""

    def commit(self, **named: Any) -> None:
        assert named["asynchronous"]


def test_a_commit_that_follows_one_given_up_gets_its_own_answer() -> None:
    commits = Commits(lambda partition: True, lambda reason: None, lambda: 0.0, "kafka g", {})
    client: Any = Sent()
    places = [Partition(PartitionId("t", number), READER, floor=0) for number in range(2)]
    first, second = FakeAnswer(), FakeAnswer()
    commits.send(client, Commit([Settlement(each, [], 5) for each in places], first))
    # One of the two was lost: what is committed of the other goes out again.
    first.given_up = True
    commits.send(client, Commit([Settlement(places[1], [], 6)], second))
    commits.on_commit(None, [TopicPartition("t", 0, 5), TopicPartition("t", 1, 5)])
    assert second.given == [] and commits.unanswered
    commits.on_commit(None, [TopicPartition("t", 1, 6)])
    assert second.given == [None] and not commits.unanswered


def test_a_late_answer_of_an_expired_commit_is_not_that_of_a_newer_one_of_the_same_position() -> None:
    now = 0.0
    commits = Commits(lambda partition: True, lambda reason: None, lambda: now, "kafka g", {})
    client: Any = Sent()
    partition = Partition(PartitionId("t", 0), READER, floor=0)
    first, second = FakeAnswer(), FakeAnswer()
    commits.send(client, Commit([Settlement(partition, [], 5)], first))
    now = COMMIT_TIMEOUT
    commits.expire(now)
    newer = Commit([Settlement(partition, [], 5, [(7, 9)])], second)
    commits.send(client, newer)
    commits.on_commit(None, [TopicPartition("t", 0, 5)])
    assert isinstance(first.given[0], lanes.SourceError) and second.given == [] and commits.unanswered
    commits.on_commit(None, newer.offsets)
    assert second.given == [None] and not commits.unanswered


@pytest.mark.anyio
async def test_a_broker_that_is_back_takes_the_commits_of_a_revoke(cluster: MockCluster, name: str) -> None:
    async with reading(cluster, "848", name, 2) as reader:
        await reader.assigned(2)
        # Nothing is read or committed after an outage.
        reader.client.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        async with reading(cluster, "848", name, 2):
            event = await reader.told()
            assert isinstance(event, Revoking)
            await reader.settle(event.partition, 5)
            await reader.source.release(event.partition)
        assert 5 in await reader.committed()


class Asked:
    """A client of a group in which others have committed something since it was asked for the first time."""

    def __init__(self, later: int) -> None:
        self.later = later
        self.asked = 0
        self.commits: list[list[tuple[int, int]]] = []

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.asked += 1
        found = {1: self.later} if self.asked > 1 else {}
        return [TopicPartition(each.topic, each.partition, found.get(each.partition, -1001)) for each in partitions]

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 3) for each in partitions]

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        self.commits.append(sorted((each.partition, each.offset) for each in offsets))

    def assignment(self) -> list[TopicPartition]:
        return []

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        pass

    def resume(self, partitions: list[TopicPartition]) -> None:
        pass


@pytest.mark.parametrize(("later", "decided"), [(-1001, [(0, 3), (1, 3)]), (7, [(0, 3)])])
def test_where_a_group_begins_undoes_nothing_that_another_member_has_committed(
    later: int, decided: list[tuple[int, int]]
) -> None:
    client: Any = Asked(later)
    config = client_config({"bootstrap.servers": "b:1", "group.id": "g", "group.protocol": "consumer"}, start="next")
    topics: Any = SimpleNamespace(
        known={"t": Topic("id", 2)},
        wait=lambda timeout: True,
        appears=lambda topic, timeout: True,
        id_of=lambda topic: "id",
    )
    failures: list[Exception] = []
    owning = group.Group(
        config,
        topics,
        lambda events: None,
        lambda seconds: None,
        failures.append,
        lambda: 0.0,
        "kafka g",
        is_full=lambda: False,
        hands_over=True,
    )
    owning.on_assign(client, [TopicPartition("t", 0)])
    assert failures == [] and client.commits == [decided]


# --- topics


@pytest.mark.parametrize("pending", [False, True], ids=["heard", "unheard"])
def test_an_old_answer_says_nothing_of_a_topic(pending: bool) -> None:
    admin = FakeAdmin(t="id-A")
    client: Any = admin
    topics = Topics(["t"], client, lambda: 0.0)
    if pending:
        topics.ask()
    else:
        topics.wait(1.0)
    admin.topics = {"t": "id-B"}
    assert topics.wait(1.0) and topics.known["t"].id == "id-B"


# --- the end


@pytest.mark.anyio
async def test_a_callback_that_ends_its_thread_ends_the_source(cluster: MockCluster, name: str) -> None:
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


@pytest.mark.anyio
async def test_a_call_that_ends_the_thread_of_a_producer_is_told(name: str) -> None:
    def leave(wanted: Any) -> None:
        raise SystemExit(3)

    producer = ConfirmedProducer({}, name)
    producer.open()
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError, match=f"{name}: .*SystemExit"):
            await producer.call(leave)
        # Others are served on.
        assert await producer.call(lambda wanted: 3) == 3
        await producer.aclose()


@pytest.mark.anyio
async def test_a_producer_that_is_closed_is_asked_for_nothing(name: str) -> None:
    producer = ConfirmedProducer({}, name)
    with pytest.raises(lanes.SourceError, match="not opened, or already closed"):
        await producer.call(lambda wanted: 3)
    producer.open()
    with anyio.fail_after(WITHIN):
        await producer.aclose()
        with pytest.raises(lanes.SourceError, match="not opened, or already closed"):
            await producer.call(lambda wanted: 3)


def test_a_loop_that_is_gone_is_noticed_however_it_went() -> None:
    async def made() -> Bridge:
        return Bridge()

    bridge = asyncio.run(made())
    bridge.post(lambda: None)
    assert not bridge.is_alive()
    loop = asyncio.new_event_loop()
    bridge = loop.run_until_complete(made())
    assert bridge.is_alive()
    bridge.post(lambda: None)
    # With what was posted last still to come.
    loop.close()
    assert not bridge.is_alive()


@pytest.mark.anyio
async def test_a_close_that_comes_while_the_client_is_polled_is_not_slept_over(
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


@pytest.mark.anyio
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_nothing_is_called_back_while_the_client_closes(cluster: MockCluster, name: str, protocol: str) -> None:
    """librdkafka may never answer what a callback asks for then, and the interpreter's lock is held meanwhile."""
    async with reading(cluster, protocol, name, 2) as reader:
        await reader.assigned(2)
    assert reader.client.called_back == {"before": ["on_assign", "on_revoke"], "in close": []}
    # Before it has heard of anything: whatever it is told of, it is told before.
    async with reading(cluster, protocol, name) as reader:
        pass
    assert reader.client.called_back["in close"] == []


@pytest.mark.parametrize("static", [True, False])
def test_a_rebalance_behind_messages_is_served_before_the_client_closes(static: bool) -> None:
    heard = SimpleNamespace(rebalances=0)

    class Queued:
        """A client with messages and a rebalance behind them; what is paused brings none."""

        queue: ClassVar = [b"1", b"2", b"3", "rebalance"]
        has: ClassVar = [TopicPartition("t", 0)]

        def unsubscribe(self) -> None:
            assert not static, "it would leave its group"

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


def test_a_member_whose_loop_is_gone_leaves_its_group(cluster: MockCluster, name: str) -> None:
    topic = topic_of(cluster, name, 2)
    peer = Consumer({**QUIET, "bootstrap.servers": topic.url, "group.id": f"g-{name}", "group.protocol": "consumer"})
    readers: list[Reader] = []

    async def left_behind(*, revoked: bool) -> None:
        """A reader that is never closed, with a revoke that nobody answers any more."""
        reader = Reader(topic, "848")
        readers.append(reader)
        await reader.source.open()
        await reader.assigned(2)
        if revoked:
            peer.subscribe([name])
            peer.poll(0.1)
            assert isinstance(await reader.told(), Revoking)

    def has_all() -> bool:
        peer.poll(0.05)
        return len(peer.assignment()) == 2

    try:
        asyncio.run(left_behind(revoked=False))
        asyncio.run(left_behind(revoked=True))
        # A drain may take 16 s there.
        wait_until(has_all, "the peer to have all partitions", seconds=10)
    finally:
        peer.close()
    wait_until(lambda: not any(one.name == "lanes-kafka" for one in threading.enumerate()), "the threads to end")
