"""Errors of a broker at the start: addresses, credentials, topics, permissions and old versions are named."""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import anyio
import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

import lanes
from lanes.core.types import Message
from lanes_kafka import KafkaSource
from lanes_kafka.cli.doctor import examine
from lanes_kafka.client import thread
from lanes_kafka.config import client_config
from tests.components import KafkaServer
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

PASSWORD = "canary5e1f"
NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker with logins and without permissions, commit metadata and KIP-848."""
    properties: dict[str, str | int] = {
        "offset.metadata.max.bytes": 0,
        "group.coordinator.rebalance.protocols": "classic",
    }
    with KafkaServer(users={"admin": "adminpass", "bob": PASSWORD}, properties=properties) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give up soon on a broker that does not answer."""
    monkeypatch.setattr(thread, "OPEN_TIMEOUT", 2.0)


async def refused(config: dict[str, Any], topic: str) -> lanes.LanesError:
    """The error that a consumer of this configuration ends with."""

    async def handle(message: Message) -> NoReturn:
        raise AssertionError(f"{message!r} was read")

    consumer = lanes.Consumer(KafkaSource({**QUIET, **config}, topics=topic), handle)
    with anyio.fail_after(40), pytest.raises(lanes.LanesError) as failed:
        await consumer.run()
    assert PASSWORD not in str(failed.value)
    return failed.value


def allow(topic: Topic, kind: ResourceType, name: str, *operations: AclOperation) -> None:
    wanted = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:bob", "*", operation, AclPermissionType.ALLOW)
        for operation in operations
    ]
    for made in topic.admin.create_acls(wanted).values():
        made.result(10)


async def test_a_wrong_address_is_named(impatient: None) -> None:
    failure = await refused({"bootstrap.servers": NOWHERE, "group.id": "g"}, "T")
    assert isinstance(failure, lanes.SourceError) and failure.retryable
    assert f"no Kafka broker answers at {NOWHERE} within 2 s" in str(failure)
    assert "bootstrap.servers" in str(failure)


async def test_a_listener_with_tls_is_recognised(impatient: None) -> None:
    with tls_listener() as url:
        config = {"bootstrap.servers": url, "group.id": "g"}
        # The client writes its line about the end of a connection at this level.
        failure = await refused(config | {"log_level": 6}, "T")
        (check,) = examine(client_config(config), ["T"], timeout=2.0)
    assert isinstance(failure, lanes.SourceError) and failure.retryable
    assert f"no Kafka broker answers at {url} within 2 s ({url}/bootstrap: " in str(failure)
    assert str(failure).endswith(
        ": connecting to a listener with TLS?); start one, or correct bootstrap.servers and security.protocol"
    )
    assert check.ok is False and check.detail.endswith(": connecting to a listener with TLS?")
    assert check.remedy == "correct security.protocol and the ssl settings"


@contextmanager
def tls_listener() -> Iterator[str]:
    """A server that ends each connection whose first bytes are no TLS, so it needs no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(self.request, server_side=True)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        serving.join()


async def test_wrong_credentials_are_named_and_not_shown(guarded: KafkaServer, impatient: None) -> None:
    config = guarded.config("bob") | {"group.id": "g", "sasl.password": PASSWORD + "no"}
    failure = await refused(config, "T")
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert f"login refused at {guarded.url}" in str(failure)
    assert "correct the credentials" in str(failure)


async def test_a_login_at_a_listener_without_logins_is_named(guarded: KafkaServer, impatient: None) -> None:
    login = guarded.config("bob") | {"bootstrap.servers": guarded.admin_url, "group.id": "g"}
    failure = await refused(login, "T")
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert f"login refused at {guarded.admin_url}" in str(failure)
    assert str(failure).endswith("; correct security.protocol and sasl.mechanism to those of the listener")


async def test_an_unknown_topic_is_named(guarded: KafkaServer) -> None:
    failure = await refused({"bootstrap.servers": guarded.admin_url, "group.id": "g"}, "no-such-topic")
    assert isinstance(failure, lanes.ConfigError)
    assert "topic 'no-such-topic' does not exist" in str(failure) and str(failure).endswith(
        "create the topic, or correct topics=…"
    )


async def test_a_topic_with_a_similar_name_is_suggested(guarded: KafkaServer, topic: MakeTopic) -> None:
    there = topic(on=guarded)
    config = {"bootstrap.servers": guarded.admin_url, "group.id": "g"}
    for misspelt in (there.name + "s", there.name.swapcase()):
        failure = await refused(config, misspelt)
        assert isinstance(failure, lanes.ConfigError)
        assert str(failure).endswith(f"create the topic, or correct topics=… (did you mean {there.name!r}?)")


async def test_a_session_timeout_outside_of_the_bounds_is_named(guarded: KafkaServer, topic: MakeTopic) -> None:
    config = {"bootstrap.servers": guarded.admin_url, "group.id": "g", "session.timeout.ms": 100}
    config |= {"heartbeat.interval.ms": 30}
    failure = await refused(config, topic(on=guarded).name)
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert "session.timeout.ms=100 is outside the bounds of the broker; set session.timeout.ms between " in str(failure)
    assert "group.min.session.timeout.ms (default 6000)" in str(failure)


async def test_a_setting_with_a_similar_name_is_suggested(guarded: KafkaServer) -> None:
    config = {"bootstrap.servers": guarded.admin_url, "group.id": "g", "auto.offset.rest": "earliest"}
    failure = await refused(config, "T")
    assert isinstance(failure, lanes.ConfigError)
    assert 'No such configuration property: "auto.offset.rest"' in str(failure)
    assert str(failure).endswith("correct the configuration of the client (did you mean 'auto.offset.reset'?)")


async def test_a_topic_that_may_not_be_seen_is_named(guarded: KafkaServer, topic: MakeTopic) -> None:
    there = topic(on=guarded)
    failure = await refused(guarded.config("bob") | {"group.id": "g"}, there.name)
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert f"this user may not describe topic {there.name!r}; allow the user Describe" in str(failure)


@pytest.mark.parametrize(
    ("allowed", "code"),
    [(AclOperation.READ, "GROUP_AUTHORIZATION_FAILED"), (AclOperation.DESCRIBE, "TOPIC_AUTHORIZATION_FAILED")],
)
async def test_a_missing_permission_is_named(
    allowed: AclOperation, code: str, guarded: KafkaServer, topic: MakeTopic
) -> None:
    there = topic(on=guarded)
    produce(there, 1)
    name = f"g-{there.name}"
    allow(there, ResourceType.TOPIC, there.name, allowed)
    if allowed != AclOperation.READ:
        allow(there, ResourceType.GROUP, name, AclOperation.READ)
    failure = await refused(guarded.config("bob") | {"group.id": name}, there.name)
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert code in str(failure) and name in str(failure) and there.name in str(failure)
    assert "allow this user" in str(failure) and "Read on the" in str(failure)


async def test_a_broker_without_kip_848_is_named(guarded: KafkaServer, topic: MakeTopic) -> None:
    there = topic(on=guarded)
    config = {"bootstrap.servers": guarded.admin_url, "group.id": "g", "group.protocol": "consumer"}
    failure = await refused(config, there.name)
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert "group.protocol='consumer' (KIP-848); set 'classic'" in str(failure)


async def test_without_room_for_metadata_nothing_is_lost(guarded: KafkaServer, topic: MakeTopic) -> None:
    events = topic(on=guarded)
    produce(events, 20, keys=20)
    story = Story()
    work = Work(story)
    work.hold(b"5")
    async with group(events, "cooperative", work) as members:
        first = members.start("first", settings=lanes.Settings(commit_interval=0.0, drain_timeout=0.0))
        await until(lambda: len(work.ended) == 19)
        await first.consumer.drain()
        assert members.committed() == [5]
        work.let_go(b"5")
        members.start("second")
        await until(lambda: len(work.ended) == 20 and len(story.of("end", "second")) == 15)
    assert sorted(each.position for each in story.of("start", "second")) == list(range(5, 20))
    assert members.committed() == [20] and work.violations == []
