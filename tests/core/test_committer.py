"""Sources that commit one position: what is committed when, and how far ahead of it the engine goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED, SETTLED
from lanes.core.types import ACK, Message, Partition, Settlement
from tests.core.builders import (
    COMMIT_COUNT,
    COMMIT_INTERVAL,
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    new_message,
    take_all,
)

INFINITY = float("inf")


def start(engine: Engine, partition: Partition, *positions: int, now: float = 0.0) -> list[Message]:
    """Deliver messages in lanes of their own, and run them."""
    run = deliver(engine, partition, *positions, key=None, now=now)
    take_all(engine)
    return run


def ack(engine: Engine, *messages: Message, now: float = 0.0) -> None:
    for message in messages:
        engine.finish(message, ACK, now)


def said(settlements: Sequence[Settlement]) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """Floor and completed set of each commit, which carries no messages."""
    assert all(s.messages == [] for s in settlements)
    return [(s.floor, list(s.completed)) for s in settlements]


def ahead(engine: Engine) -> list[tuple[str, int | None]]:
    """Which effects said that ``max_ahead`` was reached or left, and the position that held the floor."""
    found: list[tuple[str, int | None]] = []
    for effect in effects(engine):
        if isinstance(effect, fx.AheadReached):
            found.append(("reached", None if effect.oldest is None else effect.oldest.position))
        elif isinstance(effect, fx.AheadLeft):
            found.append(("left", None))
    return found


# --- when


def test_a_commit_follows_after_the_interval() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 4)
    assert (engine.commit_at(), engine.collect(9.0)) == (INFINITY, [])
    ack(engine, first)
    assert engine.collect(10.0) == []
    assert engine.commit_at() == 10.0 + COMMIT_INTERVAL
    ack(engine, third)
    assert engine.collect(10.0 + COMMIT_INTERVAL - 0.1) == []
    assert said(engine.collect(10.0 + COMMIT_INTERVAL)) == [(1, [(4, 5)])]
    assert engine.commit_at() == INFINITY
    assert (engine.flow.in_flight, engine.settled_count, second.state != SETTLED) == (1, 2, True)


def test_so_many_finished_messages_do_not_wait() -> None:
    engine = new_engine(concurrency=100)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, *range(COMMIT_COUNT))
    ack(engine, *run[1:])
    assert engine.collect(1.0) == []
    ack(engine, run[0])
    assert said(engine.collect(1.0)) == [(COMMIT_COUNT, [])]


def test_everything_is_committed_on_demand_and_only_what_changed() -> None:
    engine = new_engine()
    one, other = assigned(engine, 0, floor=0), assigned(engine, 1, floor=0)
    first, _ = start(engine, one, 0, 1)
    start(engine, other, 0)
    ack(engine, first)
    (settlement,) = engine.collect(0.0, everything=True)
    assert (settlement.partition, settlement.floor) == (one, 1)
    assert engine.collect(0.0, everything=True) == []


def test_one_commit_of_a_partition_is_on_its_way() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    sent = engine.collect(0.0, everything=True)
    ack(engine, second)
    assert engine.collect(100.0, everything=True) == []
    assert engine.commit_at() == INFINITY
    engine.settled(sent)
    assert engine.commit_at() == 100.0 + COMMIT_INTERVAL
    assert said(engine.collect(100.0, everything=True)) == [(2, [])]


def test_an_unknown_result_is_repeated_with_what_came_since() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 2)
    ack(engine, first)
    sent = engine.collect(0.0, everything=True)
    assert said(sent) == [(1, [])]
    ack(engine, third)
    engine.collect(1.0)
    engine.unsettled(sent)
    again = engine.collect(1.0)
    assert said(again) == [(1, [(2, 3)])]
    engine.unsettled(again)
    ack(engine, second)
    assert said(engine.collect(1.0)) == [(3, [])]
    assert (engine.settled_count, engine.flow.in_flight) == (3, 0)


def test_an_unknown_result_may_be_repeated_later() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    ack(engine, *start(engine, partition, 0))
    engine.unsettled(engine.collect(0.0), again_at=9.0)
    assert (engine.commit_at(), engine.collect(8.9)) == (9.0, [])
    assert said(engine.collect(9.0)) == [(1, [])]


def test_two_kinds_of_partition_settle_side_by_side() -> None:
    engine = new_engine()
    single, cumulative = assigned(engine, 0), assigned(engine, 1, floor=5)
    (one,), (other,) = start(engine, single, 8), start(engine, cumulative, 8)
    ack(engine, one, other)
    settlements = engine.collect(0.0, everything=True)
    assert [(s.partition, s.messages, s.floor) for s in settlements] == [(single, [one], None), (cumulative, [], 9)]
    assert engine.flow.in_flight == 1
    engine.unsettled(settlements)
    again = engine.collect(0.0)
    assert [(s.partition, s.messages, s.floor) for s in again] == [(single, [one], None), (cumulative, [], 9)]
    engine.settled(again)
    assert (engine.flow.in_flight, engine.settled_count) == (0, 2)


# --- the source's own position


def test_what_the_source_skips_is_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    engine.progressed(partition, 7, 2.0)
    assert engine.commit_at() == 2.0 + COMMIT_INTERVAL
    engine.progressed(partition, 9, 4.0)
    assert said(engine.collect(2.0 + COMMIT_INTERVAL)) == [(9, [])]
    engine.progressed(partition, 9, 5.0)
    assert engine.commit_at() == INFINITY


def test_what_the_source_skips_above_an_unfinished_message_is_not() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    (message,) = start(engine, partition, 3)
    assert engine.commit_at() == INFINITY
    engine.progressed(partition, 9, 2.0)
    assert engine.collect(100.0, everything=True) == []
    ack(engine, message)
    assert said(engine.collect(100.0, everything=True)) == [(9, [])]


def test_progress_of_others_is_ignored() -> None:
    engine = new_engine()
    single, draining, fenced, gone = assigned(engine, 0), *(assigned(engine, n, floor=0) for n in (1, 2, 3))
    engine.drain(draining)
    engine.fence(fenced)
    engine.lose(gone)
    for partition in (single, draining, fenced, gone):
        engine.progressed(partition, 50, 0.0)
    assert engine.collect(0.0, everything=True) == []
    assert [partition.ledger.floor() for partition in (draining, fenced, gone)] == [0, 0, 0]


# --- what a predecessor completed


def test_completed_messages_are_not_run() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=2, completed=[(3, 5), (6, 7)])
    run = deliver(engine, partition, 2, 3, 4, 5, 6, size=10, now=1.0)
    assert [(e.message, e.cause) for e in effects(engine) if isinstance(e, fx.Redelivered)] == [
        (run[i], fx.ALREADY_SETTLED) for i in (1, 2, 4)
    ]
    assert (engine.flow.in_flight, engine.flow.bytes) == (2, 20)
    # The chain of the key goes past them.
    assert take_all(engine) == [2]
    ack(engine, run[0])
    assert take_all(engine) == [5]
    assert said(engine.collect(1.0, everything=True)) == [(5, [(6, 7)])]
    assert engine.settled_count == 1


def test_a_run_that_was_completed_as_a_whole_is_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=2, completed=[(2, 5)])
    deliver(engine, partition, 2, 3, 4, now=1.0)
    assert take_all(engine) == []
    assert engine.commit_at() == 1.0 + COMMIT_INTERVAL
    assert said(engine.collect(1.0, everything=True)) == [(5, [])]
    assert engine.flow.in_flight == 0


# --- how far ahead


def test_what_is_delivered_beyond_the_ceiling_waits_in_order() -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, 0, 1, now=1.0)
    assert (ahead(engine), engine.room().paused) == ([], frozenset())
    run += start(engine, partition, 2, 3, 4, now=2.0)
    assert (ahead(engine), engine.room().paused) == ([("reached", 0)], frozenset({partition}))
    run += start(engine, partition, 5, now=3.0)
    assert (ahead(engine), engine.running_handlers, engine.flow.in_flight) == ([], 3, 6)
    ack(engine, run[0], run[1])
    (settlement,) = engine.collect(4.0)
    assert take_all(engine) == []
    engine.settled([settlement])
    assert take_all(engine) == [3, 4]
    assert (ahead(engine), engine.room().paused) == ([], frozenset({partition}))
    ack(engine, *run[2:5])
    engine.settled(engine.collect(4.0))
    assert (take_all(engine), ahead(engine), engine.room().paused) == ([5], [("left", None)], frozenset())
    assert [m.received for m in run] == [1.0, 1.0, 2.0, 2.0, 2.0, 3.0]


def test_reaching_the_ceiling_exactly_is_reaching_it() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, 0, 1)
    assert ahead(engine) == [("reached", 0)]
    ack(engine, run[0])
    engine.settled(engine.collect(0.0))
    assert ahead(engine) == [("left", None)]


def test_a_floor_that_others_wait_for_is_committed_at_once() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    first, second, _ = start(engine, partition, 0, 1, 2)
    ack(engine, second)
    assert engine.collect(7.0) == []
    # Only the completed set has changed, for which nobody waits.
    assert engine.commit_at() == 7.0 + COMMIT_INTERVAL
    ack(engine, first)
    assert said(engine.collect(7.5)) == [(2, [])]


def test_the_message_that_holds_the_floor_is_named() -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    # Finished, and not yet entered into the ledger: it does not hold the floor.
    deliver(engine, partition, 2)
    assert ahead(engine) == [("reached", 1)]
    engine.finish(second, failed(terminal=True), 0.0)
    assert ahead(engine) == []


def test_only_a_confirmation_may_be_missing() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0, completed=[(0, 5)])
    deliver(engine, partition, 0, 1, 2)
    assert ahead(engine) == [("reached", None)]
    assert engine.flow.in_flight == 1
    sent = engine.collect(0.0)
    assert said(sent) == [(2, [(2, 5)])]
    # What waited was completed, too, and what comes after it.
    engine.settled(sent)
    assert ([type(e) for e in effects(engine)], engine.flow.in_flight) == ([fx.Redelivered, fx.AheadLeft], 0)
    assert said(engine.collect(0.0, everything=True)) == [(3, [(3, 5)])]


def test_what_waits_is_not_passed_by_the_sources_position() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 5)
    engine.progressed(partition, 9, 0.0)
    ack(engine, first)
    sent = engine.collect(0.0)
    assert said(sent) == [(1, [])]
    engine.settled(sent)
    assert take_all(engine) == [5]
    ack(engine, second)
    assert said(engine.collect(0.0, everything=True)) == [(9, [])]


def test_an_unconfirmed_floor_lets_nothing_in() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    first, _ = start(engine, partition, 0, 1)
    ack(engine, first)
    engine.unsettled(engine.collect(0.0))
    assert take_all(engine) == []
    engine.settled(engine.collect(0.0))
    assert take_all(engine) == [1]


@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_position_that_does_not_rise_changes_nothing(position: int) -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=2)
    deliver(engine, partition, 3, 4, 7)
    before = (effects(engine), repr(engine), repr(partition.ledger))[1:]
    with pytest.raises(ValueError, match=f"delivered position {position} after 7"):
        deliver(engine, partition, position)
    with pytest.raises(ValueError, match="delivered position 8 after 9"):
        deliver(engine, partition, 9, 8)
    assert (repr(engine), repr(partition.ledger)) == before
    assert effects(engine) == []


# --- the end


@pytest.mark.parametrize("way", ["lose", "release"])
def test_after_the_end_nothing_is_committed(way: str) -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, 0, 1, 2, 3)
    ack(engine, run[0])
    sent = engine.collect(0.0, everything=True)
    ack(engine, run[1])
    getattr(engine, way)(partition)
    assert (engine.collect(100.0, everything=True), engine.commit_at()) == ([], INFINITY)
    assert (engine.room().paused, run[3].state, run[1].state) == (frozenset(), ABANDONED, ABANDONED)
    effects(engine)
    for report in (engine.settled, engine.unsettled):
        report(sent)
        assert (effects(engine), engine.collect(100.0, everything=True), engine.settled_count) == ([], [], 1)
    ack(engine, run[2])
    assert (engine.flow.in_flight, engine.running_handlers) == (0, 0)


def test_a_late_answer_does_not_reach_the_next_assignment() -> None:
    engine = new_engine(max_ahead=1)
    old = assigned(engine, floor=0)
    (message,) = start(engine, old, 0)
    ack(engine, message)
    sent = engine.collect(0.0)
    engine.release(old)
    new = assigned(engine, floor=0)
    start(engine, new, 0, 1)
    engine.settled(sent)
    engine.unsettled(sent)
    assert (engine.running_handlers, engine.collect(100.0, everything=True)) == (1, [])
    assert new.commits is not None
    assert new.commits.confirmed == 0


def test_what_finishes_in_a_drain_is_committed_and_what_waits_is_abandoned() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 2)
    engine.progressed(partition, 50, 0.0)
    assert engine.drain(partition) == [third]
    deliver(engine, partition, 3)
    assert (engine.flow.in_flight, third.state) == (2, ABANDONED)
    ack(engine, first, second)
    sent = engine.collect(0.0, everything=True)
    assert said(sent) == [(2, [])]
    engine.settled(sent)
    assert take_all(engine) == []
    assert engine.flow.in_flight == 0


def test_what_finished_before_the_fence_is_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    assert engine.fence(partition) == [second]
    ack(engine, second)
    assert said(engine.collect(0.0, everything=True)) == [(1, [])]


def test_a_message_larger_than_others_waits_with_its_bytes() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    run = [new_message(partition, 0, None, 5), new_message(partition, 1, None, 70)]
    engine.receive(partition, run, 75, 0.0)
    assert (engine.flow.in_flight, engine.flow.bytes) == (2, 75)
    engine.drain(partition)
    assert (engine.flow.in_flight, engine.flow.bytes) == (0, 0)
