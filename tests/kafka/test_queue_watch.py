"""The watch over partitioned queues: its questions, its findings and its log, with a fake broker and manual time."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupState, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from lanes import PartitionedQueue, Stranded
from lanes_kafka.client.lag import PORTION
from lanes_kafka.client.queue_watch import QueueWatch, queue_facts
from tests.kafka.mock_cluster import OFFSET_FETCH, MockCluster
from tests.kafka.workload import QUIET

QUEUE = PartitionedQueue("q", 2)
STABLE = ConsumerGroupState.STABLE


def member(*names: str, size: int = 1) -> Any:
    places = [TopicPartition(name, number) for name in names for number in range(size)]
    return SimpleNamespace(assignment=SimpleNamespace(topic_partitions=places))


class Broker:
    """A broker, both kinds of admin clients, and the consumer.

    Attributes:
        now: Time of the clock.
        logs: The start and the end of the log of each partition, by topic.
        positions: Committed positions by topic and partition.
        members: Members of the group.
        state: State of the group.
        asked: The questions: their kinds, and the number of their subjects.
        refused: Code of the error of each question of a kind.
        silent: Kinds of questions that get no answer.
        made: Number of clients for the coordinator.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.logs: dict[str, list[tuple[int, int]]] = {"q": [(0, 5)], "q__p1": [(0, 5)]}
        self.positions: dict[tuple[str, int], int] = {}
        self.members = [member("q"), member("q__p1")]
        self.state = STABLE
        self.asked: list[tuple[str, int]] = []
        self.refused: dict[str, int] = {}
        self.silent: set[str] = set()
        self.made = 0

    def poll(self, timeout: float) -> None: ...

    def describe_topics(self, topics: Any, *, request_timeout: float) -> dict[str, Future[Any]]:
        def describe(name: str) -> Any:
            if name not in self.logs:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
            return SimpleNamespace(partitions=[SimpleNamespace(id=number) for number in range(len(self.logs[name]))])

        return self._ask("topics", list(topics.topic_names), describe)

    def list_offsets(self, specs: Any, *, request_timeout: float) -> dict[Any, Future[Any]]:
        latest = {type(spec).__name__ == "LatestSpec" for spec in specs.values()} == {True}
        return self._ask(
            "ends" if latest else "starts",
            list(specs),
            lambda place: SimpleNamespace(offset=self.logs[place.topic][place.partition][latest]),
        )

    def describe_consumer_groups(self, groups: list[str], *, request_timeout: float) -> dict[str, Future[Any]]:
        return self._ask("members", groups, lambda _: SimpleNamespace(state=self.state, members=self.members))

    def list_topics(self, *, timeout: float) -> Any:
        self.asked.append(("all topics", 1))
        if "all topics" in self.refused:
            raise KafkaException(KafkaError(self.refused["all topics"]))
        return SimpleNamespace(
            topics={name: SimpleNamespace(partitions=dict(enumerate(log))) for name, log in self.logs.items()}
        )

    def committed(self, places: list[TopicPartition], *, timeout: float) -> list[TopicPartition]:
        self.asked.append(("positions", len(places)))
        if "positions" in self.refused:
            raise KafkaException(KafkaError(self.refused["positions"]))
        return [
            TopicPartition(each.topic, each.partition, self.positions.get((each.topic, each.partition), -1001))
            for each in places
        ]

    def make(self) -> Any:
        self.made += 1
        return self

    def _ask(self, kind: str, subjects: list[Any], answer: Any) -> dict[Any, Future[Any]]:
        self.asked.append((kind, len(subjects)))
        futures: dict[Any, Future[Any]] = {each: Future() for each in subjects}
        for each, future in futures.items():
            if kind in self.silent:
                continue
            try:
                if kind in self.refused:
                    raise KafkaException(KafkaError(self.refused[kind]))
                future.set_result(answer(each))
            except KafkaException as failure:
                future.set_exception(failure)
        return futures


class Stand:
    """A watch, whose turns the test makes. ``woken``: number of calls that wake its thread."""

    def __init__(self, *queues: PartitionedQueue) -> None:
        self.broker = Broker()
        self.woken = 0
        broker: Any = self.broker
        self.watch = QueueWatch(
            queues,
            "g",
            lambda: broker,
            broker.make,
            lambda: broker,
            self._wake,
            lambda: self.broker.now,
            "kafka g/q",
        )

    def _wake(self, command: None) -> None:
        self.woken += 1

    def look(self, after: float) -> list[str]:
        """Make turns after a time, and return the kinds of the questions."""
        self.broker.now += after
        self.broker.asked.clear()
        for _ in range(6):
            self.watch.advance(ask=True)
        return [kind for kind, _ in self.broker.asked]

    def found(self) -> tuple[Stranded, ...]:
        return self.watch.found

    def strand(self, *topics: str) -> None:
        self.broker.logs |= {topic: [(2, 5), (0, 1)] for topic in topics}


@pytest.fixture
def stand() -> Stand:
    stand = Stand(QUEUE)
    assert stand.look(4.9) == []
    return stand


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_without_such_topics_one_question_is_asked_every_five_seconds(stand: Stand) -> None:
    assert stand.look(0.2) == ["all topics", "topics"]
    assert stand.broker.asked[1] == ("topics", 2) and stand.woken == 2
    assert stand.look(4.9) == []
    assert stand.look(0.1) == ["topics"]
    assert [stand.look(5.0) for _ in range(12)].count(["topics"]) == 11
    assert stand.broker.made == 0 and stand.found() == ()


def test_without_a_queue_or_a_client_nothing_is_asked() -> None:
    assert Stand().look(100.0) == []
    stand = Stand(QUEUE)
    stand.watch._admin = lambda: None
    assert stand.look(100.0) == []
    stand = Stand(QUEUE)
    stand.broker.now += 100.0
    stand.watch.advance(ask=False)
    assert stand.broker.asked == []


def test_topics_that_nobody_reads_are_found_at_the_second_look(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    stand.strand("q__p3")
    found = ["topics", "starts", "ends", "members", "positions"]
    assert stand.look(0.1) == ["all topics", *found]
    assert stand.found() == () and lines(caplog, logging.WARNING) == []
    assert stand.look(1.0) == found
    assert stand.found() == (Stranded("q", "q__p3", 4),)
    stand.broker.positions = {("q__p3", 0): 3, ("q__p3", 1): 1}
    assert stand.look(5.0) == found
    assert stand.found() == (Stranded("q", "q__p3", 2),)
    (line,) = lines(caplog, logging.WARNING)
    assert line == (
        "kafka g/q: queue 'q': no consumer of group 'g' reads the messages in 'q__p3' (4). The producers use "
        "another number of partitions; start the consumers with that number"
    )
    with caplog.at_level(logging.INFO):
        stand.broker.members.append(member("q__p3", size=2))
        stand.look(5.0)
    assert stand.found() == ()
    assert lines(caplog, logging.INFO) == ["kafka g/q: queue 'q': no message waits in 'q__p3' any more"]


@pytest.mark.parametrize("members", [[member("q__p2", size=2)], [member("q__p2"), member("q__p2", size=2)]])
def test_a_topic_that_another_member_reads_is_not_stranded(stand: Stand, members: list[Any]) -> None:
    stand.strand("q__p2")
    stand.broker.members += members
    assert "members" in stand.look(0.1)
    assert stand.look(1.0) == []
    stand.look(5.0)
    assert stand.found() == ()


def test_a_topic_that_is_read_in_part_is_stranded(stand: Stand) -> None:
    stand.strand("q__p2")
    stand.broker.members += [member("q__p2"), SimpleNamespace(assignment=None)]
    stand.look(0.1)
    stand.look(1.0)
    assert [each.name for each in stand.found()] == ["q__p2"]


def test_a_topic_without_messages_needs_no_group(stand: Stand) -> None:
    stand.broker.logs["q__p2"] = [(7, 7)]
    assert stand.look(0.1) == ["all topics", "topics", "starts", "ends"]
    assert stand.found() == ()


def test_a_group_that_rebalances_is_asked_again_after_a_second(stand: Stand) -> None:
    stand.strand("q__p2")
    stand.broker.state = ConsumerGroupState.PREPARING_REBALANCING
    for after in (0.1, 1.0, 1.0):
        assert "members" in stand.look(after)
    stand.broker.state = STABLE
    stand.look(1.0)
    assert stand.found() == ()
    stand.look(1.0)
    assert [each.name for each in stand.found()] == ["q__p2"]


def test_topics_of_a_former_number_are_found_by_the_positions_of_the_group(stand: Stand) -> None:
    stand.strand("q__p6", "other__p6")
    stand.broker.positions = {("q__p6", 0): 4, ("other__p6", 0): 1, ("q", 0): 5}
    stand.look(0.1)
    stand.look(1.0)
    assert stand.found() == (Stranded("q", "q__p6", 2),)


@pytest.mark.parametrize("kind", ["starts", "ends", "members", "positions"])
def test_a_failed_look_keeps_the_findings(stand: Stand, kind: str) -> None:
    stand.strand("q__p2")
    stand.look(0.1)
    stand.look(1.0)
    stand.broker.refused = {kind: KafkaError._TIMED_OUT}
    stand.look(5.0)
    assert [each.name for each in stand.found()] == ["q__p2"]
    stand.broker.refused, stand.broker.logs = {}, {}
    stand.look(5.0)
    assert stand.found() == ()


def test_a_failed_question_about_topics_keeps_the_findings(stand: Stand) -> None:
    stand.strand("q__p2")
    stand.look(0.1)
    stand.look(1.0)
    stand.broker.refused = {"topics": KafkaError._TRANSPORT}
    stand.look(5.0)
    assert [each.name for each in stand.found()] == ["q__p2"]


@pytest.mark.parametrize("code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION])
def test_topics_that_this_user_may_not_see_are_left_out(stand: Stand, code: int) -> None:
    stand.broker.refused = {"topics": code, "all topics": KafkaError._TIMED_OUT}
    assert stand.look(0.1) == ["all topics", "topics"]
    assert stand.found() == ()


def test_a_look_without_an_answer_is_given_up_after_ten_seconds(stand: Stand) -> None:
    stand.broker.silent = {"topics"}
    assert not stand.watch
    assert stand.look(0.1) == ["all topics", "topics"]
    # The thread polls often during a look, so that five questions take no second.
    assert stand.watch
    assert stand.look(9.9) == []
    assert stand.look(0.1) == ["topics"]
    stand.broker.silent = {"members"}
    stand.strand("q__p2")
    stand.watch.end()
    assert stand.look(5.0)[-1] == "members"
    assert stand.watch._own is not None
    stand.look(10.0)
    assert stand.broker.asked[-1][0] == "members"
    stand.watch.end()
    # No client of a lost question may live on.
    assert stand.watch._own is None


def test_many_names_are_asked_in_portions() -> None:
    stand = Stand(PartitionedQueue("q", 300))
    stand.look(5.0)
    assert stand.broker.asked[-1] == ("topics", PORTION)
    stand.strand("q__p310", "q__p590")
    stand.look(5.0)
    assert stand.broker.asked[0] == ("topics", 50)
    for _ in range(3):
        stand.look(5.0)
    assert sorted(each.name for each in stand.found()) == ["q__p310", "q__p590"]


def test_names_of_another_queue_of_the_source_are_left_out() -> None:
    stand = Stand(QUEUE, PartitionedQueue.of("r", ["q__p2", "r"]))
    stand.look(5.0)
    assert stand.broker.asked[-1] == ("topics", 4)  # q__p3, r__p1, r__p2, r__p3


def test_the_facts_of_a_topic_are_the_sums_of_its_partitions() -> None:
    bounds = {TopicPartition("t", 0): (2, 9), TopicPartition("t", 1): (0, 4), TopicPartition("u", 0): (3, 3)}
    positions = [TopicPartition("t", 0, 1), TopicPartition("t", 1, 3), TopicPartition("u", 0, -1001)]
    facts = queue_facts("g", bounds, [member("t", size=2), member("u")], positions)
    assert facts["t"]._asdict() == {"size": 2, "messages": 11, "unfinished": {"g": 8}, "readers": {"g": 1}}
    assert facts["u"]._asdict() == {"size": 1, "messages": 0, "unfinished": {"g": 0}, "readers": {"g": 1}}


def test_a_coordinator_that_has_moved_ends_a_look_and_not_the_process(cluster: MockCluster, name: str) -> None:
    """librdkafka 2.16 ends the process if an ``AdminClient`` asks for positions then."""
    for topic in (name, f"{name}__p1", f"{name}__p6"):
        cluster.create(topic, 1)
    settings = {**QUIET, "bootstrap.servers": cluster.url}
    admin = AdminClient(settings)
    consumer = Consumer({**settings, "group.id": "g"})
    now = 0.0
    watch = QueueWatch(
        [PartitionedQueue(name, 2)],
        "g",
        lambda: admin,
        lambda: AdminClient(settings),
        lambda: consumer,
        lambda _: None,
        lambda: now,
        "q",
    )
    consumer.commit(offsets=[TopicPartition(f"{name}__p6", 0, 3)], asynchronous=False)
    for refused, known in ((True, frozenset()), (False, {f"{name}__p6"})):
        if refused:
            cluster.fail(OFFSET_FETCH, [KafkaError.NOT_COORDINATOR])
        now += 100.0
        watch.advance(ask=True)
        assert watch._known == known
        while watch:
            # A client must not end while it waits for an answer, so the check goes on to its end.
            admin.poll(0.01)
            watch.advance(ask=False)
    consumer.close()
