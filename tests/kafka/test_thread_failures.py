"""Errors that a client reports, its rebuild after a permanent failure, and its housekeeping, with a fake client."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

import lanes
from lanes.source import Assigned, Lost, Progressed
from lanes_kafka.client import thread
from lanes_kafka.client.commits import Commit
from lanes_kafka.client.mailbox import Close, Confirm
from tests.kafka.fakes import FakeAnswer
from tests.kafka.test_thread_turns import Admin, Stand, committing


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(monkeypatch, {}).open().reading()


# --- errors among the messages


def test_a_permanent_error_ends_the_source(reading: Stand) -> None:
    reading.fails(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    (failure,) = reading.failures
    assert failure.startswith("kafka g/t: TOPIC_AUTHORIZATION_FAILED: ") and "allow this user" in failure


def test_a_passing_error_is_logged(reading: Stand, caplog: pytest.LogCaptureFixture) -> None:
    reading.fails(KafkaError._TRANSPORT)
    reading.fails(KafkaError._PARTITION_EOF)
    assert reading.failures == [] and len(caplog.messages) == 1 and "_TRANSPORT" in caplog.messages[0]


def test_a_missed_poll_is_an_error_with_a_remedy(reading: Stand, caplog: pytest.LogCaptureFixture) -> None:
    reading.fails(KafkaError._MAX_POLL_EXCEEDED)
    (line,) = caplog.records
    assert line.levelno == logging.ERROR and reading.failures == []
    assert line.getMessage().startswith("kafka g/t: the client was not polled for max.poll.interval.ms, so the group")


def test_an_unknown_topic_is_asked_for(reading: Stand, caplog: pytest.LogCaptureFixture) -> None:
    asked = Admin.made[0].asked
    reading.fails(KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert Admin.made[0].asked > asked and reading.failures == [] and caplog.messages == []


def test_a_position_out_of_range_moves_into_the_log(reading: Stand) -> None:
    reading.fails(KafkaError._AUTO_OFFSET_RESET, offset=200)
    moved = [event for event, _ in reading.told]
    assert [type(each) for each in moved] == [Lost, Assigned] and reading.failures == []


def test_a_recreated_topic_is_noticed_before_a_move(reading: Stand) -> None:
    Admin.made[0].topics = {"t": "id-B"}
    reading.fails(KafkaError._AUTO_OFFSET_RESET, offset=200)
    (failure,) = reading.failures
    assert "deleted and recreated" in failure
    assert [type(event) for event, _ in reading.told] == [Lost]


# --- permanent failures of the client


def test_a_client_that_failed_for_good_ends_the_source_without_rebuilds(reading: Stand) -> None:
    partition = reading.partition
    reading.fails(KafkaError._FATAL)
    (failure,) = reading.failures
    assert failure.startswith("kafka g/t: the client has failed permanently: _FATAL")
    assert [event for event, _ in reading.told] == [Lost(partition, "the client has failed permanently")]


def test_a_fatal_error_of_any_code_is_one(reading: Stand) -> None:
    reading.fails(KafkaError.UNKNOWN_MEMBER_ID, "gone", fatal=True)
    assert len(reading.failures) == 1 and "failed permanently" in reading.failures[0]


def test_a_static_member_names_its_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {"group.instance.id": "one"}).open()
    stand.demand(1)
    (partition,) = stand.assigned(0)
    stand.fails(KafkaError._FATAL)
    why = "only one member may have group.instance.id='one'; give each member its own"
    assert stand.failures[0].startswith(f"kafka g/t: {why}; the client has failed permanently: ")
    assert [event for event, _ in stand.told] == [Lost(partition, why)]


def test_a_failed_client_is_rebuilt_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(monkeypatch, {}, rebuilds=1).open()
    stand.demand(1)
    stand.assigned(0)
    stand.thread._commits.limit = 77
    answer = FakeAnswer()
    first = stand.client
    stand.fails(KafkaError._FATAL)
    stand.fails(KafkaError._FATAL)
    assert stand.failures == [], "a failure that is reported again uses up no further rebuild"
    assert [each for each in caplog.messages if each.endswith("the client is rebuilt in 1 s")]
    assert stand.thread._rebuild_in == 1.0
    stand.thread.send(Commit([], answer))
    begun = stand.now

    def get(timeout: float) -> Any:
        stand.now += timeout
        raise Empty

    monkeypatch.setattr(stand.queue, "get", get)
    first.mine = []
    stand.thread._rebuild(1.0)
    assert first.closed == 1 and len(stand.clients) == 2 and stand.now == begun + 1.0
    assert stand.thread.polled == begun + 0.5
    assert [stand.thread._rebuild_in] == [None]
    assert stand.thread.limit == 77 and stand.thread._commits.limit == 77, "a learned limit survives"
    assert stand.client.callbacks["on_assign"] is not None and stand.thread._group.owned == {}
    stand.fails(KafkaError._FATAL)
    assert len(stand.failures) == 1


def test_a_stop_ends_the_pause_before_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {}, rebuilds=5).open()
    stand.thread.send(Close())
    stand.thread._rebuild(60.0)
    assert len(stand.clients) == 1 and stand.thread._group.closing


# --- housekeeping


def test_gaps_are_reported_twice_a_second(reading: Stand) -> None:
    partition = reading.partition
    reading.client.at[0] = 8
    reading.turn()
    assert reading.told == []
    reading.now += 0.5
    reading.turn()
    assert reading.told == [(Progressed(partition, 8), 1)]
    assert reading.thread.end_offsets.of(partition) == 100


def test_a_loop_that_ended_closes_the_client(reading: Stand) -> None:
    reading.alive = False
    reading.now += 0.5
    reading.turn()
    assert reading.thread._group.closing


@pytest.mark.parametrize("why", ["down", "failed", ""])
def test_nothing_is_asked_without_a_broker_or_after_a_failure(
    why: str, reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(reading.thread.end_offsets, "refresh", lambda client, owned, ask: asked.append(ask))
    monkeypatch.setattr(reading.thread.retention, "refresh", lambda owned, ask: asked.append(ask))
    if why == "down":
        reading.thread.errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    elif why:
        reading.thread._fail(lanes.SourceError("failed"))
    reading.now += 0.5
    reading.turn()
    assert asked == [not why] * 2


def test_a_reclaim_that_fails_ends_the_source(reading: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(client: Any) -> None:
        raise KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))

    monkeypatch.setattr(reading.thread._group, "reclaim", refuse)
    reading.now += 0.5
    reading.turn()
    (failure,) = reading.failures
    assert failure.startswith("kafka g/t: cannot assign partitions again: GROUP_AUTHORIZATION_FAILED")


def test_the_end_of_a_client_answers_its_commands(reading: Stand) -> None:
    commit = committing(reading)
    reading.turn()
    confirmed: Any = FakeAnswer()
    reading.thread.send(Confirm([reading.partition], confirmed))
    reading.turn()
    reading.client.mine = []
    reading.thread._close()
    (error,) = commit.given
    assert str(error) == "kafka g/t: a commit has no answer: the client was closed"
    assert confirmed.given == [()] and reading.client.closed == 1 and reading.thread._group.closing


def test_a_static_member_stays_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {"group.instance.id": "one"}).open()
    stand.thread._close()
    assert ("unsubscribe", []) not in stand.client.calls and stand.client.closed == 1
    stand = Stand(monkeypatch, {}).open()
    stand.thread._close()
    assert stand.client.calls == [("unsubscribe", [])]
    assert stand.client.consumed == [(1, 0.01)], "a queued callback is served first"


def test_a_confirmation_polls_without_a_wait_for_callbacks_before_it_answers(
    reading: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued callback may take the partition away."""
    listed: Future[Any] = Future()
    monkeypatch.setattr(Admin, "describe_consumer_groups", lambda admin, groups, request_timeout: {"g": listed})
    answer: Any = FakeAnswer()
    reading.demand(2, 0)
    reading.thread.send(Confirm([reading.partition], answer))
    reading.turn()
    reading.forget()
    listed.set_result(SimpleNamespace(members=[SimpleNamespace(member_id="me")]))
    reading.turn()
    assert reading.client.consumed == [(1, 0.0)] and answer.given == [[reading.partition]]


def test_housekeeping_keeps_all_parts_of_the_client_up_to_date(reading: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    for name, part, method in (
        ("session", reading.thread._session, "refresh"),
        ("log", reading.thread.client_log, "due"),
        ("keys", reading.thread._keys, "report"),
    ):
        monkeypatch.setattr(part, method, lambda *arguments, name=name: done.append(name))
    reading.now += 0.5
    reading.turn()
    reading.turn()
    assert sorted(done) == ["keys", "log", "session"], "half a second passes between two rounds"


@pytest.mark.parametrize("how", ["hangs", "refuses"])
def test_an_outage_is_a_warning_and_a_line_at_its_end(
    how: str, reading: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    admin: Any = reading.thread._topics.admin
    reading.turn()
    admin.topics = {"t": None if how == "hangs" else KafkaError._TRANSPORT}
    begun = reading.now
    while not caplog.messages and reading.now < begun + 30.0:
        reading.now += 0.5
        reading.turn()
    assert len(caplog.messages) == 1
    for _ in range(200):
        reading.now += 0.5
        reading.turn()
    warning, again = caplog.records
    assert again.levelname == "WARNING" and again.created >= warning.created
    assert ": no broker has answered for " in again.getMessage(), "the line repeats once a minute"
    assert (warning.name, warning.levelname) == ("lanes.kafka", "WARNING")
    why = "neither an answer nor an error for 10 s" if how == "hangs" else "Local: Broker transport failure"
    assert warning.getMessage().startswith("kafka g/t: no broker has answered for ") and why in warning.getMessage()
    admin.topics = {"t": "id-A"}
    while len(caplog.records) == 2 and reading.now < begun + 200.0:
        reading.now += 0.5
        reading.turn()
    end = caplog.records[-1]
    assert end.levelname == "INFO"
    assert end.getMessage() == f"kafka g/t: a broker answers again after {reading.now - begun:.0f} s"


# --- the start and the end


def test_a_close_that_fails_is_logged_and_ends_the_source(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand = Stand(monkeypatch, {})

    def close() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(stand.thread, "_close", close)
    stand.thread.start(stand.opened)
    stand.thread.send(Close())
    stand.run()
    assert (stand.opened.given, stand.ends, stand.failures) == ([None], 1, [])
    assert caplog.messages == ["kafka g/t: cannot close the client (RuntimeError: broken); the source ends anyway"]
    assert stand.thread._topics.admin is None


@pytest.mark.parametrize("error", [TypeError, ValueError])
@pytest.mark.parametrize("own", [True, False])
def test_settings_that_a_client_refuses_are_an_error_of_the_start(
    own: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of a user may raise such an error for another reason, which stays as it is."""
    stand = Stand(monkeypatch, {})

    def refuse(settings: dict[str, Any]) -> Any:
        raise error("expected another type")

    stand.thread.make = refuse
    if own:
        monkeypatch.setattr(thread, "Consumer", refuse)
    with pytest.raises(lanes.LanesError if own else error, match="expected another type") as raised:
        stand.open()
    assert str(raised.value).startswith("kafka g/t") is own
