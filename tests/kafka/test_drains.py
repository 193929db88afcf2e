"""A revoke or a close drains partitions within its timeout, even while handlers fill the process or hang."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import anyio
import pytest

import lanes
from lanes.core import flow
from lanes_kafka import KafkaSource
from lanes_kafka.client import thread
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Story, Work, group
from tests.kafka.workload import QUIET, produce, until

pytestmark = pytest.mark.anyio

ONE = lanes.Settings(concurrency=1, max_in_flight=1)


@pytest.mark.parametrize("protocol", [pytest.param("cooperative", marks=pytest.mark.slow), "848"])
async def test_a_partition_assigned_to_a_full_process_starts_paused(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    story = Story()
    work = Work(story)
    work.hold(b"first")
    async with group(events, protocol, work) as members:
        old, leaving = members.start("old", settings=ONE), members.start("leaving", settings=ONE)
        await members.owning(old=1, leaving=1)
        (kept,) = story.owned("old")
        produce(events, 1, keys=[b"first"], partition=kept)
        await until(lambda: bool(story.of("start", "old")))
        await leaving.consumer.drain()
        produce(events, 5, keys=[b"second"], partition=1 - kept)
        await members.owning(old=2)
        await old.polled(20)
        assert 1 - kept in old.client.paused and 1 - kept not in old.client.fetched
        work.let_go(b"first")
        await until(lambda: len(work.ended) == 6)
        assert old.client.paused == set()
    assert set(work.ended.values()) == {1} and work.violations == []


@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_a_pause_ends_with_the_ownership_of_the_partition(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        old = members.start("old")
        await members.owning(old=2)
        old.consumer.pause()
        await until(lambda: old.client.paused == {0, 1})
        # The old member loses at least one partition, and gets the partition back.
        other = members.start("other")
        await members.owning(old=1, other=1)
        old.consumer.resume()
        await other.consumer.drain()
        await members.owning(old=2)
        for number in (0, 1):
            produce(events, 5, partition=number)
        await until(lambda: len(work.ended) == 10)
        assert old.client.paused == set()
    assert set(work.ended.values()) == {1}


async def test_a_full_source_is_not_paused_again_and_again(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that gets no CPU for a second may be full for as long.
    for module in (flow, thread):
        monkeypatch.setattr(module, "PAUSE_AFTER", 3_600.0)
    events = topic(2)
    for number in range(2):
        produce(events, 400, partition=number)
    story = Story()
    work = Work(story, lambda message: 0.002)
    async with group(events, "848", work) as members:
        # The source becomes full and gets room again about once for each message.
        one = members.start("one", settings=lanes.Settings(concurrency=5, max_in_flight=10))
        await until(lambda: len(work.ended) == 800)
        assert one.client.pauses <= 8
    assert work.violations == []


@pytest.mark.parametrize("protocol", ["cooperative", pytest.param("848", marks=pytest.mark.slow)])
async def test_a_drain_past_its_deadline_reports_the_abandoned_messages(
    protocol: str, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    events = topic(2)
    for number in range(2):
        produce(events, 1, keys=[b"slow"], partition=number)
    story = Story()
    work = Work(story)
    work.hold(b"slow")
    work.stubborn.add(b"slow")
    async with group(events, protocol, work) as members:
        members.start("old", settings=lanes.Settings(drain_timeout=0.5, grace=0.2))
        await until(lambda: len(work.running) == 2)
        slow = work.held(b"slow")
        work.hold(b"slow")
        members.start("new")
        await members.owning(old=1, new=1)
        (moved,) = story.owned("new")
        assert " did not end within drain_timeout and grace and still runs for 1 message(s)" in caplog.text
        assert f" Positions: {events.name}/{moved}: " in caplog.text
        await until(lambda: bool(story.of("start", "new", moved)))
        slow.set()
        await until(lambda: len(story.of("end", "old")) == 2)
        # Too late for the abandoned partition: another member repeats its messages.
        await until(lambda: members.committed()[1 - moved] == 1)
        assert members.committed()[moved] == 0
        work.let_go(b"slow")
        await until(lambda: members.committed() == [1, 1])
    assert (work.ended[moved, 0], work.ended[1 - moved, 0]) == (2, 1)


@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_a_stopped_member_leaves_its_group_beside_a_handler_that_goes_on(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    for number in range(2):
        produce(events, 1, keys=[b"slow"], partition=number)
    story = Story()
    work = Work(story)
    work.hold(b"slow")
    work.stubborn.add(b"slow")
    async with group(events, protocol, work) as members:
        old = members.start("old", settings=lanes.Settings(drain_timeout=0.2, grace=0.2))
        await until(lambda: len(work.running) == 2)
        slow = work.held(b"slow")
        work.hold(b"slow")
        old.consumer.stop()
        await until(lambda: bool(story.of("close", "old")))
        members.start("new")
        await members.owning(new=2)
        assert not old.ended.is_set() and story.of("end", "old") == []
        slow.set()
        await until(old.ended.is_set)
        work.let_go(b"slow")
        await until(lambda: members.committed() == [1, 1])


@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_a_stop_drains_all_partitions_before_the_client_closes(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    produce(events, 3, keys=[b"key"])
    story = Story()
    work = Work(story)
    work.hold(b"key")
    async with group(events, protocol, work, max_poll_interval_ms=60_000) as members:
        one = members.start("one")
        await until(lambda: bool(story.of("start", "one")))
        one.consumer.stop()
        # During the drain, the member stays in its group and polls.
        await one.polled(50)
        assert story.of("close") == [] and not one.ended.is_set()
        work.let_go(b"key")
        await one.ended.wait()
        order = [story.at(what, "one") for what in ("end", "commit", "released", "close")]
        assert order == sorted(order) and one.failure is None
    assert len(story.of("start")) == 1 and members.committed() == [1]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0


def all_threads() -> int:
    """All threads of the process, with those that librdkafka started."""
    return len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else threading.active_count()


@pytest.mark.parametrize("protocol", ["eager", pytest.param("cooperative", marks=pytest.mark.slow), "848"])
async def test_a_closed_source_leaves_no_thread_and_no_descriptor(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    config = {**QUIET, "bootstrap.servers": events.url, "group.id": f"g-{events.name}", **PROTOCOLS[protocol]}

    async def opened(config: dict[str, object], topic: str) -> None:
        source = KafkaSource(config, topics=topic)
        try:
            await source.open()
        finally:
            await source.aclose()

    async def rounds(count: int) -> None:
        for _ in range(count):
            await opened(config, events.name)
        with pytest.raises(lanes.ConfigError, match="does not exist"):
            await opened(config, f"{events.name}-not")
        with pytest.raises(lanes.ConfigError):
            await opened({**config, "fetch.min.bytes": "none"}, events.name)

    await rounds(1)
    files, threads = open_files(), all_threads()
    await rounds(10)
    with anyio.fail_after(10):
        await until(lambda: open_files() <= files and all_threads() <= threads)
    assert [thread for thread in threading.enumerate() if thread.name.startswith("lanes-kafka")] == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_a_revoke_ends_although_the_broker_hangs(
    protocol: str, fresh_kafka: KafkaFactory, topic: MakeTopic
) -> None:
    server = fresh_kafka(warm=True)
    events = topic(2, on=server)
    story = Story()
    work = Work(story)
    work.hold(b"key")
    async with group(events, protocol, work) as members:
        old = members.start("old", settings=lanes.Settings(commit_interval=0.0, drain_timeout=2.0, grace=0.2))
        await members.owning(old=2)
        for number in range(2):
            produce(events, 1, keys=[b"key"], partition=number)
        await until(lambda: len(story.of("start", "old")) == 2)
        members.start("new")
        await until(lambda: bool(story.of("revoking", "old")))
        # The broker neither answers nor refuses.
        server.pause()
        work.let_go(b"key")
        # The callback has ended.
        await old.polled(20)
        assert len(story.of("released", "old")) == 1
        server.resume()
        # The owner after the outage commits the positions.
        await until(lambda: members.committed() == [1, 1])
    assert work.violations == []
