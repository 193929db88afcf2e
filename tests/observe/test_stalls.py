"""A stall at ``max_ahead`` is reported when it lasts, once for each message that blocks the floor."""

from __future__ import annotations

from lanes.core.engine import Engine
from lanes.core.types import ACK, Message, Partition
from lanes.observe.health import Stalls, examine
from tests.core.builders import assigned, deliver, failed, new_engine, take_all

INFINITY = float("inf")


def standing(*positions: int, max_ahead: int = 3) -> tuple[Engine, Partition, list[Message], Stalls]:
    """A partition that reaches ``max_ahead`` at 10 s; each message runs in its own lane."""
    engine = new_engine(max_ahead=max_ahead)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, *positions, key=None, now=10.0)
    take_all(engine)
    stalls = Stalls(engine.committer)
    stalls.reached(partition, 10.0)
    return engine, partition, run, stalls


def told(stalls: Stalls, now: float) -> list[tuple[int, int | None]]:
    """Floor and oldest position of the stalls that are due."""
    return [(each.floor, None if each.oldest is None else each.oldest.position) for each in stalls.due(now)]


def confirm(engine: Engine, now: float = 10.0) -> None:
    engine.settled(engine.collect(now, everything=True))


def test_a_lasting_stall_is_reported_once() -> None:
    _, partition, _, stalls = standing(0, 1, 2)
    assert (stalls.next_at(), told(stalls, 10.9)) == (11.0, [])
    (stall,) = stalls.due(11.0)
    assert stall.partition is partition and stall.oldest is not None and stall.oldest.position == 0
    assert (stalls.next_at(), told(stalls, 99.0)) == (INFINITY, [])
    assert repr(stalls) == "<Stalls 1 partitions at max_ahead>"


def test_a_short_stall_is_not_reported() -> None:
    engine, partition, run, stalls = standing(0, 1, 2)
    engine.finish(run[0], ACK, 10.5)
    confirm(engine)
    assert not stalls.moved(10.5)
    assert (stalls.next_at(), told(stalls, 99.0)) == (INFINITY, [])
    deliver(engine, partition, 3, now=20.0)
    stalls.reached(partition, 20.0)
    assert told(stalls, 21.0) == [(1, 1)]


def test_a_new_blocker_is_reported_after_its_own_time() -> None:
    engine, _, run, stalls = standing(0, 1, 2, 3, 4, 5)
    assert told(stalls, 11.0) == [(0, 0)]
    engine.finish(run[0], ACK, 12.0)
    confirm(engine)
    # A waiting message has been admitted instead, so the partition is still stopped.
    assert stalls.moved(12.0)
    assert (stalls.next_at(), told(stalls, 12.9), told(stalls, 13.0)) == (13.0, [], [(1, 1)])
    assert not stalls.moved(14.0)


def test_a_moving_floor_postpones_the_report_of_a_stall() -> None:
    engine, _, run, stalls = standing(0, 1, 2, 3, 4, 5)
    engine.finish(run[1], ACK, 10.5)
    confirm(engine)
    assert (stalls.moved(10.5), stalls.next_at()) == (False, 11.0)
    engine.finish(run[0], ACK, 10.7)
    confirm(engine)
    assert (stalls.moved(10.7), stalls.next_at()) == (True, 11.7)


def test_a_missing_confirmation_after_a_blocker_is_reported_after_its_own_time() -> None:
    engine, _, run, stalls = standing(0, 1, 2, 3)
    assert told(stalls, 11.0) == [(0, 0)]
    engine.finish(run[0], ACK, 12.0)
    engine.collect(12.0, everything=True)
    assert (stalls.moved(12.0), stalls.next_at(), told(stalls, 12.9), told(stalls, 13.0)) == (
        True,
        13.0,
        [],
        [(1, None)],
    )
    assert (stalls.moved(14.0), stalls.next_at()) == (False, INFINITY)


def test_a_missing_confirmation_names_no_message() -> None:
    engine, _, run, stalls = standing(0, 1, 2, 3)
    for message in run[:2]:
        engine.finish(message, ACK, 10.0)
    engine.collect(10.0, everything=True)
    assert told(stalls, 11.0) == [(2, None)]


def test_a_message_that_has_just_finished_is_not_blamed() -> None:
    engine, _, run, stalls = standing(0, 1, 2)
    engine.finish(run[0], ACK, 11.0)
    assert (told(stalls, 11.0), stalls.next_at()) == ([], 12.0)


def test_a_draining_or_lost_partition_has_no_stall() -> None:
    for end in ("drain", "lose"):
        engine, partition, _, stalls = standing(0, 1, 2)
        getattr(engine, end)(partition)
        assert (told(stalls, 99.0), repr(stalls)) == ([], "<Stalls 0 partitions at max_ahead>")


def test_a_message_that_waits_for_a_retry_is_reported() -> None:
    engine, _, run, stalls = standing(0, 1, 2)
    engine.finish(run[0], failed(), 10.0)
    assert told(stalls, 11.0) == [(0, 0)]


def test_health_names_the_first_unfinished_message() -> None:
    engine, _, run, _ = standing(0, 1, 2)
    held = []
    for message in run:
        engine.finish(message, ACK, 10.0)  # not entered into the ledger yet
        (reason,) = examine(engine, 10.0, unhealthy_after=9.0, stuck=[], unknown={}, unsettled={}).reasons
        held.append(reason.removeprefix("S/0 has reached max_ahead=3").partition(", key")[0])
    assert held == [", held by S/0 position 1", ", held by S/0 position 2", ""]


def test_a_message_of_a_part_that_was_given_up_is_never_named() -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, 0, 1, 2, key=None, now=10.0)
    stalls = Stalls(engine.committer)
    stalls.reached(partition, 10.0)
    assert engine.part(partition, lambda message: message.position == 0) == run[:1]
    # The floor waits for the hand-over of the part, and not for a later message.
    assert told(stalls, 11.0) == []
    take_all(engine)
    for message in run[1:]:
        engine.finish(message, ACK, 11.0)
    confirm(engine, 11.0)
    assert told(stalls, 20.0) == []
    assert stalls.next_at() < INFINITY
