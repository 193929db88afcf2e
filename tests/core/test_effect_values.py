"""The effects of failures, dead letters and bounds have exact values, and an ended message references no other."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.flow import LOOK_EVERY, PAUSE_AFTER
from lanes.core.policy import RetryPolicy
from lanes.core.types import Failure, Message
from tests.core.builders import (
    BACKOFF,
    ack,
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    new_policy,
    start,
    take,
    take_all,
)


def told(engine: Engine) -> list[tuple[type, dict[str, Any]]]:
    """The effects as types and fields, because effects are compared by identity."""
    return [
        (type(effect), {each.name: getattr(effect, each.name) for each in fields(cast(Any, effect))})
        for effect in effects(engine)
    ]


def about(kind: type, message: Message, failure: Failure, follows: str, **more: float) -> tuple[type, dict[str, Any]]:
    return kind, {"message": message, "failure": failure, "follows": follows, **more}


def keeping_engine() -> Engine:
    """An engine whose retries wait until the store of attempts has saved them."""
    return Engine(
        new_policy(concurrency=4, max_in_flight=50, max_bytes=500, retry=RetryPolicy(3, 1.0, 8.0), keeps_attempts=True)
    )


def test_the_effect_of_a_held_message_has_its_failure_and_its_delay() -> None:
    engine = new_engine()
    (message,) = start(engine, assigned(engine), 0)
    effects(engine)
    failure = failed(chance=1.0)
    engine.finish(message, failure, 10.0)
    assert told(engine) == [about(fx.Held, message, failure, "hold", delay=BACKOFF)]
    assert engine.next_due() == 10.0 + BACKOFF


def test_the_effects_of_parked_messages_have_their_failures_and_follow_earlier_effects() -> None:
    engine = new_engine(attempts=1, poison="block")
    messages = start(engine, assigned(engine), 0, 1)
    effects(engine)
    failures = [failed(), failed()]
    for message, failure in zip(messages, failures, strict=True):
        engine.finish(message, failure, 0.0)
    blocked = [
        about(fx.Blocked, message, failure, "block") for message, failure in zip(messages, failures, strict=True)
    ]
    assert engine.park(None) == 2
    due = [
        about(fx.DeadLetterDue, message, failure, "dead_letter")
        for message, failure in zip(messages, failures, strict=True)
    ]
    assert told(engine) == [*blocked, *due]


def test_a_message_is_blocked_after_its_dead_letter() -> None:
    engine = new_engine(attempts=1, poison="block_and_dlq")
    (message,) = start(engine, assigned(engine), 0)
    effects(engine)
    failure = failed()
    engine.finish(message, failure, 0.0)
    assert told(engine) == [about(fx.DeadLetterDue, message, failure, "dead_letter_and_block")]
    engine.dead_lettered(message)
    assert told(engine) == [about(fx.Blocked, message, failure, "block")]


@pytest.mark.parametrize("floor", [None, 0])
def test_the_times_of_the_checks_and_of_the_pause_at_a_bound_count_from_the_delivery(floor: int | None) -> None:
    engine = new_engine(max_in_flight=2)
    partition = assigned(engine, floor=floor)
    deliver(engine, partition, 0, 1, key=None, now=50.0)
    assert (engine.flow.look_at, engine.flow.pause_at) == (50.0 + LOOK_EVERY, 50.0 + PAUSE_AFTER)
    assert engine.next_due() == 50.0 + LOOK_EVERY
    engine.flow.look_at = 60.0
    assert engine.next_due() == 50.0 + PAUSE_AFTER


@pytest.mark.parametrize("order", ["key", "partition"])
def test_a_message_that_has_ended_holds_no_later_message(order: str) -> None:
    """A reference would keep every later message of a key alive."""
    engine = new_engine(order="key" if order == "key" else "partition")
    partition = assigned(engine)
    first, second, third = deliver(engine, partition, 0, 1, 2)
    ack(engine, take(engine))
    assert (first.next, second.next) == (None, third)
    engine.finish_batch([take(engine)], [failed(terminal=True)], 0.0)
    engine.dead_lettered(second)
    assert second.next is None
    assert take(engine) is third


def test_finished_messages_are_counted_over_several_settlements() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    for message in start(engine, partition, 0, 1, 2):
        ack(engine, message)
        engine.collect(0.0)
    assert partition.commits is not None and partition.commits.finished == 3


def test_every_confirmed_commit_of_a_call_counts() -> None:
    engine = new_engine()
    partitions = [assigned(engine, number, floor=0) for number in range(2)]
    for partition in partitions:
        ack(engine, *start(engine, partition, 0, 1))
    settlements = engine.collect(0.0, everything=True)
    assert len(settlements) == 2
    engine.settled(settlements)
    assert [partition.commits and partition.commits.confirmed for partition in partitions] == [2, 2]


def test_every_late_message_is_counted() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 5)
    deliver(engine, partition, 1, 2)
    assert engine.late == 2


def test_a_retry_waits_for_its_time_and_for_its_stored_attempt() -> None:
    engine = keeping_engine()
    first, second = start(engine, assigned(engine), 0, 1)
    for message in (first, second):
        engine.finish(message, failed(chance=1.0), 0.0)
    assert engine.next_due() == float("inf")
    engine.due(100.0)
    assert take_all(engine) == []
    for _ in range(2):
        engine.kept(second)
    assert engine.next_due() == 1.0
    engine.due(0.5)
    assert take_all(engine) == []
    engine.due(1.0)
    assert take(engine) is second
    engine.kept(second)  # late: the message runs
    assert (engine.next_due(), engine.take()) == (float("inf"), None)
    engine.kept(first)
    engine.due(2.0)
    assert take(engine) is first
    assert first.attempt == second.attempt == 2
