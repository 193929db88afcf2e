"""Retries: a failed message holds its lane for the backoff, until its attempts are used up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core import effects as fx
from lanes.core.lane import (
    HELD,
)
from lanes.core.policy import EXHAUSTED, RetryPolicy
from lanes.core.types import ACK, NEVER
from tests.core.builders import (
    BACKOFF,
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    take,
    take_all,
)


def test_a_failed_head_is_held_and_only_its_lane_waits() -> None:
    engine = new_engine()
    partition = assigned(engine)
    head, successor = deliver(engine, partition, 0, 1)
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
    assert take(engine) is successor


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


CHANCES = st.floats(0.0, 1.0, exclude_max=True)
ALMOST_ONE = 1.0 - 2.0**-53


def test_the_backoff_doubles_up_to_its_bound() -> None:
    policy = RetryPolicy(10, 0.2, 30.0)
    ceilings = [policy.delay(attempt, failed(chance=ALMOST_ONE)) for attempt in range(1, 10)]
    assert ceilings == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])


def test_the_shortest_delay_with_full_jitter_is_zero() -> None:
    policy = RetryPolicy(10, 0.2, 30.0)
    assert [policy.delay(attempt, failed(chance=0.0)) for attempt in range(1, 10)] == [0.0] * 9
    assert policy.delay(2, failed(chance=0.5)) == pytest.approx(0.2)


@given(
    attempt=st.integers(1, 10**6),
    chance=CHANCES,
    backoff=st.floats(0.0, 1e6),
    more=st.floats(0.0, 1e6),
)
def test_a_delay_is_never_negative_nor_above_the_bound(
    attempt: int, chance: float, backoff: float, more: float
) -> None:
    policy = RetryPolicy(10**7, backoff, backoff + more)
    assert 0.0 <= policy.delay(attempt, failed(chance=chance)) <= policy.max_backoff


@pytest.mark.parametrize("attempt", [61, 62, 1_025, 10**9])
def test_a_huge_number_of_attempts_does_not_overflow_the_backoff(attempt: int) -> None:
    policy = RetryPolicy(10**10, 1e-3, 30.0)
    assert policy.delay(attempt, failed(chance=0.5)) == 15.0


def test_no_backoff_means_an_immediate_retry() -> None:
    assert RetryPolicy(5, 0.0, 30.0).delay(4, failed(chance=ALMOST_ONE)) == 0.0


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_no_attempt_follows_the_last_one(attempts: int) -> None:
    policy = RetryPolicy(attempts, 0.2, 30.0)
    answers = [policy.delay(attempt, failed()) for attempt in range(1, attempts + 2)]
    assert EXHAUSTED not in answers[: attempts - 1]
    assert answers[attempts - 1 :] == [EXHAUSTED, EXHAUSTED]


def test_a_delay_of_the_handler_replaces_the_backoff_and_keeps_the_attempts() -> None:
    policy = RetryPolicy(3, 0.2, 30.0)
    assert policy.delay(1, failed(delay=120.0)) == 120.0
    assert policy.delay(2, failed(delay=0.0)) == 0.0
    assert policy.delay(3, failed(delay=0.0)) == EXHAUSTED


def test_a_terminal_failure_is_not_retried() -> None:
    assert RetryPolicy(5, 0.2, 30.0).delay(1, failed(delay=1.0, terminal=True)) == EXHAUSTED
