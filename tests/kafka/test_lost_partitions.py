"""A frozen member commits nothing of its lost partitions."""

from __future__ import annotations

import pytest

import lanes
from lanes_kafka import KafkaSource
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import PROTOCOLS, Client, Group, Story, Work, group, short_sessions
from tests.kafka.workload import produce, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("short_polls")]

CLASSIC = [protocol for protocol in PROTOCOLS if protocol != "848"]
QUICK = lanes.Settings(commit_interval=0.0, drain_timeout=1.0, grace=0.2)


def commits(story: Story, member: str, since: int) -> list[int]:
    """Positions that a member committed after event ``since`` and before its next assignment."""
    found = []
    for each in story.events[since:]:
        if each.member == member and each.what == "assigned":
            break
        if each.member == member and each.what == "commit":
            found.append(each.position)
    return found


def watched(monkeypatch: pytest.MonkeyPatch, *, watch: bool) -> None:
    """Without ``watch`` only the client reports a loss, after it is polled again."""
    if not watch:
        monkeypatch.setattr(KafkaSource, "_check_polling", lambda source: None)


@pytest.mark.parametrize(
    "watch", [pytest.param(True, marks=pytest.mark.slow, id="presumed"), pytest.param(False, id="told")]
)
@pytest.mark.parametrize("protocol", [*(pytest.param(one, marks=pytest.mark.slow) for one in CLASSIC), "848"])
async def test_a_lost_partition_commits_nothing(
    protocol: str, watch: bool, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched(monkeypatch, watch=watch)
    events = topic(1)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work, **short_sessions(events, protocol)) as members:
        # Messages end without a commit.
        old = members.start("old", settings=lanes.Settings(commit_interval=3_600.0, drain_timeout=1.0, grace=0.2))
        await members.owning(old=1)
        produce(events, 5)
        await until(lambda: len(story.of("end", "old")) == 5)
        old.client.freeze()
        since = len(story.events)
        await until(lambda: members.size() == 0)
        new = members.start("new", settings=QUICK)
        await members.owning(new=1)
        assert [each.position for each in story.of("assigned", "new")] == [0]
        await until(lambda: members.committed() == [5])
        old.client.thaw()
        await until(lambda: bool(story.of("lost", "old")))
        await old.polled(20)
        assert commits(story, "old", since) == []
        await new.consumer.drain()
        await members.owning(old=1)
        assert story.of("assigned", "old")[-1].position == 5
    assert set(work.ended.values()) == {2} and members.committed() == [5]


async def frozen(members: Group, story: Story) -> Client:
    """The client of a member that runs one message, and is no longer polled."""
    old = members.start("old", settings=QUICK)
    await members.owning(old=1)
    produce(members.topic, 1, keys=[b"key"])
    await until(lambda: bool(story.of("start", "old")))
    old.client.freeze()
    return old.client


async def test_a_frozen_member_commits_nothing(topic: MakeTopic) -> None:
    events = topic(1)
    story = Story()
    work = Work(story)
    work.hold(b"key")
    work.stubborn.add(b"key")
    # The broker does not help: it accepts commits of this member for another session timeout.
    async with group(events, "848", work, **short_sessions(events, "848")) as members:
        client = await frozen(members, story)
        since, polls = len(story.events), client.polls
        await until(lambda: bool(story.of("lost", "old")))
        assert client.polls == polls
        work.let_go(b"key")
        await until(lambda: bool(story.of("end", "old")))
        client.thaw()
        await until(lambda: len(story.of("assigned", "old")) == 2)
        assert commits(story, "old", since) == []
        assert story.of("assigned", "old")[-1].position == 0
        await until(lambda: work.ended[0, 0] == 2)
    assert members.committed() == [1]


@pytest.mark.parametrize("protocol", [pytest.param("cooperative", marks=pytest.mark.slow), "848"])
async def test_the_result_of_a_zombie_is_fenced(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    story = Story()
    work = Work(story)
    work.hold(b"key")
    work.stubborn.add(b"key")
    async with group(events, protocol, work, **short_sessions(events, protocol)) as members:
        client = await frozen(members, story)
        zombie = work.held(b"key")
        work.hold(b"key")
        new = members.start("new", settings=QUICK)
        await until(lambda: bool(story.of("start", "new")))
        client.thaw()
        await until(lambda: bool(story.of("lost", "old")))
        zombie.set()
        await until(lambda: bool(story.of("end", "old")))
        await new.polled(20)
        assert members.committed() == [0] and len(story.of("commit", "old")) == 1, "where the group begins"
        work.let_go(b"key")
        await until(lambda: members.committed() == [1])
        assert len(story.of("commit", "old")) == 1
        await new.consumer.drain()
    assert set(work.ended.values()) == {2}


@pytest.mark.parametrize("protocol", ["eager", pytest.param("848", marks=pytest.mark.slow)])
async def test_a_partition_is_presumed_lost_before_another_member_has_it(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    story = Story()
    work = Work(story)
    work.hold(b"key")
    async with group(events, protocol, work, **short_sessions(events, protocol)) as members:
        client = await frozen(members, story)
        new = members.start("new", settings=QUICK)
        await members.owning(new=1)
        # About a second in which this process runs.
        last = new.client.polls + 50
        await until(lambda: bool(story.of("lost", "old")) or new.client.polls > last)
        assert story.of("lost", "old")
        client.thaw()
        work.let_go(b"key")
        await until(lambda: bool(work.ended))
