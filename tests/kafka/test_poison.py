"""A message that always fails, on a real broker, under each poison policy."""

from __future__ import annotations

import pytest

import lanes
from lanes_kafka import KafkaDeadLetters
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import config_of, stored
from tests.kafka.failing_handlers import FailingWork
from tests.kafka.members import Story, group
from tests.kafka.workload import Topic, produce, until

pytestmark = pytest.mark.anyio

BAD = b"2"
# The positions of the bad key among twenty messages of five keys.
OF_BAD = [2, 7, 12, 17]
TWICE = lanes.Retry(attempts=2, backoff=0.0)


def settings(poison: lanes.config.Poison) -> lanes.Settings:
    return lanes.Settings(poison=poison, retry=TWICE, commit_interval=0.0)


def sent(topic: Topic) -> Topic:
    produce(topic, 20, keys=5)
    return topic


def committed(story: Story) -> int:
    """The highest committed position."""
    return max((each.position for each in story.of("commit")), default=0)


async def test_poison_skip(topic: MakeTopic) -> None:
    events, dead = sent(topic()), topic()
    story = Story()
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:
        members.start("one", settings=settings("skip"), dead_letters=KafkaDeadLetters(config_of(dead), dead.name))
        await until(lambda: committed(story) == 20)
    # Each message has its attempts and then its dead letter; the next one of its key follows.
    assert work.refused == dict.fromkeys(OF_BAD, 2) and len(work.ended) == 16 and work.violations == []
    letters = await stored(dead)
    assert [(one.position, one.attempts, one.error_type) for one in letters] == [
        (position, 2, "ValueError") for position in OF_BAD
    ]
    assert {(one.source, one.partition, one.key) for one in letters} == {(events.name, 0, BAD)}
    assert members.committed() == [20]


async def test_poison_block(topic: MakeTopic) -> None:
    events = sent(topic())
    story = Story()
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=settings("block"))
        await until(lambda: len(work.ended) == 16 and one.consumer.status().blocked == 1 and committed(story) == 2)
        assert work.refused == {2: 2}
        # Blocked again after its one attempt.
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: work.refused == {2: 3} and one.consumer.status().blocked == 1)
        work.bad.clear()
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: committed(story) == 20)
    assert set(work.ended.values()) == {1} and len(work.ended) == 20 and work.violations == []
    assert members.committed() == [20]


async def test_poison_block_and_dlq(topic: MakeTopic) -> None:
    events, dead = sent(topic()), topic()
    story = Story()
    work = FailingWork(story, BAD)
    target = KafkaDeadLetters(config_of(dead), dead.name)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=settings("block_and_dlq"), dead_letters=target)
        await until(lambda: len(work.ended) == 16 and one.consumer.status().blocked == 1)
        # The dead letter is written, and its key stays blocked.
        (letter,) = await stored(dead)
        # A commit takes a moment, because it asks for topic ids first.
        await until(lambda: committed(story) == 2)
        assert (letter.position, work.refused, committed(story)) == (2, {2: 2}, 2)
        work.bad.clear()
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: committed(story) == 20)
    assert set(work.ended.values()) == {1} and len(work.ended) == 20 and work.violations == []
    assert [one.position for one in await stored(dead)] == [2]
    assert members.committed() == [20]


async def test_poison_exit(topic: MakeTopic) -> None:
    events = sent(topic())
    story = Story()
    work = FailingWork(story, BAD)
    work.hold(b"4")
    async with group(events, "848", work) as members:
        one = members.start("one", settings=settings("exit"))
        await until(lambda: work.refused == {2: 2})
        # Running handlers may end; queued messages are redelivered.
        await until(lambda: one.consumer.status().running == 1)
        work.let_go(b"4")
        await one.ended.wait()
        assert isinstance(one.failure, lanes.HandlerHalted)
        assert f"{events.name}/0 position 2 with ValueError" in str(one.failure)
        done = {position for _, position in work.ended}
        assert 4 in done and not {7, 9} & done
        assert members.committed() == [2]
        work.bad.clear()
        members.start("two", settings=settings("exit"))
        await until(lambda: committed(story) == 20)
    # The new consumer starts at it, and repeats no other message.
    assert sorted(each.position for each in story.of("start", "two")) == sorted(set(range(20)) - done)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == [20]
