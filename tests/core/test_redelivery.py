"""Redelivery: a known position gets the new token or is settled again, and an unknown position is queued in order."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import QUEUED, SETTLED
from lanes.core.ledgers import AckLedger
from lanes.core.types import ACK, RETURN, Message, Partition
from tests.core.builders import assigned, deliver, effects, failed, new_engine, new_message, take, take_all


def again(engine: Engine, partition: Partition, position: int, key: bytes | None = b"k") -> tuple[Message, str]:
    """Deliver a position again with another token; returns the message and the cause of the effect."""
    effects(engine)
    message = new_message(partition, position, key)
    message.token, message.raw = "newer token", "newer raw"
    engine.receive(partition, [message], message.size, 1.0)
    (effect,) = effects(engine)
    assert isinstance(effect, fx.Redelivered)
    assert effect.message is message
    return message, effect.cause


def ran(engine: Engine) -> list[int]:
    """Run all messages to their end; returns their positions in order of start."""
    positions = []
    while (message := engine.take()) is not None:
        positions.append(message.position)
        engine.finish(message, ACK, 0.0)
    return positions


@pytest.mark.parametrize("state", ["queued", "running", "held", "dead_lettering", "finished", "collected"])
def test_a_redelivered_message_in_flight_gets_the_newer_token(state: str) -> None:
    engine = new_engine()
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 3)
    if state != "queued":
        take(engine)
    if state == "held":
        engine.finish(message, failed(delay=1.0), 0.0)
    elif state == "dead_lettering":
        engine.finish(message, failed(terminal=True), 0.0)
    elif state in ("finished", "collected"):
        engine.finish(message, ACK, 0.0)
    if state == "collected":
        engine.collect(0.0)
    before = message.state
    newer, cause = again(engine, partition, 3)
    assert cause == fx.STILL_IN_FLIGHT
    assert (message.token, message.raw, message.state) == ("newer token", "newer raw", before)
    assert newer.state != QUEUED
    assert (engine.flow.in_flight, engine.flow.bytes) == (1, 1)


def test_a_redelivered_settled_message_is_settled_again_and_not_run() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 3)
    ran(engine)
    engine.settled(engine.collect(0.0))
    newer, cause = again(engine, partition, 3)
    assert (cause, newer.state, engine.take()) == (fx.ALREADY_SETTLED, SETTLED, None)
    assert (engine.dirty, engine.flow.in_flight) == ([partition], 0)
    (settlement,) = engine.collect(0.0)
    assert settlement.messages == [newer]
    engine.unsettled([settlement])
    (settlement,) = engine.collect(0.0)
    assert settlement.messages == [newer]
    engine.settled([settlement])
    assert (engine.settled_count, engine.flow.in_flight, engine.collect(0.0)) == (1, 0, [])


def test_a_second_settlement_is_sent_with_finished_messages() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 3)
    ran(engine)
    engine.settled(engine.collect(0.0))
    newer, _ = again(engine, partition, 3)
    newest, _ = again(engine, partition, 3)
    (following,) = deliver(engine, partition, 4)
    ran(engine)
    assert engine.dirty == [partition]
    (settlement,) = engine.collect(0.0)
    assert settlement.messages == [following, newer, newest]
    engine.unsettled([settlement])
    assert engine.collect(0.0)[0].messages == [following, newer, newest]


@pytest.mark.parametrize("key", [b"k", None])
def test_an_unknown_position_is_admitted_and_counted_as_late(key: bytes | None) -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 5, key=b"other")
    late, cause = again(engine, partition, 3, key)
    assert (cause, late.state, late.received, engine.late) == (fx.LATE, QUEUED, 1.0, 1)
    assert (engine.flow.in_flight, engine.flow.bytes, partition.ledger.highest) == (2, 2, 5)
    assert ran(engine) == [5, 3]


def test_a_run_with_all_kinds_of_redelivery_counts_only_new_messages() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 1, 5, size=10)
    engine.finish(take(engine), ACK, 0.0)
    engine.settled(engine.collect(0.0))
    assert (engine.flow.in_flight, engine.flow.bytes) == (1, 10)
    effects(engine)
    deliver(engine, partition, 6, 1, 5, 3, 6, 7, size=100)
    causes = [effect.cause for effect in effects(engine) if isinstance(effect, fx.Redelivered)]
    assert causes == [fx.ALREADY_SETTLED, fx.STILL_IN_FLIGHT, fx.LATE, fx.STILL_IN_FLIGHT]
    assert (engine.flow.in_flight, engine.flow.bytes) == (4, 310)
    assert ran(engine) == [3, 5, 6, 7]


def test_a_settled_position_that_the_ledger_has_forgotten_runs_again() -> None:
    engine = new_engine()
    partition = assigned(engine)
    assert isinstance(partition.ledger, AckLedger)
    partition.ledger._runs_limit = 2
    for position in (0, 2, 4):
        deliver(engine, partition, position)
        ran(engine)
        engine.settled(engine.collect(0.0))
    assert again(engine, partition, 0)[1] == fx.LATE
    assert again(engine, partition, 4)[1] == fx.ALREADY_SETTLED


# --- the place of a late message


def late_ones(engine: Engine, partition: Partition) -> None:
    """Deliver the late positions 7, 3, 12 and 5 into a lane with 10 and 20."""
    for position in (7, 3, 12, 5):
        assert again(engine, partition, position)[1] == fx.LATE


def test_a_late_message_goes_before_a_queued_head() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    late_ones(engine, partition)
    assert ran(engine) == [3, 5, 7, 10, 12, 20]


def test_a_late_message_follows_a_running_head() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    head = take(engine)
    late_ones(engine, partition)
    assert engine.take() is None
    engine.finish(head, ACK, 0.0)
    assert ran(engine) == [3, 5, 7, 12, 20]


def test_a_late_message_follows_a_held_head() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    engine.finish(take(engine), failed(delay=1.0), 0.0)
    late_ones(engine, partition)
    assert engine.take() is None
    engine.due(1.0)
    assert ran(engine) == [10, 3, 5, 7, 12, 20]


def test_a_late_message_follows_a_head_that_is_due_for_its_next_attempt() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    engine.finish(take(engine), failed(delay=1.0), 0.0)
    assert again(engine, partition, 6)[1] == fx.LATE
    engine.due(1.0)
    late_ones(engine, partition)
    assert ran(engine) == [10, 3, 5, 6, 7, 12, 20]


def test_a_late_message_goes_before_a_returned_head() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    engine.finish(take(engine), RETURN, 0.0)
    late_ones(engine, partition)
    assert ran(engine) == [3, 5, 7, 10, 12, 20]


def test_a_late_message_follows_a_head_returned_in_a_later_attempt() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    engine.finish(take(engine), failed(delay=1.0), 0.0)
    engine.due(1.0)
    engine.finish(take(engine), RETURN, 1.0)
    late_ones(engine, partition)
    assert ran(engine) == [10, 3, 5, 7, 12, 20]


def test_a_late_message_follows_a_head_on_its_way_to_the_dead_letters() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    head = take(engine)
    engine.finish(head, failed(terminal=True), 0.0)
    late_ones(engine, partition)
    assert engine.take() is None
    engine.dead_lettered(head)
    assert ran(engine) == [3, 5, 7, 12, 20]


def test_a_late_message_is_the_head_after_a_finished_one() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 10, 20)
    engine.finish(take(engine), ACK, 0.0)
    late_ones(engine, partition)
    assert ran(engine) == [3, 5, 7, 12, 20]


@pytest.mark.parametrize("delivered", [(10, 20), ()])
def test_a_late_message_follows_a_zombie(delivered: tuple[int, ...]) -> None:
    engine = new_engine()
    former = assigned(engine)
    (zombie,) = deliver(engine, former, 10)
    take(engine)
    engine.lose(former)
    partition = assigned(engine)
    deliver(engine, partition, *delivered)
    deliver(engine, partition, 30, key=b"other")
    late_ones(engine, partition)
    assert take_all(engine) == [30]
    engine.finish(zombie, ACK, 0.0)
    assert ran(engine) == sorted({3, 5, 7, 12, *delivered})


def test_a_late_message_changes_no_other_lane() -> None:
    engine = new_engine()
    one, other = assigned(engine, 0), assigned(engine, 1)
    deliver(engine, one, 10)
    deliver(engine, one, 11, key=b"other")
    deliver(engine, other, 10)
    again(engine, one, 5)
    assert take_all(engine) == [5, 11, 10]


# --- while draining


def test_a_running_message_of_a_drain_gets_the_newer_token() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 3)
    take(engine)
    engine.drain(partition)
    _, cause = again(engine, partition, 3)
    assert (cause, message.token, message.raw) == (fx.STILL_IN_FLIGHT, "newer token", "newer raw")


def test_a_drain_admits_no_message() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 3)
    take(engine)
    engine.drain(partition)
    deliver(engine, partition, 1, 4, 5)
    assert (engine.flow.in_flight, engine.take(), effects(engine)) == (1, None, [])
    assert [m.position for m in partition.ledger.in_flight()] == [3]
