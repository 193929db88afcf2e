"""What was read and is not delivered yet: shared among partitions, forgotten for those that rest, never skipped."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import cast

from lanes.core.types import Message, Partition, PartitionId, Room
from lanes.source import Delivered, Lost, SourceEvent
from lanes_kafka.ahead import AHEAD, AHEAD_BYTES, Ahead
from lanes_kafka.group import Group
from lanes_kafka.held import REWIND_AFTER, Held
from lanes_kafka.reading import READER
from lanes_kafka.requests import Want

PARTITIONS = [Partition(PartitionId("T", number), READER, "") for number in range(3)]


def run(number: int, first: int, count: int, size: int = 1) -> Delivered:
    partition = PARTITIONS[number]
    found = [Message(partition, position, None, size, None, None) for position in range(first, first + count)]
    return Delivered(partition, found, count * size)


def delivered(events: list[SourceEvent]) -> Counter[int]:
    return Counter({each.partition.id.number: len(each.run) for each in events if isinstance(each, Delivered)})


def positions(events: list[SourceEvent], number: int) -> list[int]:
    runs = [each.run for each in events if isinstance(each, Delivered) and each.partition is PARTITIONS[number]]
    return [message.position for found in runs for message in found]


def test_partitions_share_the_room_and_leave_what_they_do_not_need() -> None:
    held = Held()
    held.add([run(0, 0, 100), run(1, 0, 5), run(2, 0, 100)], 1)
    assert delivered(held.take(Room(45, 1_000))) == {0: 20, 1: 5, 2: 20}
    assert held.messages == 160 and held.received == 205
    assert positions(held.take(Room(10, 1_000)), 0) == [20, 21, 22, 23, 24]


def test_bytes_are_crossed_by_one_message() -> None:
    held = Held()
    held.add([run(0, 0, 10, size=100)], 1)
    assert positions(held.take(Room(10, 250)), 0) == [0, 1]
    assert positions(held.take(Room(10, 1)), 0) == [2]
    assert held.take(Room(10, 0)) == []


def test_a_partition_that_rests_for_a_moment_keeps_what_was_read_of_it() -> None:
    held = Held()
    held.add([run(0, 0, 10)], 1)
    resting = frozenset({PARTITIONS[0]})
    assert held.rewind(resting, 2, 0.0) == {}
    assert held.take(Room(10, 100, resting)) == [] and held.waiting(resting) == 0
    assert held.rewind(frozenset(), 3, REWIND_AFTER) == {} and not held.stale(REWIND_AFTER)
    assert positions(held.take(Room(10, 100)), 0) == list(range(10))


def test_what_was_forgotten_is_asked_for_until_somebody_has_seen_that() -> None:
    held = Held()
    held.add([run(0, 5, 10)], 1)
    resting = frozenset({PARTITIONS[0]})
    held.rewind(resting, 2, 0.0)
    assert held.stale(REWIND_AFTER)
    assert held.rewind(resting, 3, REWIND_AFTER) == {PARTITIONS[0]: (3, 5)}
    assert held.messages == 0 and not held.stale(REWIND_AFTER)
    # A request replaces the one before it: whoever reads may never have seen that one.
    assert held.rewind(frozenset(), 4, REWIND_AFTER) == {PARTITIONS[0]: (3, 5)}
    held.add([run(0, 15, 5)], 2)
    assert not held, "it comes again, behind what was forgotten"
    held.add([run(0, 5, 10)], 4)
    assert positions(held.take(Room(100, 100)), 0) == list(range(5, 15))
    held.add([Lost(PARTITIONS[0], "")], 4)
    assert held.rewind(frozenset(), 5, REWIND_AFTER) == {}


def wanted(
    ahead: Ahead, room: int, *, partitions: int = 2, held: int = 0, received: int = 0, average: float = 1.0
) -> int:
    group = cast(Group, SimpleNamespace(owned=range(partitions), rounds=1))
    want = Want(1, room, 64 << 20 if room else 0, frozenset(), {}, held=held, received=received)
    return ahead.wanted(want, group, average)


def test_what_is_read_ahead_is_bounded() -> None:
    ahead = Ahead()
    assert wanted(ahead, 10) == 10 + AHEAD, "the first look"
    ahead.gather([run(0, 0, 70), run(1, 0, 30)])
    assert wanted(ahead, 10) == 10 + AHEAD - 100
    assert delivered(list(ahead.taken())) == {0: 70, 1: 30} and ahead.taken() == []
    # On its way to the loop, which does not know of it yet.
    assert wanted(ahead, 10) == 0
    assert wanted(ahead, 10, received=100) == 10, "handlers that keep up get what is there"
    assert wanted(ahead, 0, received=100) == AHEAD
    assert wanted(ahead, 0, held=AHEAD // 2, received=100) == 0
    assert wanted(ahead, 0, partitions=1, received=100) == 0
    assert wanted(ahead, 0, received=100, average=AHEAD_BYTES / 3) == 3
    assert wanted(ahead, 10, received=100, average=1e12) == 1, "larger than all the room"
