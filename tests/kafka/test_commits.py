"""On a real broker, commits have the correct position and metadata, also at gaps and after failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import lanes
from lanes.core.offset_map import decode, encode
from lanes_kafka.client import thread
from lanes_kafka.client.mailbox import Release
from lanes_kafka.client.topics import Topics
from tests.conftest import KafkaFactory
from tests.kafka import members as group_members
from tests.kafka.conftest import MakeTopic
from tests.kafka.failing_handlers import FailingWork, commit, metadata
from tests.kafka.members import Client, Story, Work, group
from tests.kafka.workload import QUIET, Topic, produce, transactions, until

pytestmark = pytest.mark.anyio

LONG = 3_600.0
NOW = lanes.Settings(concurrency=100, commit_interval=0.0, drain_timeout=0.0)


def positions(story: Story, member: str) -> list[int]:
    """The positions that a member ran."""
    return sorted(each.position for each in story.of("start", member))


# --- floor and completed set


@pytest.mark.parametrize(("commit_metadata", "again"), [(True, [5]), (False, [5, 6, 7, 8, 9])])
async def test_a_nak_of_message_5_commits_position_5_and_the_restart_begins_there(
    commit_metadata: bool, again: list[int], topic: MakeTopic
) -> None:
    events = topic()
    produce(events, 10, keys=10)
    story = Story()
    work = FailingWork(story, b"5", error=lanes.Nak(delay=LONG))
    async with group(events, "cooperative", work) as members:
        first = members.start("first", settings=NOW, commit_metadata=commit_metadata)
        await until(lambda: len(work.ended) == 9 and bool(work.refused))
        await first.consumer.drain()
        assert members.committed() == [5]
        assert any(metadata(events, members.id)) == commit_metadata
        assert max(each.position for each in story.of("commit")) == 5
        work.bad.clear()
        members.start("second", settings=NOW, commit_metadata=commit_metadata)
        await until(lambda: len(work.ended) == 10 and len(story.of("end", "second")) == len(again))
    assert [each.position for each in story.of("assigned", "second")] == [5]
    assert positions(story, "second") == again
    assert members.committed() == [10]


async def test_the_next_owner_restores_the_completed_messages_from_the_commit_metadata(topic: MakeTopic) -> None:
    events = topic()
    produce(events, 60, keys=60)
    holes = list(range(3, 60, 7))
    story = Story()
    work = Work(story)
    work.hold(*[b"%d" % position for position in holes])
    async with group(events, "848", work) as members:
        first = members.start("first", settings=NOW)
        await until(lambda: len(work.ended) == 60 - len(holes) and len(story.of("start")) == 60)
        await first.consumer.drain()
        (text,) = metadata(events, members.id)
        completed = decode(text or "", 3, 60)
        assert completed is not None
        done = {position for start, end in completed for position in range(start, end)}
        assert members.committed() == [3] and done == set(range(3, 60)) - set(holes)
        work.let_go(*[b"%d" % position for position in holes])
        members.start("second", settings=NOW)
        await until(lambda: len(work.ended) == 60)
    assert positions(story, "second") == holes
    assert members.committed() == [60]


async def test_hostile_metadata_is_ignored(topic: MakeTopic) -> None:
    ours = encode(3, [(4, 6)])
    hostile = [
        "x" * 4_095,
        "漢" * 4_095,
        "\U0001f600" * 2_047,
        '{"leaderEpoch": 4}',
        " \t\r\n\x7f",
        encode(2, [(4, 6)]),
        ours + "x",
        ours[:-1],
        ours[:-1] + chr(ord(ours[-1]) ^ 1),
        ours[:1] * 4_095,
    ]
    events = topic(len(hostile) + 1)
    producer = Producer({**QUIET, "bootstrap.servers": events.url, "enable.idempotence": True})
    for number in range(events.partitions):
        for offset in range(6):
            producer.produce(events.name, value=b"v", key=b"%d" % offset, partition=number)
    assert producer.flush(20) == 0
    story = Story()
    work = Work(story)
    async with group(events, "848", work) as members:
        commit(events, members.id, 3, [*hostile, ours])
        members.start("one", settings=NOW)
        await until(lambda: len(work.ended) == 3 * len(hostile) + 1)
    ran = [sorted(each.position for each in story.of("start", None, number)) for number in range(events.partitions)]
    assert ran == [*[[3, 4, 5]] * len(hostile), [3]]
    assert members.committed() == [6] * events.partitions


# --- gaps


async def test_a_gap_of_offsets_never_blocks_the_committed_position(topic: MakeTopic) -> None:
    events = topic()
    transactions(events, 5, -5, 5)
    story = Story()
    work = Work(story)
    work.hold(b"14")
    async with group(events, "cooperative", work) as members:
        members.start("one", settings=NOW)
        await until(lambda: len(work.ended) == 9 and bool(story.of("commit")))
        # The commit passes two markers and the aborted messages, but never an unfinished message.
        await until(lambda: max(each.position for each in story.of("commit")) >= 14)
        work.let_go(b"14")
        await until(lambda: 18 in [each.position for each in story.of("commit")])
    assert positions(story, "one") == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16]
    assert 14 in [each.position for each in story.of("commit")]
    assert not {15, 16} & {each.position for each in story.of("commit")}
    assert members.committed() == events.ends() == [18]


@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_the_lag_becomes_zero_after_transaction_markers(protocol: str, topic: MakeTopic) -> None:
    events = topic()
    transactions(events, 3, -2)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        members.start("one")
        await until(lambda: 7 in [each.position for each in story.of("commit")])
        # No handler sees these records.
        transactions(events, -4)
        await until(lambda: 12 in [each.position for each in story.of("commit")])
    assert positions(story, "one") == [0, 1, 2]
    assert members.committed() == events.ends() == [12]


async def test_a_stop_leaves_no_lag_after_a_transaction_marker(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_HOUSEKEEPING_EVERY", LONG)
    events = topic()
    transactions(events, 3, -2)
    story = Story()
    work = Work(story)
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=LONG))
        await until(lambda: len(work.ended) == 3)
        await one.consumer.drain()
        assert members.committed() == events.ends() == [7]
        assert one.failure is None and story.at("commit") < story.at("close")


@pytest.mark.parametrize("behind", [0, 1], ids=["marker", "message"])
async def test_a_stop_reads_on_to_a_marker_but_past_no_message(
    behind: int, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("_HOUSEKEEPING_EVERY", "PAUSE_AFTER"):
        monkeypatch.setattr(thread, seconds, LONG)
    # A marker may arrive late on a busy machine. The source does not wait if it knows that no marker follows.
    monkeypatch.setattr(thread, "_READ_PAST_FOR", 20.0)
    events = topic()
    transactions(events, 3)
    if behind:
        produce(events, 1)
    work = Work(Story())
    work.hold(b"2")
    async with group(events, "cooperative", work) as members:
        # With max_in_flight=1, the source reads no message while a handler runs.
        one = members.start("one", settings=lanes.Settings(concurrency=1, max_in_flight=1))
        await until(lambda: len(work.ended) == 2 and len(work.running) == 1)
        one.consumer.stop()
        work.let_go(b"2")
        await one.ended.wait()
        # The commit passes the marker if the marker is the last record, but never an unhandled message.
        assert members.committed() == [3 if behind else 4] and events.ends() == [4 + behind]
        assert len(work.ended) == 3 and one.failure is None


async def test_a_stop_sends_its_commit_after_late_topic_ids(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    answered_at = 0.0
    is_done, release = Topics._is_done, thread.ClientThread._release

    def released(client: thread.ClientThread, command: Release, *, until: float | None) -> None:
        nonlocal answered_at
        release(client, command, until=until)
        answered_at = time.monotonic() + 0.3

    monkeypatch.setattr(thread.ClientThread, "_release", released)
    monkeypatch.setattr(Topics, "_is_done", lambda topics: time.monotonic() > answered_at and is_done(topics))
    # No other event wakes the thread that sends the commit.
    for seconds in ("_HOUSEKEEPING_EVERY", "PAUSE_AFTER"):
        monkeypatch.setattr(thread, seconds, LONG)
    monkeypatch.setattr(thread, "_READ_PAST_FOR", 20.0)
    events = topic()
    transactions(events, 3)
    work = Work(Story())
    work.hold(b"2")
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=1, max_in_flight=1))
        await until(lambda: len(work.ended) == 2 and len(work.running) == 1)
        one.consumer.stop()
        work.let_go(b"2")
        await one.ended.wait()
        assert one.failure is None and members.committed() == events.ends() == [4]


async def test_a_stop_commits_no_marker_above_unfinished_messages(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_HOUSEKEEPING_EVERY", LONG)
    events = topic()
    transactions(events, 3)
    work = Work(Story())
    work.hold(b"2")
    async with group(events, "cooperative", work) as members:
        one = members.start("one", settings=NOW)
        await until(lambda: len(work.ended) == 2 and len(work.running) == 1)
        await one.consumer.drain()
        assert members.committed() == [2]
        work.let_go(b"2")
        members.start("two", settings=NOW)
        await until(lambda: len(work.ended) == 3)
    assert members.committed() == events.ends() == [4]


@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_a_revoke_leaves_no_lag_after_a_transaction_marker(
    protocol: str, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "_HOUSEKEEPING_EVERY", LONG)
    events = topic(2)
    for number in range(2):
        transactions(events, 3, partition=number)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        old = members.start("old", settings=lanes.Settings(commit_interval=LONG))
        await until(lambda: len(work.ended) == 6)
        # The marker is read in the same call as the message before it, or in the next one.
        await old.polled(2)
        members.start("new")
        await members.owning(old=1, new=1)
        (moved,) = story.owned("new")
        assert story.of("assigned", "new", moved)[-1].position == events.ends()[moved] == 4


@pytest.mark.slow
async def test_a_gap_in_a_compacted_log_never_blocks_the_committed_position(
    fresh_kafka: KafkaFactory, topic: MakeTopic
) -> None:
    server = fresh_kafka(warm=True, properties={"log.cleaner.backoff.ms": 200})
    config = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    events = topic(on=server, config=config)
    for _ in range(3):
        produce(events, 50, keys=[b"0", b"1", b"2", b"3", b"4"])
    left: list[int] = []

    async def few() -> None:
        """Wait until most records are compacted away; a segment closes when the next one is written."""
        while not 0 < len(left) < 100:
            produce(events, 1, keys=[b"last"])
            left[:] = _offsets(events)

    await few()
    story = Story()
    work = Work(story)
    work.hold(b"last")
    async with group(events, "cooperative", work) as members:
        members.start("one", settings=NOW)
        await until(lambda: bool(story.of("start")) and bool(work.running))
        work.let_go(b"last")
        await until(lambda: max([each.position for each in story.of("commit")], default=0) == events.ends()[0])
    assert work.violations == []
    assert len(work.ended) < events.ends()[0] == (members.committed()[0] or 0)


def _offsets(topic: Topic) -> list[int]:
    end = topic.ends()[0]
    found: list[int] = []
    reader = Consumer({**QUIET, "bootstrap.servers": topic.url, "group.id": "reader", "enable.auto.commit": False})
    try:
        reader.assign([TopicPartition(topic.name, 0, 0)])
        while not found or found[-1] < end - 1:
            message = reader.poll(20)
            assert message is not None
            offset = message.offset()
            assert message.error() is None and offset is not None
            found.append(offset)
    finally:
        reader.close()
    return found


# --- errors


async def test_a_failed_partition_leaves_the_others_uncommitted(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[set[int]] = []

    class Spoiling(Client):
        """A client whose first commit has more metadata for partition 1 than the broker accepts."""

        def commit(self, *arguments: Any, **named: Any) -> Any:
            offsets: list[TopicPartition] = named["offsets"]
            if not sent:
                texts = ["", "x" * 5_000]
                offsets = [TopicPartition(o.topic, o.partition, o.offset, texts[o.partition]) for o in offsets]
            sent.append({each.partition for each in offsets})
            return super().commit(*arguments, **named | {"offsets": offsets})

    monkeypatch.setattr(group_members, "Client", Spoiling)
    events = topic(2)
    for number in range(2):
        produce(events, 3, keys=3, partition=number)
    story = Story()
    work = Work(story)
    async with group(events, "cooperative", work) as members:
        # The start positions are committed already, so the source commits nothing at first.
        commit(events, members.id, 0, ["", ""])
        one = members.start("one", settings=lanes.Settings(commit_interval=LONG))
        await until(lambda: len(work.ended) == 6)
        await one.consumer.drain()
    # The refused commit counts for no partition, and all partitions are committed again.
    assert sent[:2] == [{0, 1}, {0, 1}]
    assert members.committed() == [3, 3]
