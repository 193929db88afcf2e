"""The answers of a broker about topics: the answers that count, their effects, and the time of the next question."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

import lanes
from lanes_kafka.client import topics as topics_module
from lanes_kafka.client.topics import ASK_EVERY, Topic, Topics
from tests.kafka.fakes import FakeAdmin

DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED
MISSING = KafkaError.UNKNOWN_TOPIC_OR_PART


class Time:
    """Manual time: a sleep passes at once, and a wait for an answer ends at its deadline."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Stand:
    """Topics of a broker.

    Attributes:
        waits: Timeouts of the waits for an answer.
        cause: Called before each wait.
        woken: Number of wake-ups.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **topics: str | int | None) -> None:
        self.time = Time()
        monkeypatch.setattr(topics_module, "time", self.time)
        monkeypatch.setattr(topics_module, "wait_for", self._wait_for)
        self.admin = FakeAdmin(**topics)
        self.waits: list[float] = []
        self.woken = 0
        self.polled: list[float] = []
        monkeypatch.setattr(self.admin, "poll", self.polled.append)
        admin: Any = self.admin
        self.topics = Topics(list(topics), admin, self.time.monotonic, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def _wait_for(self, admin: Any, futures: Any, deadline: float, give_up: Any) -> bool:
        assert admin is self.admin
        self.waits.append(round(deadline - self.time.now, 6))
        if all(each.done() for each in futures):
            return True
        if not give_up():
            self.time.now = max(self.time.now, deadline)
        return False

    def pass_time(self, seconds: float) -> bool:
        self.time.now += seconds
        return self.topics.poll()


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand(monkeypatch, t="id-A", u="id-U")
    assert made.topics.wait(2.0)
    made.admin.asked = made.woken = 0
    return made


# --- questions


def test_a_question_is_asked_every_second(stand: Stand) -> None:
    assert not stand.pass_time(0.5) and not stand.pass_time(ASK_EVERY - 0.75)
    assert stand.admin.asked == 0
    assert not stand.pass_time(0.25) and stand.admin.asked == 1, "the answer is taken by the next poll"
    assert stand.pass_time(0.0) and stand.admin.asked == 1
    assert stand.polled[-1] == 0, "log lines wait in the client until it is polled"


def test_a_demand_for_ids_asks_now_or_right_after_the_open_question(stand: Stand) -> None:
    stand.admin.topics = {"t": None, "u": None}
    assert stand.topics.ask() == 2 and stand.admin.asked == 1
    assert stand.topics.ask() == stand.topics.ask() == 3 and stand.admin.asked == 1
    stand.admin.answer("id-A")
    assert stand.woken == 1, "the thread learns of a whole answer, and not of each topic"
    assert stand.topics.poll() and stand.topics.answered == 2 and stand.admin.asked == 2
    stand.admin.answer("id-A")
    assert stand.topics.poll() and stand.topics.answered == 3
    assert not stand.topics.poll() and stand.admin.asked == 2, "nobody waits for a fourth question"


def test_a_failed_question_is_repeated_at_its_time_although_it_is_wanted(stand: Stand) -> None:
    stand.admin.topics = {"t": KafkaError._TIMED_OUT, "u": "id-U"}
    assert stand.topics.ask() == 2
    stand.topics.ask()
    assert not stand.topics.poll() and stand.topics.answered == 1
    assert stand.admin.asked == 1
    stand.pass_time(ASK_EVERY)
    assert stand.admin.asked == 2


def test_a_wait_takes_an_answer_to_a_question_that_is_newer_than_the_wait(stand: Stand) -> None:
    stand.topics.ask()
    assert stand.topics.wait(2.0)
    # The open question may be older; its answer is taken, and a new one is asked.
    assert stand.admin.asked == 2 and stand.topics.answered == 3 and stand.waits[1:] == [2.0, 2.0]


def test_a_wait_ends_at_its_deadline_and_keeps_the_question_open(stand: Stand) -> None:
    stand.admin.topics = {"t": None, "u": None}
    assert not stand.topics.wait(0.5) and stand.waits[-1] == 0.5
    stand.admin.answer("id-B")
    assert stand.topics.poll() and stand.topics.id_of("t") == "id-B"


def test_a_wait_for_a_failed_answer_is_no_success(stand: Stand) -> None:
    stand.admin.topics = {"t": DENIED, "u": "id-U"}
    assert stand.topics.wait(2.0), "a permission that was taken away hides later changes only"
    stand.admin.topics = {"t": KafkaError.LEADER_NOT_AVAILABLE, "u": "id-U"}
    assert not stand.topics.wait(2.0) and stand.topics.id_of("t") == "id-A"


def test_after_a_close_nothing_is_asked(stand: Stand) -> None:
    stand.topics.ask()
    stand.topics.close()
    assert stand.topics.admin is None and not stand.pass_time(60.0) and stand.admin.asked == 1
    assert not stand.topics.wait(1.0)
    stand.topics.close()


# --- answers


def test_an_answer_has_the_ids_and_the_numbers_of_partitions(stand: Stand) -> None:
    assert stand.topics.known == {"t": Topic("id-A", 2), "u": Topic("id-U", 2)}
    assert (stand.topics.id_of("t"), stand.topics.id_of("nowhere")) == ("id-A", "")


@pytest.mark.parametrize("zero", ["", "AAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAA==", "0000-00"])
def test_a_broker_without_topic_ids_answers_with_none(zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=zero)
    assert stand.topics.wait(1.0) and stand.topics.known == {"t": Topic("", 2)}


def test_a_missing_topic_counts_as_deleted_after_half_a_second(stand: Stand) -> None:
    stand.admin.topics = {"t": MISSING, "u": "id-V"}
    assert not stand.topics.wait(1.0) and stand.topics.id_of("u") == "id-U", "an answer counts as a whole"
    stand.time.now += 0.49
    assert not stand.topics.wait(1.0) and stand.topics.change("t", "id-A") is None
    stand.time.now += 0.01
    assert stand.topics.wait(1.0) and stand.topics.change("t", "id-A") == "deleted"
    assert stand.topics.known == {"u": Topic("id-V", 2)}


@pytest.mark.parametrize("between", ["id-A", KafkaError.LEADER_NOT_AVAILABLE])
def test_a_topic_that_reappears_restarts_the_wait_before_it_counts_as_deleted(between: str | int, stand: Stand) -> None:
    for answer in (MISSING, between, MISSING):
        stand.admin.topics = {"t": answer, "u": "id-U"}
        stand.topics.wait(1.0)
        stand.time.now += 0.4
    stand.topics.wait(1.0)
    assert stand.topics.change("t", "id-A") is None


def test_a_topic_that_was_never_known_is_missing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=MISSING, u="id-U")
    assert stand.topics.wait(1.0) and stand.topics.known == {"u": Topic("id-U", 2)}


def test_a_missing_permission_fails_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=DENIED, u="id-U")
    assert not stand.topics.wait(1.0) and stand.topics.known == {} and stand.topics.answered == 0


def test_a_permission_that_was_taken_away_keeps_the_known_topic(stand: Stand) -> None:
    stand.admin.topics = {"t": DENIED, "u": "id-V"}
    assert stand.topics.wait(1.0)
    assert stand.topics.known == {"t": Topic("id-A", 2), "u": Topic("id-V", 2)}


def test_a_new_id_is_a_recreated_topic(stand: Stand) -> None:
    assert stand.topics.change("t", "id-A") is None and stand.topics.change("t", "") is None
    assert stand.topics.change("t", "id-0") == "deleted and recreated (its id was id-0, and is id-A now)"
    stand.admin.topics = {"t": "", "u": "id-U"}
    stand.topics.wait(1.0)
    assert stand.topics.change("t", "id-0") is None, "an older broker tells no id"


# --- outages


def test_a_broker_that_answers_is_no_outage_and_silence_is_one(stand: Stand) -> None:
    stand.admin.topics = {"t": "id-A", "u": KafkaError._TRANSPORT}
    for _ in range(3):
        stand.time.now += 1.0
        stand.topics.wait(1.0)
    outage = stand.topics.contact.outage()
    assert outage is not None and outage.seconds == 3.0 and "transport" in outage.error.lower()
    stand.admin.topics = {"t": DENIED, "u": MISSING}
    stand.topics.wait(1.0)
    assert stand.topics.contact.outage() is None, "an error of a broker is an answer"


def test_a_question_without_an_end_is_given_up_after_ten_seconds(stand: Stand) -> None:
    stand.admin.topics = {"t": None, "u": None}
    stand.topics.ask()
    stand.pass_time(9.9)
    assert stand.admin.asked == 1
    stand.pass_time(0.1)
    assert stand.admin.asked == 2
    stand.pass_time(10.0)
    outage = stand.topics.contact.outage()
    assert outage is not None and outage.error == "neither an answer nor an error for 10 s"


def test_an_answer_that_arrives_at_the_deadline_counts(stand: Stand) -> None:
    stand.admin.topics = {"t": None, "u": None}
    stand.topics.ask()
    stand.admin.answer("id-B")
    stand.time.now += 10.0
    assert stand.topics.poll() and stand.topics.id_of("t") == "id-B"


# --- the start


def test_a_topic_appears_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=MISSING, u="id-U")
    stand.topics.wait(1.0)
    stand.admin.next = [{"t": MISSING, "u": "id-U"}, {"t": "", "u": "id-U"}, {"t": "id-A", "u": "id-U"}]
    assert stand.topics.appears("t", 2.0) and stand.topics.id_of("t") == "id-A"
    assert stand.time.slept == [0.1] * 3 and stand.waits[1:] == [2.0] * 3


def test_the_wait_for_a_topic_or_its_id_ends_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=MISSING, u="id-U", v="")
    stand.topics.wait(1.0)
    assert not stand.topics.appears("t", 2.0) and len(stand.time.slept) in (10, 11)
    assert stand.topics.appears("v", 2.0), "a topic without an id is known"
    assert len(stand.time.slept) > 15


def test_a_known_topic_needs_no_wait(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stand.topics.appears("t", 2.0) and stand.time.slept == []
    without_ids = Stand(monkeypatch, t="", u="")
    without_ids.topics.wait(1.0)
    assert without_ids.topics.appears("t", 2.0) and without_ids.time.slept == []


def check(stand: Stand, reported: Any = ()) -> None:
    stand.topics.check(3.0, {"bootstrap.servers": "b:1"}, "kafka g/t", reported)


def test_the_check_repeats_its_question_until_a_broker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t="id-A")
    down: dict[str, str | int | None] = {"t": KafkaError._TRANSPORT}
    stand.admin.next = [down, down, {"t": "id-A"}]
    check(stand)
    assert stand.topics.id_of("t") == "id-A" and stand.time.slept == [0.1, 0.1]
    assert stand.waits == [3.0, 2.9, 2.8], "the time of all answers together"


def test_the_check_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, t=KafkaError._TRANSPORT)
    with pytest.raises(lanes.SourceError, match=r"no Kafka broker answers at b:1 within 3 s \(.*transport") as failed:
        check(stand)
    assert failed.value.retryable and stand.time.now <= 103.0 and len(stand.time.slept) >= 28
    silent = Stand(monkeypatch, t=None)
    with pytest.raises(lanes.SourceError, match=r"within 3 s \(no answer in time\)"):
        check(silent)


def test_an_error_of_the_broker_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, u="id-U", t=DENIED)
    with pytest.raises(lanes.SourceError, match="this user may not describe topic 't'"):
        check(stand)
    assert stand.time.slept == []


def test_a_refused_login_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = [KafkaError(KafkaError._TRANSPORT), KafkaError(KafkaError._AUTHENTICATION, "wrong password")]
    stand = Stand(monkeypatch, t=None)
    with pytest.raises(lanes.SourceError, match=r"login refused at b:1 .*wrong password"):
        check(stand, refused)
    assert stand.time.now == 100.0, "the wait ends at once"


def test_a_missing_topic_is_named_with_a_similar_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, u="id-U", orders=MISSING)
    asked: list[float] = []

    def list_topics(timeout: float) -> Any:
        asked.append(timeout)
        return SimpleNamespace(topics={"order": None, "u": None})

    monkeypatch.setattr(stand.admin, "list_topics", list_topics, raising=False)
    with pytest.raises(lanes.ConfigError) as failed:
        check(stand)
    assert asked == [5.0]
    assert str(failed.value).startswith(
        "kafka g/t: topic 'orders' does not exist, or this client may not see it; create"
    )
    assert "'order'" in str(failed.value)


def test_a_broker_that_refuses_the_question_is_an_error_of_the_caller(stand: Stand) -> None:
    stand.admin.broken = True
    with pytest.raises(KafkaException):
        stand.topics.ask()
