"""Drains without a handed-over completed set run the queued messages below the highest started one."""

from __future__ import annotations

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.types import ABANDON, ACK, Message, Outcome, Partition
from tests.core.builders import (
    assigned,
    commits_of,
    deliver_keys,
    effects,
    failed,
    kinds,
    new_engine,
    positions,
    take,
    take_all,
)

A, B, C = b"a", b"b", b"c"


def committed(engine: Engine) -> list[tuple[int | None, list[tuple[int, int]]]]:
    return commits_of(engine.collect(0.0, everything=True))


def test_the_completed_set_is_handed_over_with_the_floor() -> None:
    engine = new_engine(concurrency=3)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aabc")
    take_all(engine)
    engine.finish(run[2], ACK, 0.0)
    assert positions(engine.drain(partition)) == [1]
    assert kinds(engine) == []
    engine.finish(run[3], ACK, 0.0)
    engine.finish(run[0], failed(), 0.0)
    assert kinds(engine) == [fx.Interrupted, fx.Drained]
    assert (committed(engine), take_all(engine)) == ([(0, [(2, 4)])], [])


def begun_out_of_turn() -> tuple[Engine, Partition, list[Message]]:
    """Eight messages: 0 and 1 have finished, 5 and 2 run."""
    engine = new_engine(concurrency=2)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"abaabcba")
    take_all(engine)
    engine.finish(run[0], ACK, 0.0)
    engine.finish(run[1], ACK, 0.0)
    assert take_all(engine) == [5, 2]
    return engine, partition, run


def test_a_drain_runs_only_messages_below_the_highest_started_one() -> None:
    engine, partition, run = begun_out_of_turn()
    # 5 has started: 3 and 4 are below it, 6 and 7 are not.
    assert positions(engine.drain(partition, close_prefix=True)) == [6, 7]
    assert (engine.take(), kinds(engine), engine.drain(partition)) == (None, [], [])
    engine.finish(run[5], ACK, 0.0)
    assert take_all(engine) == [4]
    engine.finish(run[2], ACK, 0.0)
    assert take_all(engine) == [3]
    engine.finish(run[4], ACK, 0.0)
    assert kinds(engine) == []
    engine.finish(run[3], ACK, 0.0)
    assert (kinds(engine), take_all(engine)) == ([fx.Drained], [])
    assert committed(engine) == [(6, [])]
    assert (partition.tails, engine.running_handlers) == ({}, 0)


@pytest.mark.parametrize("entered", [False, True])
def test_a_finished_message_counts_as_started(entered: bool) -> None:
    engine = new_engine(concurrency=3)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aabac")
    assert take_all(engine) == [0, 2, 4]
    engine.finish(run[2], ACK, 0.0)
    if entered:
        engine.collect(0.0)
    engine.finish(run[4], failed(terminal=True), 0.0)
    effects(engine)
    # 2 is the highest started message that is not repeated; 4 was given up, so 4 is repeated.
    assert positions(engine.drain(partition, close_prefix=True)) == [3, 4]
    engine.finish(run[0], ACK, 0.0)
    assert take_all(engine) == [1]
    engine.finish(run[1], ACK, 0.0)
    assert (kinds(engine), committed(engine)) == ([fx.Drained], [(3, [])])


def test_a_lane_of_a_drain_ends_at_the_highest_started_position() -> None:
    engine = new_engine(concurrency=2)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aacaa")
    assert take_all(engine) == [0, 2]
    assert positions(engine.drain(partition, close_prefix=True)) == [3, 4]
    assert partition.tails == {A: run[1], C: run[2]}
    assert run[1].next is None
    engine.finish(run[0], ACK, 0.0)
    assert take_all(engine) == [1]


def test_messages_after_a_held_head_do_not_run() -> None:
    engine = new_engine(concurrency=3)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aabbc")
    take_all(engine)
    engine.finish(run[0], failed(), 0.0)
    assert positions(engine.drain(partition, close_prefix=True)) == [0, 1]
    engine.finish(run[2], ACK, 0.0)
    assert take_all(engine) == [3]
    effects(engine)
    engine.finish(run[4], ACK, 0.0)
    assert kinds(engine) == []
    engine.finish(run[3], ACK, 0.0)
    assert kinds(engine) == [fx.Drained]
    assert committed(engine) == [(0, [(2, 5)])]


@pytest.mark.parametrize("outcome", [failed(), failed(terminal=True), ABANDON])
def test_a_failure_while_closing_ends_only_its_lane(outcome: Outcome) -> None:
    engine = new_engine(concurrency=3)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aabbc")
    take_all(engine)
    assert engine.drain(partition, close_prefix=True) == []
    engine.finish(run[0], outcome, 0.0)
    abandoned, *interrupted = effects(engine)
    told = [] if outcome is ABANDON else [fx.Interrupted]
    assert isinstance(abandoned, fx.Abandoned)
    assert (positions(abandoned.messages), [type(effect) for effect in interrupted]) == ([1], told)
    engine.finish(run[4], ACK, 0.0)
    engine.finish(run[2], ACK, 0.0)
    assert (take_all(engine), kinds(engine)) == ([3], [])
    engine.finish(run[3], outcome, 0.0)
    assert kinds(engine) == [*told, fx.Drained]
    assert committed(engine) == [(0, [(2, 3), (4, 5)])]
    assert (engine.flow.in_flight, partition.tails, engine.stopped_lanes()) == (0, {}, [])


def test_a_closing_drain_without_messages_below_is_an_ordinary_drain() -> None:
    engine = new_engine(concurrency=1)
    idle, busy = assigned(engine, 0, floor=0), assigned(engine, 1, floor=0)
    run = deliver_keys(engine, busy, b"ab")
    deliver_keys(engine, idle, b"ab")
    assert take(engine) is run[0]
    assert positions(engine.drain(idle, close_prefix=True)) == [0, 1]
    assert kinds(engine) == [fx.Drained]
    assert positions(engine.drain(busy, close_prefix=True)) == [1]
    assert kinds(engine) == []
    engine.finish(run[0], ACK, 0.0)
    assert kinds(engine) == [fx.Drained]


def test_closing_runs_no_message_beyond_max_ahead() -> None:
    engine = new_engine(max_ahead=3, concurrency=2)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"abcda")
    take_all(engine)
    engine.finish(run[1], ACK, 0.0)
    assert take_all(engine) == [2]
    assert positions(engine.drain(partition, close_prefix=True)) == [3, 4]


def test_a_batch_may_close_the_prefix() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aaabab")
    batch = engine.take_batch(2)
    assert positions(batch) == [0, 1]
    (single,) = engine.take_batch(1)
    assert single is run[3]
    assert positions(engine.drain(partition, close_prefix=True)) == [4, 5]
    engine.finish_batch(batch, [ACK, ACK], 0.0)
    engine.finish_batch([single], [ACK], 0.0)
    assert (kinds(engine), engine.available(10)) == ([], 1)
    engine.finish_batch(engine.take_batch(10), [ACK], 0.0)
    assert (kinds(engine), committed(engine)) == ([fx.Drained], [(4, [])])


def test_a_fence_ends_a_closing_drain() -> None:
    engine = new_engine(concurrency=2)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aab")
    take_all(engine)
    engine.drain(partition, close_prefix=True)
    assert engine.fence(partition) == [run[0], run[2]]
    engine.finish(run[0], ACK, 0.0)
    engine.finish(run[2], ACK, 0.0)
    assert (take_all(engine), kinds(engine), engine.flow.in_flight) == ([], [fx.Zombie, fx.Zombie], 0)


def test_a_message_that_waits_for_a_zombie_does_not_close_the_prefix() -> None:
    engine = new_engine()
    old = assigned(engine, floor=0)
    (zombie,) = deliver_keys(engine, old, b"a")
    take(engine)
    engine.lose(old)
    new = assigned(engine, floor=0)
    run = deliver_keys(engine, new, b"aac")
    assert take_all(engine) == [2]
    assert positions(engine.drain(new, close_prefix=True)) == [0, 1]
    assert new.tails == {A: zombie, C: run[2]}
    engine.finish(zombie, ACK, 0.0)
    engine.finish(run[2], ACK, 0.0)
    assert (take_all(engine), kinds(engine), new.tails) == ([], [fx.Zombie, fx.Drained], {})


def test_no_message_closes_the_prefix_after_stop_closing() -> None:
    engine, partition, run = begun_out_of_turn()
    engine.drain(partition, close_prefix=True)
    engine.finish(run[5], ACK, 0.0)
    # 4 could start now, and 3 after 2.
    assert positions(engine.stop_closing(partition)) == [3, 4]
    assert (engine.stop_closing(partition), take_all(engine), kinds(engine)) == ([], [], [])
    engine.finish(run[2], ACK, 0.0)
    assert (kinds(engine), take_all(engine)) == ([fx.Drained], [])
    assert (engine.stop_closing(partition), kinds(engine)) == ([], [])
    assert committed(engine) == [(3, [(5, 6)])]
    assert (partition.tails, engine.running_handlers, engine.flow.in_flight) == ({}, 0, 0)


def test_stop_closing_ends_a_drain_without_running_handlers() -> None:
    engine = new_engine(concurrency=2)
    busy, partition = assigned(engine, 0), assigned(engine, 1, floor=0)
    run = deliver_keys(engine, partition, b"aab")
    assert take_all(engine) == [0, 2]
    engine.finish(run[2], ACK, 0.0)
    deliver_keys(engine, busy, b"xy")
    assert take_all(engine) == [0]
    engine.finish(run[0], ACK, 0.0)
    # A slow handler of another partition is next, and 1 waits for it.
    assert take_all(engine) == [1]
    assert engine.drain(partition, close_prefix=True) == []
    assert kinds(engine) == []
    assert positions(engine.stop_closing(partition)) == [1]
    assert kinds(engine) == [fx.Drained]
    assert committed(engine) == [(1, [(2, 3)])]


@pytest.mark.parametrize("ending", ["none", "fence", "lose"])
def test_stop_closing_ignores_a_partition_that_does_not_drain(ending: str) -> None:
    engine = new_engine(concurrency=1)
    partition = assigned(engine, floor=0)
    run = deliver_keys(engine, partition, b"aab")
    take(engine)
    if ending != "none":
        engine.drain(partition, close_prefix=True)
        getattr(engine, ending)(partition)
    effects(engine)
    assert (engine.stop_closing(partition), kinds(engine)) == ([], [])
    engine.finish(run[0], ACK, 0.0)
    assert take_all(engine) == ([2] if ending == "none" else [])
