"""Prefetched messages are shared among partitions, dropped for long pauses, and never skipped."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from lanes.core.types import Message, Partition, PartitionId, Room
from lanes.source import Delivered, Lost, SourceEvent
from lanes_kafka.client.group import Group
from lanes_kafka.client.mailbox import Demand
from lanes_kafka.client.prefetch import READ_AHEAD, READ_AHEAD_BYTES, REWIND_AFTER, Prefetched, ReadAhead
from lanes_kafka.client.records import READER

PARTITIONS = [Partition(PartitionId("T", number), READER, "") for number in range(3)]
OWNED = set(PARTITIONS)


def run(number: int, first: int, count: int, size: int = 1) -> Delivered:
    partition = PARTITIONS[number]
    found = [Message(partition, position, None, size, None, None) for position in range(first, first + count)]
    return Delivered(partition, found, count * size)


def delivered(events: list[SourceEvent]) -> Counter[int]:
    return Counter({each.partition.id.number: len(each.run) for each in events if isinstance(each, Delivered)})


def positions(events: list[SourceEvent], number: int) -> list[int]:
    runs = [each.run for each in events if isinstance(each, Delivered) and each.partition is PARTITIONS[number]]
    return [message.position for found in runs for message in found]


def test_partitions_share_the_room_by_need() -> None:
    held = Prefetched()
    held.add([run(0, 0, 100), run(1, 0, 5), run(2, 0, 100)], 1)
    assert delivered(held.take(Room(45, 1_000))) == {0: 20, 1: 5, 2: 20}
    assert held.messages == 160 and held.received == 205
    assert positions(held.take(Room(10, 1_000)), 0) == [20, 21, 22, 23, 24]


def test_the_byte_bound_is_crossed_by_one_message_at_most() -> None:
    held = Prefetched()
    held.add([run(0, 0, 10, size=100)], 1)
    assert positions(held.take(Room(10, 250)), 0) == [0, 1]
    assert positions(held.take(Room(10, 1)), 0) == [2]
    assert held.take(Room(10, 0)) == []


def paused(*numbers: int, messages: int = 10) -> Room:
    return Room(messages, 1 << 20, frozenset(PARTITIONS[number] for number in numbers))


def test_a_briefly_paused_partition_keeps_its_messages() -> None:
    held = Prefetched()
    held.add([run(0, 0, 10)], 1)
    assert held.rewind(paused(0), OWNED, 2, 0.0) == {} and held.client_paused == frozenset()
    assert held.take(paused(0)) == [] and held.waiting(paused(0).paused) == 0
    assert held.due() == REWIND_AFTER
    assert held.rewind(Room(10, 100), OWNED, 3, REWIND_AFTER) == {} and held.due() == math.inf
    assert positions(held.take(Room(10, 100)), 0) == list(range(10))


def test_the_client_is_paused_for_a_long_pause_or_for_all_partitions() -> None:
    held = Prefetched()
    held.rewind(paused(0), OWNED, 1, 0.0)
    held.rewind(paused(0, 1), OWNED, 2, 0.5)
    assert held.client_paused == frozenset() and held.due() == REWIND_AFTER
    held.rewind(paused(0, 1), OWNED, 3, REWIND_AFTER)
    assert held.client_paused == {PARTITIONS[0]} and held.due() == REWIND_AFTER + 0.5
    held.rewind(paused(1), OWNED, 4, REWIND_AFTER)
    assert held.client_paused == frozenset()
    held.rewind(paused(1, 2, messages=0), OWNED, 5, REWIND_AFTER)
    assert held.client_paused == frozenset(), "the first partitions wait for a commit, and the others for room"
    held.rewind(paused(0, 1, 2, messages=0), OWNED, 6, REWIND_AFTER)
    assert held.client_paused == OWNED and held.due() == math.inf


def test_dropped_messages_are_requested_until_they_are_read_again() -> None:
    held = Prefetched()
    held.add([run(0, 5, 10)], 1)
    held.rewind(paused(0), OWNED, 2, 0.0)
    assert held.due() == REWIND_AFTER
    assert held.rewind(paused(0), OWNED, 3, REWIND_AFTER) == {PARTITIONS[0]: (3, 5)}
    assert held.messages == 0 and held.due() == math.inf
    # A demand replaces the former one, which the thread may never have seen.
    assert held.rewind(Room(10, 100), OWNED, 4, REWIND_AFTER) == {PARTITIONS[0]: (3, 5)}
    held.add([run(0, 15, 5)], 2)
    assert held.take(Room(10, 100)) == [], "the partition is delivered again, after the dropped messages"
    held.add([run(0, 5, 10)], 4)
    assert positions(held.take(Room(100, 100)), 0) == list(range(5, 15))
    held.add([Lost(PARTITIONS[0], "")], 4)
    assert held.rewind(Room(10, 100), OWNED, 5, REWIND_AFTER) == {}


@pytest.mark.parametrize(("count", "size"), [(READ_AHEAD // 4, 1), (1, READ_AHEAD_BYTES // 4)])
def test_paused_partitions_leave_room_for_the_others(count: int, size: int) -> None:
    held = Prefetched()
    held.rewind(paused(0, 1), OWNED, 1, 0.0)
    for number in (0, 1, 2):
        held.add([run(number, 0, count, size)], 1)
    assert held.due() == REWIND_AFTER and held.rewind(paused(0, 1), OWNED, 2, 0.0) == {}
    held.add([run(0, count, 1)], 1)
    assert held.due() < 0
    # Without messages in other partitions, no partition needs the room of the paused ones.
    assert held.rewind(paused(0, 1, messages=0), OWNED, 3, 0.0) == {}
    assert held.rewind(paused(0, 1), OWNED, 4, 0.0) == {PARTITIONS[0]: (4, 0), PARTITIONS[1]: (4, 0)}
    assert held.client_paused == {PARTITIONS[0], PARTITIONS[1]} and held.messages == count


def wanted(
    ahead: ReadAhead,
    room: int,
    *,
    partitions: int = 2,
    client_paused: int = 0,
    gone: int = 0,
    held: int = 0,
    aside: int = 0,
    received: int = 0,
    average: float = 1.0,
) -> int:
    owned = {each.id: SimpleNamespace(partition=each) for each in PARTITIONS[:partitions]}
    group = cast(Group, SimpleNamespace(owned=owned, rebalances=1))
    paused = frozenset([*PARTITIONS[:client_paused], *PARTITIONS[len(PARTITIONS) - gone :]])
    demand = Demand(1, room, 64 << 20 if room else 0, paused, {}, waiting=held, waiting_paused=aside, received=received)
    return ahead.to_read(demand, group, average)


def test_reading_ahead_is_bounded() -> None:
    ahead = ReadAhead()
    assert wanted(ahead, 10) == 10 + READ_AHEAD, "the first check of the partitions"
    ahead.gather([run(0, 0, 70), run(1, 0, 30)])
    assert wanted(ahead, 10) == 10 + READ_AHEAD - 100
    assert delivered(list(ahead.take())) == {0: 70, 1: 30} and ahead.take() == []
    # The messages are on their way to the loop.
    assert wanted(ahead, 10) == 0
    assert wanted(ahead, 10, received=100) == 10, "fast handlers get all messages"
    assert wanted(ahead, 0, received=100) == READ_AHEAD
    assert wanted(ahead, 0, held=READ_AHEAD // 2, received=100) == 0
    assert wanted(ahead, 0, partitions=1, received=100) == 0
    assert wanted(ahead, 0, received=100, average=READ_AHEAD_BYTES / 3) == 3
    assert wanted(ahead, 10, received=100, average=1e12) == 1, "a message larger than the whole room"


def test_messages_of_paused_partitions_are_bounded() -> None:
    ahead = ReadAhead()
    assert wanted(ahead, 10, partitions=3, client_paused=1, aside=1_000) == 10 + READ_AHEAD - 1_000
    ahead.gather([run(0, 0, 1), run(1, 0, 1)])
    ahead.take()
    assert wanted(ahead, 10, client_paused=1, aside=READ_AHEAD // 2, received=2) == 10, "the other partitions continue"
    assert wanted(ahead, 10, client_paused=1, aside=READ_AHEAD + 5, received=2) == 5
    assert wanted(ahead, 10, client_paused=2, received=2) == 0, "no message can be delivered"


def test_a_paused_partition_that_was_given_back_stops_no_other_partition() -> None:
    # The loop may send no newer demand before the next message arrives.
    assert wanted(ReadAhead(), 10, partitions=1, gone=1) == 10
    assert wanted(ReadAhead(), 10, gone=1) == 10 + READ_AHEAD, "two partitions are left"
    assert wanted(ReadAhead(), 10, partitions=1, client_paused=1, gone=1) == 0, "no message can be delivered"
