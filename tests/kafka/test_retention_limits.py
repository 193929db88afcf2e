"""The retention of a message at the edges of its topic's limits: zero, missing and tiny values."""

from __future__ import annotations

import logging

import pytest

from lanes.source import Retention
from lanes_kafka.client.retention import ASK_EVERY
from tests.kafka.test_log_retention import DENIED, SIZED, TIMED, Stand


def test_a_topic_that_keeps_nothing_may_delete_a_message_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {**TIMED, "retention.ms": "0"})
    stand.learn((0, 100))
    found = stand.of(5)
    assert found is not None and (found.left, found.rule) == (0.0, "retention.ms=0")


def test_an_unknown_size_of_segments_adds_nothing_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, {name: value for name, value in SIZED.items() if name != "segment.bytes"})
    stand.has_read(1_000, 92)
    # The log holds more records than its limit in uncompressed bytes.
    stand.learn((0, 400), (0, 1_100))
    found = stand.of(0)
    assert found is not None and found.span == 1_100 / ((1_100 - 400) / 10)


def test_without_a_size_of_segments_a_deletion_shows_the_messages_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand = Stand(monkeypatch, {name: value for name, value in SIZED.items() if name != "segment.bytes"})
    stand.has_read(1_000, 92)
    stand.learn((0, 1_000), (50, 1_050))
    assert stand.of(800) == Retention((1_000 - 249) / 5, 200.0, "retention.bytes=10000")


def test_few_read_messages_are_enough_for_a_message_near_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, SIZED)
    stand.has_read(11, 92)
    stand.learn((0, 200), (0, 400))
    assert stand.of(0) is None and stand.of(379) is not None and stand.of(377) is None


def test_records_without_content_have_the_size_of_their_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, SIZED)
    stand.has_read(1_000, 0)
    stand.learn((0, 20), (0, 40))
    found = stand.of(0)
    assert found is not None and found.span == (10_000 / 8) / 2


def test_a_partition_that_left_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, TIMED)
    stand.learn((7, 100))
    found = stand.of(6)
    assert found is not None and found.left == 0.0
    for _ in range(3):
        stand.refresh(after=ASK_EVERY, start=7, end=100)
    assert stand.of(6) == Retention(50.0, 60.0, "retention.ms=60000"), "the start of the log is asked for again"


def test_a_partition_is_wanted_for_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    stand = Stand(monkeypatch, TIMED)
    stand.of(0)
    stand.refresh(after=5.0)
    assert stand.broker.asked == ["start", "limits"]
    later = Stand(monkeypatch, TIMED)
    later.of(0)
    later.refresh(after=5.1)
    assert later.broker.asked == []


def test_settings_that_may_not_be_read_are_logged_for_developers_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lanes.kafka")
    stand = Stand(monkeypatch, DENIED)
    stand.learn((0, 100))
    (line,) = caplog.records
    assert line.levelno == logging.DEBUG
    assert line.getMessage().startswith("the settings of topic 't' are unknown: ")
    assert "TOPIC_AUTHORIZATION_FAILED" in line.getMessage()
