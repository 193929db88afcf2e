"""``JetStreamMemberSource`` takes over in order, and survives late notices of a loss and other faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from lanes.core.types import Message, Partition, Room, Settlement
from lanes.dead_letter import DeadLetter
from lanes.errors import SourceError
from lanes.source import Assigned, Exhausted, Lost, Revoking, SourceEvent
from memsource.contract.harness import messages_of
from memsource.jetstream.pull_consumer import ConsumerSettings
from memsource.jetstream.source import JetStreamMemberSource, JetStreamPersonality
from memsource.jetstream.takeover import SHRINK_SECONDS
from memsource.personality import Personality

LEASE = 9.0
ALL = Room(100, 1 << 20)


class Bench:
    """A broker with ``count`` messages, and a clock that moves only by ``until``."""

    def __init__(self, count: int = 0, *, partitions: int = 1, ack_wait: float = 1000.0, bound: int = 100) -> None:
        self.now = 0.0
        settings = ConsumerSettings(ack_wait=ack_wait, max_ack_pending=bound)
        self.broker = JetStreamPersonality(partitions, settings=settings, lease=LEASE, revoke_timeout=5.0)
        self.publish(count)

    def publish(self, count: int) -> None:
        for number in range(count):
            self.broker.publish(f"{number}", key=f"key-{number % 3}")

    async def source(self, member: str) -> JetStreamMemberSource:
        source = self.broker.source(member, lambda: self.now)
        await source.open()
        return source

    def until(self, now: float) -> None:
        while (at := self.broker.next_at()) <= now:
            self.now = at
            self.broker.advance(at)
        self.now = now

    async def owner(self, member: str) -> tuple[JetStreamMemberSource, Partition]:
        """A source that has taken over the only partition, which has no orphaned messages."""
        source = await self.source(member)
        (event,) = await source.receive(ALL)
        assert isinstance(event, Assigned)
        return source, event.partition


async def came(source: JetStreamMemberSource, room: Room = ALL) -> list[SourceEvent]:
    """The available events; none if the call would wait."""
    events: list[SourceEvent] = []

    async def receive() -> None:
        events.extend(await source.receive(room))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        # The call suspends once. Then it returns the available events, or waits for an event that never arrives.
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    return events


async def positions(source: JetStreamMemberSource, room: Room = ALL) -> list[int]:
    return [message.position for message in messages_of(await came(source, room))]


async def ack(source: JetStreamMemberSource, partition: Partition, messages: Sequence[Message]) -> None:
    await source.settle([Settlement(partition, list(messages))])


@pytest.mark.anyio
async def test_the_next_owner_gets_all_orphans_by_sequence_before_new_messages() -> None:
    bench = Bench(6)
    a, partition = await bench.owner("a")
    first = messages_of(await came(a))
    await ack(a, partition, [first[1]])
    bench.broker.consumer(0).nak(5, 0.0)
    bench.publish(2)
    bench.broker.crash("a", 0.0)
    b = await bench.source("b")
    assert await came(b) == []
    bench.until(LEASE)
    (event,) = await came(b)
    assert isinstance(event, Assigned)
    assert await came(b) == []
    bench.until(LEASE + SHRINK_SECONDS - 0.01)
    assert await came(b) == []
    bench.until(LEASE + SHRINK_SECONDS)
    # The messages are collected without room, and delivered when there is room.
    assert await came(b, Room(0, 0)) == []
    assert await positions(b, Room(2, 1 << 20)) == [1, 3]
    assert await positions(b) == [4, 5, 6]
    assert await positions(b) == [7, 8]
    assert bench.broker.consumer(0).settings == bench.broker.settings


@pytest.mark.anyio
async def test_every_owner_has_a_higher_epoch_than_the_former_one() -> None:
    bench = Bench()
    _, first = await bench.owner("a")
    bench.broker.crash("a", 0.0)
    b = await bench.source("b")
    bench.until(LEASE)
    (event,) = await came(b)
    assert isinstance(event, Assigned)
    assert (first.epoch, event.partition.epoch) == (1, 2)


@pytest.mark.anyio
async def test_a_takeover_includes_messages_extended_at_the_last_moment() -> None:
    bench = Bench(4)
    a, _ = await bench.owner("a")
    messages = messages_of(await came(a))
    bench.broker.freeze("a", 60.0)
    b = await bench.source("b")
    bench.until(LEASE)
    await came(b)
    assert await came(b) == []
    # Just before the timer: 2 becomes due after the timer and before the end of the shrink, in a separate batch.
    bench.now = LEASE + 0.0995
    await a.extend([messages[1]])
    bench.until(LEASE + 0.101)
    assert bench.broker.consumer(0).waiting == 4
    # This extension does not even delay its message to a separate batch.
    await a.extend([messages[0]])
    bench.until(LEASE + SHRINK_SECONDS)
    assert await positions(b) == [1, 2, 3, 4]


@pytest.mark.anyio
async def test_a_takeover_shrinks_again_for_messages_that_expire_late() -> None:
    bench = Bench(3)
    a, _ = await bench.owner("a")
    messages = messages_of(await came(a))
    bench.broker.freeze("a", 60.0)
    b = await bench.source("b")
    bench.until(LEASE)
    await came(b)
    await came(b)
    for millisecond in range(401):
        bench.now = LEASE + millisecond / 1000
        await a.extend([messages[0]])
        bench.broker.advance(bench.now)
    assert await came(b) == []
    bench.until(bench.now + SHRINK_SECONDS)
    assert await positions(b) == [1, 2, 3]


@pytest.mark.anyio
async def test_a_revoked_takeover_leaves_no_shrunk_ack_wait() -> None:
    bench = Bench(3)
    a, partition = await bench.owner("a")
    await came(a)
    await a.release(partition)
    await a.aclose()
    b = await bench.source("b")
    await came(b)
    await came(b)
    assert bench.broker.consumer(0).settings.ack_wait < 1
    assert bench.broker.cohort.revoke(0, bench.now)
    (event,) = await came(b)
    assert isinstance(event, Revoking)
    assert event.timeout == 5.0
    assert bench.broker.consumer(0).settings.ack_wait == 1000.0
    bench.until(1.0)
    assert await came(b) == []


@pytest.mark.anyio
async def test_a_crash_in_a_takeover_leaves_a_shrunk_ack_wait_that_the_next_owner_restores() -> None:
    bench = Bench(3)
    a, partition = await bench.owner("a")
    await came(a)
    await a.aclose()
    b = await bench.source("b")
    await came(b)
    await came(b)
    bench.broker.crash("b", bench.now)
    c = await bench.source("c")
    bench.until(LEASE)
    assert bench.broker.consumer(0).settings.ack_wait < 1
    await came(c)
    await came(c)
    bench.until(LEASE + 1)
    assert await positions(c) == [1, 2, 3]
    assert bench.broker.consumer(0).settings == bench.broker.settings
    assert not a.owned
    assert partition.id.number == 0


@pytest.mark.anyio
async def test_a_woken_owner_may_acknowledge_until_it_hears_of_its_loss() -> None:
    bench = Bench(3)
    a, old = await bench.owner("a")
    first = messages_of(await came(a))
    bench.broker.freeze("a", 20.0)
    b = await bench.source("b")
    bench.until(19.0)
    assert await came(a) == []
    await came(b)
    await came(b)
    bench.until(20.0)
    assert await positions(b) == [1, 2, 3]
    # Two owners. The server checks no token: the acknowledgement of an old delivery counts.
    await ack(a, old, first[:1])
    assert bench.broker.consumer(0).unacknowledged == [2, 3]
    (event,) = await came(a)
    assert isinstance(event, Lost)
    assert event.partition is old
    await ack(a, old, first[1:])
    await a.extend(first[1:])
    await a.release(old)
    assert bench.broker.consumer(0).unacknowledged == [2, 3]
    assert (a.owned, b.owned) == ([], [0])
    assert bench.broker.cohort.owner(0) == b.member
    bench.until(500.0)
    await a.extend(first[1:])
    bench.until(1020.1)
    assert bench.broker.consumer(0).waiting == 2


@pytest.mark.anyio
async def test_a_frozen_member_receives_nothing_and_wakes_by_itself() -> None:
    bench = Bench()
    a, _ = await bench.owner("a")
    bench.broker.freeze("nobody", 5.0)
    bench.broker.freeze("a", 5.0)
    bench.publish(1)
    assert await came(a) == []
    received: list[SourceEvent] = []
    async with anyio.create_task_group() as tasks:

        async def receive() -> None:
            received.extend(await a.receive(ALL))

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        bench.until(5.0)
    assert [message.position for message in messages_of(received)] == [1]


@pytest.mark.anyio
async def test_a_client_repeats_acknowledgements_and_takes_over_after_a_kill_of_the_server() -> None:
    bench = Bench(6)
    a, partition = await bench.owner("a")
    messages = messages_of(await came(a, Room(4, 1 << 20)))
    bench.until(1.0)
    await ack(a, partition, messages[:2])
    later = messages_of(await came(a))
    assert [message.position for message in later] == [5, 6]
    await ack(a, partition, later[:1])
    assert bench.broker.restart(1.0)
    assert [record.position for record in bench.broker.unfinished] == [1, 2, 3, 4, 5, 6]
    assert await came(a) == []
    # 1 and 2 were acknowledged again; 5 could not be: the server does not know to have delivered it.
    bench.until(1.0 + SHRINK_SECONDS)
    assert await positions(a) == [3, 4]
    assert await positions(a) == [5, 6]


@pytest.mark.anyio
async def test_a_crashed_member_changes_nothing() -> None:
    bench = Bench(2)
    a, partition = await bench.owner("a")
    messages = messages_of(await came(a))
    bench.broker.crash("a", 0.0)
    bench.broker.crash("nobody", 0.0)
    for call in (a.receive(ALL), a.settle([Settlement(partition, messages)]), a.extend(messages), a.release(partition)):
        with pytest.raises(SourceError, match="member a#1 of memory has crashed"):
            await call
    await a.aclose()
    assert bench.broker.cohort.owner(0) == "a#1"
    # A new process of the same name is another member.
    again = await bench.source("a")
    assert again.member == "a#2"
    assert await came(again) == []
    assert bench.broker.consumer(0).unacknowledged == [1, 2]
    bench.until(LEASE)
    assert isinstance((await came(again))[0], Assigned)


@pytest.mark.anyio
async def test_redeliver_delivers_acknowledged_and_unacknowledged_messages_again() -> None:
    bench = Bench(3)
    assert not bench.broker.redeliver(0, 0.0)
    a, partition = await bench.owner("a")
    messages = messages_of(await came(a))
    await ack(a, partition, messages[1:])
    again = []
    for _ in range(2):
        assert bench.broker.redeliver(0, 0.0)
        again += await positions(a)
    assert sorted(again) == [1, 3]
    tokens = {message.token for message in messages}
    assert all(each.token not in tokens for each in messages_of(await came(a)))
    with pytest.raises(IndexError, match="partition=1: memory has only the partitions 0 to 0"):
        bench.broker.redeliver(1, 0.0)


@pytest.mark.anyio
async def test_max_ack_pending_is_a_bound_and_an_acknowledgement_wakes() -> None:
    bench = Bench(3, bound=2)
    a, partition = await bench.owner("a")
    messages = messages_of(await came(a))
    assert [message.position for message in messages] == [1, 2]
    assert await came(a) == []
    received: list[SourceEvent] = []
    async with anyio.create_task_group() as tasks:

        async def receive() -> None:
            received.extend(await a.receive(ALL))

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        await ack(a, partition, messages[:1])
    assert [message.position for message in messages_of(received)] == [3]


@pytest.mark.anyio
async def test_a_paused_partition_is_taken_over_and_not_delivered() -> None:
    bench = Bench(2)
    a, partition = await bench.owner("a")
    assert await came(a, Room(9, 1 << 20, frozenset([partition]))) == []
    assert await positions(a) == [1, 2]


@pytest.mark.anyio
async def test_partitions_share_the_sequences_of_one_stream() -> None:
    bench = Bench(partitions=2)
    records = [bench.broker.publish(partition=number) for number in (0, 1, 1, 0)]
    bench.broker.skip(3, partition=1)
    records.append(bench.broker.publish(partition=0))
    assert [record.position for record in records] == [1, 2, 3, 4, 8]
    assert [(each.partition, each.position) for each in bench.broker.records] == [
        (0, 1),
        (0, 4),
        (0, 8),
        (1, 2),
        (1, 3),
    ]
    assert bench.broker.unfinished == bench.broker.records
    assert repr(bench.broker) == "<JetStreamBroker memory: 2 partitions, 5 messages>"
    a = await bench.source("a")
    assert len(await came(a)) == 2
    assert sorted(await positions(a)) == [1, 2, 3, 4, 8]
    assert repr(a) == "<JetStreamMemberSource a#1 of memory: 2 partitions>"


@pytest.mark.anyio
async def test_a_finite_source_is_exhausted_after_all_its_messages() -> None:
    bench = Bench(3)
    a, partition = await bench.owner("a")
    await came(a)
    await a.release(partition)
    await a.aclose()
    b = await bench.source("b")
    b.finish()
    await came(b)
    assert await came(b) == []
    bench.until(1.0)
    assert await positions(b, Room(2, 1 << 20)) == [1, 2]
    assert await positions(b) == [3]
    assert [type(event) for event in await came(b)] == [Exhausted]
    assert await came(b) == []


def test_the_simulated_jetstream_has_the_interface_of_a_personality() -> None:
    personality: Personality = JetStreamPersonality(2)
    assert personality.name == "jetstream"
    assert personality.next_at() == math.inf
    assert not personality.rebalance(0.0)
    assert not personality.lose(1, 0.0)


def test_a_dead_letter_is_kept_once() -> None:
    broker = JetStreamPersonality()
    fields: dict[str, Any] = {"source": "memory", "partition": 0, "position": 1, "subject": "memory", "key": None}
    fields |= {"headers": (), "attempts": 1, "error_type": "", "error_text": "", "epoch": 1, "time": 0.0}
    letters = [DeadLetter(id=name, value=value, **fields) for name, value in (("1", b"a"), ("2", b"b"), ("1", b"c"))]
    for letter in letters:
        broker.write_dead_letter(letter)
    assert broker.dead_letters == letters[:2]
