"""Partitions that move between live members: completed messages are not repeated."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import anyio
import pytest
from confluent_kafka.admin import NewPartitions

import lanes
from lanes.core import flow
from lanes_kafka.client import thread
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Group, Story, Work, group
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

_MESSAGES = 10_000
_KEYS = 100
_CLASSIC = [protocol for protocol in PROTOCOLS if protocol != "848"]
# Three members join, then each of them is replaced.
_STEPS = 6


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_revoke_drains_before_the_release(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    for number in range(2):
        produce(events, 1, keys=[b"first"], partition=number)
    story = Story()
    work = Work(story)
    work.hold(b"first")
    async with group(events, protocol, work) as members:
        old = members.start("old")
        await until(lambda: len(story.of("start")) == 2)
        new = members.start("new")
        await until(lambda: bool(story.of("revoking", "old")))
        # The new member polls during the drain of the other member, but gets no partition.
        await new.polled(50)
        assert story.of("assigned", "new") == [] and story.of("released", "old") == []
        work.let_go(b"first")
        await members.owning(old=1, new=1)
        (moved,) = story.owned("new")
        order = [story.at(what, "old", moved) for what in ("end", "commit", "released")]
        assert [*order, story.at("assigned", "new", moved)] == sorted([*order, story.at("assigned", "new", moved)])
        assert [each.position for each in story.of("assigned", "new", moved)] == [1]
        assert old.client.strangers == new.client.strangers == set()
    assert work.ended == {(0, 0): 1, (1, 0): 1}
    assert members.committed() == [1, 1]


@pytest.mark.parametrize("protocol", ["eager", "848"])
async def test_a_revoke_does_not_wait_for_answers_after_it(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        settings = lanes.Settings(commit_interval=0.0, drain_timeout=2.0, grace=0.2)
        old = members.start("old", settings=settings)
        await members.owning(old=2)
        # The client returns no more answers, so a commit is unanswered when the callback begins.
        old.client.withhold = True
        for number in range(2):
            produce(events, 1, partition=number)
        await until(lambda: all(members.committed()))
        sent = len(story.of("commit", "old"))
        members.start("new")
        await members.owning(old=1, new=1)
        (moved,) = story.owned("new")
        again = [each.position for each in story.of("commit", "old", moved)][sent // 2 :]
        assert again == [1], "the commit was sent again, and its answer awaited"
        old.client.withhold = False
    assert set(work.ended.values()) == {1}


@pytest.mark.parametrize("protocol", ["cooperative", "848"])
async def test_a_kept_partition_keeps_running(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    for number, key in enumerate((b"zero", b"one")):
        produce(events, 50, keys=[key], partition=number)
    story = Story()
    work = Work(story)
    work.hold(b"zero", b"one")
    async with group(events, protocol, work) as members:
        members.start("old")
        await until(lambda: len(story.of("start")) == 2)
        members.start("new")
        await until(lambda: bool(story.of("revoking", "old")))
        (leaving,) = [each.partition for each in story.of("revoking", "old")]
        kept, held = (b"one", b"zero") if leaving == 0 else (b"zero", b"one")
        work.let_go(kept)
        await until(lambda: len(story.of("end", "old", 1 - leaving)) == 50)
        # All of these run while the callback of the client waits for this handler.
        assert story.of("end", "old", leaving) == story.of("released") == []
        work.let_go(held)
        await members.owning(old=1, new=1)
        await until(lambda: len(work.ended) == 100)
    assert set(work.ended.values()) == {1} and work.violations == []


class Pace:
    """Spreads the messages over all steps: fast until the share of a step is done, then slow."""

    def __init__(self) -> None:
        self.steps = 0
        self.done = 0

    def __call__(self, message: lanes.Message) -> float:
        self.done += 1
        return 0.002 if self.done < _MESSAGES * (self.steps + 1) / (_STEPS + 2) else 0.3


async def joined(members: Group, name: str, story: Story, *, commit_metadata: bool) -> None:
    """Let a member join, and wait until it owns a partition."""
    settings = lanes.Settings(concurrency=50, max_in_flight=400)
    members.start(name, settings=settings, commit_metadata=commit_metadata)
    while not story.owned(name):
        members.look()
        await anyio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("commit_metadata", [True, False], ids=["metadata", "prefix"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_clean_rebalance_repeats_nothing(protocol: str, commit_metadata: bool, topic: MakeTopic) -> None:
    events = topic(8)
    produce(events, _MESSAGES, keys=_KEYS)
    story, pace = Story(), Pace()
    work = Work(story, pace)
    async with group(events, protocol, work) as members:
        for name in ("a", "b", "c"):
            await joined(members, name, story, commit_metadata=commit_metadata)
            pace.steps += 1
        for leaving, joining in zip(list(members.members), ("d", "e", "f"), strict=True):
            await leaving.consumer.drain()
            await joined(members, joining, story, commit_metadata=commit_metadata)
            pace.steps += 1
        assert len(work.ended) < _MESSAGES, "messages were in flight in every rebalance"
        pace.steps = _STEPS + 2
        while len(work.ended) < _MESSAGES:
            members.look()
            await anyio.sleep(0.01)
    members.look()
    assert work.violations == []
    assert set(work.ended.values()) == {1} and len(story.of("start")) == _MESSAGES
    assert members.committed() == events.ends()
    assert story.of("lost") == []


@pytest.mark.parametrize("protocol", [pytest.param("cooperative", marks=pytest.mark.slow), "848"])
@pytest.mark.parametrize("start", ["beginning", "next"])
async def test_added_partitions_lose_nothing(protocol: str, start: str, topic: MakeTopic) -> None:
    events = topic(1)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work, topic_metadata_refresh_interval_ms=3_000) as members:
        members.start("a", start=start)
        await members.owning(a=1)
        produce(events, 5, partition=0)
        await until(lambda: len(work.ended) == 5)
        events.admin.create_partitions([NewPartitions(events.name, 3)])[events.name].result(10)
        events.partitions = 3
        # The controller answers before the broker knows the partitions.
        listed = partial(events.admin.list_topics, events.name, timeout=5)
        await until(lambda: len(listed().topics[events.name].partitions) == 3)
        # Produce before any member knows these partitions.
        for number in (1, 2):
            produce(events, 5, partition=number)
        assert story.owned("a") == {0}
        await members.owning(a=3)
        await until(lambda: len(work.ended) == 15)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == [5, 5, 5]


@pytest.mark.parametrize("protocol", [*(pytest.param(one, marks=pytest.mark.slow) for one in _CLASSIC), "848"])
async def test_a_close_leaves_the_group_at_once(protocol: str, topic: MakeTopic) -> None:
    events = topic(2)
    story = Story()
    # The session would not end within the timeout of the test.
    session = {} if protocol == "848" else {"session_timeout_ms": 45_000}
    async with group(events, protocol, Work(story), **session) as members:
        leaving = members.start("leaving")
        members.start("staying")
        await members.owning(leaving=1, staying=1)
        await leaving.consumer.drain()
        assert members.size() == 1
        await members.owning(staying=2)


@pytest.mark.parametrize("protocol", _CLASSIC)
async def test_a_member_more_than_partitions_says_that_it_has_none(
    protocol: str, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    events = topic(1)
    async with group(events, protocol, Work(Story())) as members:
        members.start("one")
        await members.owning(one=1)
        members.start("two")
        await until(lambda: any("the group has no partition for this member" in line for line in caplog.messages))
        said = [line for line in caplog.messages if "the group has no partition" in line]
        assert len(said) == 1 and "because other members own all 1. " in said[0]


async def test_no_partition_starves_on_a_backlog(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    # A full process pauses its client after a second, in which the broker may not have answered for each partition.
    for module in (flow, thread):
        monkeypatch.setattr(module, "PAUSE_AFTER", 3_600.0)
    events = topic(4)
    for number in range(4):
        # Each partition has messages for more than the whole room, so one partition could fill it.
        produce(events, 1_000, keys=[b"%d" % number], partition=number)
    story = Story()
    work = Work(story, lambda message: 0.001)
    work.hold(b"0", b"1", b"2", b"3")
    async with group(events, "848", work) as members:
        one = members.start("one", settings=lanes.Settings(concurrency=10, max_in_flight=40))
        # The broker may answer late for some partitions.
        await until(lambda: bool(one.clients) and one.client.fetched == {0, 1, 2, 3})
        work.let_go(b"0", b"1", b"2", b"3")
        await until(lambda: max(Counter(number for number, _ in work.ended).values(), default=0) >= 200)
        done = Counter(number for number, _ in work.ended)
        assert min(done[number] for number in range(4)) >= 100, done
        await until(lambda: len(work.ended) == 4_000)
    assert set(work.ended.values()) == {1} and work.violations == []
