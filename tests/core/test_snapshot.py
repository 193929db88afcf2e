"""A snapshot is a value with exactly the state that decides the next steps of an engine."""

from __future__ import annotations

import pytest

from lanes.core.engine import Engine
from lanes.core.ledgers import AckLedger
from lanes.core.snapshot import MessageId, message_id, restore, snapshot
from lanes.core.types import ABANDON, ACK, Message, Partition
from lanes.errors import MessageError
from tests.core.builders import assigned, deliver, effects, failed, new_engine, new_message, take, take_all


def again(engine: Engine) -> Engine:
    """Restore an engine twice in a row; both snapshots must be equal."""
    effects(engine)
    state = snapshot(engine)
    restored = restore(state)
    assert snapshot(restored) == state
    assert hash(snapshot(restored)) == hash(state)
    return restored


def only(engine: Engine) -> Partition:
    (partition,) = engine.partitions.values()
    return partition


def busy() -> tuple[Engine, Partition, list[Message]]:
    """An engine with a queued, a running, a held, a finished and a waiting message, and a commit on its way."""
    engine = new_engine(max_ahead=4)
    partition = assigned(engine, floor=10, completed=[(12, 13)])
    run = deliver(engine, partition, 10, 11, key=b"a") + deliver(engine, partition, 12, 14, key=b"b")
    run += deliver(engine, partition, 15, key=b"c") + deliver(engine, partition, 16, key=b"c")
    engine.finish(take(engine), failed(), 1.0)
    engine.finish(take(engine), ACK, 2.0)
    engine.collect(3.0, everything=True)
    return engine, partition, run


def test_taking_a_snapshot_changes_nothing_and_equal_engines_have_equal_snapshots() -> None:
    engine, _, _ = busy()
    effects(engine)
    state = snapshot(engine)
    assert snapshot(engine) == state
    other, _, _ = busy()
    effects(other)
    # Failures are kept by reference, and each engine has its own; everything else is equal.
    assert snapshot(other)._replace(lanes=state.lanes) == state
    assert other.take() is None
    other.due(99.0)
    effects(other)
    assert snapshot(other) != state


@pytest.mark.parametrize("knows_settled", [True, False])
def test_a_restored_engine_knows_settled_positions_if_its_policy_says_so(knows_settled: bool) -> None:
    engine = new_engine(knows_settled=knows_settled)
    deliver(engine, assigned(engine), 3)
    restored = again(engine)
    restored.finish(take(restored), ACK, 0.0)
    restored.settled(restored.collect(0.0))
    ledger = only(restored).ledger
    assert isinstance(ledger, AckLedger)
    assert ledger.is_settled(3) == knows_settled


def test_a_restored_engine_has_its_own_partitions_and_messages() -> None:
    engine, partition, run = busy()
    restored = again(engine)
    assert only(restored) is not partition
    assert not set(only(restored).ledger.in_flight()) & set(run)
    restored.lose(only(restored))
    assert (engine.flow.in_flight, restored.flow.in_flight) == (4, 0)


def test_a_restored_engine_continues_the_work() -> None:
    engine, _, run = busy()
    restored = again(engine)
    for one in (engine, restored):
        assert one.room().paused == frozenset({only(one)})
        commits = only(one).commits
        assert commits is not None
        sending = commits.sending
        assert sending is not None
        assert (sending.floor, list(sending.completed)) == (10, [(12, 15)])
        one.settled([sending])
        one.due(99.0)
        assert take_all(one) == [10]
    assert message_id(run[0]) == MessageId(1, 10)


def test_a_snapshot_with_unperformed_effects_is_refused() -> None:
    engine, _, _ = busy()
    with pytest.raises(ValueError, match="effects that are not performed; perform them, and empty the list"):
        snapshot(engine)


def test_a_fenced_handler_keeps_its_key_after_its_partition_was_given_up() -> None:
    engine = new_engine()
    for floor in (0, None):
        lost = assigned(engine, floor=floor)
        deliver(engine, lost, 5)
        deliver(engine, lost, 6, key=None)
        assert take_all(engine) == [5, 6]
        assert len(engine.lose(lost)) == 2
        heir = assigned(engine, floor=floor)
        deliver(engine, heir, 5)
        restored = again(engine)
        assert restored.take() is None
        zombies = {message.key: message for message in restored.chains.fenced}
        restored.finish(zombies[None], ACK, 0.0)
        assert restored.take() is None
        restored.finish(zombies[b"k"], ACK, 0.0)
        assert take(restored).partition is only(restored)
        assert (restored.flow.in_flight, restored.running_handlers) == (1, 1)
        for message in list(engine.chains.fenced):
            engine.finish(message, ABANDON, 0.0)
        engine.lose(heir)
    assert again(engine).flow.in_flight == 0


def test_objects_of_the_client_are_kept_by_reference() -> None:
    engine = new_engine(dead_letters=True)
    partition = assigned(engine)
    error = MessageError("no key")
    message = new_message(partition, 1)
    message.data, message.broken = None, error
    engine.receive(partition, [message, new_message(partition, 2)], 2, 7.0)
    first, second = only(again(engine)).ledger.in_flight()
    assert (first.raw, first.token, first.data, first.broken, first.received) == ("raw 1", "token 1", None, error, 7.0)
    assert first.next is second
    assert not hasattr(second, "data")
    assert first.value == b"raw 1"


def test_a_restored_engine_settles_a_redelivery_again() -> None:
    engine = new_engine()
    partition = assigned(engine)
    deliver(engine, partition, 1, key=b"a")
    deliver(engine, partition, 3, key=b"b")
    deliver(engine, partition, 5, key=b"c")
    for _ in range(2):
        engine.finish(take(engine), ACK, 0.0)
    engine.settled(engine.collect(0.0))
    deliver(engine, partition, 3, key=b"b")
    restored = again(engine)
    assert (restored.ready, restored.flow.in_flight, len(restored.dirty)) == (1, 1, 1)
    (settlement,) = restored.collect(0.0)
    assert [(m.position, m.token) for m in settlement.messages] == [(3, "token 3")]
    deliver(restored, only(restored), 1, key=b"a")
    assert (restored.ready, restored.late) == (1, 0)


def test_a_restored_drain_continues() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0, 1, key=b"a")
    deliver(engine, partition, 2, key=b"b")
    first, last = take(engine), take(engine)
    engine.finish(last, ACK, 0.0)
    engine.drain(partition, close_prefix=True)
    for one in (again(engine), engine):
        running = next(m for m in only(one).ledger.in_flight() if m.position == first.position)
        one.finish(running, ACK, 0.0)
        one.finish(take(one), ACK, 0.0)
        (drained,) = effects(one)
        assert type(drained).__name__ == "Drained"
        (commit,) = one.collect(0.0, everything=True)
        assert (commit.floor, list(commit.completed)) == (3, [])


@pytest.mark.parametrize(("over", "floors"), [(False, [7]), (True, [])])
def test_a_restored_engine_knows_the_position_of_the_source_and_the_end_of_commits(
    over: bool, floors: list[int]
) -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0)
    engine.progressed(partition, 7, 0.0)
    assert partition.commits is not None
    partition.commits.over = over
    restored = again(engine)
    restored.finish(take(restored), ACK, 0.0)
    assert [commit.floor for commit in restored.collect(0.0, everything=True)] == floors
