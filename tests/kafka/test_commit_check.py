"""A commit has one request, one answer, a deadline and its own errors; with a fake client and a fake broker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import lanes
from lanes.core.offset_map import LIMIT, encode
from lanes.core.types import Partition, PartitionId, Settlement
from lanes_kafka.client import commits
from lanes_kafka.client.commits import COMMIT_TIMEOUT, Commit, Commits, TopicIdCheck
from lanes_kafka.client.records import READER
from tests.kafka.fakes import FakeAnswer

Content = tuple[int, int, str | None]


class Client:
    """A client of a broker that stores all commits except the refused commits.

    Attributes:
        requests: The requests: whether each is asynchronous, and its contents.
        stored: The stored positions with their metadata.
        asked: The questions for stored positions, with their timeouts.
        raises: Error of the next request.
        refuses: Whether the broker stores nothing.
        answers: The result of a synchronous commit.
        partial: Error of the question for one stored position.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[bool, list[Content]]] = []
        self.stored: dict[int, tuple[int, str | None]] = {}
        self.asked: list[tuple[list[int], float]] = []
        self.raises: Exception | None = None
        self.refuses = False
        self.answers: list[Any] | None = []
        self.partial: KafkaError | None = None

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Any:
        if self.raises is not None:
            raise self.raises
        self.requests.append((asynchronous, [(each.partition, each.offset, each.metadata) for each in offsets]))
        if not self.refuses:
            self.stored |= {each.partition: (each.offset, each.metadata) for each in offsets}
        return None if asynchronous else self.answers

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> list[Any]:
        self.asked.append(([each.partition for each in places], timeout))
        found = []
        for each in places:
            offset, metadata = self.stored.get(each.partition, (-1001, None))
            found.append(
                SimpleNamespace(
                    topic=each.topic, partition=each.partition, offset=offset, metadata=metadata, error=self.partial
                )
            )
        return found


class Bench:
    """Commits of three partitions, and the check of their topic ids.

    Attributes:
        owned: Partitions that may be committed.
        lost: The reasons of reported losses.
        answered: Number of the newest answered question for topic ids.
        begun: Number of the newest asked question.
        waits: Whether a wait for topic ids gets its answer, and the times that were allowed.
        checks: Number of checks of the topics.
        contacts: Number of reports that a broker has answered.
    """

    def __init__(self, incarnation: str = "id-A", limit: int = 100) -> None:
        self.now = 100.0
        self.client: Any = Client()
        self.partitions = [Partition(PartitionId("t", n), READER, incarnation, floor=0) for n in range(3)]
        self.owned = set(self.partitions)
        self.lost: list[str] = []
        self.released: list[Partition] = []
        self.answered = self.begun = 7
        self.will_answer = True
        self.waits: list[float] = []
        self.checks = self.contacts = 0
        self.down = False
        topics: Any = self
        group: Any = SimpleNamespace(owns=self.owns, release=self.released.append, check_topics=self._check_topics)
        errors: Any = SimpleNamespace(answered=self._contact, settings={}, down=False)
        self.errors = errors
        self.commits = Commits(self.owns, self.lost.append, lambda: self.now, "kafka g", {}, limit)
        self.check = TopicIdCheck(topics, group, self.commits, errors, lambda: self.now, "kafka g")

    def owns(self, partition: Partition) -> bool:
        return partition in self.owned

    def _check_topics(self) -> None:
        self.checks += 1

    def _contact(self) -> None:
        self.contacts += 1

    # --- the topics
    def ask(self) -> int:
        self.begun += 1
        return self.begun

    def poll(self) -> bool:
        return self.will_answer

    def wait(self, timeout: float) -> bool:
        self.waits.append(timeout)
        if self.will_answer:
            self.answered = self.begun = self.begun + 1
        return self.will_answer

    # --- the calls of a test
    def made(
        self, *positions: tuple[int, int], completed: Sequence[tuple[int, int]] = (), releases: int | None = None
    ) -> tuple[Commit, FakeAnswer]:
        answer = FakeAnswer()
        settlements = [Settlement(self.partitions[number], [], floor, list(completed)) for number, floor in positions]
        return Commit(settlements, answer, None if releases is None else self.partitions[releases]), answer

    def sent(self, *positions: tuple[int, int], timeout: float | None = None, **made: Any) -> FakeAnswer:
        commit, answer = self.made(*positions, **made)
        self.commits.send(self.client, commit, timeout=timeout)
        return answer

    def answer(self, *positions: tuple[int, int], error: int | None = None) -> None:
        found = [TopicPartition("t", *position) for position in positions]
        self.commits.on_commit(None if error is None else KafkaError(error), found)


def said(answer: FakeAnswer) -> str:
    (error,) = answer.given
    assert isinstance(error, lanes.SourceError)
    return str(error)


# --- requests and answers


def test_a_commit_is_one_request_that_does_not_block() -> None:
    bench = Bench()
    answer = bench.sent((0, 5), (1, 6))
    assert bench.client.requests == [(True, [(0, 5, None), (1, 6, None)])]
    assert answer.given == [] and set(bench.commits.unanswered) == {each.id for each in bench.partitions[:2]}
    bench.answer((0, 5), (1, 6))
    assert answer.given == [None] and bench.commits.unanswered == {}


def test_an_answer_with_other_content_belongs_to_another_commit() -> None:
    bench = Bench()
    answer = bench.sent((0, 5))
    bench.answer((0, 4))
    bench.answer((1, 5))
    assert answer.given == []
    bench.commits.on_commit(None, [TopicPartition("other", 0, 5)])
    assert answer.given == []
    bench.commits.on_commit(None, [TopicPartition("t", 0, 5, "runs")])
    assert answer.given == []
    bench.answer((0, 5))
    assert answer.given == [None]


def test_one_failed_partition_fails_the_commit() -> None:
    bench = Bench()
    answer = bench.sent((0, 5), (1, 6))
    failed: Any = SimpleNamespace(
        topic="t", partition=1, offset=6, metadata=None, error=KafkaError(KafkaError.REBALANCE_IN_PROGRESS)
    )
    bench.commits.on_commit(None, [TopicPartition("t", 0, 5), failed])
    assert said(answer).startswith("kafka g: t/0, t/1: not committed: ") and "REBALANCE_IN_PROGRESS" in said(answer)
    assert bench.lost == []


def test_a_fatal_error_of_a_commit_is_a_loss_that_may_be_retried() -> None:
    bench = Bench()
    answer = bench.sent((0, 5))
    error = KafkaError(KafkaError.POLICY_VIOLATION, "no", True)
    bench.commits.on_commit(error, [TopicPartition("t", 0, 5)])
    assert bench.lost == ["a commit was refused: POLICY_VIOLATION"]
    (failure,) = answer.given
    assert isinstance(failure, lanes.SourceError) and failure.retryable


def test_a_commit_of_a_partition_that_was_given_up_is_not_sent() -> None:
    bench = Bench()
    bench.owned.discard(bench.partitions[1])
    answer = bench.sent((0, 5), (1, 6))
    assert said(answer) == "kafka g: not committed: this member no longer owns a partition of the commit"
    assert bench.client.requests == [] and bench.commits.unanswered == {}
    (failure,) = answer.given
    assert isinstance(failure, lanes.SourceError) and failure.retryable


def test_a_commit_that_was_given_up_is_not_sent() -> None:
    bench = Bench()
    commit, answer = bench.made((0, 5))
    answer.given_up = True
    bench.commits.send(bench.client, commit)
    assert bench.client.requests == [] and answer.given == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KafkaException(KafkaError(KafkaError._STATE)), "kafka g: t/0: not committed: "),
        (RuntimeError("Consumer closed"), "kafka g: not committed: "),
    ],
)
def test_a_client_that_refuses_a_commit_fails_it(error: Exception, text: str) -> None:
    bench = Bench()
    bench.client.raises = error
    answer = bench.sent((0, 5))
    assert said(answer).startswith(text) and bench.commits.unanswered == {}


def test_an_unanswered_commit_fails_at_its_deadline() -> None:
    bench = Bench()
    first = bench.sent((0, 5))
    bench.now += 1.0
    second = bench.sent((1, 6))
    bench.commits.expire(100.0 + COMMIT_TIMEOUT - 0.1)
    assert first.given == second.given == []
    bench.commits.expire(100.0 + COMMIT_TIMEOUT)
    assert said(first) == "kafka g: the broker did not answer a commit within 10 s; check that a broker runs"
    assert second.given == [] and set(bench.commits.unanswered) == {bench.partitions[1].id}


def test_the_wait_for_topic_ids_counts_towards_the_deadline() -> None:
    bench = Bench()
    commit, _ = bench.made((0, 5))
    bench.check.commit(bench.client, commit, until=None)
    assert commit.deadline == 110.0
    bench.now += 4.0
    bench.answered = bench.begun
    bench.check.advance(bench.client)
    assert bench.client.requests and commit.deadline == 110.0


def test_the_end_of_a_client_fails_its_unanswered_commits() -> None:
    bench = Bench()
    first = bench.sent((0, 5), (1, 6))
    waiting, second = bench.made((2, 7))
    bench.check.commit(bench.client, waiting, until=None)
    bench.check.abandon("the client was closed")
    assert said(first) == "kafka g: a commit has no answer: the client was closed"
    assert said(second) == "kafka g: a commit was not sent: the client was closed"
    assert not bench.check and bench.commits.unanswered == {} and first.given and len(first.given) == 1


# --- commits in a callback, in which no answer arrives


def test_a_commit_in_a_callback_asks_whether_it_is_stored() -> None:
    bench = Bench()
    answer = bench.sent((0, 5), (1, 6), timeout=3.0)
    assert answer.given == [None] and bench.commits.unanswered == {}
    assert bench.client.asked == [([0, 1], 3.0)]
    assert [asynchronous for asynchronous, _ in bench.client.requests] == [True]


@pytest.mark.parametrize("other", [(4, None), (5, "runs")])
def test_a_commit_that_is_not_stored_is_repeated_to_learn_the_error(other: tuple[int, str | None]) -> None:
    bench = Bench()
    bench.client.refuses = True
    bench.client.stored = {0: other}
    bench.client.answers = [SimpleNamespace(error=KafkaError(KafkaError.UNKNOWN_MEMBER_ID))]
    answer = bench.sent((0, 5), timeout=3.0)
    assert [asynchronous for asynchronous, _ in bench.client.requests] == [True, False]
    assert "UNKNOWN_MEMBER_ID" in said(answer) and bench.lost == ["a commit was refused: UNKNOWN_MEMBER_ID"]


@pytest.mark.parametrize("answers", [[], None])
def test_a_repeated_commit_without_an_error_has_succeeded(answers: list[Any] | None) -> None:
    bench = Bench()
    bench.client.refuses = True
    bench.client.answers = answers
    assert bench.sent((0, 5), timeout=3.0).given == [None]


def test_an_error_of_the_question_does_not_count_as_stored() -> None:
    bench = Bench()
    bench.client.partial = KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE)
    bench.client.answers = [SimpleNamespace(error=KafkaError(KafkaError.REBALANCE_IN_PROGRESS))]
    assert "REBALANCE_IN_PROGRESS" in said(bench.sent((0, 5), timeout=3.0))


def test_a_callback_waits_five_seconds_for_topic_ids_and_sends_with_the_rest() -> None:
    bench = Bench()
    commit, answer = bench.made((0, 5), releases=0)
    bench.check.commit(bench.client, commit, until=1e9)
    assert bench.waits == [5.0] and answer.given == [None] and bench.client.asked == [([0], 5.0)]
    assert (bench.checks, bench.contacts, bench.released) == (1, 1, [bench.partitions[0]])


def test_a_callback_waits_a_second_while_no_broker_is_reached() -> None:
    bench = Bench()
    bench.errors.down = True
    bench.will_answer = False
    commit, answer = bench.made((0, 5), releases=0)
    bench.check.commit(bench.client, commit, until=1e9)
    assert bench.waits == [1.0]
    assert said(answer) == "kafka g: not committed: the client reaches no broker; check that a broker runs"
    assert bench.client.requests == [] and bench.released == [bench.partitions[0]] and bench.contacts == 0


def test_a_commit_at_the_end_of_its_callback_has_no_negative_timeout() -> None:
    bench = Bench()
    commit, answer = bench.made((0, 5))
    bench.check.commit(bench.client, commit, until=99.0)
    assert bench.waits == [-1.0] and bench.client.asked == [([0], 0.0)] and answer.given == [None]


def test_a_topic_that_was_recreated_is_noticed_before_the_commit_of_a_callback() -> None:
    bench = Bench()

    def gone() -> None:
        bench.owned.clear()

    bench.check.group.check_topics = gone  # type: ignore[method-assign]
    commit, answer = bench.made((0, 5))
    bench.check.commit(bench.client, commit, until=1e9)
    assert "no longer owns" in said(answer) and bench.client.requests == []


def test_topics_are_checked_once_for_each_answer() -> None:
    bench = Bench()
    bench.check.advance(bench.client)
    assert (bench.checks, bench.contacts) == (0, 1)
    bench.answered = 8
    bench.check.advance(bench.client)
    bench.check.advance(bench.client)
    assert bench.checks == 1
    bench.will_answer = False
    bench.check.advance(bench.client)
    assert bench.contacts == 3


def test_the_commits_of_a_callback_are_sent_again_within_it() -> None:
    bench = Bench()
    first, answered = bench.made((0, 5))
    bench.commits.send(bench.client, first)
    second, also = bench.made((1, 6))
    bench.check.commit(bench.client, second, until=None)
    bench.check.resend(bench.client, 101.0)
    assert answered.given == also.given == [None] and bench.waits == [1.0, 1.0]
    assert not bench.check and bench.commits.unanswered == {}


def test_a_commit_that_waits_too_long_for_topic_ids_fails_alone() -> None:
    bench = Bench()
    old, failed = bench.made((0, 5), releases=0)
    bench.check.commit(bench.client, old, until=None)
    bench.now += 5.0
    new, waits = bench.made((1, 6))
    bench.check.commit(bench.client, new, until=None)
    bench.now += 5.0
    bench.check.advance(bench.client)
    assert "did not confirm the topic ids in time" in said(failed) and bench.released == [bench.partitions[0]]
    assert waits.given == [] and bench.check and bench.client.requests == []


def test_a_partition_is_released_after_its_last_commit() -> None:
    bench = Bench("")
    commit, _ = bench.made((0, 5), releases=0)
    bench.check.commit(bench.client, commit, until=None)
    assert bench.client.requests and bench.released == [bench.partitions[0]]
    commit, _ = bench.made((1, 5))
    bench.check.commit(bench.client, commit, until=None)
    assert bench.released == [bench.partitions[0]]


# --- completed messages in the metadata


def test_metadata_carry_the_completed_messages() -> None:
    bench = Bench()
    bench.sent((0, 5), completed=[(7, 9)])
    assert bench.client.requests == [(True, [(0, 5, encode(5, [(7, 9)], 100))])]
    bench.sent((1, 5))
    assert bench.client.requests[1:] == [(True, [(1, 5, None)])]
    bench.commits.limit = 0
    bench.sent((2, 5), completed=[(7, 9)])
    assert bench.client.requests[2:] == [(True, [(2, 5, None)])]


def test_runs_that_do_not_fit_are_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    many = [(5 + 1_000_003 * n, 6 + 1_000_003 * n) for n in range(1, 200)]
    bench = Bench()
    bench.sent((0, 5), completed=many)
    bench.sent((1, 5), completed=many)
    ((_, [(_, _, text)]), _) = bench.client.requests
    assert text == encode(5, many, 100) and len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "kafka g: offset.metadata.max.bytes of the broker is too small for all messages"
    )


def test_a_commit_with_refused_metadata_halves_the_limit_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(limit=100)
    answer = bench.sent((0, 5))
    bench.answer((0, 5), error=KafkaError.OFFSET_METADATA_TOO_LARGE)
    assert [each.split(" of the broker")[0] for each in caplog.messages] == ["kafka g: offset.metadata.max.bytes"]
    assert bench.commits.limit == 50 and "OFFSET_METADATA_TOO_LARGE" in said(answer) and bench.lost == []
    bench.sent((0, 5))
    bench.answer((0, 5), error=KafkaError.REBALANCE_IN_PROGRESS)
    assert bench.commits.limit == 50


def test_an_unknown_limit_of_metadata_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(admin: Any) -> int:
        raise lanes.SourceError("no answer")

    monkeypatch.setattr(commits, "metadata_limit", fail)
    caplog.set_level(logging.INFO, "lanes.kafka")
    bench = Bench()
    assert commits.metadata_room(bench.client, "kafka g") == LIMIT
    assert caplog.messages == [
        f"kafka g: the broker's limit for commit metadata is unknown (no answer); the first commit tries {LIMIT} units"
    ]
