"""A cohort over a partitioned queue on a simulated server: each physical queue is one cohort partition."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest

from lanes import ConfigError, PartitionedQueue, SourceError
from lanes.clock import monotonic
from lanes.core.cohort.records import CONFIG_KEY, PLAN_KEY
from lanes.core.types import Message, Partition, PartitionId, Room, Settlement
from lanes.source import Assigned, Delivered, Destination, Generation, Lost, Revoking
from lanes_jetstream import Cohort, JetStreamSource, header
from lanes_jetstream.cohort.source import CohortSource
from tests.simulated.jetstream.stage import LATENCY, Stage, played

QUEUE: Final = PartitionedQueue("q", partitions=4)
ROOM: Final = Room(100, 1_000_000)


def subjects(queue: PartitionedQueue) -> list[str]:
    return [subject for name in queue.names for subject in (name, f"{name}.>")]


class Member:
    """A member that settles all received messages, and releases all revoked partitions."""

    def __init__(self, client: Any, member: str, queue: PartitionedQueue, **cohort: Any) -> None:
        made = JetStreamSource(
            client,
            stream="S",
            cohort=Cohort("c", member=member, **{"lease": 3.0, **cohort}),
            key=header("customer"),
            queue=queue,
        )._source
        assert isinstance(made, CohortSource)
        self.source = made
        self.owned: dict[PartitionId, Partition] = {}
        self.messages: list[Message] = []

    async def run(self) -> None:
        while True:
            for event in await self.source.receive(ROOM):
                if isinstance(event, Assigned):
                    self.owned[event.partition.id] = event.partition
                elif isinstance(event, Lost):
                    self.owned.pop(event.partition.id, None)
                elif isinstance(event, Revoking):
                    self.owned.pop(event.partition.id, None)
                    await self.source.release(event.partition)
                elif isinstance(event, Delivered):
                    self.messages += event.run
                    await self.source.settle([Settlement(event.partition, event.run)])
                else:
                    assert isinstance(event, Generation)


async def joined(stage: Stage, member: str = "a", queue: PartitionedQueue = QUEUE, **cohort: Any) -> Member:
    """A running member with a separate client. The stream has the subjects of four partitions."""
    if "S" not in stage.server.api.streams:
        await stage.stream("S", subjects=subjects(QUEUE))
    made = Member(await stage.connect(), member, queue, **cohort)
    await made.source.open()
    return made


async def until(condition: Any, *members: Member) -> None:
    """Let members run until a condition is true."""
    async with asyncio.timeout(120):
        tasks = [asyncio.create_task(member.run()) for member in members]
        try:
            while not condition():
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def left(*members: Member) -> None:
    for member in members:
        for partition in member.owned.values():
            await member.source.release(partition)
        member.owned.clear()
        await member.source.aclose()
        await member.source.connection.client.close()


async def forget_settings(stage: Stage) -> None:
    """Delete the settings and the plan of the cohort from its bucket, as an operator does to change the width."""
    (bucket,) = stage.server.api.buckets.values()
    keys = (CONFIG_KEY, PLAN_KEY)
    for key in keys:
        found = bucket.data.read(key, monotonic())
        assert found.value is not None
        bucket.data.write(key, found.value, monotonic(), revision=found.revision, ttl=1)
    await asyncio.sleep(10.0)
    assert [bucket.data.read(key, monotonic()).value for key in keys] == [None, None]


def test_each_physical_queue_is_a_cohort_partition() -> None:
    async def scene(stage: Stage) -> None:
        member = await joined(stage)
        traits = member.source.declared()
        assert (traits.partitions, traits.queues) == (4, (QUEUE,))
        await stage.publish("q", "q__p3", "q__p1.ann", "q.bob", "q__p2")
        await until(lambda: len(member.messages) == 5, member)
        assert set(member.owned) == {PartitionId(name, number) for number, name in enumerate(QUEUE.names)}
        assert {message.position: message.partition.id for message in member.messages} == {
            1: PartitionId("q", 0),
            2: PartitionId("q__p3", 3),
            3: PartitionId("q__p1", 1),
            4: PartitionId("q", 0),
            5: PartitionId("q__p2", 2),
        }
        consumers = stage.server.api.streams["S"].consumers.values()
        assert sorted(each.config["filter_subjects"] for each in consumers) == [
            ["q", "q.>"],
            ["q__p1", "q__p1.>"],
            ["q__p2", "q__p2.>"],
            ["q__p3", "q__p3.>"],
        ]
        assert member.source.reads(Destination("nats", "S", "q__p1"))
        assert not member.source.reads(Destination("nats", "S", "q__p4"))
        assert "partitions of q>" in repr(member.source._partitions)
        await left(member)

    played(scene)


def test_two_members_share_the_partitions_and_repeat_nothing() -> None:
    async def scene(stage: Stage) -> None:
        one = await joined(stage, "a")
        await stage.publish(*QUEUE.names)
        await until(lambda: len(one.messages) == 4, one)
        other = await joined(stage, "b")
        await until(lambda: (len(one.owned), len(other.owned)) == (2, 2), one, other)
        assert not one.owned.keys() & other.owned.keys()
        await stage.publish(*QUEUE.names)
        await until(lambda: len(one.messages + other.messages) >= 8, one, other)
        assert sorted(message.position for message in one.messages + other.messages) == list(range(1, 9))
        await left(one, other)

    played(scene)


def test_a_member_of_another_width_is_refused() -> None:
    async def scene(stage: Stage) -> None:
        member = await joined(stage)
        other = Member(await stage.connect(), "b", PartitionedQueue("q", partitions=2))
        with pytest.raises(ConfigError, match=r"partitions.*4.*2|partitions.*2.*4"):
            await other.source.open()
        await left(other, member)

    played(scene)


def test_after_its_settings_were_deleted_a_cohort_continues_with_more_partitions() -> None:
    async def scene(stage: Stage) -> None:
        narrow = await joined(stage, queue=PartitionedQueue("q", partitions=2))
        await stage.publish(*QUEUE.names)
        await until(lambda: len(narrow.messages) == 2, narrow)
        await left(narrow)
        await forget_settings(stage)
        wide = await joined(stage)
        await until(lambda: len(wide.messages) >= 2, wide)
        await stage.publish(*QUEUE.names)
        await until(lambda: len(wide.messages) >= 6, wide)
        # The partitions from before continue at their positions, and the added ones begin with their first messages.
        assert sorted(message.position for message in wide.messages) == [3, 4, 5, 6, 7, 8]
        await left(wide)

    played(scene)


def test_a_stream_without_a_partition_is_refused_at_the_start_and_during_the_run() -> None:
    async def scene(stage: Stage) -> None:
        await stage.stream("S", subjects=subjects(QUEUE)[:-2])
        made = Member(await stage.connect(), "a", QUEUE)
        with pytest.raises(ConfigError, match=r"^stream 'S' does not store partition 3 of queue 'q'; add the subjects"):
            await made.source.open()
        await left(made)
        stage.server.api.streams["S"].config["subjects"] = subjects(QUEUE)
        member = await joined(stage)
        stage.server.api.streams["S"].config["subjects"] = subjects(QUEUE)[2:]
        with pytest.raises((ConfigError, SourceError), match=r"does not store partition 0 of queue 'q'"):
            await until(lambda: False, member)
        member.owned.clear()
        await left(member)

    played(scene)


def test_a_missing_stream_is_named_with_the_queue() -> None:
    async def scene(stage: Stage) -> None:
        made = Member(await stage.connect(), "a", QUEUE)
        with pytest.raises(ConfigError, match=r"^stream 'S' does not exist .* with the subjects of queue 'q'"):
            await made.source.open()
        await left(made)
        await asyncio.sleep(LATENCY)

    played(scene)


def test_messages_that_no_member_reads_are_found_by_name(caplog: pytest.LogCaptureFixture) -> None:
    narrow = PartitionedQueue("q", partitions=2)

    async def scene(stage: Stage) -> None:
        wide = await joined(stage)
        await stage.publish("q__p2", "q__p3")
        await until(lambda: len(wide.messages) == 2, wide)
        await left(wide)
        await forget_settings(stage)
        # One finished and one unfinished message in q__p2, and a finished one in q__p3.
        await stage.publish("q__p2.ann")
        member = await joined(stage, "b", narrow)
        began = monotonic()
        await until(lambda: bool(member.source.queue_watch.found), member)
        assert monotonic() - began < 6.2
        assert [(each.name, each.messages) for each in member.source.queue_watch.found] == [("q__p2", 1)]
        (text,) = member.source.queue_watch.findings()
        assert "no consumer of cohort 'c' reads the messages in 'q__p2' (1). The producers use" in text
        lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert lines == [f"jetstream S/c, member b: {text}"]
        # A cohort that has never read these names finds all stored messages.
        new = await joined(stage, "n", narrow, namespace="new")
        await until(lambda: bool(new.source.queue_watch.found), new)
        found = {each.name: each.messages for each in new.source.queue_watch.found}
        assert found == {"q__p2": 2, "q__p3": 1}
        await left(member, new)

    played(scene)
