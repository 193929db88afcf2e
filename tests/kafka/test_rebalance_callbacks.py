"""The rebalance callbacks of a group check topics, wait for releases, and give a loss its reason."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as Raw

from lanes.core.types import Partition, PartitionId
from lanes.source import Assigned, Lost, SourceEvent
from lanes_kafka.client.group import Group
from lanes_kafka.client.intake import Intake
from lanes_kafka.client.topics import Topics
from lanes_kafka.config import client_config
from tests.kafka.fakes import FakeAdmin


class Member:
    """A group, and its client with a log from 0 to 10 in which 5 is committed.

    Attributes:
        within: Functions to call in ``consume``.
        beginning: Functions to call in ``committed``.
        now: Time of the group.
    """

    protocol = "consumer"

    def __init__(self, **topics: str | int) -> None:
        ticks = itertools.count()
        self.admin = FakeAdmin(**topics)
        admin: Any = self.admin
        self.topics = Topics(list(topics), admin, lambda: next(ticks) / 10)
        self.topics.wait(1.0)
        self.told: list[SourceEvent] = []
        self.failures: list[str] = []
        self.served = 0
        self.now = 0.0
        config = {"bootstrap.servers": "b:1", "group.id": "g", "group.protocol": self.protocol}
        self.group = Group(
            client_config(config),
            self.topics,
            self.told.extend,
            self._serve,
            lambda failure: self.failures.append(str(failure)),
            lambda: self.now,
            "kafka g",
            is_full=lambda: False,
            hands_over=False,
        )
        self.within: list[Any] = []
        self.beginning: list[Any] = []

    def _serve(self, seconds: float) -> None:
        self.served += 1
        self.group.closing = True

    def assign(self, topic: str, number: int) -> Partition:
        client: Any = self
        self.group.on_assign(client, [TopicPartition(topic, number)])
        return self.group.owned[PartitionId(topic, number)].partition

    # --- the client

    def consume(self, count: int, timeout: float) -> list[Raw]:
        while self.within:
            self.within.pop()()
        return []

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        while self.beginning:
            self.beginning.pop()()
        return [TopicPartition(each.topic, each.partition, 5) for each in partitions]

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 0 if each.offset == -2 else 10) for each in partitions]

    def position(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(each.topic, each.partition, 5) for each in partitions]

    def get_watermark_offsets(self, partition: TopicPartition, *, cached: bool) -> tuple[int, int]:
        return 0, 10

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        pass

    def resume(self, partitions: list[TopicPartition]) -> None:
        pass


def test_an_assignment_checks_topics_that_are_owned_already() -> None:
    member = Member(t="id-A")
    kept = member.assign("t", 0)
    member.admin.topics = {"t": "id-B"}
    member.assign("t", 1)
    (failure,) = member.failures
    assert "deleted and recreated" in failure and not member.group.owns(kept)


def test_an_assignment_takes_the_topic_id_before_its_start_position() -> None:
    member = Member(t="id-A")

    def anew() -> None:
        member.admin.topics = {"t": "id-B"}
        member.topics.wait(1.0)

    member.beginning.append(anew)
    assert member.assign("t", 0).incarnation == "id-A"
    member.group.check_topics()
    assert "deleted and recreated" in member.failures[0]


@pytest.mark.parametrize("missing", [{"t": KafkaError.UNKNOWN_TOPIC_OR_PART, "u": "id-U"}, {"t": "", "u": "id-U"}])
def test_an_assignment_asks_again_for_a_missing_topic_id(missing: dict[str, str | int | None]) -> None:
    member = Member(t="", u="id-U")
    member.admin.next = [missing, missing, {"t": "id-A", "u": "id-U"}]
    assert member.assign("t", 0).incarnation == "id-A" and not member.failures


def test_a_revoke_does_not_wait_for_a_release_around_it() -> None:
    member = Member(t="id-A")
    client: Any = member
    partition = member.assign("t", 0)
    intake = Intake(client, member.group, lambda message: None, lambda error, raw: None)
    member.within.append(lambda: member.group.on_revoke(client, [TopicPartition("t", 0)]))
    intake.read_past(partition, 5, 60.0)
    assert member.served == 0 and not member.failures and not member.group.owned
    # A released partition is neither revoked nor lost.
    assert [type(event) for event in member.told] == [Assigned]


def test_a_revoke_waits_for_a_commit_after_a_release() -> None:
    member = Member(t="id-A")
    client: Any = member
    partition = member.assign("t", 0)
    intake = Intake(client, member.group, lambda message: None, lambda error, raw: None)
    intake.read_past(partition, 5, 0.01)
    member.group.on_revoke(client, [TopicPartition("t", 0)])
    assert member.served == 1


def test_a_deleted_invisible_topic_does_not_block_answers_for_others() -> None:
    member = Member(t="id-A", u="id-U")
    member.admin.topics = {"t": "id-A", "u": KafkaError.UNKNOWN_TOPIC_OR_PART}
    while "u" in member.topics.known:
        member.topics.wait(1.0)
    member.admin.topics = {"t": "id-B", "u": KafkaError.TOPIC_AUTHORIZATION_FAILED}
    assert member.topics.wait(1.0) and member.topics.id_of("t") == "id-B" and "u" not in member.topics.known


def test_a_loss_in_an_outage_names_the_outage_as_its_reason() -> None:
    member = Member(T="id-A")
    client: Any = member
    member.assign("T", 0)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.assign("T", 0)
    begin_outage(member)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    outside, inside = [event.reason for event in member.told if isinstance(event, Lost)]
    assert outside == "this member's session ended, or the group chose another owner"
    assert re.fullmatch(r"no broker has answered for \d+ s, so this member's session may have ended", inside)


def test_an_assignment_of_nothing_is_an_answer_of_the_group() -> None:
    member = Member(T="id-A")
    client: Any = member
    assert member.group.join_watch.waits
    member.group.on_assign(client, [])
    assert not member.group.join_watch.waits


class ClassicMember(Member):
    protocol = "classic"


def test_a_member_that_gave_all_partitions_back_says_that_its_group_waits(caplog: pytest.LogCaptureFixture) -> None:
    member = ClassicMember(t="id-A")
    client: Any = member
    for number in (0, 1):
        member.group.release(member.assign("t", number))
    member.group.join_watch.joins()
    member.group.on_revoke(client, [TopicPartition("t", 0)])
    member.now = 10.0
    member.group.join_watch.look(45.0, 1, outage=False)
    assert caplog.messages == [], "the member has a partition"
    member.group.on_revoke(client, [TopicPartition("t", 1)])
    member.now = 15.0
    member.group.join_watch.look(45.0, 1, outage=False)
    (said,) = caplog.messages
    assert said.startswith("kafka g: the group has assigned no partition for 5 s, so no message is handled. ")
    member.group.on_assign(client, [])
    member.group.closing = True
    member.group.on_revoke(client, [])
    member.now = 30.0
    member.group.join_watch.look(45.0, 1, outage=False)
    assert len(caplog.messages) == 1, "a member that ends waits for nothing"


@pytest.mark.parametrize("outage", [False, True])
@pytest.mark.parametrize("kind", [ClassicMember, Member])
def test_a_member_that_lost_all_partitions_says_that_its_group_waits(
    kind: type[Member], outage: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    member = kind(T="id-A")
    client: Any = member
    member.assign("T", 0)
    member.assign("T", 1)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.now += 6.0
    member.group.join_watch.look(45.0, 1, outage=False)
    assert caplog.messages == [], "the member has a partition"
    if outage:
        begin_outage(member)
    member.group.on_lost(client, [TopicPartition("T", 1)])
    member.group.report_return()
    member.now += 20.0
    if outage:
        member.group.join_watch.look(45.0, 1, outage=True)
        member.topics.contact.answered()
        member.group.report_return()
        member.now += 5.0
    caplog.clear()
    member.group.join_watch.look(45.0, 1, outage=False)
    (said,) = caplog.messages
    assert said.startswith(f"kafka g: the group has assigned no partition for {5 if outage else 20} s")
    member.group.on_assign(client, [])
    member.now += 100.0
    member.group.join_watch.look(45.0, 1, outage=False)
    (_, answered) = caplog.messages
    assert answered.startswith("kafka g: the group has no partition for this member"), "the group has answered"
    member.assign("T", 0)
    member.group.closing = True
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.now += 10.0
    member.group.join_watch.look(45.0, 1, outage=False)
    assert len(caplog.messages) == 2, "a member that ends waits for nothing"


def test_a_broker_that_returns_before_the_assignment_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    member = Member(T="id-A")
    client: Any = member
    member.assign("T", 0)
    begin_outage(member)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.group.report_return()
    assert (caplog.messages, member.group.rejoining) == ([], False)
    member.topics.contact.answered()
    member.group.report_return()
    member.group.report_return()
    assert member.group.rejoining
    (line,) = caplog.messages
    assert line == (
        "kafka g: waiting for the group to assign partitions again, perhaps until the broker has ended this member's "
        "former session"
    )


def test_a_broker_that_returns_after_the_assignment_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    member = Member(T="id-A")
    client: Any = member
    member.assign("T", 0)
    begin_outage(member)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.topics.contact.answered()
    member.assign("T", 0)
    member.group.report_return()
    assert (caplog.messages, member.group.rejoining) == ([], False)


def test_a_loss_before_the_outage_is_certain_waits_for_the_group_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    member = Member(T="id-A")
    client: Any = member
    member.assign("T", 0)
    member.group.on_lost(client, [TopicPartition("T", 0)])
    member.group.report_return()
    assert (caplog.messages, member.group.rejoining) == ([], False)
    for _ in range(2):
        begin_outage(member)
        member.group.report_return()
        assert not member.group.rejoining
        member.topics.contact.answered()
        member.group.report_return()
        assert member.group.rejoining
    waits = "kafka g: waiting for the group to assign partitions again"
    assert [line.partition(",")[0] for line in caplog.messages] == [waits] * 2
    # The group may leave a member without partitions.
    member.group.on_assign(client, [])
    assert not member.group.rejoining
    member.group.report_return()
    assert not member.group.rejoining


def test_a_member_that_had_no_partition_does_not_wait_for_the_group(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    member = Member(T="id-A")
    client: Any = member
    begin_outage(member)
    member.group.on_lost(client, [])
    member.group.report_return()
    member.topics.contact.answered()
    member.group.report_return()
    assert (caplog.messages, member.group.rejoining) == ([], False)


def begin_outage(member: Member) -> None:
    """Leave two requests without an answer, which are an outage."""
    for _ in range(2):
        member.topics.contact.unanswered(1e6, "no answer")
