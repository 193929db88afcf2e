"""Poison messages: a message without an attempt left is dead-lettered, blocks its lane, or stops everything."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import (
    ABANDONED,
    BLOCKED,
    DEAD_LETTERING,
    DEAD_LETTERING_BLOCKED,
    FINISHED,
    HELD,
    QUEUED,
    IllegalTransition,
)
from lanes.core.policy import Order, Poison
from lanes.core.types import ACK, NEVER, Failure, Message
from tests.core.builders import (
    ATTEMPTS,
    assigned,
    deliver,
    effects,
    failed,
    new_engine,
    take,
    take_all,
)

A, B = b"a", b"b"
ENDS: dict[str, tuple[type[fx.Effect], int]] = {
    "skip": (fx.DeadLetterDue, DEAD_LETTERING),
    "block": (fx.Blocked, BLOCKED),
    "block_and_dlq": (fx.DeadLetterDue, DEAD_LETTERING_BLOCKED),
    "exit": (fx.Halted, BLOCKED),
}


def told(engine: Engine) -> list[tuple[type[fx.Effect], Message, Failure]]:
    """The effects that name a message and its failure; the list is empty afterwards."""
    named = [e for e in effects(engine) if isinstance(e, fx.Failed) and not isinstance(e, fx.Held)]
    return [(type(e), e.message, e.failure) for e in named]


def given_up(poison: Poison, order: Order = "key") -> tuple[Engine, list[Message], Failure]:
    """An engine with three messages, of which the first failed for good; the second has the same key."""
    engine = new_engine(poison=poison, order=order)
    partition = assigned(engine)
    run = deliver(engine, partition, 0, 1, key=A) + deliver(engine, partition, 2, key=B)
    failure = failed(terminal=True)
    engine.finish(take(engine), failure, 0.0)
    return engine, run, failure


@pytest.mark.parametrize("poison", ENDS)
def test_a_poison_message_is_reported_once_and_delays_only_its_lane(poison: Poison) -> None:
    engine, run, failure = given_up(poison)
    effect, state = ENDS[poison]
    assert told(engine) == [(effect, run[0], failure)]
    assert (run[0].state, engine.halted, engine.retries) == (state, poison == "exit", 0)
    assert [lane.head for lane in engine.stopped_lanes()] == [run[0]]
    assert take_all(engine) == [2]
    engine.due(1e9)
    assert (take_all(engine), engine.next_due()) == ([], NEVER)
    assert engine.oldest() is run[0]


@pytest.mark.parametrize("poison", ENDS)
def test_a_poison_policy_applies_after_the_last_attempt(poison: Poison) -> None:
    engine = new_engine(poison=poison)
    (message,) = deliver(engine, assigned(engine), 0)
    failure = failed()
    for attempt in range(1, ATTEMPTS + 1):
        assert (take(engine).attempt, told(engine)) == (attempt, [])
        engine.finish(message, failure, 0.0)
        engine.due(1e9)
    assert told(engine) == [(ENDS[poison][0], message, failure)]


@pytest.mark.parametrize("dead_lettered", [False, True])
@pytest.mark.parametrize("poison", ENDS)
def test_a_failure_in_a_drain_names_the_next_step_of_the_next_owner(poison: Poison, dead_lettered: bool) -> None:
    """The next owner continues with the next step, for messages with and without an attempt left."""
    for terminal in (False, True):
        failure = Failure(ValueError(), terminal=terminal, dead_lettered=dead_lettered and terminal)
        engine = new_engine(poison=poison)
        deliver(engine, assigned(engine), 0)
        engine.finish(take(engine), failure, 0.0)
        (here,) = effects(engine)
        engine = new_engine(poison=poison)
        partition = assigned(engine)
        (message,) = deliver(engine, partition, 0)
        take(engine)
        engine.drain(partition)
        engine.finish(message, failure, 0.0)
        left, ended = effects(engine)
        assert isinstance(here, fx.Failed) and isinstance(left, fx.Interrupted) and isinstance(ended, fx.Drained)
        assert (left.message, left.failure, left.follows) == (message, failure, here.follows)
        assert (message.state, engine.stopped_lanes(), engine.retries) == (ABANDONED, [], 0)


def test_a_message_that_was_dead_lettered_before_is_blocked_and_gets_no_second_dead_letter() -> None:
    engine = new_engine(poison="block_and_dlq")
    (message,) = deliver(engine, assigned(engine), 0)
    failure = Failure(ValueError(), terminal=True, dead_lettered=True)
    engine.finish(take(engine), failure, 0.0)
    assert (told(engine), message.state) == ([(fx.Blocked, message, failure)], BLOCKED)


def test_skip_continues_the_lane_after_the_dead_letter() -> None:
    engine, run, _ = given_up("skip")
    assert engine.collect(0.0) == []
    engine.dead_lettered(run[0])
    assert [s.messages for s in engine.collect(0.0)] == [[run[0]]]
    assert take_all(engine) == [2, 1]
    with pytest.raises(IllegalTransition, match="'dead_lettered' is not allowed while finished"):
        engine.dead_lettered(run[0])


def test_block_and_dlq_writes_a_dead_letter_then_blocks() -> None:
    engine, run, failure = given_up("block_and_dlq")
    told(engine)
    # Until the dead letter is confirmed, no lane can be unblocked or parked.
    assert (engine.unblock(A), engine.park(A)) == (0, 0)
    engine.dead_lettered(run[0])
    assert told(engine) == [(fx.Blocked, run[0], failure)]
    assert (run[0].state, engine.collect(0.0), take_all(engine)) == (BLOCKED, [], [2])
    assert engine.unblock(A) == 1
    engine.finish(take(engine), failure, 0.0)
    assert (told(engine), run[0].state) == ([(fx.DeadLetterDue, run[0], failure)], DEAD_LETTERING_BLOCKED)


@pytest.mark.parametrize("order", ["key", "partition"])
def test_unblock_gives_one_more_attempt(order: Order) -> None:
    engine, run, _ = given_up("block", order)
    take_all(engine)
    told(engine)
    assert (engine.unblock(B), engine.unblock(None), engine.stopped_lanes()[0].head) == (0, 0, run[0])
    assert engine.unblock(A) == 1
    assert (engine.stopped_lanes(), run[0].attempt, run[0].state, engine.unblock(A)) == ([], 2, QUEUED, 0)
    assert take(engine) is run[0]
    engine.finish(run[0], ACK, 0.0)
    assert take(engine) is run[1]


def test_a_failure_after_unblock_blocks_again() -> None:
    engine = new_engine(poison="block", attempts=2)
    (message,) = deliver(engine, assigned(engine), 0)
    for _ in range(2):
        engine.finish(take(engine), failed(chance=0.0), 0.0)
        engine.due(0.0)
    for attempt in (3, 4):
        assert engine.unblock(b"k") == 1
        assert take(engine).attempt == attempt
        told(engine)
        engine.finish(message, failed(chance=0.0), 0.0)
        assert [effect for effect, _, _ in told(engine)] == [fx.Blocked]
        assert message.state == BLOCKED


def test_every_blocked_lane_of_a_key_is_unblocked() -> None:
    engine = new_engine(poison="block")
    heads = [deliver(engine, assigned(engine, number), 0, key=None)[0] for number in range(3)]
    take_all(engine)
    engine.finish(heads[0], failed(terminal=True), 0.0)
    engine.finish(heads[1], failed(terminal=True), 0.0)
    engine.finish(heads[2], failed(), 0.0)
    # A held message is not blocked.
    assert engine.unblock(None) == 2
    assert [take(engine), take(engine), engine.take()] == [heads[0], heads[1], None]


def test_park_writes_dead_letters_of_blocked_and_held_messages() -> None:
    engine = new_engine(poison="block")
    blocked, held, other = (deliver(engine, assigned(engine, n), 0, 1, key=A if n < 2 else B) for n in range(3))
    take_all(engine)
    failures = [failed(terminal=True), failed(), failed()]
    for (message, _), failure in zip((blocked, held, other), failures, strict=True):
        engine.finish(message, failure, 0.0)
    told(engine)
    assert engine.park(A) == 2
    assert told(engine) == [(fx.DeadLetterDue, blocked[0], failures[0]), (fx.DeadLetterDue, held[0], failures[1])]
    assert [m.state for m in (blocked[0], held[0], other[0])] == [DEAD_LETTERING, DEAD_LETTERING, HELD]
    assert engine.park(A) == 0
    # The end of the former hold has no effect on a parked message.
    engine.due(1e9)
    assert (held[0].state, held[0].attempt, take(engine)) == (DEAD_LETTERING, 1, other[0])
    engine.dead_lettered(blocked[0])
    engine.dead_lettered(held[0])
    assert [m.state for m in (blocked[0], held[0])] == [FINISHED, FINISHED]
    assert [take(engine), take(engine)] == [blocked[1], held[1]]


@pytest.mark.parametrize("poison", ENDS)
@pytest.mark.parametrize("way", ["drain", "fence", "lose"])
def test_a_blocked_message_is_abandoned_with_its_partition(poison: Poison, way: str) -> None:
    engine, run, _ = given_up(poison)
    told(engine)
    getattr(engine, way)(run[0].partition)
    assert ({m.state for m in run}, engine.stopped_lanes(), engine.flow.in_flight) == ({ABANDONED}, [], 0)
    # The confirmation of a dead letter has no effect after the loss of its partition.
    engine.dead_lettered(run[0])
    assert (engine.unblock(A), engine.park(A), take_all(engine), told(engine)) == (0, 0, [], [])
    assert engine.collect(0.0) == []


def test_a_blocked_message_holds_back_the_floor_and_no_other_key() -> None:
    engine = new_engine(poison="block")
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0, 1, key=A)
    deliver(engine, partition, 2, key=B)
    engine.finish(take(engine), failed(terminal=True), 0.0)
    engine.finish(take(engine), ACK, 0.0)
    (settlement,) = engine.collect(0.0, everything=True)
    assert (settlement.floor, settlement.completed) == (0, [(2, 3)])
    engine.park(A)
    engine.dead_lettered(engine.stopped_lanes()[0].head)
    engine.settled([settlement])
    (settlement,) = engine.collect(0.0, everything=True)
    assert (settlement.floor, settlement.completed) == (1, [(2, 3)])


def test_held_and_blocked_lanes_are_counted() -> None:
    engine, run, _ = given_up("block")
    stopped = engine.stopped
    assert [stopped.count(state) for state in (BLOCKED, HELD)] == [1, 0]
    assert repr(stopped) == "<StoppedLanes 1 stopped lanes>"
    assert repr(engine.stopped_lanes()[0]) == "<StoppedLane blocked at S/0 position 0>"
    assert repr(engine.chains) == "<Chains 1 ready, 0 fenced handlers>"
    assert run[0].partition.live


def exhaust(*, dead_letters: bool) -> tuple[list[fx.Effect], list[Message]]:
    """Fail the first of two messages until it is given up; returns the last effects and both messages."""
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


def test_used_up_attempts_lead_to_a_dead_letter() -> None:
    (due,), (head, successor) = exhaust(dead_letters=True)
    assert isinstance(due, fx.DeadLetterDue)
    assert (due.message, head.state, head.attempt, successor.state) == (head, DEAD_LETTERING, ATTEMPTS, QUEUED)


def test_used_up_attempts_halt_without_dead_letters() -> None:
    (halted,), (head, successor) = exhaust(dead_letters=False)
    assert isinstance(halted, fx.Halted)
    assert (halted.message, head.state, successor.state) == (head, BLOCKED, QUEUED)


def test_a_lane_waits_for_the_confirmation_of_its_dead_letter() -> None:
    engine = new_engine()
    partition = assigned(engine)
    head, successor = deliver(engine, partition, 0, 1)
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
    assert take(engine) is successor


def test_a_dead_lettered_message_alone_in_its_lane_leaves_nothing_behind() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (keyed,) = deliver(engine, partition, 0)
    (keyless,) = deliver(engine, partition, 1, key=None)
    for message in (keyed, keyless):
        engine.finish(take(engine), failed(terminal=True), 0.0)
        engine.dead_lettered(message)
    assert partition.tails == {}
    assert engine.collect(0.0)[0].messages == [keyed, keyless]


def test_a_confirmed_dead_letter_counts_once() -> None:
    engine = new_engine()
    (message,) = deliver(engine, assigned(engine), 0)
    engine.finish(take(engine), failed(terminal=True), 0.0)
    engine.dead_lettered(message)
    with pytest.raises(IllegalTransition, match="'dead_lettered' is not allowed while finished"):
        engine.dead_lettered(message)


def test_a_halted_lane_is_drained_with_the_rest() -> None:
    engine = new_engine(dead_letters=False)
    partition = assigned(engine)
    head, successor = deliver(engine, partition, 0, 1)
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
    assert engine.drain(partition) == [head, successor]
    assert [type(effect) for effect in effects(engine)] == [fx.Drained]
    assert engine.collect(0.0)[0].messages == [other]


@pytest.mark.parametrize(
    ("poison", "first", "again"),
    [
        ("skip", "dead_letter", "dead_letter"),
        ("block", "block", "block"),
        ("block_and_dlq", "dead_letter_and_block", "block"),
        ("exit", "halt", "halt"),
    ],
)
def test_the_next_step_of_a_given_up_message_depends_on_its_dead_letter(poison: Poison, first: str, again: str) -> None:
    policy = new_engine(poison=poison).policy
    assert [policy.given_up(dead_lettered=before) for before in (False, True)] == [first, again]


@pytest.mark.parametrize(
    ("poison", "first", "dead_lettered"),
    [
        ("skip", "dead_letter", "dead_letter"),
        ("block", "block", "block"),
        # The dead letter is written once; a recalled message only blocks its lane again.
        ("block_and_dlq", "dead_letter_and_block", "block"),
        ("exit", "halt", "halt"),
    ],
)
def test_a_message_that_has_its_dead_letter_gets_no_second_one(poison: Poison, first: str, dead_lettered: str) -> None:
    policy = new_engine(poison=poison).policy
    assert policy.given_up(dead_lettered=False) == first
    assert policy.given_up(dead_lettered=True) == dead_lettered
