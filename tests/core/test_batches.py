"""A call of a batch handler gets several messages, in order within each lane."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED, FINISHED, HELD, QUEUED, RUNNING, SETTLED, STATE_NAMES, IllegalTransition
from lanes.core.partition_budgets import make_engine
from lanes.core.types import ABANDON, ACK, RETURN, Message, Outcome
from tests.core.builders import BACKOFF, assigned, deliver, deliver_keys, effects, failed, new_engine, take

A, B, C = b"a", b"b", b"c"


def started(engine: Engine, limit: int = 100) -> list[int]:
    return [message.position for message in engine.take_batch(limit)]


def states(messages: list[Message]) -> list[str]:
    return [STATE_NAMES[message.state] for message in messages]


# --- the messages of a batch


def test_a_batch_has_heads_of_lanes_with_their_successors() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"ab.ac.b")
    assert engine.available(100) == 7
    assert started(engine) == [0, 3, 1, 6, 2, 4, 5]
    assert {message.state for message in run} == {RUNNING}
    assert (engine.running_handlers, engine.ready, engine.available(100)) == (1, 0, 0)


@pytest.mark.parametrize(
    ("limit", "first", "second"), [(1, [0], []), (2, [0, 3], [1, 2]), (3, [0, 3, 4], [1, 2]), (4, [0, 3, 4, 1], [2])]
)
def test_a_batch_keeps_its_limit_and_the_rest_of_a_lane_waits(limit: int, first: list[int], second: list[int]) -> None:
    engine = new_engine(concurrency=2)
    deliver_keys(engine, assigned(engine), b"abcaa")
    assert engine.available(limit) == limit
    assert started(engine, limit) == first
    if second:
        assert started(engine, len(second)) == second
    else:
        assert started(engine, limit) == [1]


@pytest.mark.parametrize("calls", [0, 2], ids=["plain", "with a budget per partition"])
def test_the_engine_returns_no_message_while_starts_are_held(calls: int) -> None:
    engine = make_engine(new_engine(concurrency=2).policy._replace(concurrency_per_partition=calls))
    deliver_keys(engine, assigned(engine), b"ab")
    engine.hold_starts()
    assert (engine.take(), engine.take_batch(10), engine.available(10)) == (None, [], 0)
    assert (engine.ready, engine.running_handlers, engine.concurrency) == (2, 0, 2)
    engine.resume_starts()
    assert engine.available(10) == 2
    engine.finish(take(engine), ACK, 0.0)
    assert started(engine) == [1]


def test_a_lane_is_in_one_running_batch_only() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver_keys(engine, partition, b"aaab")
    assert started(engine, 2) == [0, 1]
    deliver_keys(engine, partition, b"ab")
    assert engine.available(100) == 2
    assert started(engine) == [3, 5]
    assert (started(engine), engine.running_handlers) == ([], 2)


def test_a_batch_counts_as_one_running_handler() -> None:
    engine = new_engine(concurrency=2)
    run = deliver_keys(engine, assigned(engine), b"abcdef")
    first = engine.take_batch(2)
    assert started(engine, 3) == [2, 3, 4]
    assert (started(engine), engine.take()) == ([], None)
    engine.finish_batch(first, [ACK, ACK], 0.0)
    assert (engine.running_handlers, started(engine), engine.running_handlers) == (1, [5], 2)
    assert states(run) == ["finished"] * 2 + ["running"] * 4


def test_a_batch_may_have_no_message() -> None:
    engine = new_engine()
    assigned(engine)
    assert (engine.take_batch(10), engine.available(10), engine.running_handlers) == ([], 0, 0)
    engine.finish_batch([], [], 0.0)
    assert engine.running_handlers == 0


# --- the end of a batch


def test_a_handled_batch_is_settled_and_each_lane_goes_on() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aabaab.")
    batch = engine.take_batch(3)
    assert batch == [run[0], run[1], run[3]]
    engine.finish_batch(batch, [ACK] * 3, 0.0)
    assert engine.running_handlers == 0
    (settlement,) = engine.collect(0.0)
    assert settlement.messages == batch
    assert started(engine) == [2, 5, 6, 4]
    engine.settled([settlement])
    assert {message.state for message in batch} == {SETTLED}


def test_a_lane_is_forgotten_when_its_last_message_ends() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver_keys(engine, partition, b"aab.")
    engine.finish_batch(engine.take_batch(10), [ACK] * 4, 0.0)
    assert (partition.tails, engine.ready, engine.running_handlers) == ({}, 0, 0)


def test_outcomes_after_the_first_failure_of_a_lane_do_not_count() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aaaaabb")
    batch = engine.take_batch(6)
    assert [m.position for m in batch] == [0, 1, 2, 3, 4, 5]
    engine.finish_batch(batch, [ACK, failed(delay=3.0), ACK, failed(), ABANDON, ACK], 10.0)
    assert states(run) == ["finished", "held", "queued", "queued", "queued", "finished", "queued"]
    assert [(e.message, e.delay) for e in effects(engine) if isinstance(e, fx.Held)] == [(run[1], 3.0)]
    assert (engine.running_handlers, engine.retries, partition.draining) == (0, 1, False)
    assert started(engine) == [6]
    engine.due(13.0)
    # The later messages run again, in order.
    assert started(engine) == [1, 2, 3, 4]
    assert [m.attempt for m in run] == [1, 2, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_any_message_of_a_lane_may_be_the_first_to_fail(failing: int) -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aaab")
    outcomes: list[Outcome] = [ACK] * 4
    outcomes[failing] = failed(chance=0.0)
    engine.finish_batch(engine.take_batch(10), outcomes, 0.0)
    assert states(run[:3]) == ["finished"] * failing + ["held"] + ["queued"] * (2 - failing)
    assert run[3].state == FINISHED
    assert engine.ready == 0
    engine.due(BACKOFF)
    assert started(engine) == list(range(failing, 3))


def test_a_dead_letter_lets_the_rest_of_the_lane_go_on() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aaa")
    engine.finish_batch(engine.take_batch(10), [failed(terminal=True), ACK, ACK], 0.0)
    assert states(run) == ["dead_lettering", "queued", "queued"]
    assert started(engine) == []
    engine.dead_lettered(run[0])
    assert started(engine) == [1, 2]


def test_an_interruption_drains_the_partition() -> None:
    engine = new_engine()
    partition, other = assigned(engine, 0), assigned(engine, 1)
    run, others = deliver_keys(engine, partition, b"aab."), deliver_keys(engine, other, b"a")
    batch = engine.take_batch(10)
    assert batch == [run[0], run[1], run[2], run[3], others[0]]
    queued = deliver_keys(engine, partition, b"ac")
    effects(engine)
    engine.finish_batch(batch, [ABANDON, ACK, failed(), ACK, ACK], 0.0)
    assert states(run + others) == ["abandoned", "abandoned", "abandoned", "finished", "finished"]
    assert {m.state for m in queued} == {ABANDONED}
    abandoned, interrupted, drained = effects(engine)
    assert isinstance(abandoned, fx.Abandoned)
    assert set(abandoned.messages) == {run[1], *queued}
    # The first outcome drains the partition, so the failure of the third happens in a drain.
    assert isinstance(interrupted, fx.Interrupted) and isinstance(drained, fx.Drained)
    assert interrupted.message is run[2]
    assert (drained.partition, engine.running_handlers, partition.unended, engine.flow.in_flight) == (
        partition,
        0,
        0,
        2,
    )
    assert partition.tails == {}


@pytest.mark.parametrize("outcome", [failed(), failed(terminal=True), ABANDON])
def test_a_failure_in_a_drain_abandons_the_rest_of_its_lane(outcome: Outcome) -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aaab")
    batch = engine.take_batch(10)
    assert engine.drain(partition) == []
    assert effects(engine) == []
    engine.finish_batch(batch, [ACK, outcome, ACK, ACK], 0.0)
    assert states(run) == ["finished", "abandoned", "abandoned", "finished"]
    abandoned, *interrupted, drained = effects(engine)
    assert isinstance(abandoned, fx.Abandoned)
    assert (abandoned.messages, type(drained)) == ([run[2]], fx.Drained)
    # Only the first failure of the lane counts.
    assert [e.message for e in interrupted if isinstance(e, fx.Interrupted)] == [run[1]] * (outcome is not ABANDON)
    assert (engine.flow.in_flight, engine.running_handlers, partition.tails) == (2, 0, {})


def test_a_drain_waits_for_the_whole_call() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aab")
    batch = engine.take_batch(2)
    assert engine.drain(partition) == [run[2]]
    assert effects(engine) == []
    engine.finish_batch(batch, [ACK, ACK], 0.0)
    assert [type(e) for e in effects(engine)] == [fx.Drained]


@pytest.mark.parametrize("outcome", [ACK, ABANDON, failed()])
def test_lanes_wait_for_the_messages_of_a_fenced_batch(outcome: Outcome) -> None:
    engine = new_engine()
    old = assigned(engine)
    run = deliver_keys(engine, old, b"aab")
    batch = engine.take_batch(10)
    assert engine.lose(old) == run
    new = assigned(engine)
    again = deliver_keys(engine, new, b"aabc")
    assert started(engine) == [3]
    effects(engine)
    engine.finish_batch(batch, [outcome, ACK, ACK], 0.0)
    assert [(e.message, type(e)) for e in effects(engine) if isinstance(e, fx.Zombie)] == [(m, fx.Zombie) for m in run]
    assert (engine.zombies, states(run)) == (3, ["abandoned"] * 3)
    assert (engine.running_handlers, engine.flow.in_flight) == (1, 4)
    assert started(engine) == [0, 1, 2]
    engine.finish_batch(again[:3], [ACK] * 3, 0.0)
    engine.finish_batch([again[3]], [ACK], 0.0)
    assert (new.tails, engine.running_handlers) == ({}, 0)


@pytest.mark.parametrize(("late", "order"), [(0, [0, 5, 7]), (3, [3, 5, 7]), (6, [5, 6, 7]), (8, [5, 7, 8])])
def test_a_late_message_follows_the_running_batch(late: int, order: list[int]) -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 2, 4, 5, 7)
    batch = engine.take_batch(2)
    deliver(engine, partition, 9, key=B)
    (message,) = deliver(engine, partition, late)
    assert (engine.late, message.state) == (1, QUEUED)
    engine.finish_batch(batch, [ACK, ACK], 0.0)
    assert started(engine) == [9, *order]


@pytest.mark.parametrize(("late", "order"), [(0, [2, 0, 4, 5]), (3, [2, 3, 4, 5]), (6, [2, 4, 5, 6])])
def test_a_late_message_may_overtake_messages_that_run_again(late: int, order: list[int]) -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 2, 4, 5)
    deliver(engine, partition, 9, key=None)
    engine.finish_batch(engine.take_batch(3), [failed(chance=0.0), ACK, ACK], 0.0)
    deliver(engine, partition, late)
    assert started(engine) == [9]
    engine.due(0.0)
    assert started(engine) == order


def test_a_returned_message_goes_back_to_its_lane() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aab.")
    engine.finish_batch(engine.take_batch(10), [RETURN, ACK, ACK, RETURN], 0.0)
    assert states(run) == ["queued", "queued", "finished", "queued"]
    assert (effects(engine), engine.running_handlers, engine.retries) == ([], 0, 0)
    assert started(engine) == [0, 1, 3]
    # A returned message has made no attempt.
    assert [m.attempt for m in run] == [1] * 4


def test_a_message_returned_in_a_drain_is_abandoned() -> None:
    engine = new_engine()
    partition = assigned(engine)
    run = deliver_keys(engine, partition, b"aab")
    batch = engine.take_batch(10)
    engine.drain(partition)
    engine.finish_batch(batch, [RETURN, ACK, RETURN], 0.0)
    assert states(run) == ["abandoned"] * 3
    abandoned, drained = effects(engine)
    assert isinstance(abandoned, fx.Abandoned)
    assert (abandoned.messages, type(drained), engine.running_handlers) == ([run[1]], fx.Drained, 0)


def test_a_batch_of_a_source_that_commits_is_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aab")
    engine.finish_batch(engine.take_batch(10), [ACK, failed(), ACK], 0.0)
    (settlement,) = engine.collect(0.0, everything=True)
    assert (settlement.floor, settlement.completed) == (1, [(2, 3)])
    assert run[1].state == HELD


# --- refused calls


def test_a_batch_that_contains_a_queued_message_cannot_be_finished() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aab")
    batch = engine.take_batch(1)
    with pytest.raises(
        IllegalTransition, match=r"^lane of S/0 position 1: 'finish' is not allowed while queued; a bug"
    ):
        engine.finish_batch([*batch, run[1]], [ACK, ACK], 0.0)
    # The refused call changed nothing.
    assert (run[0].state, engine.running_handlers) == (RUNNING, 1)
    engine.finish_batch(batch, [ACK], 0.0)
    with pytest.raises(IllegalTransition, match="position 0: 'finish' is not allowed while finished"):
        engine.finish_batch(batch, [ACK], 0.0)
    assert engine.running_handlers == 0


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_batch_needs_one_outcome_for_each_message(count: int) -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"ab")
    batch = engine.take_batch(2)
    with pytest.raises(ValueError, match=f"^{count} outcomes for a batch of 2 messages; return one for each"):
        engine.finish_batch(batch, [ACK] * count, 0.0)
    assert (states(run), engine.running_handlers) == (["running"] * 2, 1)


def test_single_messages_and_batches_may_run_in_one_engine() -> None:
    engine = new_engine()
    run = deliver_keys(engine, assigned(engine), b"aaab")
    single = take(engine)
    assert single is run[0]
    batch = engine.take_batch(5)
    assert batch == [run[3]]
    engine.finish(single, ACK, 0.0)
    assert started(engine, 5) == [1, 2]
    engine.finish_batch(batch, [ACK], 0.0)
    assert engine.running_handlers == 1
