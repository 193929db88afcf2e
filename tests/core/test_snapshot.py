"""A snapshot is a value with exactly the state that decides the next steps of an engine."""

from __future__ import annotations

import pytest

from lanes.core.commits import PartitionCommits
from lanes.core.engine import Engine
from lanes.core.ledgers import AckLedger
from lanes.core.partition_budgets import make_engine
from lanes.core.snapshot import (
    AckLedgerState,
    BudgetState,
    CommitsState,
    FlowState,
    MessageId,
    OffsetLedgerState,
    message_id,
    restore,
    snapshot,
)
from lanes.core.types import ABANDON, ACK, NEVER, Message, Partition, PartitionId
from lanes.errors import MessageError
from tests.core.builders import READER, assigned, deliver, effects, failed, new_engine, new_message, take, take_all


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


def test_a_restored_engine_continues_commits_pauses_and_handlers() -> None:
    engine, _, run = busy()
    restored = again(engine)
    for one in (engine, restored):
        assert one.room().paused == frozenset({only(one)})
        commits = only(one).commits
        assert commits is not None
        sending = commits.sending
        assert sending is not None
        assert (sending.floor, list(sending.completed), sending.messages) == (10, [(12, 15)], [])
        one.settled([sending])
        one.due(99.0)
        assert take_all(one) == [10]
    assert message_id(run[0]) == MessageId(1, 10)


def test_a_message_that_is_held_after_a_restore_follows_those_with_an_equal_end() -> None:
    engine = new_engine()
    partition = assigned(engine)
    for position, key in enumerate((b"a", b"b", b"c")):
        deliver(engine, partition, position, key=key)
    for _ in range(2):
        engine.finish(take(engine), failed(), 1.0)
    restored = again(engine)
    restored.finish(take(restored), failed(), 1.0)
    assert len({until for until, _ in snapshot(again(restored)).holds}) == 1
    restored.due(99.0)
    assert take_all(restored) == [0, 1, 2]


def test_a_restored_partition_has_its_incarnation() -> None:
    engine = new_engine()
    engine.assign(Partition(PartitionId("orders", 0), READER, "since May"))
    assert only(again(engine)).incarnation == "since May"


def test_a_restored_engine_gives_out_no_message_until_its_starts_are_resumed() -> None:
    engine = new_engine()
    deliver(engine, assigned(engine), 0)
    engine.hold_starts()
    restored = again(engine)
    assert restored.take() is None
    restored.resume_starts()
    assert take_all(restored) == [0]


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


def test_a_snapshot_keeps_messages_and_tokens_of_the_client_by_reference() -> None:
    engine = new_engine(dead_letters=True)
    partition = assigned(engine)
    error = MessageError("no key")
    message = new_message(partition, 1)
    message.data, message.broken = "data", error
    engine.receive(partition, [message, new_message(partition, 2)], 2, 7.0)
    first, second = only(again(engine)).ledger.in_flight()
    assert (first.raw, first.token, first.data, first.broken) == ("raw 1", "token 1", "data", error)
    assert first.received == 7.0
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
    found = [(m.position, m.token, m.partition) for m in settlement.messages]
    assert found == [(3, "token 3", only(restored))]
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


def test_a_snapshot_shows_the_counts_of_the_flow_and_the_work_of_each_assignment() -> None:
    engine, _, _ = busy()
    effects(engine)
    state = snapshot(engine)
    assert state.flow == FlowState(4, 4, taking=True, paused=False, pausing=False, pause_at=NEVER, look_at=NEVER)
    (found,) = state.assignments
    assert (found.floor, found.completed, found.owned, found.live, found.ahead) == (10, ((12, 13),), True, True, True)
    entries = (10, True, True), (11, True, True), (12, False, False), (14, False, False)
    assert found.ledger == OffsetLedgerState(14, 10, -1, 16, (), 0, entries)
    assert found.commits == CommitsState(0.0, 0, 0.0, 10, 0, (10, ((12, 15),), 0), over=False)
    assert [each.position for each in found.in_flight] == [10, 11]
    assert [each.position for each in found.waiting] == [15, 16]
    assert (state.running_handlers, state.ready, state.dirty, state.budgets, state.halted) == (0, (), (), None, False)
    held = MessageId(1, 10)
    assert (state.holds, [each[0] for each in state.lanes]) == (((1.5, held),), [held])


def test_only_running_handlers_are_left_of_an_assignment_that_was_given_up() -> None:
    engine = new_engine()
    lost = assigned(engine, floor=10, completed=[(12, 13)])
    deliver(engine, lost, 10, 11, 15)
    take(engine)
    engine.drain(lost)
    engine.lose(lost)
    effects(engine)
    (found,) = snapshot(engine).assignments
    assert (found.completed, found.owned, found.draining, found.unended, found.commits) == ((), False, False, 0, None)
    assert found.ledger == OffsetLedgerState(9, 10, -1, 9, (), 0, ())
    assert ([each.position for each in found.fenced], found.in_flight, found.waiting) == ([10], (), ())


def test_the_time_of_the_first_change_counts_only_until_its_commit_is_answered() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)

    def since() -> float:
        effects(engine)
        commits = snapshot(engine).assignments[0].commits
        assert commits is not None
        return commits.since

    deliver(engine, partition, 0, 1, key=None)
    assert isinstance(partition.commits, PartitionCommits)
    partition.commits.since = 3.0
    assert since() == 0.0
    partition.commits.changes = 1
    assert since() == 3.0
    partition.commits.changes = 0
    engine.finish(take(engine), ACK, 2.0)
    commits = engine.collect(9.0, everything=True)
    assert since() == 9.0
    engine.settled(commits)
    assert since() == 0.0


def test_a_position_of_the_source_counts_while_it_lies_above_the_floor() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    deliver(engine, partition, 0)
    for position in (0, 7):
        engine.progressed(partition, position, 0.0)
        effects(engine)
        ledger = snapshot(engine).assignments[0].ledger
        assert isinstance(ledger, OffsetLedgerState)
        assert ledger.trailing == (position or -1)


def test_a_restored_engine_keeps_the_budget_of_each_partition() -> None:
    policy = new_engine().policy._replace(concurrency_per_partition=1, max_in_flight_per_partition=2)
    engine = make_engine(policy)
    partition = assigned(engine)
    deliver(engine, partition, 0, key=b"a")
    deliver(engine, partition, 1, key=b"b")
    assert take(engine).position == 0
    restored = again(engine)
    assert snapshot(restored).budgets == BudgetState(((partition.id, 1),), (partition.id,))
    assert restored.take() is None, "the only call of the partition runs"
    assert restored.room().paused == {only(restored)}
    running = next(each for each in only(restored).ledger.in_flight() if each.position == 0)
    restored.finish(running, ACK, 0.0)
    assert take_all(restored) == [1]


def test_a_restored_engine_knows_runs_of_settled_positions() -> None:
    engine = new_engine()
    partition = assigned(engine)
    ledger = partition.ledger
    assert isinstance(ledger, AckLedger)
    ledger._starts.extend([1, 7])
    ledger._ends.extend([4, 9])
    ledger._loose.add(5)
    ledger.highest = 9
    state = snapshot(engine).assignments[0].ledger
    assert state == AckLedgerState(9, ((1, 4), (7, 9)), (5,))
    restored = only(again(engine)).ledger
    assert isinstance(restored, AckLedger)
    assert [position for position in range(12) if restored.is_settled(position)] == [1, 2, 3, 5, 7, 8]
