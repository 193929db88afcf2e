"""Dead letters on a real broker: confirmed, whole or cut, with clear errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
)

import lanes
from lanes_kafka import KafkaDeadLetters, KafkaSource, read_dead_letter
from lanes_kafka.broker import TopicFacts
from lanes_kafka.dead_letters.box import message_at
from memsource import MemoryBroker, MemorySource
from tests.components import KafkaServer, wait_until
from tests.fakes.dead_letters import dead_letter
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import config_of, opened, records, stored
from tests.kafka.workload import Topic

pytestmark = pytest.mark.anyio

SECRET = "canary5e1f"


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


only_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


# --- writes


async def test_a_dead_letter_holds_the_original_with_origin_and_reason(topic: MakeTopic) -> None:
    dead = topic()
    sent = dead_letter()
    async with opened(config_of(dead), dead.name) as target:
        await target.put(sent)
        # The dead letter is confirmed, and readable while the target is still open.
        (raw,) = await run_sync(records, dead)
    assert (raw.key(), raw.value()) == (b"customer-42", b"payload")
    headers: Any = raw.headers()
    assert headers[:3] == [("color", b"red"), ("color", b"blue"), ("Lanes-Origin-Lanes-Error", b"spoofed")]
    assert dict(headers[3:]) == {
        "Lanes-Id": sent.id.encode(),
        "Lanes-Source": b"orders",
        "Lanes-Partition": b"3",
        "Lanes-Position": str(sent.position).encode(),
        "Lanes-Subject": b"orders",
        "Lanes-Attempts": b"5",
        "Lanes-Error": b"ValueError",
        "Lanes-Error-Text": b"no such customer",
        "Lanes-Epoch": b"2",
        "Lanes-Time": b"1700000000.250000",
        "Lanes-Timestamp": b"1600000000.125000",
    }
    assert read_dead_letter(message_at(dead.name, raw)) == sent


DIFFERENT: dict[str, dict[str, Any]] = {
    "tombstone": {"key": None, "value": b"", "tombstone": True, "headers": ()},
    "empty": {"key": None, "value": b"", "headers": ()},
    "empty key": {"key": b"", "value": b"\0"},
    "lane's key": {"key": b"lane", "record_key": None},
    "two keys": {"key": b"lane", "record_key": b"record"},
    "broker's key": {"key": None, "record_key": b"record"},
    "null headers": {"headers": (("none", b""), ("empty", b""), ("none", b"")), "null_headers": (0, 2)},
    "names": {"headers": (("", b"\0\xff"), ("a\0b", b"x"), ("\ud800", b"y"), ("é%41", b"z"))},
}


@only_asyncio
async def test_missing_and_empty_values_stay_distinct(topic: MakeTopic) -> None:
    dead = topic()
    sent = {name: dead_letter(**changes) for name, changes in DIFFERENT.items()}
    async with opened(config_of(dead), dead.name) as target:
        for one in sent.values():
            await target.put(one)
    raws = await run_sync(records, dead)
    assert len(raws) == len(sent)
    for (name, one), raw in zip(sent.items(), raws, strict=True):
        assert (raw.value() is None) == one.tombstone, name
        assert read_dead_letter(message_at(dead.name, raw)) == one, name


@only_asyncio
async def test_concurrent_writes_are_confirmed_in_key_order(topic: MakeTopic) -> None:
    dead = topic(partitions=3)
    sent = [dead_letter(key=b"%d" % (number % 7)) for number in range(300)]
    async with opened(config_of(dead), dead.name) as target, anyio.create_task_group() as tasks:
        for one in sent:
            tasks.start_soon(target.put, one)
    found = await stored(dead)
    assert sorted(one.position for one in found) == [one.position for one in sent]
    for key in {one.key for one in sent}:
        positions = [one.position for one in found if one.key == key]
        assert positions == sorted(positions)


@only_asyncio
@pytest.mark.parametrize(("limit", "size"), [(1_048_588, 2_000_000), (20_000, 300_000), (20_000, 19_900)])
async def test_a_dead_letter_too_large_for_the_topic_is_cut(topic: MakeTopic, limit: int, size: int) -> None:
    dead = topic(config={"max.message.bytes": str(limit)})
    value = os.urandom(size)
    small = dead_letter()
    async with opened(config_of(dead), dead.name) as target, anyio.create_task_group() as tasks:
        tasks.start_soon(target.put, dead_letter(value=value))
        # Other dead letters stay whole.
        tasks.start_soon(target.put, small)
    (cut,) = [raw for raw in await run_sync(records, dead) if len(raw.value() or b"") > 100]
    headers: Any = cut.headers()
    assert dict(headers)["Lanes-Truncated"] == str(size).encode()
    assert "color" not in dict(headers)
    assert limit - 1_000 < len(cut.value() or b"") < limit
    assert value.startswith(cut.value() or b"")
    assert small in await stored(dead)


@only_asyncio
async def test_a_large_compressible_dead_letter_is_kept_whole(topic: MakeTopic) -> None:
    dead = topic()
    sent = dead_letter(value=b"x" * 3_000_000)
    async with opened(config_of(dead, **{"compression.type": "lz4"}), dead.name) as target:
        await target.put(sent)
    assert await stored(dead) == [sent]


@only_asyncio
async def test_a_reason_above_the_topic_limit_is_an_error(topic: MakeTopic) -> None:
    dead = topic(config={"max.message.bytes": "300"})
    async with opened(config_of(dead), dead.name) as target:
        with (
            pytest.raises(lanes.SourceError, match=r"raise max\.message\.bytes of the topic") as refused,
            anyio.fail_after(20),
        ):
            await target.put(dead_letter(error_text="x" * 500))
    assert not refused.value.retryable


@only_asyncio
async def test_compaction_keeps_dead_letters_of_one_key(topic: MakeTopic) -> None:
    dead = topic(config={"cleanup.policy": "compact"})
    sent = [dead_letter(), dead_letter(), dead_letter(key=None), dead_letter(value=b"", tombstone=True)]
    async with opened(config_of(dead), dead.name) as target:
        for one in sent:
            await target.put(one)
    raws = await run_sync(records, dead)
    assert [raw.key() for raw in raws] == [one.id.encode() for one in sent]
    assert None not in [raw.value() for raw in raws]
    assert await stored(dead) == sent


# --- errors


@only_asyncio
async def test_a_missing_topic_is_refused_and_not_created(topic: MakeTopic) -> None:
    there = topic()
    with pytest.raises(lanes.ConfigError, match=r"'.*-not' does not exist \(did you mean '.*'\?\); create it"):
        await lanes.run(
            MemorySource(MemoryBroker()), print, dead_letters=KafkaDeadLetters(config_of(there), f"{there.name}-not")
        )
    assert f"{there.name}-not" not in there.admin.list_topics(timeout=10).topics


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "a/b", "x" * 250, "é", None, ["dead"]])
def test_an_invalid_topic_name_is_refused(name: Any) -> None:
    with pytest.raises(lanes.ConfigError, match=r"dead-letter topic .*: must be 1 to 249 .* and not '\.' or '\.\.'"):
        KafkaDeadLetters({"bootstrap.servers": "127.0.0.1:9"}, name)


@only_asyncio
async def test_a_source_that_reads_the_dead_letters_is_refused(topic: MakeTopic) -> None:
    dead = topic()
    async with opened(config_of(dead), dead.name) as target:
        with pytest.raises(lanes.SourceError, match="every dead letter would create another dead letter") as refused:
            await target.put(dead_letter(source=dead.name, subject=dead.name))
    assert not refused.value.retryable
    assert dead.ends() == [0]


async def test_no_broker_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_kafka.broker.TOPIC_DEADLINE", 1.0)
    target = KafkaDeadLetters({"bootstrap.servers": "127.0.0.1:9", "sasl.password": SECRET}, "dead")
    with pytest.raises(lanes.SourceError, match=r"broker answers at 127\.0\.0\.1:9 .*[Cc]onnect") as refused:
        await target.open()
    # The source of the same program may have another address.
    assert str(refused.value).startswith("dead letters to dead: no Kafka broker answers at ")
    assert refused.value.retryable
    assert SECRET not in repr(target) + str(refused.value) + repr(refused.value)


@pytest.mark.parametrize(
    ("name", "value"), [("security.protocol", SECRET), ("no.such.setting", "x"), ("sasl.password", 5.5)]
)
@only_asyncio
async def test_settings_that_the_client_refuses_are_named_without_secrets(name: str, value: object) -> None:
    more = {"ssl.key.pem": SECRET, "security.protocol": "ssl"} if name == "sasl.password" else {name: value}
    target = KafkaDeadLetters({"bootstrap.servers": "127.0.0.1:9", "sasl.password": SECRET} | more, "dead")
    with pytest.raises(lanes.ConfigError, match="the Kafka client refuses its settings") as refused:
        await target.open()
    assert SECRET not in str(refused.value).replace(str(value), "") or name == "security.protocol"


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker with logins and ACLs. No ACL ever lets Ben write."""
    with KafkaServer(users={"admin": "secretadmin", "ann": "secretann", "ben": "secretben"}) as server:
        yield server


def allow(topic: Topic, *operations: AclOperation, user: str = "ann") -> list[AclBinding]:
    """Allow these operations to a user, and wait until the broker applies it."""
    acls = [
        AclBinding(
            ResourceType.TOPIC,
            topic.name,
            ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]
    for done in topic.admin.create_acls(acls).values() if acls else ():
        done.result(20)
    # The broker may learn of the ACL after the controller.
    wait_until(lambda: all(_in_force(topic, one) for one in acls), f"{operations} on {topic!r}")
    return acls


def forbid(topic: Topic, acls: list[AclBinding]) -> None:
    """Revoke permissions, and wait until the broker applies it."""
    for done in topic.admin.delete_acls([_filter(one) for one in acls]).values():
        done.result(20)
    wait_until(lambda: not any(_in_force(topic, one) for one in acls), f"nothing of {acls} on {topic!r}")


def _in_force(topic: Topic, one: AclBinding) -> bool:
    return bool(topic.admin.describe_acls(_filter(one)).result(20))


def _filter(one: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        one.restype, one.name, one.resource_pattern_type, one.principal, one.host, one.operation, one.permission_type
    )


@pytest.mark.slow
@only_asyncio
async def test_a_wrong_password_is_reported_at_once(guarded: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=guarded)
    target = KafkaDeadLetters(guarded.config("ann") | {"sasl.password": SECRET}, dead.name)
    with pytest.raises(lanes.SourceError, match=r"login refused at .*; correct the credentials") as refused:
        await target.open()
    assert not refused.value.retryable
    assert SECRET not in str(refused.value)


@pytest.mark.slow
@only_asyncio
@pytest.mark.parametrize(
    ("operations", "said"), [((), "may not describe topic"), ((AclOperation.DESCRIBE,), "may not write to it")]
)
async def test_a_topic_without_write_permission_is_refused_at_the_start(
    guarded: KafkaServer, topic: MakeTopic, operations: tuple[AclOperation, ...], said: str
) -> None:
    dead = topic(on=guarded)
    await run_sync(partial(allow, dead, *operations))
    with pytest.raises(lanes.SourceError, match=said) as refused:
        await KafkaDeadLetters(guarded.config("ann"), dead.name).open()
    assert not refused.value.retryable


@pytest.mark.slow
@only_asyncio
async def test_a_user_without_any_write_permission_is_refused(
    guarded: KafkaServer, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Kafka 2.8 an idempotent producer needed more than Write on its topic.

    Since then Write on any topic is enough.
    """
    dead = topic(on=guarded)
    await run_sync(partial(allow, dead, AclOperation.DESCRIBE, user="ben"))
    monkeypatch.setattr(
        "lanes_kafka.dead_letters.writer.describe_topic", lambda *_, **__: TopicFacts(1, True, False, None)
    )
    async with opened(guarded.config("ben"), dead.name) as target:
        with pytest.raises(lanes.SourceError, match="CLUSTER_AUTHORIZATION_FAILED") as refused:
            await target.put(dead_letter())
    assert not refused.value.retryable


@pytest.mark.slow
@only_asyncio
async def test_a_revoked_permission_is_a_permanent_error(guarded: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=guarded)
    acls = await run_sync(partial(allow, dead, AclOperation.WRITE))
    async with opened(guarded.config("ann"), dead.name) as target:
        await target.put(dead_letter())
        await run_sync(forbid, dead, acls)
        with pytest.raises(lanes.SourceError, match=r"TOPIC_AUTHORIZATION_FAILED.*correct the permissions") as refused:
            await target.put(dead_letter())
    assert not refused.value.retryable


@pytest.mark.slow
@only_asyncio
async def test_a_compacted_topic_is_detected_without_reading_its_settings(
    guarded: KafkaServer, topic: MakeTopic
) -> None:
    dead = topic(on=guarded, config={"cleanup.policy": "compact"})
    await run_sync(partial(allow, dead, AclOperation.WRITE))
    sent = [dead_letter(key=None), dead_letter()]
    async with opened(guarded.config("ann"), dead.name) as target:
        for one in sent:
            await target.put(one)
    assert [raw.key() for raw in await run_sync(records, dead)] == [one.id.encode() for one in sent]


# --- dead letters that the source would read again


@only_asyncio
async def test_a_topic_that_the_source_reads_is_refused_at_the_start(topic: MakeTopic) -> None:
    orders, refunds = topic(), topic()
    handled: list[lanes.Message] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message)

    source = KafkaSource(config_of(orders), topics=[orders.name, refunds.name])
    consumer = lanes.Consumer(source, handler, dead_letters=KafkaDeadLetters(config_of(orders), refunds.name))
    with pytest.raises(lanes.ConfigError) as refused:
        await consumer.run()
    assert str(refused.value) == (
        f"kafka g/{orders.name},{refunds.name}: the dead letters go to {refunds.name!r}, which this source also "
        "reads, so each dead letter would create another dead letter. Write the dead letters to a separate topic or "
        "stream"
    )
    assert handled == []
