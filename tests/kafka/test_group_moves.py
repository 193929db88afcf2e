"""Partitions that were presumed lost come back, and positions out of range move into the log, with a fake client."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, TopicPartition

from lanes.source import Assigned, Lost
from tests.kafka.test_group import BASE, EAGER, P0, P1, EagerMember, Member

# --- presumed losses


def presumed(member: Member, *numbers: int) -> None:
    member.assign(*numbers)
    member.mine = [TopicPartition("t", number) for number in numbers]
    member.group.lose_all("not polled", presumed=True)
    member.take()
    del member.calls[:], member.asked[:]


def test_a_presumed_loss_ends_after_five_seconds_if_the_client_still_owns_the_partition() -> None:
    member = Member()
    presumed(member, 0, 1)
    del member.mine[1]
    member.now += 4.9
    member.group.reclaim(member.client)
    assert member.told == []
    member.now += 0.1
    member.positions[P0] = 7
    member.group.reclaim(member.client)
    assert member.take() == [(Assigned, 0)] and member.did("seek") == [[(0, 7)]]
    assert member.did("incremental_assign") == []
    member.mine.append(TopicPartition("t", 1))
    member.now += 60.0
    member.group.reclaim(member.client)
    assert member.told == [], "the question is asked once"


def test_an_assignment_ends_the_wait_after_a_presumed_loss() -> None:
    member = Member()
    presumed(member, 0, 1)
    member.group.on_assign(member.client, [])
    assert member.take() == [(Assigned, 0), (Assigned, 1)]


def test_an_assignment_and_the_restarts_after_it_share_one_allowance() -> None:
    member = Member(BASE | {"max.poll.interval.ms": 50_000})
    presumed(member, 1)
    member.errors = [KafkaError.NOT_COORDINATOR] * 3
    ends: list[float] = []

    def serve(until: float) -> None:
        ends.append(until)
        member.now += 10.0

    member.serving = serve
    # The broker fails again after the partition of this callback has started.
    member.client.incremental_assign = lambda found: member.errors.extend([KafkaError.NOT_COORDINATOR] * 10)
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    assert ends == [1_035.0] * 4 and member.now == 1_040.0
    (failure,) = member.failures
    assert failure.startswith("kafka g: assigning partitions failed: ")


def test_a_client_that_closes_reclaims_nothing() -> None:
    member = Member()
    presumed(member, 0)
    member.group.closing = True
    member.now += 60.0
    member.group.reclaim(member.client)
    assert member.told == []


def test_a_real_loss_is_not_reclaimed() -> None:
    member = Member()
    member.assign(0)
    member.mine = [TopicPartition("t", 0)]
    member.group.lose_all("gone")
    member.take()
    member.now += 60.0
    member.group.reclaim(member.client)
    assert member.told == []


@pytest.mark.parametrize("how", ["revoke", "lose"])
def test_a_partition_that_leaves_after_a_presumed_loss_stays_away(how: str) -> None:
    member = Member()
    presumed(member, 0)
    getattr(member, how)(0)
    member.now += 60.0
    member.group.reclaim(member.client)
    assert member.told == []


def test_a_doubted_partition_waits_for_the_list_of_the_broker() -> None:
    member = Member()
    presumed(member, 0)
    assert not member.in_doubt()
    member.group.doubt()
    assert member.in_doubt()
    member.now += 1e6
    member.group.reclaim(member.client, until=member.now + 10.0)
    assert member.told == []
    member.group.trust()
    assert not member.in_doubt()
    member.group.reclaim(member.client)
    assert member.take() == [(Assigned, 0)]


def test_a_confirmation_does_not_delay_a_partition_that_is_due() -> None:
    member = Member()
    presumed(member, 0)
    member.now += 6.0
    member.group.trust()
    member.now -= 0.5
    member.group.reclaim(member.client)
    assert member.take() == [(Assigned, 0)]


def test_an_assignment_after_a_doubt_starts_the_partition_once() -> None:
    member = Member()
    presumed(member, 0)
    member.group.doubt()
    member.assign(0)
    assert not member.in_doubt() and member.take() == [(Assigned, 0)]
    member.now += 60.0
    member.group.reclaim(member.client)
    assert member.told == []


# --- positions out of range


def test_a_position_below_the_log_moves_forward_as_a_gap() -> None:
    member = Member(out_of_range="earliest")
    (partition,) = member.assign(0)
    member.take()
    del member.calls[:]
    member.bounds[P0] = 8, 20
    member.group.out_of_range(member.client, P0, 5)
    assert member.told == [] and member.owned().partition is partition and member.owned().position == 8
    assert member.calls == [
        ("incremental_unassign", [(0, -1001)]),
        ("incremental_assign", [(0, 8)]),
        ("resume", [(0, -1001)]),
    ]


def test_a_position_above_the_log_makes_a_new_assignment() -> None:
    member = Member(out_of_range="earliest")
    (partition,) = member.assign(0)
    member.take()
    member.bounds[P0] = 0, 3
    member.ids["t"] = "id-B"
    member.group.out_of_range(member.client, P0, 5)
    lost, again = member.told
    assert isinstance(lost, Lost) and lost.partition is partition
    assert lost.reason == "its log was truncated and is read again from an earlier offset"
    assert isinstance(again, Assigned) and again.partition is not partition
    assert (again.partition.floor, again.partition.incarnation, again.partition.completed) == (0, "id-B", [])
    assert member.owned().partition is again.partition and member.did("incremental_assign")[-1] == [(0, 0)]
    assert member.calls[-1] == ("resume", [(0, -1001)]) and not member.owned().paused


def test_a_move_to_the_present_position_keeps_the_assignment() -> None:
    member = Member(out_of_range="latest")
    (partition,) = member.assign(0)
    member.take()
    member.bounds[P0] = 0, 5
    member.group.out_of_range(member.client, P0, 9)
    assert member.told == [] and member.owned().partition is partition and member.owned().position == 5


def test_an_eager_client_moves_one_partition_and_keeps_the_others() -> None:
    member = EagerMember(EAGER, out_of_range="earliest")
    _first, _second, third = member.begin(0, 1, 2)
    member.group.release(third)
    member.group.set_paused(member.client, [member.owned(1)], True)
    del member.calls[:]
    member.bounds[P0] = 8, 20
    member.full = True
    member.group.out_of_range(member.client, P0, 5)
    # A new assignment of the client forgets its pauses.
    assert member.calls == [("assign", [(0, 8), (1, 5)]), ("pause", [(1, -1001)]), ("pause", [(0, -1001)])]
    assert member.owned().paused


def test_a_paused_partition_stays_paused_after_a_move() -> None:
    member = Member(out_of_range="earliest")
    member.assign(0)
    member.group.set_paused(member.client, [member.owned()], True)
    del member.calls[:]
    member.bounds[P0] = 8, 20
    member.group.out_of_range(member.client, P0, 5)
    assert member.calls[-1] == ("pause", [(0, -1001)]) and member.owned().paused


def test_a_position_out_of_range_ends_the_source_if_so_configured() -> None:
    member = Member(out_of_range="fail")
    member.assign(0)
    member.bounds[P0] = 8, 20
    member.group.out_of_range(member.client, P0, 5)
    (failure,) = member.failures
    assert failure.startswith("kafka g: t/0: offset 5 is out of range, because the log has 8 to 20")
    member.group.out_of_range(member.client, P1, 5)
    assert len(member.failures) == 1, "a foreign partition does not matter"


def test_the_bounds_of_a_log_are_asked_for_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    member = Member(out_of_range="earliest")
    member.assign(0)
    member.bounds[P0] = 8, 20
    member.bounds_refused = [KafkaError._TRANSPORT, KafkaError._TRANSPORT]
    member.group.out_of_range(member.client, P0, 5)
    member.now += 4.9
    member.group.reclaim(member.client)
    assert len(member.bounds_refused) == 1, "a question may block the thread"
    member.now += 0.1
    member.group.reclaim(member.client)
    assert member.bounds_refused == [] and member.owned().position == 5
    (line,) = caplog.messages
    assert line.startswith("kafka g: cannot read the log's offset range, retrying (") and "_TRANSPORT" in line
    member.now += 5.0
    member.group.reclaim(member.client)
    assert member.owned().position == 8 and not member.failures
    moves = len(member.did("incremental_assign"))
    member.now += 5.0
    member.group.reclaim(member.client)
    assert len(member.did("incremental_assign")) == moves, "the partition moves once"


def test_a_lost_partition_is_not_moved() -> None:
    member = Member(out_of_range="earliest")
    member.assign(0)
    member.bounds_refused = [KafkaError._TRANSPORT]
    member.group.out_of_range(member.client, P0, 5)
    member.lose(0)
    member.now += 5.0
    moves = len(member.did("incremental_assign"))
    member.bounds_refused = [KafkaError._TRANSPORT]
    member.group.reclaim(member.client)
    assert len(member.did("incremental_assign")) == moves
    assert member.bounds_refused, "nothing is asked about a partition that is gone"


def test_a_missing_permission_to_read_bounds_ends_the_source() -> None:
    member = Member(out_of_range="earliest")
    member.assign(0)
    member.bounds_refused = [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    member.group.out_of_range(member.client, P0, 5)
    (failure,) = member.failures
    assert failure.startswith("kafka g: reading the offset range of a log failed") and "TOPIC_AUTHORIZATION" in failure
