"""Completed messages above a position are committed as metadata, up to the limit of the broker."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

import lanes
from lanes.core.offset_map import LIMIT, decode, encode
from lanes.core.types import Partition, PartitionId, Runs, Settlement
from lanes.errors import SourceError
from lanes_kafka import KafkaSource, broker
from lanes_kafka.client import commits
from lanes_kafka.client.commits import Commit, Commits, can_carry, metadata_room
from lanes_kafka.client.records import READER
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.fakes import FakeAnswer
from tests.kafka.workload import QUIET, Topic, produce, until

STRIPES: Runs = [(offset, offset + 1) for offset in range(2, 400, 40)]
"""Every fortieth position is completed, which does not fit into so few characters."""

DEGRADED = "too small for all messages completed above a position"


def said(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if what in record.getMessage()]


# --- the limit of the broker


@pytest.mark.parametrize(
    ("allowed", "room"), [(4_096, LIMIT), (10**6, LIMIT), (100, 99), (None, LIMIT), (12, 11), (11, 0), (1, 0), (0, 0)]
)
def test_metadata_room_excludes_the_nul_of_the_client(
    allowed: int | None, room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(commits, "metadata_limit", lambda admin: allowed)
    nobody: Any = None
    assert metadata_room(nobody, "kafka g") == room
    assert can_carry(room) == (room > 0)
    # A limit below one completed offset counts as none, with a warning.
    warning = (
        f"kafka g: the broker's offset.metadata.max.bytes={allowed} is too small for the list of completed messages"
    )
    nothing = [] if room else [warning]
    assert [record.getMessage()[: len(nothing[0])] for record in caplog.records] == nothing


def test_an_unknown_metadata_limit_is_found_by_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(admin: Any) -> int:
        raise SourceError("no answer", retryable=True)

    monkeypatch.setattr(commits, "metadata_limit", fail)
    nobody: Any = None
    assert metadata_room(nobody, "kafka g") == LIMIT


# --- with a broker


async def handed_over(orders: Topic, room: int) -> Runs:
    """Complete every fortieth of 400 messages, wait until the metadata is committed, and end the consumer at once.

    Returns the committed runs.
    """
    handled: set[int] = set()

    async def handler(message: lanes.Message) -> None:
        if message.position % 40 != 2:
            await anyio.sleep_forever()
        handled.add(message.position)

    fitting = decode(encode(0, STRIPES, room), 0, 1 << 62)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer_of(orders, handler).run)
        with anyio.fail_after(30):
            await until(lambda: len(handled) == len(STRIPES))
            while (found := await run_sync(committed, orders)) != fitting:
                await anyio.sleep(0.05)
        tasks.cancel_scope.cancel()
    return found


async def next_owner(orders: Topic) -> set[int]:
    """The positions that the next owner runs."""
    handled: set[int] = set()

    async def handler(message: lanes.Message) -> None:
        handled.add(message.position)

    async with consumer_of(orders, handler):
        with anyio.fail_after(30):
            await until(lambda: max(handled, default=0) == 399)
    return handled


def consumer_of(orders: Topic, handler: Any) -> lanes.Consumer:
    config = {**QUIET, "bootstrap.servers": orders.url, "group.id": f"g-{orders.name}"}
    settings = lanes.Settings(concurrency=400, commit_interval=0.02)
    return lanes.Consumer(KafkaSource(config, topics=orders.name), handler, settings=settings)


def committed(orders: Topic) -> Runs:
    """The committed runs of completed positions. Blocks."""
    consumer = Consumer({**QUIET, "bootstrap.servers": orders.url, "group.id": f"g-{orders.name}"})
    try:
        (found,) = consumer.committed([TopicPartition(orders.name, 0)], timeout=20)
    finally:
        consumer.close()
    return decode(found.metadata or "", 0, 1 << 62) or []


def missing(runs: Runs) -> set[int]:
    return set(range(400)) - {offset for start, end in runs for offset in range(start, end)}


@pytest.mark.anyio
async def test_a_completed_set_is_cut_to_the_limit_with_one_warning(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(broker, "broker_settings", lambda admin, timeout: {broker.METADATA_LIMIT: "16"})
    orders = topic()
    produce(orders, 400, keys=[b"%d" % number for number in range(400)])
    with caplog.at_level(logging.WARNING):
        kept = await handed_over(orders, 15)
    assert 0 < len(kept) < len(STRIPES) and kept == STRIPES[: len(kept)]
    assert len(said(caplog, DEGRADED)) == 1
    assert await next_owner(orders) == missing(kept)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("says", [True, False], ids=["says", "does not say"])
async def test_a_small_metadata_limit_keeps_the_runs_that_fit(
    says: bool,
    fresh_kafka: KafkaFactory,
    topic: MakeTopic,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = fresh_kafka(warm=True, properties={"offset.metadata.max.bytes": 16})
    if not says:
        monkeypatch.setattr(broker, "broker_settings", lambda admin, timeout: {})
    orders = topic(on=server)
    produce(orders, 400, keys=[b"%d" % number for number in range(400)])
    with caplog.at_level(logging.WARNING):
        kept = await handed_over(orders, 15)
    assert len(said(caplog, DEGRADED)) == 1
    assert await next_owner(orders) == missing(kept)


@pytest.mark.anyio
@pytest.mark.parametrize(("allowed", "wanted", "does"), [("0", True, False), ("0", False, False), ("4096", True, True)])
async def test_a_source_reports_whether_it_hands_over(
    allowed: str, wanted: bool, does: bool, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "broker_settings", lambda admin, timeout: {broker.METADATA_LIMIT: allowed})
    orders = topic()
    config = {**QUIET, "bootstrap.servers": orders.url, "group.id": f"g-{orders.name}"}
    source = KafkaSource(config, topics=orders.name, commit_metadata=wanted)
    traits = await source.open()
    await source.aclose()
    assert (traits.hands_over, traits.partitions) == (does, 1)


# --- commits alone


class FakeClient:
    """A client that accepts a limited number of characters of metadata, and records each attempt."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.texts: list[str] = []
        self._taken: list[TopicPartition] = []

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        (offset,) = offsets
        self.texts.append(offset.metadata or "")
        if len(self.texts[-1]) <= self.room:
            self._taken = offsets
        elif not asynchronous:
            raise KafkaException(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return self._taken or [TopicPartition(each.topic, each.partition, -1001) for each in partitions]


def test_refused_metadata_shrinks_until_it_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    commits = Commits(lambda partition: True, lambda reason: None, lambda: 0.0, "kafka g", {})
    partition = Partition(PartitionId("t", 0), READER, floor=0)
    client: Any = FakeClient(15)
    answers: list[Any] = []
    while not answers or answers[-1].given != [None]:
        answer = FakeAnswer()
        answers.append(answer)
        commits.send(client, Commit([Settlement(partition, [], 0, STRIPES)], answer), timeout=1.0)
        assert len(answers) < 20
    assert [error.retryable for each in answers[:-1] for error in each.given] == [True] * (len(answers) - 1)
    assert commits.limit == 15 and len(client.texts[-1]) <= 15
    assert decode(client.texts[-1], 0, 1 << 62) == STRIPES[: len(decode(client.texts[-1], 0, 1 << 62) or [])]
    assert len(said(caplog, DEGRADED)) == 1 and len(caplog.records) == 1


@pytest.mark.parametrize("room", [0, LIMIT])
def test_metadata_that_fits_is_not_logged(room: int, caplog: pytest.LogCaptureFixture) -> None:
    commits = Commits(lambda partition: True, lambda reason: None, lambda: 0.0, "kafka g", {}, room)
    partition = Partition(PartitionId("t", 0), READER, floor=0)
    client: Any = FakeClient(room)
    answer = FakeAnswer()
    commits.send(client, Commit([Settlement(partition, [], 0, STRIPES)], answer), timeout=1.0)
    assert (answer.given, decode(client.texts[0], 0, 1 << 62)) == ([None], STRIPES if room else [])
    assert caplog.records == []
