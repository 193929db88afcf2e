"""Messages beyond max_ahead wait until a higher floor is confirmed."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from tests.core.builders import (
    COMMIT_PACE,
    ack,
    assigned,
    commits_of,
    deliver,
    effects,
    failed,
    new_engine,
    new_message,
    start,
    take_all,
)


def ahead(engine: Engine) -> list[tuple[str, int | None]]:
    """The effects about ``max_ahead``, each with the position that held the floor."""
    found: list[tuple[str, int | None]] = []
    for effect in effects(engine):
        if isinstance(effect, fx.AheadReached):
            found.append(("reached", None if effect.oldest is None else effect.oldest.position))
        elif isinstance(effect, fx.AheadLeft):
            found.append(("left", None))
    return found


def test_messages_beyond_max_ahead_wait_in_order() -> None:
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


def test_the_bound_max_ahead_is_reached_with_exactly_max_ahead_messages() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, 0, 1)
    assert ahead(engine) == [("reached", 0)]
    ack(engine, run[0])
    engine.settled(engine.collect(0.0))
    assert ahead(engine) == [("left", None)]


def test_a_floor_that_messages_wait_for_is_committed_at_once() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    first, second, _ = start(engine, partition, 0, 1, 2)
    ack(engine, second)
    assert engine.collect(7.0) == []
    # Only the completed set changed, and no message waits for the completed set.
    assert engine.commit_at() == 7.0 + COMMIT_PACE
    ack(engine, first)
    assert commits_of(engine.collect(7.5)) == [(2, [])]


def test_the_message_that_holds_the_floor_is_named() -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    # A finished message does not hold the floor, even before the ledger has it.
    deliver(engine, partition, 2)
    assert ahead(engine) == [("reached", 1)]
    engine.finish(second, failed(terminal=True), 0.0)
    assert ahead(engine) == []


def test_a_partition_at_max_ahead_may_wait_only_for_the_confirmation_of_a_commit() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0, completed=[(0, 5)])
    deliver(engine, partition, 0, 1, 2)
    assert ahead(engine) == [("reached", None)]
    assert engine.flow.in_flight == 1
    sent = engine.collect(0.0)
    assert commits_of(sent) == [(2, [(2, 5)])]
    # The waiting message was completed too, and so are the next ones.
    engine.settled(sent)
    assert ([type(e) for e in effects(engine)], engine.flow.in_flight) == ([fx.Redelivered, fx.AheadLeft], 0)
    assert commits_of(engine.collect(0.0, everything=True)) == [(3, [(3, 5)])]


def test_the_position_of_the_source_does_not_pass_waiting_messages() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 5)
    engine.progressed(partition, 9, 0.0)
    ack(engine, first)
    sent = engine.collect(0.0)
    assert commits_of(sent) == [(1, [])]
    engine.settled(sent)
    assert take_all(engine) == [5]
    ack(engine, second)
    assert commits_of(engine.collect(0.0, everything=True)) == [(9, [])]


def test_an_unconfirmed_floor_admits_no_message() -> None:
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


def test_a_waiting_message_counts_with_its_bytes() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    run = [new_message(partition, 0, None, 5), new_message(partition, 1, None, 70)]
    engine.receive(partition, run, 75, 0.0)
    assert (engine.flow.in_flight, engine.flow.bytes) == (2, 75)
    engine.drain(partition)
    assert (engine.flow.in_flight, engine.flow.bytes) == (0, 0)
