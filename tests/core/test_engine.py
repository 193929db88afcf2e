"""The way of a message: received, taken, finished, collected, settled; held, parked or halted on the way."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.lane import (
    ABANDONED,
    BLOCKED,
    DEAD_LETTERING,
    FINISHED,
    HELD,
    QUEUED,
    RUNNING,
    SETTLED,
    IllegalTransition,
)
from lanes.core.types import ACK, NEVER, Message, Room
from tests.core.builders import (
    ATTEMPTS,
    BACKOFF,
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    new_message,
    take,
    take_all,
)


def test_a_message_from_delivery_to_settlement() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 7, size=30, now=5.0)
    assert (message.state, message.received, engine.ready) == (QUEUED, 5.0, 1)
    assert take(engine) is message
    assert (message.state, engine.running_handlers, engine.ready) == (RUNNING, 1, 0)
    engine.finish(message, ACK, 6.0)
    assert (message.state, engine.running_handlers, engine.dirty) == (FINISHED, 0, [partition])
    (settlement,) = engine.collect(0.0)
    assert (settlement.partition, settlement.messages) == (partition, [message])
    # On its way to the broker it still counts.
    assert (engine.flow.in_flight, engine.flow.bytes, engine.dirty) == (1, 30, [])
    engine.settled([settlement])
    assert (message.state, engine.flow.in_flight, engine.flow.bytes) == (SETTLED, 0, 0)
    assert (engine.settled_count, partition.ledger.floor(), partition.tails) == (1, 8, {})
    assert effects(engine) == []


def test_a_key_runs_one_at_a_time_in_order() -> None:
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


def test_a_key_that_came_to_rest_starts_anew() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    assert partition.tails == {}
    deliver(engine, partition, 1)
    assert take_all(engine) == [1]


def test_keys_run_side_by_side_first_come_first_served() -> None:
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


def test_messages_without_a_key_wait_for_nothing() -> None:
    engine = new_engine()
    partition = assigned(engine)
    first, second, third = deliver(engine, partition, 0, 1, 2, key=None)
    assert take_all(engine) == [0, 1, 2]
    for message in (third, first, second):
        engine.finish(message, ACK, 0.0)
    assert engine.collect(0.0)[0].messages == [third, first, second]
    assert partition.tails == {}


def test_the_empty_key_is_a_key() -> None:
    engine = new_engine()
    deliver(engine, assigned(engine), 0, 1, key=b"")
    assert take_all(engine) == [0]


def test_no_more_than_concurrency_run() -> None:
    engine = new_engine(concurrency=2)
    partition = assigned(engine)
    deliver(engine, partition, 0, 1, 2, key=None)
    first = take(engine)
    take(engine)
    assert engine.take() is None
    engine.finish(first, ACK, 0.0)
    assert take_all(engine) == [2]


@pytest.mark.parametrize("state", [QUEUED, HELD, DEAD_LETTERING, FINISHED, SETTLED, ABANDONED])
def test_only_what_runs_can_finish(state: int) -> None:
    engine = new_engine()
    message = new_message(assigned(engine), 3)
    message.state = state
    with pytest.raises(IllegalTransition, match="lane of S/0 position 3: 'finish' is not allowed while "):
        engine.finish(message, ACK, 0.0)


# --- settling


def test_each_dirty_partition_has_one_settlement() -> None:
    engine = new_engine()
    one, other, idle = (assigned(engine, number) for number in range(3))
    deliver(engine, idle, 0)
    deliver(engine, one, 0, 1, key=None)
    deliver(engine, other, 5)
    take(engine)
    while (message := engine.take()) is not None:
        engine.finish(message, ACK, 0.0)
    assert engine.dirty == [one, other]
    settlements = engine.collect(0.0)
    assert [(s.partition, [m.position for m in s.messages]) for s in settlements] == [(one, [0, 1]), (other, [5])]
    assert engine.collect(0.0) == []
    engine.settled(settlements)
    assert engine.settled_count == 3


def test_what_was_not_sent_is_collected_again_first() -> None:
    engine = new_engine()
    partition = assigned(engine)
    messages = deliver(engine, partition, 0, 1, 2, key=None)
    assert take_all(engine) == [0, 1, 2]
    engine.finish(messages[1], ACK, 0.0)
    settlements = engine.collect(0.0)
    engine.finish(messages[0], ACK, 0.0)
    engine.unsettled(settlements)
    assert engine.flow.in_flight == 3
    assert [s.messages for s in engine.collect(0.0)] == [[messages[1], messages[0]]]


def test_reporting_twice_counts_once() -> None:
    engine = new_engine()
    deliver(engine, assigned(engine), 0)
    engine.finish(take(engine), ACK, 0.0)
    settlements = engine.collect(0.0)
    engine.settled(settlements)
    engine.settled(settlements)
    assert (engine.settled_count, engine.flow.in_flight) == (1, 0)


def test_a_settlement_that_may_have_been_sent_is_repeated_without_counting_twice() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    settlements = engine.collect(0.0)
    engine.settled(settlements)
    engine.unsettled(settlements)
    again = engine.collect(0.0)
    assert [s.messages for s in again] == [settlements[0].messages]
    engine.settled(again)
    assert (engine.settled_count, engine.flow.in_flight) == (1, 0)


# --- bounds


def test_taking_stops_at_the_bound_and_resumes_at_half_of_it() -> None:
    engine = new_engine(concurrency=1, max_in_flight=4, max_bytes=1_000)
    partition = assigned(engine)
    deliver(engine, partition, 0, 1, key=None, size=10)
    assert (engine.room(), effects(engine)) == (Room(2, 980), [])
    deliver(engine, partition, 2, 3, key=None, size=10)
    assert engine.room() == Room(0, 0)
    assert [type(effect) for effect in effects(engine)] == [fx.Saturated]
    for expected in ([], [fx.Resumed], []):
        engine.finish(take(engine), ACK, 0.0)
        engine.settled(engine.collect(0.0))
        assert [type(effect) for effect in effects(engine)] == expected
    assert engine.room() == Room(3, 990)


def test_bytes_are_a_bound_of_their_own() -> None:
    engine = new_engine(max_bytes=100)
    partition = assigned(engine)
    deliver(engine, partition, 0, size=250)
    assert [type(effect) for effect in effects(engine)] == [fx.Saturated]
    assert (engine.room(), engine.flow.peak_bytes) == (Room(0, 0), 250)
    engine.finish(take(engine), ACK, 0.0)
    engine.settled(engine.collect(0.0))
    assert [type(effect) for effect in effects(engine)] == [fx.Resumed]


# --- retry


def test_a_failed_head_is_held_and_only_its_lane_waits() -> None:
    engine = new_engine()
    partition = assigned(engine)
    head, behind = deliver(engine, partition, 0, 1)
    deliver(engine, partition, 2, key=b"other")
    take(engine)
    engine.finish(head, failed(chance=0.5), 100.0)
    (held,) = effects(engine)
    assert isinstance(held, fx.Held)
    assert (held.message, held.delay) == (head, BACKOFF / 2)
    assert (head.state, engine.running_handlers, engine.retries) == (HELD, 0, 1)
    (lane,) = engine.stopped_lanes()
    assert (lane.head, lane.until) == (head, 100.0 + BACKOFF / 2)
    assert take_all(engine) == [2]
    assert engine.next_due() == 100.5
    engine.due(100.4)
    assert take_all(engine) == []
    engine.due(100.5)
    assert (head.attempt, engine.stopped_lanes(), engine.next_due()) == (2, [], NEVER)
    assert take(engine) is head
    assert engine.take() is None
    engine.finish(head, ACK, 101.0)
    assert take(engine) is behind


def test_held_lanes_come_due_by_time() -> None:
    engine = new_engine()
    partition = assigned(engine)
    messages = deliver(engine, partition, *range(4), key=None)
    take_all(engine)
    for message, delay in zip(messages, [3.0, 1.0, 2.0, 1.0], strict=True):
        engine.finish(message, failed(delay=delay), 10.0)
    assert engine.next_due() == 11.0
    engine.due(11.5)
    assert take_all(engine) == [1, 3]
    engine.due(20.0)
    assert take_all(engine) == [2, 0]


def exhaust(*, dead_letters: bool) -> tuple[list[fx.Effect], list[Message]]:
    """Fail position 0 of two as often as it takes; the last effects, and both messages."""
    engine = new_engine(dead_letters=dead_letters)
    messages = deliver(engine, assigned(engine), 0, 1)
    now = 0.0
    for attempt in range(1, ATTEMPTS + 1):
        effects(engine)
        head = take(engine)
        assert (head, head.attempt) == (messages[0], attempt)
        engine.finish(head, failed(), now)
        now += 100.0
        engine.due(now)
    assert engine.take() is None
    assert (engine.retries, engine.halted) == (ATTEMPTS - 1, not dead_letters)
    return effects(engine), messages


def test_used_up_attempts_are_a_dead_letter() -> None:
    (due,), (head, behind) = exhaust(dead_letters=True)
    assert isinstance(due, fx.DeadLetterDue)
    assert (due.message, head.state, head.attempt, behind.state) == (head, DEAD_LETTERING, ATTEMPTS, QUEUED)


def test_used_up_attempts_halt_where_there_are_no_dead_letters() -> None:
    (halted,), (head, behind) = exhaust(dead_letters=False)
    assert isinstance(halted, fx.Halted)
    assert (halted.message, head.state, behind.state) == (head, BLOCKED, QUEUED)


# --- dead letters and halt


def test_a_parking_lane_waits_for_its_confirmation_and_then_goes_on() -> None:
    engine = new_engine()
    partition = assigned(engine)
    head, behind = deliver(engine, partition, 0, 1)
    other, _ = deliver(engine, partition, 2, 3, key=b"other")
    failure = failed(terminal=True)
    take(engine)
    engine.finish(head, failure, 1.0)
    (due,) = effects(engine)
    assert isinstance(due, fx.DeadLetterDue)
    assert (due.message, due.failure) == (head, failure)
    assert [(lane.head, lane.failure, lane.until) for lane in engine.stopped_lanes()] == [(head, failure, 0.0)]
    assert take(engine) is other
    assert engine.take() is None
    assert engine.collect(0.0) == []
    engine.dead_lettered(head)
    assert (head.state, engine.stopped_lanes()) == (FINISHED, [])
    assert engine.collect(0.0)[0].messages == [head]
    assert take(engine) is behind


def test_a_parked_message_alone_in_its_lane_leaves_nothing_behind() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (keyed,) = deliver(engine, partition, 0)
    (keyless,) = deliver(engine, partition, 1, key=None)
    for message in (keyed, keyless):
        engine.finish(take(engine), failed(terminal=True), 0.0)
        engine.dead_lettered(message)
    assert partition.tails == {}
    assert engine.collect(0.0)[0].messages == [keyed, keyless]


def test_a_confirmation_counts_once() -> None:
    engine = new_engine()
    (message,) = deliver(engine, assigned(engine), 0)
    engine.finish(take(engine), failed(terminal=True), 0.0)
    engine.dead_lettered(message)
    with pytest.raises(IllegalTransition, match="'dead_lettered' is not allowed while finished"):
        engine.dead_lettered(message)


def test_a_halt_keeps_its_lane_and_is_drained_with_the_rest() -> None:
    engine = new_engine(dead_letters=False)
    partition = assigned(engine)
    head, behind = deliver(engine, partition, 0, 1)
    (other,) = deliver(engine, partition, 2, key=b"other")
    take(engine)
    failure = failed(terminal=True)
    engine.finish(head, failure, 1.0)
    (halted,) = effects(engine)
    assert isinstance(halted, fx.Halted)
    assert (halted.message, halted.failure, engine.halted) == (head, failure, True)
    engine.due(1e300)
    assert engine.next_due() == NEVER
    assert take(engine) is other
    engine.finish(other, ACK, 2.0)
    assert engine.drain(partition) == [head, behind]
    assert [type(effect) for effect in effects(engine)] == [fx.Drained]
    assert engine.collect(0.0)[0].messages == [other]


# --- questions


def test_the_oldest_is_the_unfinished_message_that_came_first() -> None:
    engine = new_engine()
    assert engine.oldest() is None
    one, other = assigned(engine, 0), assigned(engine, 1)
    (late,) = deliver(engine, one, 0, now=5.0)
    (early,) = deliver(engine, other, 0, now=3.0)
    assert engine.oldest() is early
    take(engine)
    engine.finish(take(engine), ACK, 6.0)
    assert engine.oldest() is late


@pytest.mark.parametrize("floor", [None, 0])
def test_what_is_finished_is_in_flight_and_holds_nothing_up(floor: int | None) -> None:
    engine = new_engine()
    partition = assigned(engine, floor=floor)
    first, second = deliver(engine, partition, 0, 1, key=None)
    ledger = partition.ledger
    assert (ledger.in_flight(), ledger.unfinished(), ledger.oldest()) == ([first, second], [first, second], first)
    engine.finish(take(engine), ACK, 0.0)
    assert (ledger.in_flight(), ledger.unfinished(), ledger.oldest()) == ([first, second], [second], second)
    engine.finish(take(engine), ACK, 0.0)
    assert (ledger.in_flight(), ledger.unfinished(), ledger.oldest()) == ([first, second], [], None)
    assert engine.oldest() is None


def test_in_flight_since_is_all_in_flight_that_came_by_then() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (finished,) = deliver(engine, partition, 0, now=1.0)
    engine.finish(take(engine), ACK, 1.0)
    (queued,) = deliver(engine, partition, 1, now=2.0)
    (recent,) = deliver(engine, partition, 2, now=3.0)
    assert engine.in_flight_since(0.9) == []
    assert engine.in_flight_since(2.0) == [finished, queued]
    assert engine.in_flight_since(3.0) == [finished, queued, recent]


def test_the_engine_shows_counts() -> None:
    engine = new_engine()
    assert repr(engine) == "<Engine 0 partitions, 0 in flight, 0 running, 0 ready, 0 stopped>"
    partition = assigned(engine)
    deliver(engine, partition, 0, 1)
    deliver(engine, partition, 2, 3, key=None)
    deliver(engine, partition, 4, key=b"other")
    engine.finish(take(engine), failed(), 0.0)
    take(engine)
    assert repr(engine) == "<Engine 1 partitions, 5 in flight, 1 running, 2 ready, 1 stopped>"
