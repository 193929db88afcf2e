"""Intake stops at a bound of messages or bytes, and at the user's pause."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.flow import LOOK_EVERY, PAUSE_AFTER, Flow
from lanes.core.types import ACK, NEVER, Message, Room
from tests.core.builders import (
    ack,
    assigned,
    deliver,
    deliver_keys,
    effects,
    failed,
    kinds,
    new_engine,
    positions,
    take,
    take_all,
)


def test_the_flow_stops_at_max_in_flight_and_resumes_at_half_of_it() -> None:
    flow = Flow(10, 1_000)
    assert [flow.admit(1, 1, 0.0) for _ in range(10)] == [False] * 9 + [True]
    assert not flow.taking
    assert [flow.release(1, 1) for _ in range(6)] == [False] * 4 + [True, False]
    assert flow.taking


def test_the_flow_resumes_before_the_handlers_have_no_more_messages() -> None:
    flow = Flow(10, 1_000, concurrency=4)
    assert flow.admit(10, 10, 0.0)
    assert [flow.release(1, 1) for _ in range(4)] == [False, False, True, False]
    # If every message in flight runs, each handler that ends makes room for the next message.
    full = Flow(10, 1_000, concurrency=10)
    assert [full.admit(10, 10, 0.0), full.release(1, 1), full.admit(1, 1, 0.0)] == [True, True, True]


def test_the_flow_stops_at_the_bound_in_bytes_and_resumes_at_half_of_it() -> None:
    flow = Flow(100, 1_000)
    assert flow.admit(1, 1_000, 0.0)
    flow.admit(2, 0, 0.0)
    assert not flow.release(2, 400)
    assert flow.release(0, 100)


def test_the_flow_resumes_only_if_messages_and_bytes_are_both_low() -> None:
    flow = Flow(10, 1_000)
    assert flow.admit(10, 1_000, 0.0)
    assert not flow.release(9, 0)
    assert flow.release(0, 500)


def test_intake_changes_twice_for_each_reached_bound() -> None:
    flow = Flow(10, 1_000)
    flow.admit(10, 10, 0.0)
    changes = 0
    for _ in range(50):
        changes += flow.release(4, 4)
        changes += flow.admit(4, 4, 0.0)
    assert changes == 0
    changes += flow.release(5, 5)
    for _ in range(50):
        changes += flow.admit(4, 4, 0.0)
        changes += flow.release(4, 4)
    assert changes == 1


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_intake_resumes_below_a_small_bound(bound: int) -> None:
    flow = Flow(bound, 1_000)
    assert flow.admit(bound, 0, 0.0)
    assert flow.release(bound, 0)


def test_the_room_is_what_the_bounds_leave_and_zero_while_the_flow_is_stopped() -> None:
    flow = Flow(10, 1_000)
    assert flow.room() == Room(10, 1_000)
    flow.admit(4, 300, 0.0)
    assert flow.room() == Room(6, 700)
    flow.admit(6, 0, 0.0)
    assert flow.room() == Room(0, 0)
    flow.release(4, 0)
    assert flow.room() == Room(0, 0)
    flow.release(1, 0)
    assert flow.room() == Room(5, 700)


def test_one_delivery_may_exceed_the_bound_in_bytes_and_raises_the_peak() -> None:
    flow = Flow(10, 1_000)
    flow.admit(2, 5_000, 0.0)
    flow.release(2, 5_000)
    flow.admit(3, 10, 0.0)
    assert (flow.peak, flow.peak_bytes) == (3, 5_000)
    assert repr(flow) == "<Flow 3 of 10 in flight, 10 of 1000 bytes>"


def test_the_engine_stops_the_intake_at_max_in_flight_and_resumes_it_at_half_of_it() -> None:
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


def test_the_engine_stops_the_intake_at_its_bound_in_bytes() -> None:
    engine = new_engine(max_bytes=100)
    partition = assigned(engine)
    deliver(engine, partition, 0, size=250)
    assert [type(effect) for effect in effects(engine)] == [fx.Saturated]
    assert (engine.room(), engine.flow.peak_bytes) == (Room(0, 0), 250)
    engine.finish(take(engine), ACK, 0.0)
    engine.settled(engine.collect(0.0))
    assert [type(effect) for effect in effects(engine)] == [fx.Resumed]


def test_the_users_pause_stops_only_the_intake() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"ab")
    engine.flow.paused = True
    later = assigned(engine, 1)
    assert engine.room() == Room(0, 0, frozenset({partition, later}))
    assert take_all(engine) == [0, 1]
    engine.finish(run[0], ACK, 0.0)
    engine.settled(engine.collect(0.0))
    # Messages that the client had fetched still come in.
    deliver(engine, partition, 2)
    assert positions(engine.drain(partition)) == [2]
    engine.finish(run[1], ACK, 0.0)
    assert kinds(engine) == [fx.Drained]
    engine.flow.paused = False
    assert engine.room() == Room(99, 999)


def test_a_long_stop_at_a_bound_pauses_the_clients() -> None:
    engine = new_engine(max_in_flight=4)
    partition = assigned(engine)
    run = deliver(engine, partition, 0, 1, 2, 3, key=None, now=10.0)
    assert (kinds(engine), engine.room()) == ([fx.Saturated], Room(0, 0))
    assert engine.next_due() == 10.0 + LOOK_EVERY
    engine.due(10.0 + PAUSE_AFTER - 0.1)
    assert (kinds(engine), engine.room()) == ([], Room(0, 0))
    engine.due(10.0 + PAUSE_AFTER)
    assert (kinds(engine), engine.room()) == ([fx.PauseDue], Room(0, 0, frozenset({partition})))
    # A partition assigned at the bound is paused from the start.
    other = assigned(engine, 1)
    assert engine.room().paused == frozenset({partition, other})
    engine.due(1e6)
    assert (kinds(engine), engine.next_due()) == ([], NEVER)
    take_all(engine)
    for message in run[:2]:
        engine.finish(message, ACK, 1e6)
    engine.settled(engine.collect(1e6))
    assert (kinds(engine), engine.room()) == ([fx.Resumed], Room(2, 998))


def test_messages_of_a_stuck_key_stop_no_other_key_below_the_bound() -> None:
    engine = new_engine(concurrency=2, max_in_flight=10)
    partition = assigned(engine)
    # Above the low-water mark of 6: eight messages of one key, whose first handler hangs.
    deliver_keys(engine, partition, b"aaaaaaaa")
    run = deliver_keys(engine, partition, b"bc")
    take(engine)
    for message in run:
        assert take(engine) == message
        engine.finish(message, ACK, 0.1)
    engine.settled(engine.collect(0.1))
    assert (kinds(engine), engine.room()) == ([fx.Saturated], Room(0, 0))
    engine.due(LOOK_EVERY - 0.01)
    assert kinds(engine) == []
    engine.due(LOOK_EVERY)
    assert (kinds(engine), engine.room(), engine.next_due()) == ([fx.Resumed], Room(2, 992), NEVER)


def test_the_intake_stays_stopped_while_every_handler_is_busy() -> None:
    engine = new_engine(concurrency=2, max_in_flight=10)
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"abcaaaaaaa")
    take_all(engine)
    engine.finish(run[0], ACK, 0.0)
    engine.settled(engine.collect(0.0))
    take_all(engine)
    for half in range(1, 6):
        engine.due(half * LOOK_EVERY)
    assert (kinds(engine), engine.room()) == ([fx.Saturated, fx.PauseDue], Room(0, 0, frozenset({partition})))
    # A handler is idle after a failure, which leaves the count as it is.
    engine.finish(run[1], failed(delay=60.0), 3 * PAUSE_AFTER)
    take_all(engine)
    assert (kinds(engine), engine.running_handlers) == ([fx.Held], 2)
    engine.finish(run[2], failed(delay=60.0), 3 * PAUSE_AFTER)
    assert engine.next_due() == 3 * PAUSE_AFTER
    engine.due(3 * PAUSE_AFTER)
    assert (kinds(engine), engine.room()) == ([fx.Held, fx.Resumed], Room(1, 991))


def test_a_paused_client_delivers_again_as_soon_as_there_is_room() -> None:
    engine = new_engine(concurrency=2, max_in_flight=10)
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aaaaaaaaab")
    take_all(engine)
    engine.due(PAUSE_AFTER)
    assert kinds(engine) == [fx.Saturated, fx.PauseDue]
    engine.finish(run[9], ACK, 60.0)
    engine.settled(engine.collect(60.0))
    assert (kinds(engine), engine.room()) == ([fx.Resumed], Room(1, 991))


def test_the_intake_does_not_resume_for_a_partition_that_has_all_the_handlers_it_may_use() -> None:
    """With order="partition", each further message would wait for the running message."""
    engine = new_engine(concurrency=4, max_in_flight=10, order="partition")
    partition = assigned(engine)
    deliver(engine, partition, *range(10))
    engine.finish(take(engine), ACK, 0.0)
    engine.settled(engine.collect(0.0))
    take_all(engine)
    engine.due(PAUSE_AFTER)
    assert kinds(engine) == [fx.Saturated, fx.PauseDue]
    # Another partition could use the handler.
    assigned(engine, 1)
    engine.due(2 * PAUSE_AFTER)
    assert kinds(engine) == [fx.Resumed]


def test_a_short_stop_at_a_bound_pauses_no_client() -> None:
    engine = new_engine(max_in_flight=2)
    partition = assigned(engine)
    run = deliver(engine, partition, 0, 1, key=None, now=10.0)
    take_all(engine)
    engine.finish(run[0], failed(delay=0.5), 10.0)
    assert engine.next_due() == 10.5
    engine.due(10.5)
    assert engine.next_due() == 10.5 + LOOK_EVERY
    engine.finish(run[1], ACK, 10.5)
    engine.settled(engine.collect(10.5))
    assert engine.next_due() == NEVER
    engine.due(1e6)
    assert kinds(engine) == [fx.Saturated, fx.Held, fx.Resumed]
    assert engine.room() == Room(1, 999)


def test_only_a_partition_at_max_ahead_is_paused() -> None:
    engine = new_engine(max_ahead=1)
    ahead, other = assigned(engine, 0, floor=0), assigned(engine, 1, floor=0)
    deliver(engine, ahead, 0)
    assert engine.room() == Room(99, 999, frozenset({ahead}))
    engine.flow.paused = True
    assert engine.room() == Room(0, 0, frozenset({ahead, other}))


def stuck_engine(concurrency: int) -> tuple[Engine, Message]:
    """An engine at its bound: a handler runs the head of a key with later messages, and a head of another key waits."""
    engine = new_engine(concurrency=concurrency, max_in_flight=10)
    partition = assigned(engine)
    deliver(engine, partition, *range(9))
    head = take(engine)
    deliver(engine, partition, 9, key=b"j")
    return engine, head


@pytest.mark.parametrize(("concurrency", "resumes"), [(2, False), (3, True)])
def test_room_in_a_pause_is_used_at_once_if_a_handler_would_idle(concurrency: int, resumes: bool) -> None:
    engine, head = stuck_engine(concurrency)
    engine.due(PAUSE_AFTER)
    assert engine.flow.pausing
    ack(engine, head)
    engine.settled(engine.collect(0.0))
    # Two heads are ready: an engine with two handlers needs no further message.
    assert (engine.flow.taking, engine.flow.pausing) == (resumes, not resumes)
    assert engine.next_due() == (NEVER if resumes else 0.0)


@pytest.mark.parametrize(("concurrency", "resumes"), [(2, False), (3, True)])
def test_a_check_at_the_bound_resumes_the_intake_only_for_an_idle_handler(concurrency: int, resumes: bool) -> None:
    engine, head = stuck_engine(concurrency)
    ack(engine, head)
    engine.settled(engine.collect(0.0))
    assert not engine.flow.taking
    engine.due(LOOK_EVERY)
    assert engine.flow.taking is resumes
