"""Each check of ``lanes doctor kafka`` finds its fault on a real broker."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, ShareConsumer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from lanes.cli.doctor import Check
from lanes.errors import SourceError
from lanes_kafka import broker
from lanes_kafka.broker import metadata_limit
from lanes_kafka.cli import doctor
from lanes_kafka.cli.doctor import examine
from lanes_kafka.config import client_config
from tests.components import KafkaServer, wait_until
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic

PASSWORD = "canary5e1f"
NOWHERE = "127.0.0.1:9"
_groups = itertools.count(1)


@pytest.fixture
def group() -> str:
    return f"doctor{os.getpid()}x{next(_groups)}"


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker with logins and without permissions and commit metadata."""
    users = {"admin": "adminpass", "bob": PASSWORD}
    with KafkaServer(users=users, properties={"offset.metadata.max.bytes": 0}) as server:
        yield server


def by_name(checks: Sequence[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def look(config: dict[str, Any], *topics: str, timeout: float = 5.0) -> dict[str, Check]:
    return by_name(examine(client_config(config), topics, timeout=timeout))


def allow(server: KafkaServer, kind: ResourceType, name: str, *operations: AclOperation) -> None:
    """Allow these operations to bob."""
    admin = AdminClient({**QUIET, "bootstrap.servers": server.admin_url})
    wanted = [
        AclBinding(kind, name, ResourcePatternType.LITERAL, "User:bob", "*", operation, AclPermissionType.ALLOW)
        for operation in operations
    ]
    for made in admin.create_acls(wanted).values():
        made.result(10)


def test_a_share_group_is_not_taken_for_an_empty_one(kafka: KafkaServer, topic: MakeTopic, group: str) -> None:
    events = topic()
    sharing = ShareConsumer({**QUIET, **kafka.config(), "group.id": group})

    def found() -> bool:
        sharing.poll(0.1)
        return look(kafka.config() | {"group.id": group})[f"group {group}"].ok is False

    try:
        sharing.subscribe([events.name])
        # The group becomes a share group when its first member joins.
        wait_until(found, "the group to be a share group", seconds=30)
        check = look(kafka.config() | {"group.id": group})[f"group {group}"]
        assert "a share group" in check.detail and check.remedy == "use another group.id"
        # Other groups are unaffected.
        assert look(kafka.config() | {"group.id": f"{group}x"})[f"group {group}x"] == Check(
            f"group {group}x", True, "no members"
        )
    finally:
        sharing.close()


def test_a_missing_topic_is_named_with_a_similar_one(kafka: KafkaServer, topic: MakeTopic, group: str) -> None:
    there = topic()
    config = kafka.config() | {"group.id": group}
    for missing, similar in ((f"{there.name}s", f" (did you mean {there.name!r}?)"), ("zq", "")):
        assert look(config, missing)[f"topic {missing}"] == Check(
            f"topic {missing}", False, "it does not exist", f"create topic {missing}, or correct the name{similar}"
        )


def test_a_partition_whose_leader_moves_is_asked_again(
    kafka: KafkaServer, topic: MakeTopic, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = topic(1)
    codes = iter([KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.LEADER_NOT_AVAILABLE])
    asked = AdminClient.list_offsets

    def moving(self: AdminClient, wanted: Any, **options: Any) -> Any:
        code = next(codes, None)
        if code is None:
            return asked(self, wanted, **options)
        answer: Future[Any] = Future()
        answer.set_exception(KafkaException(KafkaError(code)))
        return dict.fromkeys(wanted, answer)

    monkeypatch.setattr(AdminClient, "list_offsets", moving)
    assert look(kafka.config() | {"group.id": group}, there.name)[f"transactions on {there.name}"].ok is True
    assert next(codes, None) is None


def test_a_usable_configuration_passes_all_checks(kafka: KafkaServer, topic: MakeTopic, group: str) -> None:
    there = topic(3, config={"retention.ms": "7200000", "cleanup.policy": "compact"})
    found = look(kafka.config() | {"group.id": group}, there.name)
    assert [check for check in found.values() if check.ok is not True or check.remedy] == []
    assert list(found) == [
        "broker",
        f"topic {there.name}",
        f"retention of {there.name}",
        f"transactions on {there.name}",
        f"group {group}",
        "commit metadata",
    ]
    assert kafka.url in found["broker"].detail
    assert "partitions=3" in found[f"topic {there.name}"].detail
    assert found[f"retention of {there.name}"].detail.startswith("cleanup.policy=compact, retention.ms=7200000")
    assert found[f"group {group}"].detail == "no members"
    assert found["commit metadata"].detail == "offset.metadata.max.bytes=4096"


@pytest.mark.parametrize(
    ("settings", "words", "remedy"),
    [
        ({}, ["_TRANSPORT", NOWHERE, "refused"], "bootstrap.servers"),
        ({"bootstrap.servers": "no-such-host.invalid:9"}, ["_RESOLVE", "no-such-host.invalid"], "bootstrap.servers"),
    ],
)
def test_a_wrong_address_is_named_with_its_cause(settings: dict[str, Any], words: list[str], remedy: str) -> None:
    found = look({"bootstrap.servers": NOWHERE, "group.id": "g"} | settings, "T", timeout=1.0)
    assert list(found) == ["broker"]
    assert found["broker"].ok is False
    assert [word for word in words if word not in found["broker"].detail] == []
    assert remedy in found["broker"].remedy


def test_the_wrong_security_is_named(kafka: KafkaServer) -> None:
    found = look(kafka.config() | {"group.id": "g", "security.protocol": "SSL"}, timeout=1.0)["broker"]
    assert found.ok is False
    assert "SSL" in found.detail
    assert "ssl settings" in found.remedy


def test_wrong_credentials_are_named_and_not_shown(guarded: KafkaServer) -> None:
    wrong = guarded.config("bob") | {"group.id": "g", "sasl.password": f"{PASSWORD}wrong"}
    found = look(wrong, timeout=500.0)["broker"]  # not awaited
    assert found.ok is False
    assert "_AUTHENTICATION" in found.detail
    assert "sasl.password" in found.remedy
    assert PASSWORD not in repr(found)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sasl.pasword": PASSWORD}, 'No such configuration property: "sasl.pasword"'),
        ({"security.protocol": "SSL", "ssl.key.pem": PASSWORD}, "ssl.key.pem"),
        ({"security.protocol": "SSL", "ssl.key.location": f"/{PASSWORD}"}, "ssl.key.location"),
        ({"fetch.min.bytes": "many"}, "fetch.min.bytes"),
    ],
)
def test_a_setting_that_the_client_refuses_is_a_finding(settings: dict[str, Any], words: str) -> None:
    (found,) = examine(client_config({"bootstrap.servers": NOWHERE, "group.id": "g"} | settings), ["T"])
    meant = " (did you mean 'sasl.password'?)" if "sasl.pasword" in settings else ""
    assert (found.name, found.ok) == ("client", False)
    assert found.remedy == f"correct the setting that the error names{meant}"
    assert words in found.detail
    assert PASSWORD not in found.detail


def test_a_secret_in_an_error_of_the_client_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: dict[str, Any]) -> Consumer:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, f"sasl.password: {config['sasl.password']} is short"))

    monkeypatch.setattr(doctor, "Consumer", refuse)
    (found,) = look({"bootstrap.servers": NOWHERE, "group.id": "g", "sasl.password": PASSWORD}).values()
    assert found.detail == "_INVALID_ARG: sasl.password: … is short"


def test_words_of_a_secret_are_not_in_a_finding(guarded: KafkaServer) -> None:
    settings = {
        "bootstrap.servers": guarded.url,
        "group.id": "g",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "enable.sasl.oauthbearer.unsecure.jwt": True,
        "sasl.oauthbearer.config": f"principal=p {PASSWORD}",
    }
    (found,) = look(settings).values()
    assert found.ok is False
    assert "Unrecognized sasl.oauthbearer.config" in found.detail
    assert PASSWORD not in found.detail


@pytest.mark.parametrize("name", ["no-such-topic", "", "no topic"])
def test_an_unknown_topic_is_named(kafka: KafkaServer, group: str, name: str) -> None:
    found = look(kafka.config() | {"group.id": group}, name)
    assert found[f"topic {name}"].ok is False
    assert found[f"topic {name}"].remedy
    assert f"group {group}" in found  # the other checks still run


def test_a_missing_permission_is_named_until_it_is_granted(guarded: KafkaServer, group: str) -> None:
    there = Topic(guarded.admin_url, f"secret-{group}", 1)
    there.create()
    config = guarded.config("bob") | {"group.id": group, "group.protocol": "consumer"}
    topic, members = f"topic {there.name}", f"group {group}"

    found = look(config, there.name)
    assert [found[name].ok for name in ("broker", topic, members)] == [True, False, False]
    assert "TOPIC_AUTHORIZATION_FAILED" in found[topic].detail
    assert found[topic].remedy == f"allow Describe and Read on topic {there.name}"
    assert "GROUP_AUTHORIZATION_FAILED" in found[members].detail
    assert found[members].remedy == f"allow Read on group {group}"
    for unknown in ("commit metadata", "KIP-848"):
        assert found[unknown].ok is None
        assert "allow DescribeConfigs on the cluster" in found[unknown].remedy

    allow(guarded, ResourceType.TOPIC, there.name, AclOperation.DESCRIBE)
    allow(guarded, ResourceType.GROUP, group, AclOperation.DESCRIBE)
    wait_until(lambda: "may not read it" in look(config, there.name)[topic].detail, "the topic to be seen")
    wait_until(lambda: "may not join it" in look(config)[members].detail, "the group to be seen")
    found = look(config, there.name)
    assert [found[name].ok for name in (topic, members)] == [False, False]

    allow(guarded, ResourceType.TOPIC, there.name, AclOperation.READ)
    allow(guarded, ResourceType.GROUP, group, AclOperation.READ)
    wait_until(lambda: look(config, there.name)[topic].ok is True, "the topic to be readable")
    wait_until(lambda: look(config)[members].ok is True, "the group to be usable")
    found = look(config, there.name)
    assert found[f"retention of {there.name}"].ok is None
    assert "DescribeConfigs" in found[f"retention of {there.name}"].remedy
    assert found[f"transactions on {there.name}"].ok is True


def test_a_broker_without_commit_metadata_is_named(guarded: KafkaServer) -> None:
    found = look({"bootstrap.servers": guarded.admin_url, "group.id": "g"})["commit metadata"]
    assert (found.ok, found.detail.partition(":")[0]) == (None, "offset.metadata.max.bytes=0")
    assert "commit_metadata=False" in found.remedy


@pytest.mark.parametrize(("limit", "ok"), [(0, None), (1, None), (11, None), (12, True), (4096, True)])
def test_a_limit_below_the_shortest_commit_metadata_is_named(limit: int, ok: bool | None) -> None:
    found = doctor._carries("commit metadata", str(limit))
    assert (found.ok, found.detail.partition(":")[0]) == (ok, f"offset.metadata.max.bytes={limit}")
    assert ("raise it to 4096" in found.remedy) is not ok


def test_the_metadata_limit_is_a_number_or_unknown_or_out_of_reach(kafka: KafkaServer, guarded: KafkaServer) -> None:
    def limit(config: dict[str, Any], timeout: float = 5.0) -> int | None:
        return metadata_limit(AdminClient({**QUIET, **config}), timeout=timeout)

    assert limit(dict(kafka.config())) == 4096
    assert limit({"bootstrap.servers": guarded.admin_url}) == 0
    assert limit(dict(guarded.config("bob"))) is None
    with pytest.raises(SourceError) as failed:
        limit({"bootstrap.servers": NOWHERE}, timeout=0.3)
    assert failed.value.retryable


MEMBERS: list[tuple[dict[str, Any], dict[str, Any], bool | None, str]] = [
    ({}, {}, True, "stable, classic, assignor range, members=1"),
    ({"group.instance.id": "i1"}, {}, True, "static: i1"),
    ({"group.instance.id": "i1"}, {"group.instance.id": "i1"}, None, "i1 is a member already"),
    ({}, {"partition.assignment.strategy": "cooperative-sticky"}, False, "other kind of assignor"),
    ({}, {"group.protocol": "consumer"}, None, "the other rebalance protocol"),
    ({"group.protocol": "consumer"}, {"group.protocol": "consumer"}, True, "stable, consumer, assignor uniform"),
    ({"group.protocol": "consumer"}, {}, None, "the other rebalance protocol"),
]


@pytest.mark.parametrize(("member", "mine", "ok", "words"), MEMBERS)
def test_a_group_that_is_running_is_described(
    kafka: KafkaServer,
    topic: MakeTopic,
    group: str,
    member: dict[str, Any],
    mine: dict[str, Any],
    ok: bool | None,
    words: str,
) -> None:
    config = kafka.config() | {"group.id": group}
    with closing(Consumer({**QUIET, **config, **member})) as running:
        running.subscribe([topic(1).name])

        def joined() -> bool:
            running.poll(0.05)
            return bool(running.assignment())

        wait_until(joined, "the member to have its partition")
        found = look(config | mine)[f"group {group}"]
    assert found.ok is ok
    assert words in found.detail
    assert bool(found.remedy) is (ok is not True)


def test_an_open_transaction_is_named_with_its_messages(kafka: KafkaServer, topic: MakeTopic, group: str) -> None:
    there = topic(2)
    producer = Producer({**QUIET, "bootstrap.servers": kafka.url, "transactional.id": group})
    producer.init_transactions(20)
    producer.begin_transaction()
    for _ in range(5):
        producer.produce(there.name, b"v", partition=1)
    assert producer.flush(20) == 0
    name = f"transactions on {there.name}"
    found = look(kafka.config() | {"group.id": group}, there.name)[name]
    assert found.ok is None
    assert "hold back 5 messages in 1 partitions, most in partition 1: 5" in found.detail
    producer.commit_transaction(20)
    wait_until(
        lambda: look(kafka.config() | {"group.id": group}, there.name)[name].ok is True, "the transaction to end"
    )


def test_a_silent_broker_is_given_up(fresh_kafka: KafkaFactory) -> None:
    server = fresh_kafka()
    config = client_config(server.config() | {"group.id": "g"})
    admin = AdminClient({**QUIET, **config.admin})
    assert metadata_limit(admin) == 4096
    server.pause()
    with pytest.raises(SourceError):
        metadata_limit(admin, timeout=0.5)
    (found,) = examine(config, ["T"], timeout=0.5)
    assert (found.name, found.ok) == ("broker", False)
    server.resume()


def test_an_answer_after_the_deadline_is_not_awaited(kafka: KafkaServer) -> None:
    admin = AdminClient({**QUIET, **kafka.config()})
    with pytest.raises(KafkaException) as failed:
        broker.answer(admin, Future(), time.monotonic())
    assert failed.value.args[0].code() == KafkaError._TIMED_OUT


@pytest.mark.parametrize(
    ("code", "retryable", "remedy"),
    [
        (KafkaError._TIMED_OUT, True, "check that the broker runs"),
        (KafkaError.REQUEST_TIMED_OUT, True, "check that the broker runs"),
        (KafkaError._AUTHENTICATION, False, "correct the credentials"),
        (KafkaError.UNSUPPORTED_VERSION, False, "correct the named cause"),
    ],
)
def test_a_lasting_failure_of_the_broker_settings_is_not_retryable(
    code: int, retryable: bool, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KafkaException(KafkaError(code))

    monkeypatch.setattr(broker, "answer", fail)
    admin: Any = SimpleNamespace(describe_cluster=lambda request_timeout: Future[object]())
    with pytest.raises(SourceError, match=f"cannot read the settings of a broker .*; {remedy}") as failed:
        broker.broker_settings(admin)
    assert failed.value.retryable is retryable


@pytest.mark.parametrize(
    ("protocols", "ok", "words"),
    [
        ("classic,consumer,streams", True, "classic,consumer"),
        ("classic", False, "'classic'"),
        (None, False, "no such setting"),
    ],
)
def test_a_broker_too_old_for_kip_848_is_named(
    kafka: KafkaServer, group: str, monkeypatch: pytest.MonkeyPatch, protocols: str | None, ok: bool, words: str
) -> None:
    real = broker.broker_settings

    def settings(admin: AdminClient, *, timeout: float) -> dict[str, str]:
        found = dict(real(admin, timeout=timeout)) | {"group.coordinator.rebalance.protocols": protocols}
        return {name: value for name, value in found.items() if value is not None}

    monkeypatch.setattr(doctor, "broker_settings", settings)
    config = kafka.config() | {"group.id": group}
    found = look(config | {"group.protocol": "consumer"})["KIP-848"]
    assert found.ok is ok
    assert words in found.detail
    assert "KIP-848" not in look(config)
