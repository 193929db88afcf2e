"""A simulated member of a partitioned queue reads the topics of its width, and names topics that no member reads."""

from __future__ import annotations

import pytest

from lanes import PartitionedQueue
from lanes.core.types import PartitionId, Room
from lanes.queues.stranded import Stranded
from lanes.source import Assigned, Stranding
from memsource.kafka.broker import KafkaSettings
from memsource.kafka.queue import QueueMemberSource, QueuePersonality
from memsource.sim.loop.choosers import Fifo
from memsource.sim.loop.event_loop import current
from memsource.sim.loop.virtual import run

ROOM = Room(100, 1 << 20)


def stage(width: int) -> QueuePersonality:
    return QueuePersonality("orders", most=4, width=width, settings=KafkaSettings(heartbeat_interval=0.0))


def joined(broker: QueuePersonality, member: str, width: int) -> QueueMemberSource:
    broker.workers = PartitionedQueue("orders", width)
    source = broker.source(member, lambda: 0.0)
    broker.join(source.client, 0.0)
    return source


def test_a_topic_has_an_owner_only_among_the_members_that_read_it() -> None:
    broker = stage(2)
    joined(broker, "narrow", 2)
    assert [broker.owner(number) for number in broker.partitions] == ["narrow", "narrow", None, None]
    joined(broker, "wide", 4)
    assert [broker.owner(number) for number in (2, 3)] == ["wide", "wide"]
    assert broker.width_of("narrow") == 2


def test_the_facts_of_a_topic_have_its_messages_and_its_readers() -> None:
    broker = stage(2)
    joined(broker, "narrow", 2)
    for number in (0, 3, 3):
        broker.publish(partition=number)
    facts = broker.facts(["orders", "orders__p3"])
    assert {name: (fact.messages, fact.unfinished["g"], fact.readers["g"]) for name, fact in facts.items()} == {
        "orders": (1, 1, 1),
        "orders__p3": (2, 2, 0),
    }


@pytest.mark.parametrize(("width", "found"), [(1, 0), (2, 2), (4, 0)])
def test_a_member_names_a_topic_with_messages_that_nobody_reads(width: int, found: int) -> None:
    """A member of width 1 looks up to width 2 only, and a member of width 4 reads the topic."""
    seen: list[Stranded] = []

    async def main() -> None:
        broker = stage(width)
        source = broker.source("a", current().time)
        assert isinstance(source, Stranding)
        traits = await source.open()
        assert traits.queues == (PartitionedQueue("orders", width),)
        (event, *_) = await source.receive(ROOM)
        assert isinstance(event, Assigned) and event.partition.id == PartitionId("orders", 0)
        for _ in range(2):
            broker.publish(partition=3)
        for second in range(1, 11):
            current().call_at(float(second), broker.advance, float(second))
        # The looks happen in a call that waits for messages; the message at the end ends the wait.
        current().call_at(10.0, broker.publish)
        await source.receive(ROOM)
        while current().time() < 10.0:
            await source.receive(ROOM)
        seen.extend(source.stranded())

    run(main, chooser=Fifo())
    assert seen == [Stranded("orders", "orders__p3", 2)] * bool(found)
