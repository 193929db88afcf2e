"""A commit waits for a topic id that is read after its messages, and a recreated topic gets no commit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import lanes
from lanes.core.types import Partition, PartitionId, Settlement
from lanes.source import Outage
from lanes_kafka.client import commits, thread, topics
from lanes_kafka.client.commits import COMMIT_TIMEOUT, Commit, Commits, TopicIdCheck
from lanes_kafka.client.records import READER
from lanes_kafka.client.topics import Topics
from lanes_kafka.errors import ErrorLog
from tests.kafka.conftest import MakeTopic
from tests.kafka.fakes import FakeAdmin, FakeAnswer
from tests.kafka.members import Story, Work, group
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import reading, topic_of
from tests.kafka.workload import Topic, produce, until

pytestmark = pytest.mark.anyio


class Broker:
    """A client, and the commits of its broker. ``hangs``: it answers no question."""

    def __init__(self) -> None:
        self.commits: list[tuple[int, int]] = []
        self.hangs = False
        self.blocked = 0

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        self.blocked += not asynchronous
        self.commits += [(each.partition, each.offset) for each in offsets]

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        if self.hangs:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        found = dict(self.commits)
        return [TopicPartition(each.topic, each.partition, found[each.partition]) for each in partitions]


class Bench:
    """A topic id check with a manual clock, and partitions of a topic that had the id ``incarnation``."""

    def __init__(self, incarnation: str = "id-A") -> None:
        self.now = 0.0
        self.admin = FakeAdmin(t="id-A")
        self.broker = Broker()
        self.released: list[Partition] = []
        self.partitions = [Partition(PartitionId("t", n), READER, incarnation, floor=0) for n in range(3)]
        admin: Any = self.admin
        self.topics = Topics(["t"], admin, lambda: self.now)
        self.topics.wait(1.0)
        self.admin.asked = 0
        self.errors = ErrorLog("kafka g", lambda: self.now, None, {})
        self.owned = True
        group: Any = SimpleNamespace(
            check_topics=self._check, release=self.released.append, owns=lambda partition: self.owned
        )
        commits = Commits(lambda partition: self.owned, lambda reason: None, lambda: self.now, "kafka g", {})
        self.check = TopicIdCheck(self.topics, group, commits, self.errors, lambda: self.now, "kafka g")

    def _check(self) -> None:
        self.owned = self.topics.change("t", self.partitions[0].incarnation) is None

    def commit(
        self,
        number: int,
        floor: int,
        *,
        synchronous: bool = False,
        until: float = 1e9,
        releases: bool = False,
        given_up: bool = False,
    ) -> FakeAnswer:
        answer = FakeAnswer(given_up)
        partition = self.partitions[number]
        commit = Commit([Settlement(partition, [], floor)], answer, partition if releases else None)
        client: Any = self.broker
        self.check.commit(client, commit, until=until if synchronous else None)
        return answer

    def repeat(self) -> None:
        client: Any = self.broker
        self.check.resend(client, 1e9)

    def look(self) -> None:
        client: Any = self.broker
        self.check.advance(client)


def test_a_commit_waits_for_a_topic_id_asked_for_after_it() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    bench.topics.ask()
    first = bench.commit(0, 5)
    # This answer may be older than the messages that are committed.
    bench.admin.answer("id-A")
    bench.look()
    assert (bench.broker.commits, bench.admin.asked) == ([], 2) and bench.check
    second, third = bench.commit(1, 6), bench.commit(2, 7)
    bench.admin.answer("id-A")
    bench.look()
    assert bench.broker.commits == [(0, 5)]
    # One question covers all commits that became due meanwhile.
    bench.admin.answer("id-A")
    bench.look()
    assert bench.broker.commits == [(0, 5), (1, 6), (2, 7)] and bench.admin.asked == 3 and not bench.check
    assert first.given == second.given == third.given == []


@pytest.mark.parametrize("synchronous", [False, True], ids=["sent", "awaited"])
def test_nothing_is_committed_to_a_recreated_topic(synchronous: bool) -> None:
    bench = Bench()
    bench.admin.topics = {"t": "id-B"}
    answer = bench.commit(0, 5, synchronous=synchronous, releases=True)
    bench.look()
    (error,) = answer.given
    assert "no longer owns" in str(error) and bench.broker.commits == [] and bench.released == [bench.partitions[0]]


def test_a_commit_without_an_answer_fails_and_a_later_one_is_sent() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    answer = bench.commit(0, 5, releases=True)
    bench.now += COMMIT_TIMEOUT - 1
    bench.look()
    assert answer.given == [] and bench.check
    bench.now += 1
    bench.look()
    (error,) = answer.given
    assert isinstance(error, lanes.SourceError) and error.retryable and "did not confirm the topic ids" in str(error)
    assert bench.broker.commits == [] and bench.released == [bench.partitions[0]] and not bench.check
    # A failed question is repeated, and allows no commit.
    later = bench.commit(1, 6)
    bench.admin.answer(KafkaError._TIMED_OUT)
    bench.look()
    assert bench.broker.commits == []
    bench.now += topics.ASK_EVERY
    bench.look()
    bench.admin.answer("id-A")
    bench.look()
    assert bench.broker.commits == [(1, 6)] and later.given == []


def test_a_callback_waits_for_topic_ids_with_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_CALLBACK_TIMEOUT", 0.01)
    bench = Bench()
    bench.admin.topics = {"t": None}
    (error,) = bench.commit(0, 5, synchronous=True, releases=True).given
    assert isinstance(error, lanes.SourceError) and error.retryable and bench.broker.commits == []
    assert bench.released == [bench.partitions[0]]


def test_a_commit_in_a_callback_does_not_block_on_a_hanging_broker() -> None:
    bench = Bench()
    bench.broker.hangs = True
    (error,) = bench.commit(0, 5, synchronous=True).given
    assert isinstance(error, lanes.SourceError) and error.retryable and "_TIMED_OUT" in str(error)
    assert (bench.broker.commits, bench.broker.blocked) == ([(0, 5)], 0)
    bench.broker.hangs = False
    assert bench.commit(0, 5, synchronous=True).given == [None] and not bench.broker.blocked


@pytest.mark.parametrize("recalled", ["waiting", "sent"])
def test_unanswered_commits_are_recalled_in_a_callback(recalled: str) -> None:
    bench = Bench()
    bench.admin.topics = {"t": None if recalled == "waiting" else "id-A"}
    bench.commit(0, 5)
    bench.look()
    assert bool(bench.check) == (recalled == "waiting")
    (commit,) = bench.check.recall()
    assert commit.settlements[0].floor == 5 and bench.check.recall() == [] and not bench.check


@pytest.mark.parametrize(("until", "waited"), [(0.5, 0.5), (1e9, 5.0), (-1.0, -1.0)])
def test_a_commit_in_a_callback_waits_until_the_callback_must_end(
    until: float, waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    found: list[float] = []
    monkeypatch.setattr(bench.topics, "wait", lambda timeout: found.append(timeout))
    (error,) = bench.commit(0, 5, synchronous=True, until=until).given
    assert found == [waited] and isinstance(error, lanes.SourceError) and bench.broker.commits == []


@pytest.mark.parametrize("synchronous", [False, True], ids=["sent", "awaited"])
def test_a_broker_without_topic_ids_delays_no_commit(synchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_CALLBACK_TIMEOUT", 0.01)
    bench = Bench("")
    bench.admin.topics = {"t": None}
    bench.commit(0, 5, synchronous=synchronous)
    assert bench.broker.commits == [(0, 5)]


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_topic_counts_as_deleted_after_a_while(comes_back: bool) -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    answer = bench.commit(0, 5)
    bench.admin.answer(KafkaError.UNKNOWN_TOPIC_OR_PART)
    bench.look()
    assert bench.owned and (bench.broker.commits, answer.given) == ([], [])
    bench.now += topics.ASK_EVERY
    bench.look()
    bench.admin.answer("id-A" if comes_back else KafkaError.UNKNOWN_TOPIC_OR_PART)
    bench.look()
    assert bench.owned == comes_back and bench.broker.commits == [(0, 5)] * comes_back


@pytest.mark.parametrize("synchronous", [False, True], ids=["sent", "awaited"])
def test_a_lost_partition_asks_for_no_topic_id(synchronous: bool) -> None:
    bench = Bench()
    bench.owned = False
    (error,) = bench.commit(0, 5, synchronous=synchronous, releases=True).given
    assert "no longer owns" in str(error) and bench.admin.asked == 0 and bench.released == [bench.partitions[0]]


@pytest.mark.parametrize("synchronous", [False, True], ids=["sent", "awaited"])
def test_an_abandoned_commit_asks_for_no_topic_id(synchronous: bool) -> None:
    bench = Bench()
    answer = bench.commit(0, 5, synchronous=synchronous, releases=True, given_up=True)
    assert (bench.admin.asked, bench.broker.commits, answer.given) == (0, [], []) and not bench.check
    assert bench.released == [bench.partitions[0]]


def test_an_answer_read_by_another_caller_is_checked() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    answer = bench.commit(0, 5)
    bench.admin.answer("id-B")
    bench.admin.topics = {"t": "id-B"}
    assert bench.topics.wait(1.0)
    bench.look()
    (error,) = answer.given
    assert "no longer owns" in str(error) and bench.broker.commits == []


@pytest.mark.parametrize("by", ["look", "commit"])
def test_a_question_without_an_answer_is_given_up(by: str) -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    first = bench.commit(0, 5)
    (stuck,), bench.admin.waiting = bench.admin.waiting, []
    bench.now += COMMIT_TIMEOUT - 0.1
    bench.look()
    assert bench.admin.asked == 1 and not first.given
    bench.now += 0.1
    if by == "look":
        bench.look()
        assert bench.admin.asked == 2
    later = bench.commit(1, 6)
    assert bench.admin.asked == 2
    # The late answer of the earlier question is older than the current question.
    stuck.set_result(SimpleNamespace(topic_id="id-A", partitions=[0]))
    bench.look()
    assert bench.broker.commits == [] and first.given and not later.given
    for _ in range(2):
        bench.admin.answer("id-A")
        bench.look()
    assert bench.broker.commits == [(1, 6)]


def test_commits_that_cannot_be_sent_again_fail() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    answers = [bench.commit(0, 5), bench.commit(1, 6)]
    bench.admin.answer("id-A")
    bench.admin.broken = True
    with pytest.raises(KafkaException):
        bench.repeat()
    for answer in answers:
        (error,) = answer.given
        assert isinstance(error, lanes.SourceError) and error.retryable and "_FATAL" in str(error)
    assert bench.broker.commits == [] and not bench.check


def test_a_topic_unknown_for_a_moment_is_not_deleted() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    for said in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._TIMED_OUT, KafkaError.UNKNOWN_TOPIC_OR_PART):
        bench.now += topics.ASK_EVERY
        bench.look()
        bench.admin.answer(said)
        bench.look()
        assert bench.owned
    bench.now += topics.ASK_EVERY
    bench.look()
    bench.admin.answer(KafkaError.UNKNOWN_TOPIC_OR_PART)
    bench.look()
    assert not bench.owned


def test_a_revoked_describe_permission_does_not_stop_commits() -> None:
    bench = Bench()
    bench.admin.topics = {"t": None}
    bench.commit(0, 5)
    bench.admin.answer(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    bench.look()
    assert bench.broker.commits == [(0, 5)] and bench.owned


async def test_messages_read_on_in_a_recreated_topic_are_not_committed(
    cluster: MockCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(topic_of(cluster, name, 1), 5)
    asked = FakeAdmin(**{name: "id-A"})

    class Admin(AdminClient):
        def describe_topics(self, *arguments: Any, **named: Any) -> Any:
            return asked.describe_topics(*arguments, **named)

    monkeypatch.setattr(thread, "AdminClient", Admin)
    # Only commits ask for ids.
    monkeypatch.setattr(topics, "ASK_EVERY", 3_600.0)

    async def ended() -> None:
        while True:
            await reader.receive()

    async with reading(cluster, "848", name) as reader:
        (partition,) = await reader.assigned()
        await reader.take(3)
        await reader.settle(partition, 3)
        # The client does not notice the change, and reads on.
        asked.topics = {name: "id-B"}
        await reader.take(2)
        with pytest.raises(lanes.SourceError, match="no longer owns"):
            await reader.settle(partition, 5)
        with pytest.raises(lanes.SourceError, match="deleted and recreated"):
            await ended()
        assert await reader.committed() == [3]


@pytest.mark.parametrize("pending", [False, True], ids=["heard", "unheard"])
def test_an_older_answer_is_ignored(pending: bool) -> None:
    admin = FakeAdmin(t="id-A")
    client: Any = admin
    topics = Topics(["t"], client, lambda: 0.0)
    if pending:
        topics.ask()
    else:
        topics.wait(1.0)
    admin.topics = {"t": "id-B"}
    assert topics.wait(1.0) and topics.known["t"].id == "id-B"


async def made_anew(topic: Topic, count: int) -> None:
    """Delete a topic, create it again at once, and publish ``count`` messages."""
    topic.delete()
    new = NewTopic(topic.name, 1, 1)
    made = False
    while not made:
        with suppress(KafkaException):
            topic.admin.create_topics([new])[topic.name].result(10)
            made = True
    await until(topic.exists)
    produce(topic, count)


@pytest.mark.parametrize("protocol", ["eager", "cooperative", "848"])
async def test_a_topic_recreated_within_300_ms_is_detected(protocol: str, topic: MakeTopic) -> None:
    events = topic(1)
    produce(events, 100)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.ended) == 100)
        await until(lambda: members.committed() == [100])
        before = len(story.events)
        await made_anew(events, 150)
        await until(lambda: one.ended.is_set() or len(story.of("end")) == 250)
        if one.ended.is_set():
            assert isinstance(one.failure, lanes.SourceError)
            assert f"topic '{events.name}' was deleted" in str(one.failure)
        else:
            # With KIP-848 the group may reassign the new topic, which is then read from its beginning.
            assert protocol == "848" and {each.position for each in story.of("assigned")} == {0}
        # The old position is neither committed to the new topic nor continued from.
        behind = story.events[before:]
        begun = next((at for at, each in enumerate(behind) if each.what == "assigned"), len(behind))
        assert [each for each in behind[:begun] if each.what == "commit" and each.position] == []
        if one.ended.is_set():
            assert [each for each in behind if each.what == "commit" and each.position] == []
            assert members.committed() in ([None], [0])
    assert set(work.ended) == {(0, position) for position in range(len(work.ended))}


@pytest.mark.parametrize("protocol", ["eager", pytest.param("cooperative", marks=pytest.mark.slow)])
async def test_messages_of_a_recreated_topic_are_never_committed(
    protocol: str, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "ASK_EVERY", 3_600.0)
    events = topic(1)
    produce(events, 100)
    story = Story()
    work = Work(story)
    async with group(events, protocol, work) as members:
        one = members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: members.committed() == [100])
        # The client fetches after the new topic has grown past its position, and gets no sign of the change.
        one.consumer.pause()
        await until(lambda: one.client.paused == {0})
        await made_anew(events, 150)
        one.consumer.resume()
        await one.ended.wait()
        assert f"topic '{events.name}' was deleted and recreated" in str(one.failure)
        assert max(each.position for each in story.of("commit")) == 100
        assert {each.position for each in story.of("end")} > set(range(100, 150))
        assert members.committed() == [None]


def test_questions_that_no_broker_answers_are_an_outage() -> None:
    bench = Bench()
    admin, asked = bench.admin, bench.topics

    def polled(seconds: float) -> Outage | None:
        bench.now += seconds
        asked.poll()
        return asked.contact.outage()

    asked.poll()
    assert polled(0.0) is None
    # An error of a broker is an answer.
    admin.topics = {"t": KafkaError.TOPIC_AUTHORIZATION_FAILED}
    assert polled(1.0) is None and polled(1.0) is None
    admin.topics = {"t": KafkaError._TIMED_OUT}
    # The first of these polls takes the last answer of the broker.
    assert polled(1.0) is None and polled(1.0) is None
    assert polled(1.0) == (2.0, "Local: Timed out")
    # A question without an error is given up after 10 s.
    admin.topics = {"t": "id-A"}
    polled(1.0)
    assert polled(1.0) is None
    admin.topics = {"t": None}
    polled(1.0)
    assert polled(10.0) is None
    outage = polled(10.0)
    assert outage is not None and outage.error == "neither an answer nor an error for 10 s"
