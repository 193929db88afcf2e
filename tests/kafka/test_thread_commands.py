"""Commands of the event loop, performed in the turns of a client's thread and in callbacks, with a fake client."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka import Message as Raw

import lanes
from lanes.core.types import Partition
from lanes.source import Assigned, Delivered, Lost
from lanes_kafka.client.mailbox import Close, Confirm, Expire, Release
from tests.kafka.fakes import FakeAnswer
from tests.kafka.test_thread_turns import Admin, Stand, committing, raws, runs


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open().reading()


def test_a_commit_is_sent_after_the_topic_ids_and_answered_by_the_callback(reading: Stand) -> None:
    answer = committing(reading)
    reading.turn()
    assert reading.client.commits == [(0, 6, True)] and answer.given == []
    reading.client.settings["on_commit"](None, [TopicPartition("t", 0, 6)])
    assert answer.given == [None]


def test_an_unanswered_commit_shortens_the_waits_and_is_polled_for(reading: Stand) -> None:
    reading.demand(2, messages=1)
    reading.client.answers = [raws(0, 5)]
    reading.turn()
    committing(reading)
    reading.turn()
    reading.forget()
    reading.turn()
    assert reading.queue.waits == [0.005] and reading.client.consumed == [(1, 0.0)]


def test_the_users_commit_callback_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    stand = Stand(monkeypatch, {"on_commit": lambda error, offsets: heard.append((error, offsets))}).open()
    stand.thread.errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    offsets = [TopicPartition("t", 0, 6)]
    stand.client.settings["on_commit"](None, offsets)
    assert heard == [(None, offsets)] and not stand.thread.errors.down, "a broker has answered"


def released(stand: Stand, committed: int | None) -> FakeAnswer:
    answer = FakeAnswer()
    stand.thread.send(Release(stand.partition, answer, committed))
    stand.turn()
    return answer


@pytest.mark.parametrize(("committed", "at"), [(None, 9), (5, 5)])
def test_a_partition_without_a_gap_is_released_at_once(
    committed: int | None, at: int, reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading.client.at[0] = at
    monkeypatch.setattr(reading.thread._intake, "read_past", lambda *arguments: [])
    assert released(reading, committed).given == [None]
    assert not reading.thread._group.owns(reading.partition)
    assert reading.client.commits == []


def test_a_gap_after_the_last_message_is_committed_before_the_release(reading: Stand) -> None:
    partition = reading.partition
    reading.client.at[0] = 9
    answer = released(reading, 5)
    assert reading.client.commits == [(0, 9, True)] and answer.given == []
    reading.client.settings["on_commit"](None, [TopicPartition("t", 0, 9)])
    assert answer.given == [None] and not reading.thread._group.owns(partition)


@pytest.mark.parametrize("why", ["down", "failed"])
def test_no_gap_is_looked_for_without_a_broker(why: str, reading: Stand) -> None:
    if why == "down":
        reading.thread.errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    else:
        reading.thread._fail(lanes.SourceError("failed"))
    reading.client.at[0] = 9
    assert released(reading, 5).given == [None] and reading.client.commits == []


def test_all_releases_share_half_a_second_of_patience(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    stand.demand(1)
    first, second, third = stand.assigned(0, 1, 2)
    patience: list[float] = []

    def read_past(partition: Partition, committed: int, seconds: float) -> list[Delivered]:
        patience.append(seconds)
        stand.now += 0.3
        return []

    monkeypatch.setattr(stand.thread._intake, "read_past", read_past)
    for partition in (first, second, third):
        stand.thread.send(Release(partition, FakeAnswer(), 5))
    stand.turn()
    assert patience == [0.5, pytest.approx(0.2), 0.0]


def test_messages_that_a_release_reads_are_delivered(stand: Stand) -> None:
    stand.demand(1)
    first, _ = stand.assigned(0, 1)
    stand.client.answers = [raws(1, 5)]
    stand.client.at[0] = 5

    def marker() -> list[Raw]:
        stand.client.at[0] = 9
        return []

    stand.client.answers = [raws(1, 5), marker]
    stand.thread.send(Release(first, FakeAnswer(), 5))
    stand.turn()
    assert runs(stand) == [(1, [5], 1)]


def test_a_revoke_performs_commands_within_its_callback(reading: Stand) -> None:
    partition = reading.partition
    answer = FakeAnswer()

    def revoke() -> list[Raw]:
        reading.thread.send(Release(partition, answer, None))
        reading.client.callbacks["on_revoke"](reading.client, [TopicPartition("t", 0)])
        return []

    reading.client.answers = [revoke]
    reading.turn()
    assert answer.given == [None] and partition.id not in reading.thread._group.owned


def test_a_callback_notices_the_end_of_the_loop(reading: Stand) -> None:
    reading.alive = False

    def revoke() -> list[Raw]:
        reading.client.callbacks["on_revoke"](reading.client, [TopicPartition("t", 0)])
        return []

    reading.client.answers = [revoke]
    reading.turn()
    assert reading.thread._group.closing
    assert reading.queue.waits[0] == 0.5, "a callback looks twice a second"


def test_commands_of_the_loop_reach_their_parts(reading: Stand) -> None:
    partition = reading.partition
    answer: Any = FakeAnswer()
    reading.thread.send(Confirm([partition], answer))
    reading.turn()
    assert reading.thread._membership
    reading.thread.send(Expire())
    reading.turn()
    assert [event for event, _ in reading.told] == [
        Lost(partition, "the client was not polled for max.poll.interval.ms")
    ]
    reading.forget()
    reading.thread.send(Close())
    reading.turn()
    assert reading.thread._group.closing and reading.client.consumed == []


def test_an_expired_partition_comes_back(reading: Stand) -> None:
    reading.thread.send(Expire())
    reading.turn()
    reading.forget()
    reading.now += 5.0
    reading.turn()
    assert [type(event) for event, _ in reading.told] == [Assigned] and reading.client.calls[0] == ("seek", [(0, 5)])


def committed_in_a_revoke(reading: Stand, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> FakeAnswer:
    """Commit position 6 before a revoke or within it, release the partition, and return the answer of the commit."""
    answers: list[FakeAnswer] = []
    monkeypatch.setattr(reading.client, "committed", lambda places, timeout: [TopicPartition("t", 0, 6)])
    if before:
        answers.append(committing(reading))
        reading.turn()

    def revoke() -> list[Raw]:
        if not before:
            answers.append(committing(reading))
        reading.thread.send(Release(reading.partition, FakeAnswer(), None))
        reading.client.callbacks["on_revoke"](reading.client, [TopicPartition("t", 0)])
        return []

    reading.client.answers = [revoke]
    reading.demand(2)
    reading.turn()
    return answers[0]


@pytest.mark.parametrize("before", [True, False], ids=["before", "within"])
def test_a_commit_is_answered_within_the_callback_of_a_revoke(
    before: bool, reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of the broker arrives there, so the thread asks for the stored position."""
    assert committed_in_a_revoke(reading, monkeypatch, before=before).given == [None]
    assert reading.thread._group.owned == {}


def test_a_poll_is_short_while_a_commit_waits_for_the_topic_ids(reading: Stand) -> None:
    Admin.made[0].topics = {"t": None}
    committing(reading)
    reading.turn()
    assert reading.client.consumed == [(1, 0.005)]


def test_messages_end_an_outage(reading: Stand) -> None:
    reading.thread.errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    assert reading.thread.errors.down
    reading.client.answers = [raws(0, 5)]
    reading.turn()
    assert [reading.thread.errors.down] == [False]
