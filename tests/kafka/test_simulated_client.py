"""The simulated client of ``tests.simulated`` answers like ``confluent_kafka`` on a real broker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

from tests.components import KafkaServer
from tests.components.waiting import wait_until
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import Topic, produce
from tests.simulated.kafka import producer_scripts
from tests.simulated.kafka.scripts import GUARDED_SCRIPTS, SCRIPTS, Guarded, Seen, Stage, produced_with, simulated

_quiet = logging.getLogger("tests.kafka.quiet")
_quiet.setLevel(logging.CRITICAL + 1)


class RealStage:
    """A real broker and real clients."""

    def __init__(self, topic: Topic) -> None:
        self.topic = self.written = topic.name
        self._topic = topic
        self._clients: list[Consumer] = []
        self._login: dict[str, Any] = {}

    def publish(self, partition: int, count: int) -> None:
        produce(self._topic, count, partition=partition)

    def delete(self, partition: int, before: int) -> None:
        place = TopicPartition(self.topic, partition, before)
        self._topic.admin.delete_records([place])[place].result(20)

    def recreate(self) -> None:
        place = TopicPartition(self.topic, 0)
        self._topic.delete()
        made_again(self._topic)
        wait_until(lambda: self._clients[0].committed([place], timeout=20)[0].offset < 0, "the commits to be deleted")

    def client(self, on_commit: Callable[..., object], instance: str | None = None) -> Consumer:
        config: dict[str, Any] = self._topic.config(
            **self._login,
            **({} if instance is None else {"group.instance.id": instance}),
            **{
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "on_commit": on_commit,
                "partition.assignment.strategy": "cooperative-sticky",
            },
        )
        self._clients.append(Consumer(config))
        return self._clients[-1]

    def forbid(self, what: Guarded) -> None:
        raise NotImplementedError("see GuardedStage")

    def allow(self, what: Guarded) -> None:
        raise NotImplementedError("see GuardedStage")

    def producer(self, settings: dict[str, Any], *, reachable: bool) -> Producer:
        # No server listens at the discard port.
        address = self._topic.url if reachable else "127.0.0.1:9"
        return Producer(produced_with(address, settings) | {"logger": _quiet})

    def close(self) -> None:
        for each in self._clients:
            each.close()


@pytest.mark.parametrize("script", [*SCRIPTS, *producer_scripts.SCRIPTS])
def test_the_simulated_client_answers_like_a_real_one(script: Callable[[Stage], Seen], topic: MakeTopic) -> None:
    stage = RealStage(topic(2))
    try:
        expected = script(stage)
    finally:
        stage.close()
    assert simulated(script) == expected


class GuardedStage(RealStage):
    """A real broker that checks permissions, and clients of the user bob, who has the permissions of a reader."""

    def __init__(self, topic: Topic, server: KafkaServer) -> None:
        super().__init__(topic)
        self._login = server.config("bob")
        self._watcher = Consumer(topic.config(**self._login, logger=_quiet))
        self._clients.append(self._watcher)
        self._reads: dict[Guarded, AclBinding] = {
            "group": _may_read(ResourceType.GROUP, topic.config()["group.id"]),
            "topic": _may_read(ResourceType.TOPIC, topic.name),
        }
        self.allow("group")
        self.allow("topic")

    def forbid(self, what: Guarded) -> None:
        one = self._reads[what]
        like = AclBindingFilter(
            one.restype,
            one.name,
            one.resource_pattern_type,
            one.principal,
            one.host,
            one.operation,
            one.permission_type,
        )
        self._topic.admin.delete_acls([like])[like].result(20)
        wait_until(lambda: self._is_refused(what), f"the broker to refuse the {what}")

    def allow(self, what: Guarded) -> None:
        one = self._reads[what]
        self._topic.admin.create_acls([one])[one].result(20)
        wait_until(lambda: not self._is_refused(what), f"the broker to allow the {what}")

    def _is_refused(self, what: Guarded) -> bool:
        # The broker applies a permission a moment after it has confirmed it.
        if what == "topic":
            error = self._watcher.list_topics(self.topic, timeout=20).topics[self.topic].error
            return error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        try:
            self._watcher.committed([TopicPartition(self.topic, 0)], timeout=20)
        except KafkaException as failure:
            return bool(failure.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED)
        return False


def made_again(topic: Topic) -> None:
    """Create a topic that was deleted just now. The broker refuses the name until the deletion has ended."""
    while True:
        try:
            topic.create()
            return
        except KafkaException as failure:
            if failure.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise


def _may_read(kind: ResourceType, name: str) -> AclBinding:
    literal, allow = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    return AclBinding(kind, name, literal, "User:bob", "*", AclOperation.READ, allow)


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker with logins and without permissions."""
    with KafkaServer(users={"admin": "adminpass", "bob": "bobpass"}) as server:
        yield server


@pytest.mark.parametrize("script", GUARDED_SCRIPTS)
def test_the_simulated_client_is_refused_like_a_real_one(
    script: Callable[[Stage], Seen], topic: MakeTopic, guarded: KafkaServer
) -> None:
    stage = GuardedStage(topic(2, on=guarded), guarded)
    try:
        expected = script(stage)
    finally:
        stage.close()
    assert simulated(script) == expected
