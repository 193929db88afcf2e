"""On a real broker, each poison policy has its effect on a message that always fails."""

from __future__ import annotations

import pytest

import lanes
from lanes_kafka import KafkaDeadLetters
from memsource import MemoryAttempts
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import config_of, stored
from tests.kafka.failing_handlers import FailingWork
from tests.kafka.members import Member, Story, group
from tests.kafka.workload import Topic, produce, until

pytestmark = pytest.mark.anyio

BAD = b"2"
# The positions of the bad key among twenty messages of five keys.
OF_BAD = [2, 7, 12, 17]
TWICE = lanes.Retry(attempts=2, backoff=0.0)


def settings(poison: lanes.config.Poison) -> lanes.Settings:
    return lanes.Settings(poison=poison, retry=TWICE, commit_interval=0.0)


SERIAL = lanes.Settings(order="serial", poison="block_and_dlq", retry=TWICE, commit_interval=0.0)


def sent(topic: Topic) -> Topic:
    produce(topic, 20, keys=5)
    return topic


def committed(story: Story) -> int:
    """The highest committed position."""
    return max((each.position for each in story.of("commit")), default=0)


async def test_the_policy_skip_dead_letters_the_message_and_continues(topic: MakeTopic) -> None:
    events, dead = sent(topic()), topic()
    story = Story()
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:
        members.start("one", settings=settings("skip"), dead_letters=KafkaDeadLetters(config_of(dead), dead.name))
        await until(lambda: committed(story) == 20)
    # Each message has its attempts and then its dead letter, before the next message of its key starts.
    assert work.refused == dict.fromkeys(OF_BAD, 2) and len(work.ended) == 16 and work.violations == []
    letters = await stored(dead)
    assert [(one.position, one.attempts, one.error_type) for one in letters] == [
        (position, 2, "ValueError") for position in OF_BAD
    ]
    assert {(one.source, one.partition, one.key) for one in letters} == {(events.name, 0, BAD)}
    assert members.committed() == [20]


async def test_the_policy_block_stops_the_key(topic: MakeTopic) -> None:
    events = sent(topic())
    story = Story()
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=settings("block"))
        await until(lambda: len(work.ended) == 16 and one.consumer.status().blocked == 1 and committed(story) == 2)
        assert work.refused == {2: 2}
        # After unblock, the message has one attempt, and is then blocked again.
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: work.refused == {2: 3} and one.consumer.status().blocked == 1)
        work.bad.clear()
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: committed(story) == 20)
    assert set(work.ended.values()) == {1} and len(work.ended) == 20 and work.violations == []
    assert members.committed() == [20]


async def test_the_policy_block_and_dlq_writes_a_dead_letter_and_stops_the_key(topic: MakeTopic) -> None:
    events, dead = sent(topic()), topic()
    story = Story()
    work = FailingWork(story, BAD)
    target = KafkaDeadLetters(config_of(dead), dead.name)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=settings("block_and_dlq"), dead_letters=target)
        await until(lambda: len(work.ended) == 16 and one.consumer.status().blocked == 1)
        # The dead letter is written, and the key of the message stays blocked.
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


async def test_serial_order_stops_at_a_dead_letter_until_it_is_unblocked_or_parked(topic: MakeTopic) -> None:
    events, dead = topic(), topic()
    produce(events, 8, keys=3)
    story = Story()
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:
        one = members.start("one", settings=SERIAL, dead_letters=KafkaDeadLetters(config_of(dead), dead.name))
        await until(lambda: committed(story) == 2 and one.consumer.status().blocked == 1)
        (letter,) = await stored(dead)
        assert (letter.position, work.refused, sorted(work.ended)) == (2, {2: 2}, [(0, 0), (0, 1)])
        # One more attempt fails, and writes no second dead letter.
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: work.refused == {2: 3} and one.consumer.status().blocked == 1)
        assert sorted(work.ended) == [(0, 0), (0, 1)]
        assert one.consumer.park(BAD) == 1
        await until(lambda: committed(story) == 5 and one.consumer.status().blocked == 1)
        assert work.refused == {2: 3, 5: 2}
        work.bad.clear()
        assert one.consumer.unblock(BAD) == 1
        await until(lambda: committed(story) == 8)
    assert [one.position for one in story.of("end")] == [0, 1, 3, 4, 5, 6, 7]
    assert len({letter.id for letter in await stored(dead)}) == 2
    assert [letter.position for letter in await stored(dead)] == [2, 5]


@pytest.mark.parametrize("kept", [True, False], ids=["with a store of attempts", "without a store"])
async def test_the_next_owner_of_a_serial_partition_keeps_the_block(topic: MakeTopic, kept: bool) -> None:
    """Without a store the next owner repeats the attempts and the dead letter, which has the same id."""
    events, dead = topic(), topic()
    produce(events, 8, keys=3)
    story, store = Story(), MemoryAttempts() if kept else None
    work = FailingWork(story, BAD)
    async with group(events, "848", work) as members:

        def start(name: str) -> Member:
            target = KafkaDeadLetters(config_of(dead), dead.name)
            return members.start(name, settings=SERIAL, dead_letters=target, attempts=store)

        one = start("one")
        await until(lambda: committed(story) == 2 and one.consumer.status().blocked == 1)
        one.consumer.stop()
        await one.ended.wait()
        two = start("two")
        await until(lambda: two.consumer.ready and two.consumer.status().blocked == 1)
        assert work.refused == {2: 2 if kept else 4}
        letters = await stored(dead)
        assert (len(letters), len({letter.id for letter in letters})) == (1 if kept else 2, 1)
        assert sorted(work.ended) == [(0, 0), (0, 1)]
        work.bad.clear()
        assert two.consumer.unblock(BAD) == 1
        await until(lambda: committed(story) == 8)
    assert [one.position for one in story.of("end")] == list(range(8))


async def test_the_policy_exit_stops_the_consumer(topic: MakeTopic) -> None:
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
    # The new consumer repeats the failed message, and no finished message.
    assert sorted(each.position for each in story.of("start", "two")) == sorted(set(range(20)) - done)
    assert set(work.ended.values()) == {1} and work.violations == []
    assert members.committed() == [20]
