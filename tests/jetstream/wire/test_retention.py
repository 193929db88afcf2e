"""The retention of a message is the time until the server deletes it, by the limits of its stream."""

from __future__ import annotations

from typing import Any

import pytest

from lanes.core.types import Message, Partition, PartitionId
from lanes.source import Retention
from lanes_jetstream.wire.messages import READER
from lanes_jetstream.wire.retention import Limits, StreamRetention, written_at
from tests.fakes.grouped import HandClock

NOW = 1_700_000_000.0
PARTITION = Partition(PartitionId("S", 0), READER)


def message(position: int, *, age: float = 10.0) -> Message:
    reply = f"$JS.ACK.S.c.1.{position}.{position}.{int((NOW - age) * 1e9)}.0"
    return Message(PARTITION, position, None, 10, None, reply)


def stream(
    config: dict[str, Any], *states: tuple[float, int, int], stored: int = 100, later: float = 0.0
) -> StreamRetention:
    """The retention after some states: the time, the first and the last sequence."""
    clock = HandClock()
    found = StreamRetention(lambda: NOW, clock)
    for clock.now, first, last in states:
        limits = Limits.of(config, {"messages": stored, "bytes": stored * 50})
        found.note(limits, first, last)
    clock.now += later
    return found


GROWS = ((10.0, 1, 60), (20.0, 1, 100))
"""Four messages a second."""


def test_the_time_of_a_message_is_in_both_forms_of_its_reply() -> None:
    assert written_at("$JS.ACK.S.c.1.2.3.1700000000000000000.4") == NOW
    assert written_at("$JS.ACK.hub.ACC.S.c.1.2.3.1700000000000000000.4") == NOW
    assert written_at("$JS.ACK.hub.ACC.S.c.1.2.3.1700000000000000000.4.token") == NOW
    assert written_at("") is written_at("$JS.ACK.S.c.1.2.3.x.4") is None


def test_without_limits_a_message_has_no_retention() -> None:
    for config in ({}, {"max_age": 0, "max_msgs": -1, "max_bytes": -1}, {"max_msgs": 100, "discard": "new"}):
        assert stream(config, *GROWS).of(message(1)) is None
    assert StreamRetention().of(message(1)) is None


def test_max_age_counts_from_the_time_of_the_message() -> None:
    found = stream({"max_age": 60 * 10**9, "discard": "new"}, *GROWS)
    assert found.of(message(5, age=10.0)) == Retention(50.0, 60.0, "max_age=60 s")
    assert found.of(message(5, age=90.0)) == Retention(0.0, 60.0, "max_age=60 s")


def test_max_msgs_and_max_bytes_follow_the_pace_of_new_messages() -> None:
    assert stream({"max_msgs": 120}, *GROWS).of(message(20)) == Retention(10.0, 30.0, "max_msgs=120")
    # Two seconds after the last state, more messages exist.
    assert stream({"max_msgs": 120}, *GROWS, later=2.0).of(message(20)) == Retention(8.0, 30.0, "max_msgs=120")
    assert stream({"max_bytes": 6_000}, *GROWS).of(message(20)) == Retention(10.0, 30.0, "max_bytes=6000")
    both = stream({"max_msgs": 120, "max_bytes": 5_000}, *GROWS).of(message(20))
    assert both is not None and both.rule == "max_bytes=5000"
    assert stream({"max_msgs": 120}, (10.0, 1, 100), (20.0, 1, 100)).of(message(20)) is None


def test_a_work_queue_counts_only_the_messages_that_it_still_has() -> None:
    config = {"max_msgs": 120, "retention": "workqueue"}
    assert stream(config, *GROWS, stored=10).of(message(1)) is None


def test_a_message_below_the_first_sequence_is_deleted() -> None:
    found = stream({"max_msgs": 120}, (10.0, 30, 100)).of(message(29))
    assert found == Retention(0.0, 1.0, "a limit of its stream, which begins at sequence 30")
    assert stream({"max_msgs": 120}, (10.0, 30, 100)).of(message(30)) is None


@pytest.mark.parametrize("config", [{"max_age": None, "max_msgs": None, "max_bytes": None}, {"max_age": 10**9}])
def test_a_message_without_a_time_has_no_age(config: dict[str, Any]) -> None:
    plain = Message(PARTITION, 5, None, 10, None, "reply")
    assert stream(config, *GROWS).of(plain) is None
