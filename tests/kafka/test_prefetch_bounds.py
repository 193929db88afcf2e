"""The prefetch delivers the messages of a rewind, and keeps to the smallest room."""

from __future__ import annotations

from lanes.core.types import Room
from lanes.source import Progressed
from lanes_kafka.client.prefetch import REWIND_AFTER, Prefetched
from tests.kafka.test_prefetch import OWNED, PARTITIONS, credit, paused, positions, run


def test_messages_read_for_the_demand_of_a_rewind_are_delivered() -> None:
    held = Prefetched()
    held.add([run(0, 5, 10)], 1)
    held.rewind(paused(0), OWNED, 2, 0.0)
    held.rewind(paused(0), OWNED, 3, REWIND_AFTER)
    held.add([run(0, 15, 5)], 2)
    held.add([run(0, 5, 3)], 3)
    assert positions(held.take(Room(10, 100)), 0) == [5, 6, 7]
    assert held.received.messages == 18


def test_a_commit_that_pauses_all_partitions_pauses_no_client_while_there_is_room() -> None:
    """They may resume in a moment, and a pause discards fetched messages."""
    held = Prefetched()
    held.rewind(paused(0, 1, 2, messages=1), OWNED, 1, 0.0)
    assert held.client_paused == frozenset()
    held.rewind(paused(0, 1, 2, messages=0), OWNED, 2, 0.0)
    assert held.client_paused == set(PARTITIONS)


def test_a_message_waits_alone_in_the_smallest_room() -> None:
    held = Prefetched()
    held.add([run(0, 0, 3), run(1, 0, 3)], 1)
    (first,) = held.take(Room(1, 100))
    assert len(positions([first], 0) + positions([first], 1)) == 1 and held.messages == 5
    assert held.take(Room(0, 100)) == [] and held.messages == 5
    assert credit(Prefetched(), 1, owned=1)[0] == 1


def test_messages_without_content_need_no_bytes() -> None:
    held = Prefetched()
    held.add([run(0, 0, 10, size=0)], 1)
    assert positions(held.take(Room(10, 1)), 0) == list(range(10))


def test_a_gap_follows_the_messages_before_it_and_delays_no_other_partition() -> None:
    held = Prefetched()
    after, other = Progressed(PARTITIONS[0], 15), Progressed(PARTITIONS[1], 7)
    held.add([run(0, 0, 10), after, other, run(1, 7, 2)], 1)
    first = held.take(Room(4, 100))
    assert (positions(first, 0), positions(first, 1)) == ([0, 1], [7, 8])
    assert other in first and after not in first
    rest = held.take(Room(100, 100))
    assert positions(rest, 0) == list(range(2, 10)) and rest[-1] == after
