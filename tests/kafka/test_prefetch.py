"""Prefetched messages are shared among partitions, dropped for long pauses, and never skipped."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from lanes.core.types import Message, Partition, PartitionId, Room
from lanes.source import Assigned, Delivered, Lost, SourceEvent
from lanes_kafka.client.prefetch import READ_AHEAD, READ_AHEAD_BYTES, REWIND_AFTER, Credit, Prefetched
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
    assert held.messages == 160 and held.received == (205, 205)
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
    assert held.take(paused(0)) == []
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


def test_messages_of_other_partitions_are_kept_beside_those_before_a_rewind() -> None:
    """One read of the thread may have both."""
    held = Prefetched()
    held.add([run(0, 0, 10)], 1)
    held.rewind(paused(0), OWNED, 1, 0.0)
    assert held.rewind(paused(0), OWNED, 3, REWIND_AFTER) == {PARTITIONS[0]: (3, 0)}
    held.add([run(0, 10, 5), run(1, 0, 5), Lost(PARTITIONS[2], "why")], 2)
    events = held.take(Room(100, 1_000))
    assert (delivered(events), Lost(PARTITIONS[2], "why") in events) == ({1: 5}, True)


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


def credit(held: Prefetched, room: int, *, owned: int = 2, aside: int = 0, size: int = 1 << 20) -> tuple[int, int]:
    """Messages and bytes that the thread may read now, with this room and with some paused partitions."""
    given = held.credit(Room(room, size if room else 0, frozenset(PARTITIONS[:aside])), set(PARTITIONS[:owned]))
    return given.messages - held.received.messages, given.bytes - held.received.bytes


def test_waiting_messages_use_up_the_room_of_their_partition() -> None:
    held = Prefetched()
    held.add([run(0, 0, 5, size=10)], 1)
    assert credit(held, 10, owned=1, size=100) == (5, 50)


def test_reading_ahead_is_bounded() -> None:
    held = Prefetched()
    held.add([Assigned(PARTITIONS[0]), Assigned(PARTITIONS[1])], 1)
    assert credit(held, 10) == (10 + READ_AHEAD, (1 << 20) + READ_AHEAD_BYTES), "the first look at the partitions"
    held.add([run(0, 0, 70), run(1, 0, 30)], 1)
    assert held.messages == held.bytes == 100 and credit(held, 10) == (0, 0)
    assert credit(held, 0) == (READ_AHEAD - 100, READ_AHEAD_BYTES - 100)
    assert credit(held, 0, owned=1) == (0, 0), "one partition needs no reading ahead"
    held.take(Room(100, 1_000))
    assert credit(held, 10) == (10, 1 << 20), "fast handlers get all messages"
    held.add([run(0, 70, READ_AHEAD // 2)], 1)
    assert credit(held, 0) == (0, 0)


@pytest.mark.parametrize("owned", [1, 2, 3])
def test_the_prefetch_stays_within_its_bytes(owned: int) -> None:
    held = Prefetched()
    held.add([Assigned(each) for each in PARTITIONS[:owned]], 1)
    held.take(Room(0, 0))
    position = 0
    size = READ_AHEAD_BYTES // 10
    while (given := credit(held, 0, owned=owned))[0] > 0 and given[1] > 0:
        held.add([run(position % owned, position, 1, size)], 1)
        position += 1
    # One message may exceed the bytes.
    assert held.bytes <= READ_AHEAD_BYTES + size
    assert (position > 0) is (owned > 1)


def test_messages_of_paused_partitions_are_bounded() -> None:
    held = Prefetched()
    held.add([Assigned(each) for each in PARTITIONS] + [run(0, 0, 1_000)], 1)
    assert credit(held, 0, owned=3, aside=1)[0] == READ_AHEAD - 1_000
    assert credit(held, 10, aside=1) == (10, 1 << 20), "the other partition continues"
    held.add([run(0, 1_000, READ_AHEAD - 1_000 + 5)], 1)
    assert credit(held, 10, aside=1) == (5, 1 << 20)
    assert credit(held, 10, aside=2) == (0, 0), "no message can be delivered"


def test_a_paused_partition_that_was_given_back_stops_no_other_partition() -> None:
    held = Prefetched()
    held.add([Assigned(each) for each in PARTITIONS], 1)
    gone = frozenset({PARTITIONS[2]})
    assert held.credit(Room(10, 100, gone), {PARTITIONS[0]}).messages == 10
    assert held.credit(Room(10, 100, gone), set(PARTITIONS[:2])).messages == 10 + READ_AHEAD, "two partitions are left"
    assert held.credit(Room(10, 100, gone | {PARTITIONS[0]}), {PARTITIONS[0]}).messages == 0


def test_a_credit_is_renewed_when_half_of_it_is_used_up() -> None:
    held = Prefetched()
    held.granted = Credit(10, 1_000)
    assert not held.needs_credit(Credit(10, 1_000))
    held.add([run(0, 0, 4)], 1)
    assert not held.needs_credit(Credit(14, 1_004)), "six of ten are left"
    held.add([run(0, 4, 1)], 1)
    assert held.needs_credit(Credit(15, 1_005)) and not held.needs_credit(Credit(10, 1_000)), "nothing is gained"
    held.add([run(0, 5, 1, 600)], 1)
    assert held.needs_credit(Credit(10, 1_605)), "the bytes are used up first"
    held.add([run(0, 6, 10)], 1)
    assert not held.needs_credit(held.received), "without room nothing is gained"


def test_the_first_messages_after_an_assignment_wait_for_those_of_the_other_partitions() -> None:
    held = Prefetched()
    held.add([Assigned(PARTITIONS[0]), Assigned(PARTITIONS[1])], 1)
    room = Room(10, 1_000)
    assert [type(each) for each in held.take(room)] == [Assigned, Assigned]
    held.granted = held.credit(room, set(PARTITIONS[:2]))
    held.add([run(0, 0, 1_000)], 2, filling=True)
    assert held.take(room) == []
    held.add([run(1, 0, 1_000)], 2, filling=True)
    assert held.take(room) == []
    held.add([], 2)
    assert delivered(held.take(room)) == {0: 5, 1: 5}
    held.add([run(1, 1_000, 1_000)], 2, filling=True)
    assert delivered(held.take(room)) == {0: 5, 1: 5}, "later messages do not wait"


def test_no_message_waits_for_others_after_the_credit_is_used_up() -> None:
    held = Prefetched()
    held.add([Assigned(PARTITIONS[0])], 1)
    held.granted = Credit(10, 1_000)
    held.add([run(0, 0, 10)], 2, filling=True)
    assert delivered(held.take(Room(10, 1_000))) == {0: 10}
