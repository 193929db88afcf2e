"""Ownership: partitions are assigned, drained, fenced, lost and released, and handlers may outlive them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED, FINISHED, RUNNING, SETTLED
from lanes.core.types import ABANDON, ACK, Failure, Message, Outcome, Partition, PartitionId
from tests.core.builders import assigned, deliver, effects, failed, kinds, new_engine, new_partition, take, take_all

OUTCOMES = [ACK, ABANDON, failed(), failed(terminal=True)]


def states(messages: list[Message]) -> set[int]:
    return {message.state for message in messages}


def nothing_left(engine: Engine) -> bool:
    """Whether an engine without partitions has forgotten every message, key and fence."""
    assert engine.partitions == {}
    left = (engine.chains.tails, engine.chains.fenced, engine.stopped.by_head, engine._ready, engine.dirty)
    return not any(left) and (engine.flow.in_flight, engine.flow.bytes, engine.running_handlers) == (0, 0, 0)


# --- assignment


def test_assignments_are_numbered_over_all_partitions() -> None:
    engine = new_engine()
    first, second = assigned(engine, 0), assigned(engine, 1)
    engine.release(first)
    again = assigned(engine, 0)
    assert [p.assignment for p in (first, second, again)] == [1, 2, 3]
    assert [p.live for p in (first, second, again)] == [False, True, True]
    assert list(engine.partitions) == [second.id, again.id]


def test_a_partition_is_assigned_once() -> None:
    engine = new_engine()
    partition = assigned(engine)
    for twice in (partition, new_partition()):
        with pytest.raises(ValueError, match="S/0 is already assigned; release it or report it lost"):
            engine.assign(twice)
    engine.release(partition)
    with pytest.raises(ValueError, match="already assigned"):
        engine.assign(partition)
    assert engine.latest_assignment == 1


def test_a_partition_that_is_not_assigned_admits_nothing() -> None:
    engine = new_engine()
    deliver(engine, new_partition(), 0)
    released = assigned(engine)
    engine.release(released)
    deliver(engine, released, 0)
    assert engine.drain(released) == []
    assert engine.fence(released) == []
    assert kinds(engine) == []
    assert nothing_left(engine)


# --- drain


def test_a_drain_abandons_waiting_messages_and_waits_for_running_ones() -> None:
    engine = new_engine()
    partition = assigned(engine)
    running, successor = deliver(engine, partition, 0, 1)
    held, after_held = deliver(engine, partition, 2, 3, key=b"held")
    dead_letter, after_dead_letter = deliver(engine, partition, 4, 5, key=b"dead_letter")
    (finished,) = deliver(engine, partition, 6, key=b"finished")
    (queued,) = deliver(engine, partition, 7, key=None)
    assert [take(engine).position for _ in range(4)] == [0, 2, 4, 6]
    engine.finish(held, failed(), 0.0)
    engine.finish(dead_letter, failed(terminal=True), 0.0)
    engine.finish(finished, ACK, 0.0)
    effects(engine)
    abandoned = engine.drain(partition)
    assert abandoned == [successor, held, after_held, dead_letter, after_dead_letter, queued]
    assert states(abandoned) == {ABANDONED}
    assert (kinds(engine), engine.take(), engine.stopped_lanes(), engine.flow.in_flight) == ([], None, [], 2)
    # Holds and unconfirmed dead letters at the start of the drain end without effect.
    engine.due(1e9)
    engine.dead_lettered(dead_letter)
    assert engine.take() is None
    engine.finish(running, ACK, 0.0)
    assert kinds(engine) == [fx.Drained]
    assert [m.position for m in engine.collect(0.0)[0].messages] == [6, 0]


def test_an_idle_partition_is_drained_at_once_and_once() -> None:
    engine = new_engine()
    partition, other = assigned(engine, 0), assigned(engine, 1)
    deliver(engine, other, 0)
    (drained,) = (engine.drain(partition), effects(engine))[1]
    assert isinstance(drained, fx.Drained)
    assert drained.partition is partition
    assert engine.drain(partition) == []
    assert kinds(engine) == []
    assert take_all(engine) == [0]


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_last_handler_ends_the_drain(outcome: Outcome) -> None:
    engine = new_engine()
    partition = assigned(engine)
    first, second = deliver(engine, partition, 0, 1, key=None)
    take_all(engine)
    engine.drain(partition)
    told = [fx.Interrupted] if isinstance(outcome, Failure) else []
    engine.finish(first, outcome, 0.0)
    assert kinds(engine) == told
    engine.finish(second, outcome, 0.0)
    assert kinds(engine) == [*told, fx.Drained]
    assert states([first, second]) == {FINISHED if outcome is ACK else ABANDONED}
    assert engine.flow.in_flight == (2 if outcome is ACK else 0)


def test_a_drain_makes_room() -> None:
    engine = new_engine(max_in_flight=4)
    partition = assigned(engine)
    deliver(engine, partition, 0, 1, 2, 3)
    effects(engine)
    engine.drain(partition)
    assert kinds(engine) == [fx.Resumed, fx.Drained]


@pytest.mark.parametrize("others", [0, 1])
def test_an_interrupted_handler_drains_its_partition(others: int) -> None:
    engine = new_engine()
    partition = assigned(engine)
    head, successor = deliver(engine, partition, 0, 1)
    beside = deliver(engine, partition, *range(2, 2 + others), key=None)
    take_all(engine)
    engine.finish(head, ABANDON, 0.0)
    assert states([head, successor]) == {ABANDONED}
    assert partition.draining
    assert engine.take() is None
    assert engine.drain(partition) == []
    (abandoned,) = [effect for effect in engine.effects if isinstance(effect, fx.Abandoned)]
    assert abandoned.messages == [successor]
    engine.effects.remove(abandoned)
    for message in beside:
        assert kinds(engine) == []
        engine.finish(message, ACK, 0.0)
    assert kinds(engine) == [fx.Drained]
    engine.settled(engine.collect(0.0))
    engine.release(partition)
    assert nothing_left(engine)


# --- fence, lose, release


def test_a_fence_keeps_finished_messages_for_their_settlement() -> None:
    engine = new_engine()
    partition = assigned(engine)
    finished, queued, running = (deliver(engine, partition, i, key=key)[0] for i, key in enumerate((b"f", b"q", b"r")))
    assert take(engine) is finished
    engine.finish(finished, ACK, 0.0)
    assert isinstance(engine.chains.ready, deque)
    engine.chains.ready.rotate()
    assert take(engine) is running
    assert engine.fence(partition) == [running]
    assert engine.fence(partition) == []
    assert (queued.state, engine.take(), engine.flow.in_flight) == (ABANDONED, None, 2)
    engine.settled(engine.collect(0.0))
    assert (finished.state, engine.settled_count, engine.flow.in_flight) == (SETTLED, 1, 1)
    engine.finish(running, ACK, 0.0)
    assert kinds(engine) == [fx.Zombie]
    assert (running.state, engine.zombies, engine.collect(0.0)) == (ABANDONED, 1, [])
    engine.release(partition)
    assert nothing_left(engine)


def test_a_lost_partition_settles_nothing() -> None:
    engine = new_engine()
    partition = assigned(engine)
    finished, running = deliver(engine, partition, 0, 1, key=None)
    take_all(engine)
    engine.finish(finished, ACK, 0.0)
    assert engine.lose(partition) == [running]
    assert engine.lose(partition) == []
    assert (engine.collect(0.0), finished.state, engine.partitions) == ([], ABANDONED, {})
    assert kinds(engine) == []


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("key", [b"k", None])
def test_an_outcome_of_a_handler_whose_partition_was_lost_does_not_count(outcome: Outcome, key: bytes | None) -> None:
    engine = new_engine(max_in_flight=1)
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 0, key=key)
    take(engine)
    engine.lose(partition)
    # A zombie still uses memory and a worker.
    assert (engine.flow.in_flight, engine.running_handlers, effects(engine)[1:]) == (1, 1, [])
    engine.finish(message, outcome, 0.0)
    assert kinds(engine) == [fx.Zombie, fx.Resumed]
    assert (message.state, engine.zombies) == (ABANDONED, 1)
    assert nothing_left(engine)


def test_a_drain_that_a_fence_ended_emits_no_drained_event() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 0)
    take(engine)
    engine.drain(partition)
    assert engine.fence(partition) == [message]
    engine.release(partition)
    engine.finish(message, ACK, 0.0)
    assert kinds(engine) == [fx.Zombie]
    assert nothing_left(engine)


def test_a_partition_may_be_lost_during_a_dead_letter() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (message,) = deliver(engine, partition, 0)
    engine.finish(take(engine), failed(terminal=True), 0.0)
    assert engine.lose(partition) == []
    engine.dead_lettered(message)
    assert nothing_left(engine)


def test_a_partition_may_be_lost_during_a_settlement() -> None:
    engine = new_engine()
    partition = assigned(engine)
    (sent,) = deliver(engine, partition, 0)
    engine.finish(take(engine), ACK, 0.0)
    settlements = engine.collect(0.0)
    engine.lose(partition)
    engine.unsettled(settlements)
    assert engine.collect(0.0) == []
    engine.settled(settlements)
    assert (engine.settled_count, sent.state) == (0, ABANDONED)
    assert nothing_left(engine)


def test_a_settlement_of_a_former_assignment_settles_nothing_of_the_new_one() -> None:
    engine = new_engine()
    former = assigned(engine)
    deliver(engine, former, 0)
    engine.finish(take(engine), ACK, 0.0)
    settlements = engine.collect(0.0)
    engine.lose(former)
    partition = assigned(engine)
    (again,) = deliver(engine, partition, 0)
    engine.unsettled(settlements)
    engine.settled(settlements)
    assert engine.flow.in_flight == 1
    engine.finish(take(engine), ACK, 0.0)
    assert engine.collect(0.0)[0].messages == [again]


def test_a_release_forgets_everything_left() -> None:
    engine = new_engine()
    partition = assigned(engine)
    finished, running, _ = deliver(engine, partition, 0, 1, 2, key=None)
    take(engine), take(engine)
    engine.finish(finished, ACK, 0.0)
    engine.release(partition)
    engine.release(partition)
    assert (engine.dirty, finished.state, running.state) == ([], ABANDONED, RUNNING)
    engine.finish(running, ACK, 0.0)
    assert nothing_left(engine)


# --- a key that comes back while its zombie runs


def test_a_key_waits_for_its_handler_of_a_former_assignment() -> None:
    engine = new_engine()
    former = assigned(engine)
    zombie, abandoned = deliver(engine, former, 0, 1)
    take(engine)
    engine.lose(former)
    partition = assigned(engine)
    again, successor = deliver(engine, partition, 0, 1)
    (other,) = deliver(engine, partition, 2, key=b"other")
    assert (abandoned.state, take_all(engine)) == (ABANDONED, [other.position])
    engine.finish(zombie, failed(), 0.0)
    assert kinds(engine) == [fx.Zombie]
    assert take(engine) is again
    engine.finish(again, ACK, 0.0)
    assert take(engine) is successor
    engine.finish(successor, ACK, 0.0)
    engine.finish(other, ACK, 0.0)
    engine.release(partition)
    assert nothing_left(engine)


def test_handlers_of_several_former_assignments_each_hold_their_key() -> None:
    engine = new_engine()
    zombies: list[Message] = []
    partition: Partition
    for key in (b"a", b"b", b"c"):
        partition = assigned(engine)
        for position, name in enumerate((b"a", b"b", b"c")):
            deliver(engine, partition, position, key=name)
        assert isinstance(engine.chains.ready, deque)
        for message in sorted(engine.chains.ready, key=lambda m: m.key != key):
            engine.chains.ready.remove(message)
            engine.chains.ready.append(message)
        zombie = take(engine)
        assert zombie.key == key
        zombies += engine.lose(partition)
        assert zombies[-1] is zombie
    partition = assigned(engine)
    for position, name in enumerate((b"a", b"b", b"c", b"d")):
        deliver(engine, partition, position, position + 10, key=name)
    assert take_all(engine) == [3]
    for expected, zombie in zip((1, 2, 0), (zombies[1], zombies[2], zombies[0]), strict=True):
        engine.finish(zombie, ACK, 0.0)
        assert take_all(engine) == [expected]
    engine.lose(partition)
    assert len(engine.chains.fenced) == 4


@pytest.mark.parametrize("how", ["drain", "fence", "lose", "release"])
def test_a_message_that_waits_for_a_zombie_is_abandoned_with_its_partition(how: str) -> None:
    engine = new_engine()
    former = assigned(engine)
    (zombie,) = deliver(engine, former, 0)
    take(engine)
    engine.lose(former)
    partition = assigned(engine)
    waiting = deliver(engine, partition, 0, 1)
    getattr(engine, how)(partition)
    assert states(waiting) == {ABANDONED}
    engine.release(partition)
    # The zombie still blocks the key in the next assignment.
    latest = assigned(engine)
    deliver(engine, latest, 0)
    assert engine.take() is None
    engine.finish(zombie, ACK, 0.0)
    assert take(engine).partition is latest


def test_a_zombie_of_a_lost_partition_may_end_during_the_next_assignment() -> None:
    engine = new_engine()
    former = assigned(engine)
    (zombie,) = deliver(engine, former, 0)
    take(engine)
    engine.lose(former)
    partition = assigned(engine)
    engine.finish(zombie, ACK, 0.0)
    deliver(engine, partition, 0)
    assert take_all(engine) == [0]
    engine.lose(partition)
    assert len(engine.chains.tails) == 1


def test_the_failure_of_one_partition_changes_no_other_partition() -> None:
    engine = new_engine()
    one, other = assigned(engine, 0), assigned(engine, 1)
    for partition in (one, other):
        deliver(engine, partition, 0, 1)
    running_one, running_other = take(engine), take(engine)
    engine.finish(running_one, Failure(ValueError("no"), delay=1.0), 0.0)
    engine.drain(one)
    engine.finish(running_other, ACK, 0.0)
    following = take(engine)
    assert (following.partition, following.position) == (other, 1)
    assert other.live


class Unlisted(dict[PartitionId, Partition]):
    """Assignments that refuse to be listed."""

    def __iter__(self) -> Iterator[PartitionId]:
        raise AssertionError("the end of one assignment looks at all others")


def test_the_end_of_an_assignment_looks_at_no_other_assignment() -> None:
    """Otherwise the loss of all partitions takes a time that grows with the square of their number."""
    engine = new_engine()
    partitions = [assigned(engine, number) for number in range(3)]
    (message,) = deliver(engine, partitions[0], 0)
    assert engine.take() is message
    engine.partitions = Unlisted(engine.partitions)
    for partition in partitions:
        engine.lose(partition)
    assert list(engine.chains.tails) == [partitions[0].id]
    engine.finish(message, ACK, 0.0)
    assert engine.chains.tails == {}
