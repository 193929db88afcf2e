"""The partitions of one client: their starts, drains, losses and pauses, with a fake client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from lanes.core.types import Partition, PartitionId
from lanes.source import Assigned, BrokerContact, Lost, Revoking, SourceEvent
from lanes_kafka.client.group import Assignment, Group
from lanes_kafka.client.topics import Topic
from lanes_kafka.config import client_config

P0, P1, P2 = (PartitionId("t", number) for number in range(3))
BASE = {"bootstrap.servers": "b:1", "group.id": "g", "group.protocol": "consumer"}
EAGER = {"bootstrap.servers": "b:1", "group.id": "g", "partition.assignment.strategy": "range"}
POLL_INTERVAL = 300.0


def places(found: Sequence[TopicPartition]) -> list[tuple[int, int]]:
    return [(each.partition, each.offset) for each in found]


class Member:
    """A group with a client, whose logs have offsets 0 to 10, and in which 5 is committed.

    Attributes:
        now: Time of the clock.
        full: Whether the event loop has no room.
        positions: The committed positions that differ from 5.
        bounds: First offset and end of the logs that do not have 0 to 10.
        calls: Calls of the client that change it.
        asked: The partitions of each question for committed positions.
        timeouts: The timeouts of all questions for positions.
        errors: Codes of the errors of the next questions for committed positions.
        refused: Errors of the next commits.
        told: The delivered events.
        failures: The errors that ended the source.
        serving: Called for each wait in a callback, with the end of the callback.
        ids: The topic ids.
        changed: The changes of topics.
    """

    def __init__(self, config: dict[str, Any] | None = None, **settings: Any) -> None:
        self.now = 1_000.0
        self.full = False
        self.positions: dict[PartitionId, int] = {}
        self.bounds: dict[PartitionId, tuple[int, int]] = {}
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self.asked: list[list[int]] = []
        self.timeouts: list[float] = []
        self.errors: list[int] = []
        self.refused: list[int] = []
        self.bounds_refused: list[int] = []
        self.told: list[SourceEvent] = []
        self.failures: list[str] = []
        self.serving: Callable[[float], None] = self._pass_time
        self.ids = {"t": "id-A"}
        self.changed: dict[str, str] = {}
        self.listed: list[float] = []
        self.mine: list[TopicPartition] = []
        topics: Any = SimpleNamespace(
            known={"t": Topic("id-A", 3)},
            wait=lambda timeout: True,
            appears=lambda topic, timeout: True,
            id_of=lambda topic: self.ids[topic],
            change=lambda topic, incarnation: self.changed.get(topic),
            contact=BrokerContact(lambda: self.now),
        )
        self.client: Any = self
        self.group = Group(
            client_config(config or BASE, **settings),
            topics,
            self.told.extend,
            lambda until: self.serving(until),
            lambda failure: self.failures.append(str(failure)),
            lambda: self.now,
            "kafka g",
            is_full=lambda: self.full,
            hands_over=False,
        )

    def _pass_time(self, until: float) -> None:
        self.now += 1.0

    def assign(self, *numbers: int) -> list[Partition]:
        self.group.on_assign(self.client, [TopicPartition("t", number) for number in numbers])
        return [self.group.owned[PartitionId("t", number)].partition for number in numbers]

    def revoke(self, *numbers: int) -> None:
        self.group.on_revoke(self.client, [TopicPartition("t", number) for number in numbers])

    def lose(self, *numbers: int) -> None:
        self.group.on_lost(self.client, [TopicPartition("t", number) for number in numbers])

    def owned(self, number: int = 0) -> Assignment:
        return self.group.owned[PartitionId("t", number)]

    def take(self) -> list[tuple[type[SourceEvent], int]]:
        """The kinds of the events since the last call, with their partitions."""
        told, self.told[:] = list(self.told), []
        found = [each for each in told if isinstance(each, Assigned | Revoking | Lost)]
        assert len(found) == len(told)
        return [(type(each), each.partition.id.number) for each in found]

    def in_doubt(self) -> bool:
        return self.group.doubted

    def did(self, name: str) -> list[list[tuple[int, int]]]:
        return [found for call, found in self.calls if call == name]

    # --- the client

    def committed(self, asked: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.timeouts.append(timeout)
        if self.errors:
            raise KafkaException(KafkaError(self.errors.pop(0)))
        self.asked.append([each.partition for each in asked])
        ids = [PartitionId(each.topic, each.partition) for each in asked]
        return [TopicPartition(*one, self.positions.get(one, 5)) for one in ids]

    def offsets_for_times(self, asked: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        self.timeouts.append(timeout)
        if self.bounds_refused:
            raise KafkaException(KafkaError(self.bounds_refused.pop(0)))
        found = []
        for each in asked:
            low, high = self.bounds.get(PartitionId(each.topic, each.partition), (0, 10))
            found.append(TopicPartition(each.topic, each.partition, low if each.offset == -2 else high))
        return found

    def assignment(self) -> list[TopicPartition]:
        return self.mine

    def list_topics(self, timeout: float) -> None:
        self.listed.append(timeout)
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        if self.refused:
            raise KafkaException(KafkaError(self.refused.pop(0)))
        self.calls.append(("commit", places(offsets)))

    def __getattr__(self, name: str) -> Any:
        if name in ("assign", "incremental_assign", "incremental_unassign", "pause", "resume"):
            return lambda found: self.calls.append((name, places(found)))
        if name == "seek":
            return lambda found: self.calls.append((name, places([found])))
        raise AttributeError(name)


class EagerMember(Member):
    """Its client has one call for the whole assignment, and the test calls ``begin``."""

    def begin(self, *numbers: int) -> list[Partition]:
        return Member.assign(self, *numbers)

    def assign(self, *found: Any) -> Any:
        self.calls.append(("assign", places(found[0])))


# --- assignments


def test_an_assignment_starts_at_the_committed_position_and_is_told_after_the_client() -> None:
    member = Member()
    first, second = member.assign(0, 1)
    assert member.did("incremental_assign") == [[(0, 5), (1, 5)]]
    assert member.take() == [(Assigned, 0), (Assigned, 1)]
    assert (first.id, first.floor, first.completed, first.incarnation) == (P0, 5, [], "id-A")
    assert (member.owned().position, member.owned().end, member.owned().paused) == (5, 5, False)
    assert member.owned(1).partition is second and member.group.rebalances == 1
    assert not member.failures and member.did("commit") == [] and member.did("resume")


def test_an_assignment_without_room_starts_paused() -> None:
    member = Member()
    member.full = True
    member.assign(0)
    assert [name for name, _ in member.calls] == ["incremental_assign", "pause"] and member.owned().paused


def test_an_eager_assignment_names_the_whole_assignment() -> None:
    member = EagerMember(EAGER)
    member.begin(0, 1)
    assert member.did("assign") == [[(0, 5), (1, 5)]] and member.did("incremental_assign") == []


def test_an_empty_assignment_asks_nothing() -> None:
    member = Member()
    member.group.on_assign(member.client, [])
    assert (member.asked, member.calls, member.told, member.group.rebalances) == ([], [], [], 1)


def test_a_client_that_closes_takes_no_partition() -> None:
    member = Member()
    member.group.closing = True
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    assert (member.group.owned, member.calls, member.group.rebalances) == ({}, [], 1)


def test_new_start_positions_are_committed_for_the_whole_topic() -> None:
    """A later run would decide otherwise."""
    member = Member(start="next")
    member.positions = {P0: -1001, P1: -1001, P2: -1001}
    member.assign(1)
    names = [name for name, _ in member.calls]
    assert names.index("commit") > names.index("incremental_assign")
    # The decision holds for the whole topic; the others are asked for again, because they may have moved.
    assert member.did("commit") == [[(1, 10), (0, 10), (2, 10)]]
    assert member.asked == [[1, 0, 2], [0, 2]]
    member.group.reclaim(member.client)
    assert len(member.did("commit")) == 1, "the start is committed once"


def test_a_start_that_cannot_be_committed_is_tried_again_every_five_seconds(caplog: pytest.LogCaptureFixture) -> None:
    member = Member()
    member.positions = {P0: -1001}
    member.refused = [KafkaError.COORDINATOR_NOT_AVAILABLE]
    member.assign(0)
    assert member.did("commit") == [] and not member.failures and member.take() == [(Assigned, 0)]
    assert "kafka g: cannot commit the start positions, retrying (" in caplog.text
    assert "COORDINATOR_NOT_AVAILABLE" in caplog.text
    member.now += 4.9
    member.group.reclaim(member.client)
    assert member.did("commit") == []
    member.now += 0.1
    member.group.reclaim(member.client)
    assert member.did("commit") == [[(0, 0)]] and member.asked[-1] == [0]


def test_a_repeated_start_never_overwrites_a_commit() -> None:
    member = Member()
    member.positions = {P0: -1001, P1: -1001}
    member.refused = [KafkaError.COORDINATOR_NOT_AVAILABLE]
    member.assign(0, 1)
    member.positions[P1] = 0
    member.now += 5.0
    member.group.reclaim(member.client)
    assert member.did("commit") == [[(0, 0)]]
    member.now += 5.0
    member.group.reclaim(member.client)
    assert len(member.did("commit")) == 1


def test_a_start_that_could_not_be_committed_overwrites_no_commit_at_the_next_assignment() -> None:
    member = Member()
    member.positions = {P0: -1001, P1: -1001}
    member.refused = [KafkaError._TIMED_OUT]
    member.assign(0)
    member.positions[P0] = 1  # The messages of the first partition go on, and the second one arrives.
    member.assign(1)
    assert member.did("commit") == [[(1, 0)]]


def test_a_start_that_could_not_be_committed_is_forgotten_after_a_commit_of_another_member() -> None:
    """The commit of the other member may contain finished messages, and the commit of a start contains none."""
    member = Member()
    member.positions = {P0: -1001, P1: -1001}
    member.refused = [KafkaError._TIMED_OUT]
    member.assign(0, 1)
    member.revoke(0)
    member.positions[P0] = 0
    member.assign(0)
    assert member.did("commit") == [[(1, 0)]]


# --- questions for start positions


def test_start_positions_are_asked_for_again_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    member = Member()
    member.errors = [KafkaError.NOT_COORDINATOR, KafkaError._TIMED_OUT]
    ends: list[float] = []
    member.serving = ends.append
    member.assign(0)
    assert ends == [1_060.0] * 2 and member.asked == [[0]] and not member.failures and member.listed == []
    (line,) = caplog.messages
    assert line.startswith("kafka g: cannot read the start positions, retrying (") and "NOT_COORDINATOR" in line


def test_the_questions_for_start_positions_end_before_the_poll_interval() -> None:
    member = Member(BASE | {"max.poll.interval.ms": 50_000})
    ends: list[float] = []

    def serve(until: float) -> None:
        ends.append(until)
        member.now += 10.0

    member.errors = [KafkaError.NOT_COORDINATOR] * 10
    member.serving = serve
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    # Of the 40 s of a callback, 5 s are kept for the commit of new positions.
    assert ends == [1_035.0] * 4
    (failure,) = member.failures
    assert failure.startswith("kafka g: assigning partitions failed: ") and "NOT_COORDINATOR" in failure


def test_a_late_question_for_start_positions_waits_only_until_the_end_of_the_callback() -> None:
    member = Member(BASE | {"max.poll.interval.ms": 50_000})
    topics: Any = member.group.topics

    def wait(timeout: float) -> bool:
        member.now += timeout
        return True

    def serve(until: float) -> None:
        member.now += 32.0

    topics.wait, member.serving = wait, serve
    member.errors = [KafkaError.NOT_COORDINATOR]
    member.assign(0)
    # The callback began 2 s before the first question, and 34 s of its 35 s had passed at the second one.
    assert member.timeouts == [5.0, 1.0, 1.0, 1.0]


def test_a_stop_ends_the_questions_for_start_positions() -> None:
    member = Member()
    member.errors = [KafkaError.NOT_COORDINATOR] * 3

    def serve(until: float) -> None:
        member.group.closing = True

    member.serving = serve
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    assert len(member.errors) == 1 and member.failures


def test_a_missing_permission_ends_the_questions_for_start_positions() -> None:
    member = Member()
    member.errors = [KafkaError.GROUP_AUTHORIZATION_FAILED] * 2
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    assert len(member.errors) == 1 and "GROUP_AUTHORIZATION_FAILED" in member.failures[0]


def test_a_partition_that_the_client_does_not_know_starts_after_the_callback() -> None:
    """The coordinator may know new partitions before the client does, and no callback may ask for the metadata."""
    member = Member()
    member.errors = [KafkaError._UNKNOWN_PARTITION] * 2
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    assert member.did("incremental_assign") == [[(0, 0)]] and member.did("pause") == [[(0, -1001)]]
    assert (member.listed, member.take(), member.group.owned) == ([], [], {})
    member.mine = [TopicPartition("t", 0)]
    # The first refresh finds too little.
    member.group.reclaim(member.client)
    assert member.listed == [5.0] and not member.group.owned
    member.calls.clear()
    member.group.reclaim(member.client)
    assert member.listed == [5.0, 5.0] and not member.failures
    assert [name for name, _ in member.calls][:2] == ["incremental_unassign", "incremental_assign"]
    assert member.did("incremental_assign") == [[(0, 5)]] and member.calls[-1] == ("resume", [(0, -1001)])
    assert member.take() == [(Assigned, 0)]
    member.group.reclaim(member.client)
    assert member.listed == [5.0, 5.0]


def test_an_unknown_partition_that_was_revoked_does_not_start() -> None:
    member = Member()
    member.errors = [KafkaError._UNKNOWN_PARTITION]
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    member.revoke(0)
    member.mine = [TopicPartition("t", 0)]
    member.group.reclaim(member.client)
    assert (member.take(), member.group.owned) == ([], {})


def test_a_further_assignment_does_not_start_an_unknown_partition_within_its_callback() -> None:
    member = Member()
    member.errors = [KafkaError._UNKNOWN_PARTITION]
    member.group.on_assign(member.client, [TopicPartition("t", 0)])
    member.mine = [TopicPartition("t", 0)]
    member.assign(1)
    assert member.listed == [] and list(member.group.owned) == [PartitionId("t", 1)]
    member.group.reclaim(member.client)
    assert set(member.group.owned) == {P0, PartitionId("t", 1)}


# --- revokes and losses


def test_a_revoke_waits_until_the_partitions_are_released() -> None:
    member = Member()
    first, second = member.assign(0, 1)
    member.take()
    ends: list[float] = []
    asked: list[Any] = []

    def serve(until: float) -> None:
        ends.append(until)
        asked[:] = list(member.told)
        member.group.release([first, second][len(ends) - 1])

    member.serving = serve
    member.revoke(0, 1)
    assert [(type(each), each.partition, each.timeout) for each in asked] == [
        (Revoking, first, 0.8 * POLL_INTERVAL),
        (Revoking, second, 0.8 * POLL_INTERVAL),
    ]
    assert ends == [1_240.0] * 2
    assert member.take() == [(Revoking, 0), (Revoking, 1)] and member.group.owned == {}


def test_a_partition_that_is_not_released_in_time_is_lost() -> None:
    member = Member(BASE | {"max.poll.interval.ms": 10_000})
    first, _ = member.assign(0, 1)
    member.take()

    def serve(until: float) -> None:
        member.now += 1.0
        member.group.release(first)

    member.serving = serve
    member.revoke(0, 1)
    assert member.now == 1_008.0
    lost = member.told[-1]
    assert isinstance(lost, Lost) and lost.partition.id == P1 and lost.reason == "it was not released within 8 s"
    assert member.take() == [(Revoking, 0), (Revoking, 1), (Lost, 1)] and member.group.owned == {}


def test_a_partition_that_is_given_back_already_is_not_drained_again() -> None:
    member = Member()
    first, _ = member.assign(0, 1)
    member.take()
    member.group.release(first)
    member.owned(1).returning = True
    member.revoke(0, 1, 2)
    assert member.take() == [] and member.group.owned == {} and member.now == 1_000.0
    assert member.group.rebalances == 2


def test_a_stop_ends_the_wait_for_a_drain() -> None:
    member = Member()
    member.assign(0)
    member.serving = lambda until: setattr(member.group, "closing", True)
    member.take()
    member.revoke(0)
    assert member.take() == [(Revoking, 0), (Lost, 0)] and member.group.owned == {}
    assert not member.failures


def test_a_client_that_closes_gives_its_partitions_up_as_they_are() -> None:
    """A stop drains all partitions before the client is closed."""
    member = Member()
    member.assign(0, 1)
    member.take()
    member.group.closing = True
    member.revoke(0)
    assert (member.take(), list(member.group.owned)) == ([], [P0, P1])
    member.lose(1)
    assert (member.take(), list(member.group.owned)) == ([(Lost, 1)], [P0])


def test_an_error_in_a_revoke_ends_the_source_and_the_ownership() -> None:
    member = Member()
    member.assign(0)

    def fail(until: float) -> None:
        raise RuntimeError("no client")

    member.serving = fail
    member.revoke(0)
    assert member.group.owned == {}
    (failure,) = member.failures
    assert failure.startswith("kafka g: revoking partitions failed") and "no client" in failure


def test_a_loss_names_its_reason_and_concerns_its_partitions_alone() -> None:
    member = Member()
    first, second = member.assign(0, 1)
    member.take()
    member.lose(0, 2)
    (lost,) = member.told
    assert isinstance(lost, Lost) and lost.partition is first
    assert lost.reason == "this member's session ended, or the group chose another owner"
    assert member.group.rebalances == 2
    assert member.group.assignment(first) is None and not member.group.owns(first) and member.group.owns(second)


def test_a_released_partition_is_not_reported_as_lost() -> None:
    member = Member()
    first, _ = member.assign(0, 1)
    member.take()
    member.group.release(first)
    assert not member.group.owns(first) and member.group.assignment(first) is not None
    member.group.lose_all("test")
    assert member.take() == [(Lost, 1)] and member.group.owned == {}
    member.group.lose_all("test")
    assert member.told == []


def test_commands_for_a_former_assignment_do_not_touch_the_new_one() -> None:
    member = Member()
    (former,) = member.assign(0)
    member.lose(0)
    (now,) = member.assign(0)
    member.group.drained(former)
    member.group.release(former)
    assert not member.owned().drained and member.group.owns(now) and not member.group.owns(former)
    member.group.drained(now)
    assert member.owned().drained and member.group.owns(now)
    member.group.release(now)
    assert member.owned().released


# --- recreated topics


def test_a_recreated_topic_ends_the_source_and_gives_every_partition_up() -> None:
    member = Member()
    member.assign(0, 1)
    member.take()
    member.group.check_topics()
    assert member.failures == [] and member.told == []
    member.changed["t"] = "deleted and recreated"
    member.group.check_topics()
    (failure,) = member.failures
    assert failure.startswith("kafka g: topic 't' was deleted and recreated during the run, so its offsets mean other")
    lost = list(member.told)
    assert member.take() == [(Lost, 0), (Lost, 1)] and member.group.owned == {}
    assert [each.reason for each in lost if isinstance(each, Lost)] == ["topic 't' was deleted and recreated"] * 2


def test_an_assignment_checks_the_topics_that_it_learns_about() -> None:
    member = Member()
    member.assign(0)
    member.changed["t"] = "deleted"
    member.group.on_assign(member.client, [TopicPartition("t", 1)])
    assert len(member.failures) == 1 and "was deleted" in member.failures[0]


# --- pauses


def test_pauses_follow_the_demand() -> None:
    member = Member()
    first, second, _third = member.assign(0, 1, 2)
    del member.calls[:]
    nothing: frozenset[Partition] = frozenset()
    member.group.apply_pauses(member.client, frozenset({first}), frozenset({first}))
    assert member.calls == [("pause", [(0, -1001)])], "an unpaused partition is not resumed again"
    member.group.apply_pauses(member.client, frozenset({first, second}), nothing)
    assert member.calls[1:] == [("pause", [(1, -1001)])], "a paused partition is not paused again"
    del member.calls[:]
    member.group.apply_pauses(member.client, frozenset({first}), nothing, resume=False)
    assert member.calls == []
    member.group.apply_pauses(member.client, nothing, frozenset({second}))
    assert member.calls == [("resume", [(0, -1001)])], "a partition that the user paused is not resumed"
    member.group.apply_pauses(member.client, frozenset({second}), nothing)
    assert len(member.calls) == 1
    member.group.apply_pauses(member.client, nothing, nothing)
    assert member.calls[1:] == [("resume", [(1, -1001)])]


def test_a_released_partition_is_paused_and_never_resumed() -> None:
    member = Member()
    (partition,) = member.assign(0)
    del member.calls[:]
    member.group.release(partition)
    member.group.apply_pauses(member.client, frozenset(), frozenset(), resume=False)
    member.group.apply_pauses(member.client, frozenset(), frozenset())
    assert member.calls == [("pause", [(0, -1001)])]


def test_no_partition_needs_no_call() -> None:
    member = Member()
    member.group.set_paused(member.client, [], True)
    member.group.set_paused(member.client, [], False)
    assert member.calls == []


def test_an_assignment_shows_itself_by_partition_and_position() -> None:
    member = Member()
    member.assign(0)
    assert repr(member.owned()) == "<Assignment t/0 at 5>"
    assert places([member.owned().at(), member.owned().at(0)]) == [(0, -1001), (0, 0)]
