"""The retention of a message follows from the limits of its topic and the deletions of its log."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from lanes.core.types import Message, Partition, PartitionId
from lanes.source import Retention
from lanes_kafka.client import retention
from lanes_kafka.client.group import Assignment
from lanes_kafka.client.records import READER
from lanes_kafka.client.retention import ASK_EVERY, ASK_LIMITS_EVERY, LogRetention
from tests.components import wait_until
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce

NOW = 1_700_000_000.0
DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


class Broker:
    """A broker that is asked for limits and log starts."""

    def __init__(self, limits: dict[str, str] | KafkaError) -> None:
        self.limits = limits
        self.start: int | KafkaError = 0
        self.asked: list[str] = []
        self.starts_of: list[list[int]] = []

    def list_offsets(self, wanted: dict[TopicPartition, Any], *, request_timeout: float) -> dict[Any, Future[Any]]:
        self.asked.append("start")
        self.starts_of.append([one.partition for one in wanted])
        return {one: done(self.start, offset=self.start) for one in wanted}

    def describe_configs(self, wanted: list[Any], *, request_timeout: float) -> dict[Any, Future[Any]]:
        self.asked.append("limits")
        future: Future[Any] = Future()
        if isinstance(self.limits, KafkaError):
            future.set_exception(KafkaException(self.limits))
        else:
            entries = {name: type("Entry", (), {"value": value})() for name, value in self.limits.items()}
            future.set_result(entries)
        return dict.fromkeys(wanted, future)


def done(found: object, **fields: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(found, KafkaError):
        future.set_exception(KafkaException(found))
    else:
        future.set_result(type("Found", (), fields)())
    return future


class Ends:
    end: int | None = 0

    def of(self, partition: Partition) -> int | None:
        return self.end


class Stand:
    """The retention of one partition, with a manual clock."""

    def __init__(self, monkeypatch: Any, limits: dict[str, str] | KafkaError) -> None:
        self.now = 100.0
        self.broker, self.ends = Broker(limits), Ends()
        admin: Any = self.broker
        ends: Any = self.ends
        self.found = LogRetention(lambda: admin, ends, lambda: self.now, lambda: NOW)
        self.partition = Partition(PartitionId("t", 0), READER)
        self.assignment = Assignment(self.partition, 0, 0)
        self.has_read(1_000, 30)
        monkeypatch.setattr(retention, "READER", self)
        self.age: float | None = 10.0

    def details(self, raw: object) -> Any:
        return type("Details", (), {"timestamp": None if self.age is None else NOW - self.age})()

    def has_read(self, count: int, average: int, *, head: int = 30) -> None:
        """Let the client read messages: the oldest unfinished one, and others of an average size."""
        self.head = head
        self.assignment.positions_read, self.assignment.bytes_read = count, head + (count - 1) * average

    def of(self, position: int) -> Retention | None:
        return self.found.of(Message(self.partition, position, None, self.head, None, None))

    def refresh(self, *, after: float = 0.0, start: int = 0, end: int = 0, ask: bool = True) -> None:
        self.now += after
        self.broker.start, self.ends.end = start, end
        self.found.refresh([self.assignment], ask=ask)

    def learn(self, *facts: tuple[int, int]) -> None:
        """Learn starts and ends of the log, ten seconds apart; the last fact is of now."""
        for start, end in facts:
            for _ in range(5):
                self.of(0)
                self.refresh(after=2.0, ask=False)
            self.of(0)
            self.refresh(start=start, end=end)
            self.refresh(start=start, end=end)


TIMED = {"retention.ms": "60000", "retention.bytes": "-1", "cleanup.policy": "delete", "segment.bytes": "1000"}
SIZED = {"retention.ms": "-1", "retention.bytes": "10000", "cleanup.policy": "delete", "segment.bytes": "1000"}


def test_a_broker_is_asked_only_about_wanted_partitions(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, TIMED)
    for _ in range(5):
        stand.refresh(after=5.0)
    assert stand.broker.asked == []
    assert stand.of(0) is None
    stand.refresh(ask=False)
    assert stand.broker.asked == []
    stand.refresh()
    stand.refresh()
    assert stand.broker.asked == ["start", "limits"]
    for _ in range(3):
        stand.of(0)
        stand.refresh(after=ASK_EVERY)
    assert stand.broker.asked == ["start", "limits", *["start"] * 3]
    stand.now += ASK_LIMITS_EVERY
    stand.of(0)
    stand.refresh()
    assert stand.broker.asked[-2:] == ["start", "limits"]
    before = len(stand.broker.asked)
    for _ in range(5):
        stand.refresh(after=5.1)
    assert len(stand.broker.asked) == before


class Compared(Partition):
    """A partition that counts comparisons with other partitions."""

    __slots__ = ()
    comparisons = 0
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.comparisons += 1
        return self is other


class Many(Stand):
    """The retention of many partitions, each with an old message."""

    def __init__(self, monkeypatch: Any, count: int) -> None:
        super().__init__(monkeypatch, TIMED)
        self.messages = [
            Message(Compared(PartitionId("t", number), READER), 0, None, 30, None, None) for number in range(count)
        ]
        self.owned = [Assignment(message.partition, 0, 0) for message in self.messages]

    def look(self, *, after: float = 0.5) -> None:
        """Let the watch and the client's thread look once."""
        for message in self.messages:
            self.found.of(message)
        self.now += after
        self.found.refresh(self.owned, ask=True)

    def known(self) -> list[bool]:
        return [self.found.of(message) is not None for message in self.messages]


def test_the_starts_of_many_logs_are_asked_for_in_turn(monkeypatch: Any) -> None:
    monkeypatch.setattr(retention, "PORTION", 3)
    many = Many(monkeypatch, 8)
    many.ends.end = 9
    for _ in range(8):
        many.look()
    # A round of three portions ends before the next round begins, not sooner than two seconds after the last round.
    assert many.broker.starts_of == [[0, 1, 2], [3, 4, 5], [6, 7], [0, 1, 2], [3, 4, 5], [6, 7]]
    assert many.broker.asked[:3] == ["start", "limits", "start"] and many.broker.asked.count("limits") == 1
    many.broker.starts_of.clear()
    # A partition that leaves loses its turn. A new partition waits for the next round.
    many.look(after=ASK_EVERY)
    del many.owned[3:5]
    many.look()
    assert many.broker.starts_of == [[0, 1, 2], [5, 6, 7]]


def test_each_of_many_partitions_gets_facts_in_a_round(monkeypatch: Any) -> None:
    monkeypatch.setattr(retention, "PORTION", 10)
    many = Many(monkeypatch, 35)
    many.broker.start, many.ends.end = 5, 9
    for number in range(1, 6):
        many.look()
        # The answers to a question are taken at the next look.
        told = [many.found.of(message) for message in many.messages]
        assert sum(each is not None and each.left == 0.0 for each in told) == min(35, 10 * (number - 1))
    assert [len(asked) for asked in many.broker.starts_of[:4]] == [10, 10, 10, 5]


def test_a_look_at_many_partitions_compares_none_of_them_with_all_others(monkeypatch: Any) -> None:
    many = Many(monkeypatch, 600)
    for _ in range(8):
        many.look()
    assert all(many.known())
    monkeypatch.setattr(Compared, "comparisons", 0)
    many.look()
    assert Compared.comparisons < 10 * len(many.owned)


def test_retention_by_time_counts_from_the_time_of_the_record(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, TIMED)
    stand.learn((0, 100))
    assert stand.of(5) == Retention(50.0, 60.0, "retention.ms=60000")
    stand.age = 90.0
    assert stand.of(5) == Retention(0.0, 60.0, "retention.ms=60000")
    # A record without a time, or a time in the future.
    stand.age = None
    assert stand.of(5) is None
    stand.age = -30.0
    assert stand.of(5) == Retention(90.0, 60.0, "retention.ms=60000")


def test_a_message_below_the_start_of_the_log_is_deleted(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, {**TIMED, "retention.ms": "-1"})
    stand.learn((7, 100))
    assert stand.of(6) == Retention(0.0, 1.0, "its retention, because the log begins at offset 7")
    assert stand.of(7) is None


def test_a_compacted_topic_deletes_nothing_by_age(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, {**TIMED, "cleanup.policy": "compact"})
    stand.learn((0, 100))
    assert stand.of(5) is None
    both = Stand(monkeypatch, {**TIMED, "cleanup.policy": "compact,delete"})
    both.learn((0, 100))
    assert both.of(5) is not None


def test_a_topic_with_an_empty_policy_deletes_nothing(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, {**TIMED, "cleanup.policy": ""})
    stand.learn((0, 100))
    assert stand.of(5) is None
    unsaid = Stand(monkeypatch, {name: value for name, value in TIMED.items() if name != "cleanup.policy"})
    unsaid.learn((0, 100))
    assert unsaid.of(5) is not None


def test_retention_by_size_before_a_deletion_takes_the_average_of_the_records(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, SIZED)
    stand.has_read(1_000, 92)
    stand.learn((0, 20), (0, 40))
    # 10,000 bytes of records of 92 + 8 bytes; two records a second.
    assert stand.of(0) == Retention((100 - 39) / 2, 50.0, "retention.bytes=10000")
    # The log has kept more already, because its records are compressed.
    stand.learn((0, 400), (0, 1_100))
    found = stand.of(0)
    # The start of the log shows that the message is not deleted yet.
    assert found is not None and found.left == 1.0
    kept = 1_100 * 10_000 / 11_000
    assert found.span == kept / ((1_100 - 20) / 30)


LARGE = {**SIZED, "retention.bytes": str(1 << 30), "segment.bytes": str(1 << 30)}


@pytest.mark.parametrize("head", [1_000, 20_000, 1_000_000])
def test_a_large_message_in_a_log_far_below_its_limit_has_time(head: int, monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, LARGE)
    stand.has_read(90_001, 1_000, head=head)
    stand.learn((0, 99_000), (0, 100_000))
    found = stand.of(10_000)
    keeps = (1 << 30) / 1_008
    assert found == Retention((keeps - 89_999) / 100, keeps / 100, f"retention.bytes={1 << 30}")
    assert found.left > 0.9 * found.span


def test_the_sizes_of_another_topic_do_not_count(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, LARGE)
    stand.has_read(90_001, 1_000)
    other = Assignment(Partition(PartitionId("large", 0), READER), 0, 0)
    other.positions_read, other.bytes_read = 90_001, 90_001 * 500_000
    for end in (99_000, 100_000):
        stand.now += 10.0
        stand.ends.end = end
        for _ in range(2):
            stand.of(10_000)
            stand.found.of(Message(other.partition, 10_000, None, 500_000, None, None))
            stand.found.refresh([stand.assignment, other], ask=True)
    found = stand.of(10_000)
    assert found is not None and found.left > 0.9 * found.span


def test_a_few_read_messages_tell_no_retention_by_size(monkeypatch: Any) -> None:
    for read, end, known in ((0, 20, False), (10, 20, False), (11, 20, True), (50, 400, False), (101, 400, True)):
        stand = Stand(monkeypatch, SIZED)
        stand.has_read(read, 92)
        stand.learn((0, end // 2), (0, end))
        assert (stand.of(0) is not None) is known, (read, end)


def test_retention_by_size_follows_the_deletions_that_were_seen(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, SIZED)
    stand.has_read(1_000, 92)
    stand.learn((0, 1_000), (50, 1_050))
    # A segment of 1,000 bytes had 50 records, so the broker keeps 500 and up to one segment more.
    found = stand.of(800)
    assert found == Retention((500 - 249) / 5, 100.0, "retention.bytes=10000")
    # The facts are two seconds old.
    stand.now += 2.0
    found = stand.of(800)
    assert found is not None and found.left == (500 - 249) / 5 - 2.0


def test_without_the_permission_to_read_limits_the_deletions_show_the_retention(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, DENIED)
    stand.learn((0, 900), (0, 1_000))
    assert stand.of(0) is None
    stand.learn((100, 1_100))
    found = stand.of(600)
    assert found is not None and found.rule == "the pace at which its log is deleted"
    assert found.left == (1_000 - 499) / 10


def test_answers_without_a_value_keep_the_former_facts(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, TIMED)
    stand.learn((7, 100))
    stand.broker.limits = KafkaError(KafkaError._TIMED_OUT)
    stand.now += ASK_LIMITS_EVERY
    stand.of(7)
    for _ in range(3):
        stand.now += ASK_EVERY
        stand.broker.start = KafkaError(KafkaError._TIMED_OUT)
        stand.found.refresh([stand.assignment], ask=True)
        stand.of(7)
    assert stand.of(6) is not None and stand.of(7) is not None


def test_a_failed_question_for_limits_is_repeated_soon(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, KafkaError(KafkaError._TIMED_OUT))
    stand.of(0)
    stand.refresh()
    stand.refresh()
    assert isinstance(stand.broker.limits, KafkaError) and stand.of(0) is None
    stand.broker.limits = TIMED
    for _ in range(2):
        stand.refresh(after=ASK_EVERY)
        stand.of(0)
    stand.refresh()
    assert stand.of(0) == Retention(50.0, 60.0, "retention.ms=60000")
    assert stand.broker.asked.count("limits") == 2


def test_a_refused_question_for_limits_is_repeated_after_a_minute(monkeypatch: Any) -> None:
    stand = Stand(monkeypatch, DENIED)
    for _ in range(20):
        stand.of(0)
        stand.refresh(after=ASK_EVERY)
    assert stand.broker.asked.count("limits") == 1


def test_retention_limits_that_cannot_be_read_are_ignored(monkeypatch: Any) -> None:
    for odd in ({}, {"retention.ms": "soon", "retention.bytes": "many"}):
        stand = Stand(monkeypatch, odd)
        stand.learn((0, 20), (0, 40))
        assert stand.of(0) is None


@pytest.mark.parametrize(("policy", "deletes"), [("", False), ("compact", False), ("delete", True)])
def test_a_broker_tells_whether_a_topic_deletes_by_age(policy: str, deletes: bool, topic: MakeTopic) -> None:
    orders = topic(1, config={"cleanup.policy": policy, "retention.ms": "60000"})
    produce(orders, 1, keys=[b"k"])
    ends: Any = Ends()
    found = LogRetention(lambda: orders.admin, ends, time.monotonic)
    client = Consumer(orders.config())
    client.assign([TopicPartition(orders.name, 0, 0)])
    (raw,) = client.consume(1, timeout=30.0)
    client.close()
    assignment = Assignment(Partition(PartitionId(orders.name, 0), READER), 0, 0)
    message = Message(assignment.partition, 0, None, 30, raw, None)

    def known() -> bool:
        found.of(message)
        found.refresh([assignment], ask=True)
        return orders.name in found._limits

    wait_until(known, "the limits of the topic")
    assert (found.of(message) is not None) is deletes
