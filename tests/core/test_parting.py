"""The release of a part of a partition, while the other parts continue. Commits stay correct until the hand-over."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core import effects as fx
from lanes.core.engine import Engine
from lanes.core.lane import ABANDONED, QUEUED, RUNNING, SETTLED
from lanes.core.partition_budgets import PartitionBudgetEngine, make_engine
from lanes.core.types import ACK, RETURN, Failure, Message, Outcome, Partition, PartitionId, PieceId
from tests.core.builders import (
    READER,
    ack,
    assigned,
    commits_of,
    effects,
    failed,
    new_engine,
    new_message,
    positions,
    take_all,
)

KEPT, MOVED, OTHER = b"kept", b"moved", b"other"


def moved(message: Message) -> bool:
    return message.key is not None and message.key.startswith(b"moved")


def deliver(engine: Engine, partition: Partition, *keys: bytes) -> list[Message]:
    """Deliver one message of each key, at the next positions."""
    first = partition.ledger.highest + 1
    run = [new_message(partition, position, key) for position, key in enumerate(keys, start=first)]
    engine.receive(partition, run, len(run), 0.0)
    return run


def parted(engine: Engine) -> list[fx.Parted]:
    return [effect for effect in effects(engine) if isinstance(effect, fx.Parted)]


def commit(engine: Engine) -> tuple[int | None, list[tuple[int, int]]]:
    """The state that the next commit stores, which the broker confirms."""
    (settlement,) = engine.collect(0.0, everything=True)
    engine.settled([settlement])
    return commits_of([settlement])[0]


def test_waiting_messages_of_a_part_are_given_up_and_the_others_go_on() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT, MOVED, KEPT)
    assert positions(engine.part(partition, moved)) == [0, 2]
    assert [message.state for message in run] == [ABANDONED, QUEUED, ABANDONED, QUEUED]
    assert engine.flow.in_flight == 2
    (effect,) = parted(engine)
    assert take_all(engine) == [1]
    ack(engine, run[1])
    assert take_all(engine) == [3]
    ack(engine, run[3])
    # The commit is true for the part too: its messages are not finished.
    assert commit(engine) == (0, [(1, 2), (3, 4)])
    engine.parted(partition, effect.parting, 0.0)
    assert commit(engine) == (4, [])


def test_a_part_waits_for_its_running_handlers_alone() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT, MOVED)
    take_all(engine)
    assert positions(engine.part(partition, moved)) == [2]
    assert parted(engine) == []
    assert run[0].state == RUNNING
    ack(engine, run[1])
    assert parted(engine) == []
    ack(engine, run[0])
    (effect,) = parted(engine)
    assert effect.parting.part is moved
    # The message whose handler ended is finished for the next owner, and the abandoned one is not.
    assert commit(engine) == (2, [])
    assert partition.live and not partition.draining


def test_a_failed_message_of_a_part_is_given_up_without_a_retry() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT)
    take_all(engine)
    engine.part(partition, moved)
    engine.finish(run[0], failed(), 0.0)
    ack(engine, run[1])
    found = effects(engine)
    assert [type(effect) for effect in found] == [fx.Interrupted, fx.Abandoned, fx.Parted]
    assert engine.stopped_lanes() == []
    assert commit(engine) == (0, [(1, 2)])


@pytest.mark.parametrize("poison", ["block", "skip"])
def test_held_blocked_and_parking_messages_of_a_part_are_given_up(poison: str) -> None:
    engine = new_engine(poison="block" if poison == "block" else "skip", attempts=1 if poison == "block" else 2)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT)
    take_all(engine)
    engine.finish(run[0], failed(), 0.0)
    assert len(engine.stopped_lanes()) == 1
    assert engine.part(partition, moved) == [run[0]]
    assert engine.stopped_lanes() == []
    assert len(parted(engine)) == 1


def test_a_part_does_not_wait_for_the_handlers_of_another() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, b"moved 1", b"moved 2", KEPT)
    take_all(engine)
    engine.part(partition, lambda message: message.key == b"moved 1")
    engine.part(partition, lambda message: message.key == b"moved 2")
    ack(engine, run[1])
    (second,) = parted(engine)
    assert (second.parting.part(run[0]), second.parting.part(run[1])) == (False, True)
    engine.parted(partition, second.parting, 0.0)
    # The commit is still true for the first part, whose handler runs.
    assert commit(engine) == (0, [(1, 2)])
    engine.finish(run[0], failed(), 0.0)
    ack(engine, run[2])
    (first,) = parted(engine)
    assert positions(first.parting.given_up) == [0]
    engine.parted(partition, first.parting, 0.0)
    assert commit(engine) == (3, [])


def run_all(engine: Engine) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """Run all messages that may start, and return the commits in between."""
    stored: list[tuple[int | None, list[tuple[int, int]]]] = []
    while True:
        message = engine.take()
        if message is not None:
            ack(engine, message)
        elif not (settlements := engine.collect(0.0, everything=True)):
            return stored
        else:
            engine.settled(settlements)
            stored += commits_of(settlements)


def test_a_hand_over_of_one_part_keeps_the_waiting_messages_of_another() -> None:
    """The floor must stay below a message until its own part is handed over."""
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, b"kept 0", b"moved x", b"kept 2", b"moved y", b"kept 4")
    engine.part(partition, lambda message: message.key == b"moved x")
    engine.part(partition, lambda message: message.key == b"moved y")
    first, second = parted(engine)
    engine.parted(partition, first.parting, 0.0)
    assert run_all(engine)[-1] == (3, [])
    engine.parted(partition, second.parting, 0.0)
    assert run_all(engine)[-1] == (5, [])
    assert [message.state for message in run[::2]] == [SETTLED] * 3
    assert engine.flow.in_flight == 0


def test_messages_after_a_hand_over_have_no_number_of_another_part() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    deliver(engine, partition, b"kept 0", b"kept 1", b"moved x", b"moved y")
    engine.part(partition, lambda message: message.key == b"moved x")
    engine.part(partition, lambda message: message.key == b"moved y")
    first, second = parted(engine)
    engine.parted(partition, first.parting, 0.0)
    later = [new_message(partition, position, b"kept") for position in (4, 5)]
    engine.receive(partition, later, 2, 0.0)
    assert run_all(engine)[-1][0] == 3
    engine.parted(partition, second.parting, 0.0)
    assert run_all(engine)[-1] == (6, [])
    assert [message.state for message in later] == [SETTLED] * 2


@pytest.mark.parametrize("outcome", [failed(), RETURN], ids=["failed", "returned"])
def test_a_batch_starts_no_later_message_of_a_part_after_one_that_was_given_up(outcome: Outcome | Failure) -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, MOVED, MOVED)
    batch = engine.take_batch(2)
    assert engine.part(partition, moved) == [run[2]]
    engine.finish_batch(batch, [outcome, ACK], 0.0)
    assert [message.state for message in run] == [ABANDONED] * 3
    assert engine.take() is None
    (effect,) = parted(engine)
    assert sorted(positions(effect.parting.given_up)) == [0, 1, 2]
    assert (engine.flow.in_flight, engine.running_handlers) == (0, 0)
    engine.parted(partition, effect.parting, 0.0)
    assert partition.ledger.floor() == 3


def test_a_drain_supersedes_a_parting() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT, MOVED)
    take_all(engine)
    engine.part(partition, moved)
    engine.drain(partition)
    ack(engine, run[0], run[1])
    assert [type(effect) for effect in effects(engine)] == [fx.Drained]
    # The last message of the part is not finished, so the next owner of either part finds the truth.
    assert commit(engine) == (2, [])
    assert engine.part(partition, moved) == []


def test_a_lost_partition_forgets_its_parting() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, MOVED, KEPT)
    take_all(engine)
    engine.part(partition, moved)
    engine.lose(partition)
    for message in run:
        engine.finish(message, ACK, 0.0)
    assert parted(engine) == []
    assert (engine.flow.in_flight, engine.running_handlers, engine.chains.tails) == (0, 0, {})


@given(
    st.lists(st.sampled_from([b"kept 1", b"kept 2", b"moved 1", b"moved 2"]), min_size=1, max_size=30),
    st.integers(1, 6),
    st.data(),
)
def test_a_commit_covers_a_message_of_a_part_only_if_it_is_finished(
    keys: Sequence[bytes], max_ahead: int, data: st.DataObject
) -> None:
    """With ``max_ahead``, some messages wait outside of the lanes when the part is given up."""
    engine = new_engine(max_ahead=max_ahead)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, *keys)
    running: list[Message] = []
    handed_over = False
    left = data.draw(st.integers(0, len(keys)))
    given_up = False
    for step in range(200):
        while (message := engine.take()) is not None:
            assert not (given_up and moved(message)), "a message of the part has started"
            running.append(message)
        if step == left:
            given_up = True
            engine.part(partition, moved)
        elif running:
            ack(engine, running.pop(data.draw(st.integers(0, len(running) - 1))))
        for effect in parted(engine):
            engine.parted(partition, effect.parting, 0.0)
            handed_over = True
        for settlement in engine.collect(0.0, everything=True):
            assert settlement.floor is not None
            done = {p for start, end in settlement.completed for p in range(start, end)} | set(range(settlement.floor))
            for each in run:
                if each.position in done and not (moved(each) and handed_over):
                    assert each.state not in (QUEUED, RUNNING, ABANDONED)
            engine.settled([settlement])
        if given_up and not running and not engine.ready:
            break
    assert handed_over
    engine.progressed(partition, len(keys), 0.0)
    assert partition.ledger.floor() == len(keys)
    assert engine.flow.in_flight == 0


def test_pieces_of_a_partition_share_its_lanes() -> None:
    """A fenced handler of one piece delays the messages of its key in another piece."""
    engine = new_engine()
    lost, taken = (Partition(PieceId("S", 0, piece), READER, floor=0) for piece in (1, 2))
    engine.assign(lost)
    (zombie,) = deliver(engine, lost, b"k")
    take_all(engine)
    engine.lose(lost)
    engine.assign(taken)
    deliver(engine, taken, b"k", b"other")
    assert take_all(engine) == [1]
    engine.finish(zombie, ACK, 0.0)
    assert take_all(engine) == [0]
    assert list(engine.chains.tails) == [PartitionId("S", 0)]


def test_a_released_piece_leaves_the_lanes_of_the_other_pieces() -> None:
    engine = new_engine()
    one, two = (Partition(PieceId("S", 0, piece), READER, floor=0) for piece in (1, 2))
    for partition in (one, two):
        engine.assign(partition)
    engine.release(one)
    (first, _) = deliver(engine, two, b"k", b"k")
    three = Partition(PieceId("S", 0, 3), READER, floor=0)
    engine.assign(three)
    assert three.tails is two.tails
    assert take_all(engine) == [0]
    ack(engine, first)
    assert take_all(engine) == [1]


def test_a_piece_is_named_apart_from_its_partition() -> None:
    piece = PieceId("orders", 3, 17)
    source, number = piece
    assert (source, number, piece.piece, str(piece)) == ("orders", 3, 17, "orders/3#17")
    assert piece.whole == PartitionId("orders", 3) == PartitionId("orders", 3).whole
    assert piece != PartitionId("orders", 3) and PartitionId("orders", 3) != piece
    assert piece != PieceId("orders", 3, 18)
    assert len({piece, PieceId("orders", 3, 17), PartitionId("orders", 3)}) == 2
    assert pickle.loads(pickle.dumps(piece)) == piece


def test_the_pieces_of_a_partition_share_its_bounds() -> None:
    engine = make_engine(new_engine().policy._replace(concurrency_per_partition=1, max_in_flight_per_partition=8))
    one, other = (Partition(PieceId("S", 0, piece), READER, floor=0) for piece in (1, 2))
    third = Partition(PieceId("S", 1, 3), READER, floor=0)
    for partition in (one, other, third):
        engine.assign(partition)
        deliver(engine, partition, b"key of %d" % partition.id.piece)
    assert {message.partition for message in iter(engine.take, None)} == {one, third}
    assert engine.room().messages == 6


def budgeted(bound: int, max_ahead: int = 1_000) -> tuple[Engine, Partition]:
    base = new_engine(max_ahead=max_ahead).policy
    policy = base._replace(max_in_flight_per_partition=bound, concurrency_per_partition=1)
    engine = make_engine(policy)
    partition = Partition(PieceId("S", 0, 1), READER, floor=0)
    engine.assign(partition)
    return engine, partition


def test_messages_that_wait_for_max_ahead_count_while_a_part_is_given_up() -> None:
    engine, partition = budgeted(20, max_ahead=2)
    deliver(engine, partition, MOVED, *[KEPT] * 5)
    take_all(engine)
    engine.part(partition, moved)
    assert engine.room().messages == 20 - 6


def test_a_full_budget_resumes_when_a_part_is_given_up() -> None:
    """The floor stays below a message that is kept, so no commit tells of the room."""
    engine, partition = budgeted(8)
    deliver(engine, partition, KEPT, *[MOVED] * 7)
    assert partition in engine.room().paused
    engine.part(partition, moved)
    (done,) = [each for each in effects(engine) if isinstance(each, fx.Parted)]
    assert partition not in engine.room().paused and engine.room().messages == 7
    engine.parted(partition, done.parting, 0.0)
    assert engine.room().messages == 7
    assert take_all(engine) == [0]


def test_a_piece_that_drains_leaves_the_bound_of_the_others() -> None:
    engine, draining = budgeted(8)
    other = Partition(PieceId("S", 0, 2), READER, floor=0)
    engine.assign(other)
    deliver(engine, draining, KEPT)
    take_all(engine)
    engine.drain(draining)
    deliver(engine, other, b"a", b"b")
    assert engine.room().messages == 5


def other_part(message: Message) -> bool:
    return message.key == OTHER


def test_a_second_part_that_is_given_up_stays_uncounted_after_the_handover_of_the_first() -> None:
    """The floor stays below a message that is kept, so the ledger has holes of the second part."""
    engine, partition = budgeted(20)
    deliver(engine, partition, KEPT, MOVED, OTHER, OTHER)
    engine.part(partition, moved)
    engine.part(partition, other_part)
    first, second = parted(engine)
    assert engine.room().messages == 19
    engine.parted(partition, first.parting, 0.0)
    assert engine.room().messages == 19
    engine.parted(partition, second.parting, 0.0)
    assert engine.room().messages == 19


def test_a_released_partition_leaves_neither_a_part_nor_a_full_budget() -> None:
    engine, partition = budgeted(8)
    deliver(engine, partition, *[KEPT] * 8)
    assert isinstance(engine, PartitionBudgetEngine) and engine.full
    engine.part(partition, moved)
    engine.drain(partition)
    engine.release(partition)
    assert not engine.parting and not engine.full and not engine.assigned
    again = Partition(PieceId("S", 0, 1), READER, floor=0)
    engine.assign(again)
    assert engine.room().messages == 8 and again not in engine.room().paused


@pytest.mark.parametrize("floor", [0, None])
def test_messages_that_the_runtime_puts_aside_use_up_the_budget(floor: int | None) -> None:
    engine = make_engine(new_engine().policy._replace(max_in_flight_per_partition=8, concurrency_per_partition=1))
    partition = Partition(PartitionId("S", 0), READER, floor=floor)
    engine.assign(partition)
    engine.receive(partition, [new_message(partition, 0, KEPT)], 1, 0.0)
    partition.aside = 2
    assert engine.room().messages == 5
