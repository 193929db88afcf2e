"""A partition commits its floor and completed set when a commit is due, with one commit at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanes.core import effects as fx
from lanes.core.commits import MESSAGE_PACE, PARTITION_PACE, Committer, PartitionCommits
from lanes.core.lane import ABANDONED, SETTLED
from lanes.core.types import NEVER, Message, Settlement
from tests.core.builders import (
    COMMIT_COUNT,
    COMMIT_INTERVAL,
    COMMIT_PACE,
    ack,
    assigned,
    commits_of,
    deliver,
    effects,
    new_engine,
    new_partition,
    start,
    take_all,
)

PACE, COUNT = 5.0, 10


def commits(floor: int = 3) -> PartitionCommits:
    return PartitionCommits(floor, COUNT)


def commit(floor: int, ordinal: int = 0) -> Settlement:
    settlement = Settlement(new_partition(), [], floor, [])
    settlement.ordinal = ordinal
    return settlement


def test_no_commit_is_pending_at_first() -> None:
    new = commits()
    assert (new.pending, new.confirmed, new.confirmed_ordinal) == (False, 3, 0)
    assert repr(new) == "<PartitionCommits confirmed 3, sending none, 0 changes since>"


def test_a_commit_is_due_one_interval_after_the_first_change() -> None:
    changed = commits()
    changed.changed(1, 100.0)
    changed.changed(COUNT - 2, 104.0)
    assert changed.pending
    assert changed.due_at(PACE, urgent=False) == 105.0
    assert changed.due_at(PACE, urgent=True) == 100.0


@pytest.mark.parametrize("count", [COUNT, COUNT + 1])
def test_as_many_changes_as_commit_count_make_a_commit_due_at_once(count: int) -> None:
    changed = commits()
    changed.changed(1, 100.0)
    changed.changed(count - 1, 104.0)
    assert changed.due_at(PACE, urgent=False) == 100.0


def test_no_second_commit_is_sent_before_the_answer_to_the_first() -> None:
    sending = commits()
    sending.changed(2, 100.0)
    first = commit(7, 4)
    sending.send(first)
    assert (sending.pending, sending.changes) == (False, 0)
    sending.changed(1, 101.0)
    assert not sending.pending
    assert repr(sending) == "<PartitionCommits confirmed 3, sending 7, 1 changes since>"
    sending.confirm(first)
    assert (sending.pending, sending.confirmed, sending.confirmed_ordinal) == (True, 7, 4)
    assert sending.due_at(PACE, urgent=False) == 106.0


def test_finished_messages_count_until_a_confirmed_commit_reports_them() -> None:
    sending = commits()
    sending.changed(2, 100.0)
    sending.finished += 2
    first = commit(7, 4)
    sending.send(first)
    sending.changed(1, 101.0)
    sending.finished += 1
    sending.unknown(0.0)
    assert sending.finished == 3
    sending.send(first)
    sending.finished += 4
    sending.confirm(first)
    assert sending.finished == 4


@pytest.mark.parametrize(("again_at", "due_at"), [(0.0, 100.0), (107.0, 107.0)])
def test_a_commit_with_an_unknown_result_is_due_again(again_at: float, due_at: float) -> None:
    sending = commits()
    sending.changed(1, 100.0)
    sending.send(commit(7, 4))
    sending.unknown(again_at)
    assert (sending.pending, sending.confirmed, sending.confirmed_ordinal) == (True, 3, 0)
    assert sending.due_at(PACE, urgent=False) == sending.due_at(PACE, urgent=True) == due_at


def test_a_commit_follows_a_finished_message_after_a_share_of_the_interval() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 4)
    assert (engine.commit_at(), engine.collect(9.0)) == (NEVER, [])
    ack(engine, first)
    assert engine.collect(10.0) == []
    assert engine.commit_at() == 10.0 + COMMIT_PACE
    ack(engine, third)
    assert engine.collect(10.0 + COMMIT_PACE - 0.01) == []
    assert commits_of(engine.collect(10.0 + COMMIT_PACE)) == [(1, [(4, 5)])]
    assert engine.commit_at() == NEVER
    assert (engine.flow.in_flight, engine.settled_count, second.state != SETTLED) == (1, 2, True)


@pytest.mark.parametrize(
    ("ahead", "pace"),
    [(1, COMMIT_PACE), (10_000, PARTITION_PACE + 10_000 * MESSAGE_PACE), (200_000, COMMIT_INTERVAL)],
)
def test_slow_commits_are_sent_less_often_but_within_the_interval(ahead: int, pace: float) -> None:
    engine = new_engine(max_in_flight=ahead + 1, max_ahead=ahead + 1)
    partition = assigned(engine, floor=0)
    run = deliver(engine, partition, *range(ahead))
    head = engine.take()
    assert head is run[0]
    ack(engine, head)
    assert engine.collect(3.0) == engine.collect(3.0 + 0.999 * pace) == []
    assert engine.commit_at() == pytest.approx(3.0 + pace)


def test_many_partitions_are_committed_rarely_and_in_one_call() -> None:
    engine = new_engine(concurrency=500)
    partitions = [assigned(engine, number, floor=0) for number in range(500)]
    for number, partition in enumerate(partitions):
        ack(engine, *start(engine, partition, 0))
        assert engine.collect(number / 10_000) == []
    pace = 500 * (PARTITION_PACE + MESSAGE_PACE)
    assert engine.collect(0.999 * pace) == []
    assert engine.commit_at() == pytest.approx(pace)
    assert {settlement.partition for settlement in engine.collect(engine.commit_at())} == set(partitions)


def test_a_finished_message_costs_no_look_at_the_other_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member with ranges owns hundreds of pieces, and asks for the next commit after each handler."""
    looks = 0
    pending = Committer._pending

    def counted(committer: Committer) -> object:
        nonlocal looks
        looks += 1
        return pending(committer)

    monkeypatch.setattr(Committer, "_pending", counted)
    engine = new_engine(concurrency=500)
    for number in range(500):
        ack(engine, *start(engine, assigned(engine, number, floor=0), 0))
        assert engine.collect(number / 100_000) == []
        assert engine.commit_at() > number / 100_000
    assert looks <= 2


MOMENTS = st.lists(
    st.tuples(
        st.sampled_from(["deliver", "finish", "collect", "confirm", "fail", "pass", "lose"]),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.01, COMMIT_PACE / 2, COMMIT_PACE, COMMIT_INTERVAL]),
    ),
    max_size=60,
)


@given(MOMENTS)
def test_no_commit_is_due_before_the_time_of_the_next_one(moments: list[tuple[str, int, float]]) -> None:
    """The time may be too early, and then ``collect`` finds that nothing is due. It is never too late."""
    engine = new_engine(max_ahead=8, concurrency=100)
    partitions = [assigned(engine, number, floor=0) for number in range(4)]
    ends, running, sent, now = [0] * 4, list[Message](), list[Settlement](), 0.0
    committer = engine.committer
    for what, number, later in moments:
        now += later
        partition = partitions[number]
        if what == "deliver" and partition.live:
            deliver(engine, partition, *range(ends[number], ends[number] + 3))
            ends[number] += 4
        elif what == "finish":
            while (message := engine.take()) is not None:
                running.append(message)
            done, running = running[: number + 1], running[number + 1 :]
            ack(engine, *done)
        elif what == "pass" and partition.live:
            engine.progressed(partition, ends[number], now)
        elif what == "lose":
            engine.lose(partition)
        elif sent and what == "confirm":
            engine.settled([sent.pop(0)])
        elif sent and what == "fail":
            engine.unsettled([sent.pop(0)], again_at=now + 0.3)
        exactly = committer._exactly(committer._pending())
        assert engine.commit_at() <= exactly
        found = engine.collect(now)
        sent += found
        assert bool(found) or committer._exactly(committer._pending()) > now


def test_a_failed_commit_is_not_repeated_early_with_the_commits_of_other_partitions() -> None:
    engine = new_engine()
    failing, other = assigned(engine, 0, floor=0), assigned(engine, 1, floor=0)
    ack(engine, *start(engine, failing, 0))
    engine.unsettled(engine.collect(0.0, everything=True), again_at=9.0)
    ack(engine, *start(engine, other, 0))
    assert engine.collect(1.0) == []
    assert [settlement.partition for settlement in engine.collect(1.0 + COMMIT_PACE)] == [other]


def test_as_many_finished_messages_as_commit_count_are_committed_at_once() -> None:
    engine = new_engine(concurrency=100)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, *range(COMMIT_COUNT))
    ack(engine, *run[1:])
    assert engine.collect(1.0) == []
    ack(engine, run[0])
    assert commits_of(engine.collect(1.0)) == [(COMMIT_COUNT, [])]


def test_a_commit_on_demand_covers_every_change_and_only_changes() -> None:
    engine = new_engine()
    one, other = assigned(engine, 0, floor=0), assigned(engine, 1, floor=0)
    first, _ = start(engine, one, 0, 1)
    start(engine, other, 0)
    ack(engine, first)
    (settlement,) = engine.collect(0.0, everything=True)
    assert (settlement.partition, settlement.floor) == (one, 1)
    assert engine.collect(0.0, everything=True) == []


def test_a_partition_sends_no_second_commit_before_the_answer_to_the_first() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    sent = engine.collect(0.0, everything=True)
    ack(engine, second)
    assert engine.collect(100.0, everything=True) == []
    assert engine.commit_at() == NEVER
    engine.settled(sent)
    assert engine.commit_at() == 100.0 + COMMIT_PACE
    assert commits_of(engine.collect(100.0, everything=True)) == [(2, [])]


def test_a_commit_with_an_unknown_result_is_repeated_with_later_changes() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 2)
    ack(engine, first)
    sent = engine.collect(0.0, everything=True)
    assert commits_of(sent) == [(1, [])]
    ack(engine, third)
    engine.collect(1.0)
    engine.unsettled(sent)
    again = engine.collect(1.0)
    assert commits_of(again) == [(1, [(2, 3)])]
    engine.unsettled(again)
    ack(engine, second)
    assert commits_of(engine.collect(1.0)) == [(3, [])]
    assert (engine.settled_count, engine.flow.in_flight) == (3, 0)


def test_a_commit_with_an_unknown_result_may_be_repeated_later() -> None:
    engine = new_engine(max_ahead=1)
    partition = assigned(engine, floor=0)
    ack(engine, *start(engine, partition, 0))
    engine.unsettled(engine.collect(0.0), again_at=9.0)
    assert (engine.commit_at(), engine.collect(8.9)) == (9.0, [])
    assert commits_of(engine.collect(9.0)) == [(1, [])]


def test_partitions_with_and_without_commits_settle_side_by_side() -> None:
    engine = new_engine()
    single, cumulative = assigned(engine, 0), assigned(engine, 1, floor=5)
    (one,), (other,) = start(engine, single, 8), start(engine, cumulative, 8)
    ack(engine, one, other)
    settlements = engine.collect(0.0, everything=True)
    assert [(s.partition, s.messages, s.floor) for s in settlements] == [(single, [one], None), (cumulative, [], 9)]
    assert engine.flow.in_flight == 1
    engine.unsettled(settlements)
    again = engine.collect(0.0)
    assert [(s.partition, s.messages, s.floor) for s in again] == [(single, [one], None), (cumulative, [], 9)]
    engine.settled(again)
    assert (engine.flow.in_flight, engine.settled_count) == (0, 2)


def test_positions_that_the_source_skips_are_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    engine.progressed(partition, 7, 2.0)
    assert engine.commit_at() == 2.0 + COMMIT_PACE
    engine.progressed(partition, 9, 4.0)
    assert commits_of(engine.collect(2.0 + COMMIT_PACE)) == [(9, [])]
    engine.progressed(partition, 9, 5.0)
    assert engine.commit_at() == NEVER


def test_skipped_positions_above_an_unfinished_message_are_not_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    (message,) = start(engine, partition, 3)
    assert engine.commit_at() == NEVER
    engine.progressed(partition, 9, 2.0)
    assert engine.collect(100.0, everything=True) == []
    ack(engine, message)
    assert commits_of(engine.collect(100.0, everything=True)) == [(9, [])]


def test_progress_of_other_partitions_is_ignored() -> None:
    engine = new_engine()
    single, draining, fenced, gone = assigned(engine, 0), *(assigned(engine, n, floor=0) for n in (1, 2, 3))
    engine.drain(draining)
    engine.fence(fenced)
    engine.lose(gone)
    for partition in (single, draining, fenced, gone):
        engine.progressed(partition, 50, 0.0)
    assert engine.collect(0.0, everything=True) == []
    assert [partition.ledger.floor() for partition in (draining, fenced, gone)] == [0, 0, 0]


def test_messages_completed_by_a_former_owner_do_not_run() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=2, completed=[(3, 5), (6, 7)])
    run = deliver(engine, partition, 2, 3, 4, 5, 6, size=10, now=1.0)
    assert [(e.message, e.cause) for e in effects(engine) if isinstance(e, fx.Redelivered)] == [
        (run[i], fx.ALREADY_SETTLED) for i in (1, 2, 4)
    ]
    assert (engine.flow.in_flight, engine.flow.bytes) == (2, 20)
    # The chain of the key skips completed messages.
    assert take_all(engine) == [2]
    ack(engine, run[0])
    assert take_all(engine) == [5]
    assert commits_of(engine.collect(1.0, everything=True)) == [(5, [(6, 7)])]
    assert engine.settled_count == 1


def test_a_completely_completed_run_is_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=2, completed=[(2, 5)])
    deliver(engine, partition, 2, 3, 4, now=1.0)
    assert take_all(engine) == []
    assert engine.commit_at() == 1.0 + COMMIT_PACE
    assert commits_of(engine.collect(1.0, everything=True)) == [(5, [])]
    assert engine.flow.in_flight == 0


@pytest.mark.parametrize("way", ["lose", "release"])
def test_a_lost_or_released_partition_commits_nothing(way: str) -> None:
    engine = new_engine(max_ahead=3)
    partition = assigned(engine, floor=0)
    run = start(engine, partition, 0, 1, 2, 3)
    ack(engine, run[0])
    sent = engine.collect(0.0, everything=True)
    ack(engine, run[1])
    getattr(engine, way)(partition)
    assert (engine.collect(100.0, everything=True), engine.commit_at()) == ([], NEVER)
    assert (engine.room().paused, run[3].state, run[1].state) == (frozenset(), ABANDONED, ABANDONED)
    effects(engine)
    for report in (engine.settled, engine.unsettled):
        report(sent)
        assert (effects(engine), engine.collect(100.0, everything=True), engine.settled_count) == ([], [], 1)
    ack(engine, run[2])
    assert (engine.flow.in_flight, engine.running_handlers) == (0, 0)


def test_a_late_answer_to_a_commit_does_not_reach_the_next_assignment() -> None:
    engine = new_engine(max_ahead=1)
    old = assigned(engine, floor=0)
    (message,) = start(engine, old, 0)
    ack(engine, message)
    sent = engine.collect(0.0)
    engine.release(old)
    new = assigned(engine, floor=0)
    start(engine, new, 0, 1)
    engine.settled(sent)
    engine.unsettled(sent)
    assert (engine.running_handlers, engine.collect(100.0, everything=True)) == (1, [])
    assert new.commits is not None
    assert new.commits.confirmed == 0


def test_a_drain_commits_finished_messages_and_abandons_waiting_ones() -> None:
    engine = new_engine(max_ahead=2)
    partition = assigned(engine, floor=0)
    first, second, third = start(engine, partition, 0, 1, 2)
    engine.progressed(partition, 50, 0.0)
    assert engine.drain(partition) == [third]
    deliver(engine, partition, 3)
    assert (engine.flow.in_flight, third.state) == (2, ABANDONED)
    ack(engine, first, second)
    sent = engine.collect(0.0, everything=True)
    assert commits_of(sent) == [(2, [])]
    engine.settled(sent)
    assert take_all(engine) == []
    assert engine.flow.in_flight == 0


def test_messages_finished_before_the_fence_are_committed() -> None:
    engine = new_engine()
    partition = assigned(engine, floor=0)
    first, second = start(engine, partition, 0, 1)
    ack(engine, first)
    assert engine.fence(partition) == [second]
    ack(engine, second)
    assert commits_of(engine.collect(0.0, everything=True)) == [(1, [])]
