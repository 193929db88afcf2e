"""The status of an engine shows its oldest message, its messages in flight, and its counts."""

from __future__ import annotations

import pytest

from lanes.core.types import ACK
from tests.core.builders import (
    assigned,
    deliver,
    failed,
    new_engine,
    take,
)


def test_the_oldest_message_is_the_unfinished_one_that_was_delivered_first() -> None:
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
def test_a_finished_message_is_in_flight_and_is_not_the_oldest(floor: int | None) -> None:
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


def test_in_flight_since_returns_the_messages_that_were_delivered_by_a_time() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (finished,) = deliver(engine, partition, 0, now=1.0)
    engine.finish(take(engine), ACK, 1.0)
    (queued,) = deliver(engine, partition, 1, now=2.0)
    (recent,) = deliver(engine, partition, 2, now=3.0)
    assert engine.in_flight_since(0.9) == []
    assert engine.in_flight_since(2.0) == [finished, queued]
    assert engine.in_flight_since(3.0) == [finished, queued, recent]


def test_the_repr_of_an_engine_shows_counts() -> None:
    engine = new_engine()
    assert repr(engine) == "<Engine 0 partitions, 0 in flight, 0 running, 0 ready, 0 stopped>"
    partition = assigned(engine)
    deliver(engine, partition, 0, 1)
    deliver(engine, partition, 2, 3, key=None)
    deliver(engine, partition, 4, key=b"other")
    engine.finish(take(engine), failed(), 0.0)
    take(engine)
    assert repr(engine) == "<Engine 1 partitions, 5 in flight, 1 running, 2 ready, 1 stopped>"
