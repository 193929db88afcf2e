"""A message with outputs keeps its lane, and not its handler, until the broker has confirmed the outputs."""

from __future__ import annotations

from typing import Any

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import STATE_NAMES, IllegalTransition
from lanes.core.publishing import Produced
from lanes.core.types import ACK, Failure, Message
from tests.core.builders import BACKOFF, assigned, deliver_keys, failed, new_engine, take

OUTPUTS = Produced("outputs", 10)
REFUSED = Failure(ValueError("no"), terminal=True)


def states(messages: list[Message]) -> list[str]:
    return [STATE_NAMES[message.state] for message in messages]


def found(engine: Engine, kind: type[Any]) -> list[Any]:
    """The effects of a kind; the list of effects is empty afterwards."""
    effects = [effect for effect in engine.effects if isinstance(effect, kind)]
    engine.effects.clear()
    return effects


def publishing(engine: Engine, keys: bytes = b"ab") -> list[Message]:
    """Messages of these keys, of which the first has unconfirmed outputs."""
    run = deliver_keys(engine, assigned(engine), keys)
    engine.finish(take(engine), OUTPUTS, 0.0)
    engine.effects.clear()
    return run


def test_outputs_are_due_when_the_handler_has_succeeded() -> None:
    engine = new_engine(concurrency=1)
    first, second, other = deliver_keys(engine, assigned(engine), b"aab")
    engine.finish(take(engine), OUTPUTS, 0.0)
    [due] = found(engine, fx.PublishDue)
    assert (due.message, due.produced) == (first, OUTPUTS)
    assert (engine.running_handlers, engine.dirty) == (0, [])
    # The handler is free for another key, and the key waits.
    assert take(engine) is other
    assert states([first, second]) == ["publishing", "queued"]
    engine.finish(other, ACK, 0.0)
    assert engine.take() is None
    engine.published(first, 0.0)
    assert states([first, second]) == ["finished", "queued"]
    assert take(engine) is second


def test_a_failed_send_waits_longer_each_time_without_a_limit_and_without_the_handler() -> None:
    engine = new_engine(attempts=1)
    [message] = publishing(engine, b"a")
    now = 0.0
    for sends, longest in enumerate([BACKOFF, 2 * BACKOFF, 4 * BACKOFF, 8 * BACKOFF, 8 * BACKOFF], 1):
        engine.publish_failed(message, Failure(ValueError("not now"), chance=0.5), now)
        [held] = found(engine, fx.PublishHeld)
        assert (held.sends, held.delay, engine.next_due()) == (sends, longest / 2, now + longest / 2)
        engine.due(now + longest / 2 - 0.01)
        assert STATE_NAMES[message.state] == "publish_held"
        now += longest / 2
        engine.due(now)
        [due] = found(engine, fx.PublishDue)
        assert (due.produced, message.attempt, engine.take()) == (OUTPUTS, 1, None)


@pytest.mark.parametrize(
    ("poison", "state", "effect"),
    [
        ("skip", "dead_lettering", fx.DeadLetterDue),
        ("block_and_dlq", "dead_lettering_blocked", fx.DeadLetterDue),
        ("block", "blocked", fx.Blocked),
        ("exit", "blocked", fx.Halted),
    ],
)
def test_after_a_permanent_failure_the_poison_policy_decides(poison: str, state: str, effect: type[fx.Failed]) -> None:
    engine = new_engine(poison=poison, attempts=9)  # type: ignore[arg-type]
    [message] = publishing(engine, b"a")
    engine.publish_failed(message, REFUSED, 0.0)
    assert (STATE_NAMES[message.state], engine.publishing.size) == (state, 0)
    assert [each.message for each in found(engine, effect)] == [message]


def test_a_drain_waits_for_the_confirmation_and_a_fence_drops_the_outputs() -> None:
    engine = new_engine()
    first, second = publishing(engine, b"aa")
    partition = first.partition
    assert engine.drain(partition) == [second]
    assert found(engine, fx.Drained) == []
    engine.publish_failed(first, failed(), 0.0)
    engine.due(BACKOFF)
    engine.published(first, BACKOFF)
    assert [each.partition for each in found(engine, fx.Drained)] == [partition]
    assert states([first, second]) == ["finished", "abandoned"]


def test_a_fence_drops_the_outputs_and_a_late_confirmation_changes_nothing() -> None:
    engine = new_engine()
    [message] = publishing(engine, b"a")
    assert engine.lose(message.partition) == []
    engine.published(message, 0.0)
    engine.publish_failed(message, REFUSED, 0.0)
    assert (STATE_NAMES[message.state], engine.effects, engine.flow.in_flight) == ("abandoned", [], 0)


def test_the_later_messages_of_a_batch_wait_for_the_outputs_of_the_first() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aaaa")
    engine.finish_batch(engine.take_batch(4), [OUTPUTS, ACK, OUTPUTS, ACK], 0.0)
    assert states(run) == ["publishing", "handled", "handled", "handled"]
    engine.published(run[0], 0.0)
    assert states(run) == ["finished", "finished", "publishing", "handled"]
    assert [each.message for each in found(engine, fx.PublishDue)] == [run[0], run[2]]
    engine.published(run[2], 0.0)
    assert states(run) == ["finished"] * 4
    assert (engine.publishing.size, engine.publishing.handled) == (0, {})


def test_a_refused_output_returns_the_later_messages_of_its_batch() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aaa")
    engine.finish_batch(engine.take_batch(3), [OUTPUTS, ACK, OUTPUTS], 0.0)
    engine.publish_failed(run[0], REFUSED, 0.0)
    assert states(run) == ["dead_lettering", "queued", "queued"]
    assert engine.publishing.size == 0
    engine.dead_lettered(run[0])
    assert [message.position for message in engine.take_batch(9)] == [1, 2]


def test_a_long_batch_of_one_key_is_applied_without_recursion() -> None:
    engine = new_engine(max_in_flight=10_000)
    run = deliver_keys(engine, assigned(engine), b"a" * 5_000)
    engine.finish_batch(engine.take_batch(5_000), [OUTPUTS] + [ACK] * 4_999, 0.0)
    engine.published(run[0], 0.0)
    assert set(states(run)) == {"finished"}


def test_park_sends_a_message_whose_outputs_wait_to_the_dead_letters() -> None:
    engine = new_engine()
    [message] = publishing(engine, b"a")
    assert engine.park(b"a") == 0  # a send is under way
    engine.publish_failed(message, failed(), 0.0)
    assert engine.park(b"a") == 1
    assert STATE_NAMES[message.state] == "dead_lettering"
    engine.due(100.0)
    assert found(engine, fx.PublishDue) == []


def test_a_drain_keeps_a_message_from_being_parked() -> None:
    engine = new_engine()
    [message] = publishing(engine, b"a")
    engine.publish_failed(message, failed(), 0.0)
    engine.drain(message.partition)
    assert engine.park(b"a") == 0
    engine.due(100.0)
    engine.published(message, 100.0)
    assert len(found(engine, fx.Drained)) == 1


def test_no_handler_starts_at_the_bound_of_bytes_until_half_are_confirmed() -> None:
    engine = new_engine(max_bytes=30)
    run = deliver_keys(engine, assigned(engine), b"abcd")
    for message in run[:3]:
        assert take(engine) is message
        engine.finish(message, OUTPUTS, 0.0)
    assert (engine.take(), engine.available(9), engine.ready) == (None, 0, 1)
    engine.published(run[0], 0.0)
    assert engine.take() is None
    engine.hold_starts()
    engine.published(run[1], 0.0)
    assert engine.take() is None
    engine.resume_starts()
    assert take(engine) is run[3]


@pytest.mark.parametrize("call", ["published", "publish_failed"])
def test_a_report_of_a_message_that_does_not_publish_is_refused(call: str) -> None:
    engine = new_engine()
    [message] = deliver_keys(engine, assigned(engine), b"a")
    arguments = (message, 0.0) if call == "published" else (message, REFUSED, 0.0)
    with pytest.raises(IllegalTransition, match=f"'{call}' is not allowed while queued"):
        getattr(engine, call)(*arguments)
