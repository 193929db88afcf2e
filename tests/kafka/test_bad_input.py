"""What is wrong around a source, or in what it reads: a clear error, or survived with nothing lost."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from typing import Any, NoReturn

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Producer
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

import lanes
from lanes.core.types import Message
from lanes_kafka import KafkaSource, broker
from lanes_kafka.client import thread
from tests.components import KafkaServer
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.members import Story, Work, group
from tests.kafka.workload import QUIET, Topic, produce, until

pytestmark = pytest.mark.anyio

PASSWORD = "canary5e1f"
NOWHERE = "127.0.0.1:9"
MEGABYTES = 1_000_000


@pytest.fixture(scope="module")
def guarded(kafka_prepared: None) -> Iterator[KafkaServer]:
    """Users log in, nothing is allowed yet, and the broker knows neither commit metadata nor KIP-848."""
    properties: dict[str, str | int] = {
        "offset.metadata.max.bytes": 0,
        "group.coordinator.rebalance.protocols": "classic",
    }
    with KafkaServer(users={"admin": "adminpass", "bob": PASSWORD}, properties=properties) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that does not answer is soon given up."""
    monkeypatch.setattr(thread, "OPEN_TIMEOUT", 0.5)
    monkeypatch.setattr(broker, "TOPIC_DEADLINE", 1.0)


async def refused(config: dict[str, Any], topic: str) -> lanes.LanesError:
    """What a consumer of this configuration ends with."""

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


# --- who may not


async def test_a_wrong_address_is_named(impatient: None) -> None:
    failure = await refused({"bootstrap.servers": NOWHERE, "group.id": "g"}, "T")
    assert isinstance(failure, lanes.SourceError) and failure.retryable
    assert f"no Kafka broker answers at {NOWHERE}" in str(failure)
    assert "bootstrap.servers" in str(failure)


async def test_wrong_credentials_are_named_and_not_shown(guarded: KafkaServer, impatient: None) -> None:
    config = guarded.config("bob") | {"group.id": "g", "sasl.password": PASSWORD + "no"}
    failure = await refused(config, "T")
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert f"login refused at {guarded.url}" in str(failure)
    assert "correct the credentials" in str(failure)


async def test_an_unknown_topic_is_named(guarded: KafkaServer) -> None:
    failure = await refused({"bootstrap.servers": guarded.admin_url, "group.id": "g"}, "no-such-topic")
    assert isinstance(failure, lanes.ConfigError)
    assert "no topic 'no-such-topic'" in str(failure) and "create it, or correct topics=" in str(failure)


async def test_a_topic_that_may_not_be_seen_is_named(guarded: KafkaServer, topic: MakeTopic) -> None:
    there = topic(on=guarded)
    failure = await refused(guarded.config("bob") | {"group.id": "g"}, there.name)
    assert isinstance(failure, lanes.SourceError) and not failure.retryable
    assert f"topic {there.name!r}: this user may not describe it; allow it Describe" in str(failure)


@pytest.mark.parametrize(
    ("allowed", "code"),
    [(AclOperation.READ, "GROUP_AUTHORIZATION_FAILED"), (AclOperation.DESCRIBE, "TOPIC_AUTHORIZATION_FAILED")],
)
async def test_what_may_not_be_read_is_named(
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


# --- what is read


async def test_large_records_are_read(topic: MakeTopic) -> None:
    events = topic(config={"max.message.bytes": str(12 * MEGABYTES)})
    producer = Producer({**QUIET, "bootstrap.servers": events.url, "message.max.bytes": 12 * MEGABYTES})
    for size in (1, 10 * MEGABYTES, 1):
        producer.produce(events.name, bytes(size), key=b"%d" % size)
    assert not producer.flush(20)
    sizes: list[int] = []

    class Weighing(Work):
        async def run(self, member: str, message: Message) -> None:
            sizes.append(len(message.value))
            await super().run(member, message)

    work = Weighing(Story())
    async with group(events, "848", work) as members:
        # Less than one of them.
        members.start("one", settings=lanes.Settings(max_in_flight_bytes=MEGABYTES))
        await until(lambda: len(work.ended) == 3)
    assert sorted(sizes) == [1, 1, 10 * MEGABYTES]
    assert members.committed() == [3]


async def test_null_keys_and_values_are_read(topic: MakeTopic) -> None:
    events = topic()
    produce(events, 6, keys=[None, b"", b"k"], value=lambda number: None if number % 2 else b"v")
    seen: dict[int, tuple[bytes | None, bytes]] = {}

    class Noting(Work):
        async def run(self, member: str, message: Message) -> None:
            seen[message.position] = (message.key, message.value)
            await super().run(member, message)

    work = Noting(Story())
    async with group(events, "848", work) as members:
        members.start("one")
        await until(lambda: len(work.ended) == 6)
    assert seen == {0: (None, b"v"), 1: (b"", b""), 2: (b"k", b"v"), 3: (None, b""), 4: (b"", b"v"), 5: (b"k", b"")}
    assert members.committed() == [6]


async def test_a_value_that_cannot_be_decoded_blocks_its_key_alone(topic: MakeTopic) -> None:
    events = topic()
    good = [b"1", b"\xff\xfe", b"3", b"4", b"5", b"6"]
    produce(events, 6, keys=3, value=good.__getitem__)
    decoded: list[int] = []

    def decode(message: Message) -> Any:
        return json.loads(message.value)

    async def handle(message: Message) -> None:
        decoded.append(int(str(message.data)))

    config = {**QUIET, "bootstrap.servers": events.url, "group.id": f"g-{events.name}", "group.protocol": "consumer"}
    settings = lanes.Settings(poison="block", drain_timeout=0.0)
    consumer = lanes.Consumer(KafkaSource(config, topics=events.name), handle, settings=settings, decode=decode)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        await until(lambda: sorted(decoded) == [1, 3, 4, 6])
        await until(lambda: consumer.status().blocked == 1)
        consumer.stop()
    assert events.committed(f"g-{events.name}") == [1]


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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limits of another process are set on Linux alone")
async def test_a_broker_whose_disk_is_full_loses_nothing(fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    server = fresh_kafka(warm=True)
    events = topic(on=server)
    produce(events, 20, keys=20)
    work = Work(Story())
    work.hold(b"5")
    async with group(events, "848", work) as members:
        members.start("one", settings=lanes.Settings(commit_interval=0.0))
        await until(lambda: len(work.ended) == 19)
        # From now on nothing more fits into any of its files; that ends a broker with one disk.
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (1, 1))
        work.let_go(b"5")
        await until(lambda: len(work.ended) == 20)
        await until(lambda: not server.alive)
        members.look()
        await run_sync(server.start)
        produce(events, 20, keys=20)
        await until(lambda: len(work.ended) == 40)
        await until(lambda: members.committed() == [40])
    assert work.violations == []
