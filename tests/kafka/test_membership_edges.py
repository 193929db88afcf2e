"""A question about the members or the session of the group without an answer is logged, and known facts stay."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType

from lanes_kafka.client.membership import SESSION_EVERY, Session, SessionWatch
from lanes_kafka.config import client_config
from tests.kafka.test_membership import HERE, FakeGroup


def test_a_question_that_never_ends_is_logged_as_one_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lanes.kafka")
    group = FakeGroup(0)
    group.confirm()
    group.advance()
    group.now += 10.0
    group.advance()
    (line,) = caplog.messages
    assert line.endswith("the broker does not list the members of the group, retrying (no answer)")


@pytest.mark.parametrize(("member", "in_doubt"), [("me", False), ("another", True)])
def test_a_heartbeat_ends_the_doubt_of_the_same_member_only(member: str, in_doubt: bool) -> None:
    group = FakeGroup(0)
    group.lose("the client was not polled for max.poll.interval.ms")
    group.confirm()
    group.advance()
    group.error(KafkaError.GROUP_AUTHORIZATION_FAILED)
    group.member = member
    group.now += 3.1
    group.advance()
    assert group.in_doubt() == in_doubt


def test_the_session_is_asked_of_the_group_and_stays_known_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lanes.kafka")
    now = 0.0
    asked: list[tuple[Any, Any, Future[Any]]] = []

    def describe(resources: list[ConfigResource], request_timeout: float) -> dict[ConfigResource, Future[Any]]:
        (one,) = resources
        asked.append((one.restype, one.name, Future()))
        return {one: asked[-1][2]}

    admin: Any = SimpleNamespace(describe_configs=describe)
    config = client_config(HERE | {"group.protocol": "consumer"})
    watch = SessionWatch(config, lambda: admin, lambda: now, Session(6.0, 2.0))
    watch.refresh()
    assert asked == []
    now += SESSION_EVERY
    watch.refresh()
    ((kind, name, answer),) = asked
    assert (kind, name) == (ResourceType.GROUP, "g")
    answer.set_exception(KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)))
    watch.refresh()
    assert watch.session == Session(6.0, 2.0) and len(asked) == 1
    (line,) = caplog.messages
    assert line.startswith("the session of group 'g' is unknown: ") and "GROUP_AUTHORIZATION_FAILED" in line
