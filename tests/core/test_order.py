"""Order: the messages of a key, of a partition or of a shared lane run sequentially, in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lanes.core import ring
from lanes.core.engine import Engine
from lanes.core.policy import Keyless, Order
from lanes.core.types import ACK, Message, Partition
from tests.core.builders import (
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    new_message,
    take,
    take_all,
)


def test_the_messages_of_a_key_run_one_at_a_time_in_order() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 0, 1)
    deliver(engine, partition, 2)
    started = []
    while (message := engine.take()) is not None:
        assert engine.take() is None
        started.append(message.position)
        engine.finish(message, ACK, 0.0)
    assert started == [0, 1, 2]


def test_an_idle_key_starts_at_once() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    assert partition.tails == {}
    deliver(engine, partition, 1)
    assert take_all(engine) == [1]


def test_different_keys_run_side_by_side_in_order_of_delivery() -> None:
    engine = new_engine()
    partition = assigned(engine)
    for position, key in enumerate([b"a", b"b", b"a", b"c"]):
        deliver(engine, partition, position, key=key)
    assert take_all(engine) == [0, 1, 3]


def test_equal_keys_of_two_partitions_are_two_lanes() -> None:
    engine = new_engine()
    one, other = assigned(engine, 0), assigned(engine, 1)
    deliver(engine, one, 0)
    deliver(engine, other, 0)
    assert take_all(engine) == [0, 0]


def test_messages_without_a_key_run_side_by_side() -> None:
    engine = new_engine()
    partition = assigned(engine)
    first, second, third = deliver(engine, partition, 0, 1, 2, key=None)
    assert take_all(engine) == [0, 1, 2]
    for message in (third, first, second):
        engine.finish(message, ACK, 0.0)
    assert engine.collect(0.0)[0].messages == [third, first, second]
    assert partition.tails == {}


def test_messages_with_an_empty_key_run_one_at_a_time() -> None:
    engine = new_engine()
    deliver(engine, assigned(engine), 0, 1, key=b"")
    assert take_all(engine) == [0]


def test_at_most_concurrency_handlers_run() -> None:
    engine = new_engine(concurrency=2)
    partition = assigned(engine)
    deliver(engine, partition, 0, 1, 2, key=None)
    first = take(engine)
    take(engine)
    assert engine.take() is None
    engine.finish(first, ACK, 0.0)
    assert take_all(engine) == [2]


Keys = Sequence[bytes | None]
MIXED: Keys = [b"a", b"b", None, b"a", None]


def delivered(engine: Engine, keys: Keys, floor: int | None = None) -> list[Message]:
    partition = assigned(engine, len(engine.partitions), floor=floor)
    run = [new_message(partition, position, key) for position, key in enumerate(keys)]
    engine.receive(partition, run, len(run), 0.0)
    return run


def rounds(engine: Engine) -> list[list[int]]:
    """Run all ready messages to their end, round by round; returns the sorted positions of each round."""
    found = []
    while batch := iter_take(engine):
        found.append(sorted(message.position for message in batch))
        for message in batch:
            engine.finish(message, ACK, 0.0)
    return found


def iter_take(engine: Engine) -> list[Message]:
    taken = []
    while (message := engine.take()) is not None:
        taken.append(message)
    return taken


@pytest.mark.parametrize("floor", [None, 0])
@pytest.mark.parametrize(
    ("order", "keyless", "expected"),
    [
        ("key", "any", [[0, 1, 2, 4], [3]]),
        ("key", "one_lane", [[0, 1, 2], [3, 4]]),
        ("partition", "any", [[0], [1], [2], [3], [4]]),
        ("partition", "one_lane", [[0], [1], [2], [3], [4]]),
        ("serial", "any", [[0], [1], [2], [3], [4]]),
        ("none", "any", [[0, 1, 2, 3, 4]]),
        ("none", "one_lane", [[0, 1, 2, 3, 4]]),
    ],
)
def test_each_order_setting_runs_messages_together_as_documented(
    order: Order, keyless: Keyless, expected: list[list[int]], floor: int | None
) -> None:
    engine = new_engine(order=order, keyless=keyless)
    (partition,) = {message.partition for message in delivered(engine, MIXED, floor)}
    assert rounds(engine) == expected
    assert partition.tails == {}


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_messages_of_two_partitions_never_share_a_lane(order: Order) -> None:
    engine = new_engine(order=order, keyless="one_lane", lanes=1)
    for _ in range(2):
        delivered(engine, [b"a", None])
    starts = take_all(engine)
    assert starts.count(0) == 2


def test_serial_order_refuses_a_second_partition() -> None:
    engine = new_engine(order="serial")
    first = assigned(engine, 0)
    with pytest.raises(ValueError, match=r'^order="serial": S/1 would be a second partition; assign at most one$'):
        assigned(engine, 1)
    assert (list(engine.partitions), engine.latest_assignment) == ([first.id], 1)
    engine.release(first)
    assert assigned(engine, 1).live


@pytest.mark.parametrize("order", ["partition", "serial"])
def test_a_held_message_holds_its_whole_partition_in_order(order: Order) -> None:
    engine = new_engine(order=order)
    run = delivered(engine, MIXED)
    engine.finish(take(engine), failed(delay=5.0), 0.0)
    assert engine.take() is None
    engine.due(5.0)
    assert take(engine) is run[0]


def test_without_order_a_held_message_holds_no_other() -> None:
    engine = new_engine(order="none")
    delivered(engine, [b"a", b"a"])
    engine.finish(take(engine), failed(delay=5.0), 0.0)
    assert take_all(engine) == [1]


def folded(lanes: int, count: int = 60) -> tuple[list[bytes], dict[int, list[int]]]:
    """Keys, and the positions of each lane if each key is one message."""
    keys = [b"key %d" % (n % 20) for n in range(count)]
    by_lane: dict[int, list[int]] = {}
    for position, key in enumerate(keys):
        by_lane.setdefault(ring.lane(key, lanes), []).append(position)
    return keys, by_lane


@pytest.mark.parametrize("lanes", [1, 2, 7])
def test_keys_that_share_a_lane_run_in_the_order_of_delivery(lanes: int) -> None:
    keys, by_lane = folded(lanes)
    assert len(by_lane) == lanes
    engine = new_engine(lanes=lanes, concurrency=100)
    run = delivered(engine, keys)
    assert len(run[0].partition.tails) == lanes
    found: dict[int, list[int]] = {}
    for starts in rounds(engine):
        for position in starts:
            found.setdefault(ring.lane(keys[position], lanes), []).append(position)
        assert len({ring.lane(keys[position], lanes) for position in starts}) == len(starts)
    assert found == by_lane


def test_messages_without_a_key_share_no_lane_with_keys() -> None:
    cases: Sequence[tuple[Keyless, list[list[int]]]] = (("any", [[0, 1, 2], [3]]), ("one_lane", [[0, 1], [2, 3]]))
    for keyless, expected in cases:
        engine = new_engine(lanes=1, keyless=keyless)
        delivered(engine, [None, b"a", None, b"b"])
        assert rounds(engine) == expected


def test_a_key_has_the_shared_lane_of_its_hash() -> None:
    engine = new_engine(lanes=5)
    (message,) = delivered(engine, [b"customer-42"])
    assert message.lane == ring.lane(b"customer-42", 5)
    assert (message.key, new_message(message.partition, 1, b"x").lane) == (b"customer-42", b"x")


def test_a_late_message_joins_its_shared_lane() -> None:
    engine = new_engine(lanes=1)
    partition: Partition = assigned(engine)
    deliver(engine, partition, 5, 7, key=b"a")
    deliver(engine, partition, 6, key=b"b")
    deliver(engine, partition, 8, key=b"c")
    assert [type(e).__name__ for e in effects(engine)] == ["Redelivered"]
    assert rounds(engine) == [[5], [6], [7], [8]]
