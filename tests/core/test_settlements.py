"""Settlements: each partition with finished messages has a settlement, and an unsent settlement is sent again."""

from __future__ import annotations

import pytest

from lanes.core.lane import (
    ABANDONED,
    DEAD_LETTERING,
    FINISHED,
    HELD,
    QUEUED,
    RUNNING,
    SETTLED,
    IllegalTransition,
)
from lanes.core.outbox import Outbox
from lanes.core.types import ACK, Message, Partition
from tests.core.builders import (
    assigned,
    deliver,
    effects,
    new_engine,
    new_message,
    new_partition,
    take,
    take_all,
)


def test_a_message_is_in_flight_until_its_settlement_is_confirmed() -> None:
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
    # A settlement on its way still counts.
    assert (engine.flow.in_flight, engine.flow.bytes, engine.dirty) == (1, 30, [])
    engine.settled([settlement])
    assert (message.state, engine.flow.in_flight, engine.flow.bytes) == (SETTLED, 0, 0)
    assert (engine.settled_count, partition.ledger.floor(), partition.tails) == (1, 8, {})
    assert effects(engine) == []


@pytest.mark.parametrize("state", [QUEUED, HELD, DEAD_LETTERING, FINISHED, SETTLED, ABANDONED])
def test_only_a_running_message_can_finish(state: int) -> None:
    engine = new_engine()
    message = new_message(assigned(engine), 3)
    message.state = state
    with pytest.raises(IllegalTransition, match="lane of S/0 position 3: 'finish' is not allowed while "):
        engine.finish(message, ACK, 0.0)


def test_each_partition_with_finished_messages_has_one_settlement() -> None:
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


def test_an_unsent_settlement_is_collected_again_first() -> None:
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


def test_a_settlement_reported_twice_counts_once() -> None:
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


def in_state(partition: Partition, state: int, *positions: int) -> list[Message]:
    messages = [new_message(partition, position) for position in positions]
    for message in messages:
        message.state = state
    return messages


def test_a_partition_with_several_finished_messages_is_listed_once_for_settlement() -> None:
    outbox, one, other = Outbox(), new_partition(0), new_partition(1)
    for message in (*in_state(one, FINISHED, 1, 2), *in_state(other, FINISHED, 3)):
        outbox.finished(message)
    for message in in_state(one, SETTLED, 0):
        outbox.again(message)
    assert outbox.dirty == [one, other]
    assert repr(outbox) == "<Outbox 2 partitions with something to settle>"


def test_a_settlement_leaves_the_outbox_when_it_is_collected() -> None:
    outbox, partition = Outbox(), new_partition()
    (again,) = in_state(partition, SETTLED, 0)
    finished = in_state(partition, FINISHED, 1, 2)
    outbox.again(again)
    for message in finished:
        outbox.finished(message)
    dirty = outbox.dirty
    (settlement,) = outbox.collect()
    assert (settlement.partition, settlement.messages) == (partition, [*finished, again])
    assert outbox.collect() == []
    # The engine keeps a reference to this list.
    assert outbox.dirty is dirty
    assert dirty == []


def test_an_unsent_settlement_returns_in_front_without_abandoned_messages() -> None:
    outbox, partition = Outbox(), new_partition()
    first, second, later = in_state(partition, FINISHED, 1, 2, 3)
    again, again_later = in_state(partition, SETTLED, 0, 4)
    outbox.finished(first)
    outbox.finished(second)
    outbox.again(again)
    (settlement,) = outbox.collect()
    outbox.finished(later)
    outbox.again(again_later)
    first.state = ABANDONED
    outbox.give_back(settlement)
    assert outbox.dirty == [partition]
    assert outbox.collect()[0].messages == [second, later, again, again_later]


def test_an_unsent_settlement_makes_its_partition_dirty() -> None:
    outbox, partition = Outbox(), new_partition()
    outbox.finished(*in_state(partition, FINISHED, 1))
    settlements = outbox.collect()
    outbox.give_back(settlements[0])
    assert outbox.dirty == [partition]
    assert [s.messages for s in outbox.collect()] == [settlements[0].messages]


def test_a_partition_that_was_forgotten_has_nothing_to_settle() -> None:
    outbox, one, other = Outbox(), new_partition(0), new_partition(1)
    outbox.finished(*in_state(one, FINISHED, 1))
    outbox.again(*in_state(one, SETTLED, 0))
    outbox.finished(*in_state(other, FINISHED, 1))
    outbox.forget(one)
    outbox.forget(one)
    assert outbox.dirty == [other]
    assert len(outbox.collect()) == 1
