"""The Kafka publisher keeps the contract of publishers, and refuses settings that could lose or repeat outputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync

from lanes import Message
from lanes.errors import ConfigError, SourceError
from lanes.outputs.publisher import Output, Publisher
from lanes_kafka import KafkaPublisher
from lanes_kafka.client.records import READER
from lanes_kafka.publisher import publisher_settings
from memsource.contract.publishers import (
    PublisherAbility,
    PublisherCheck,
    PublisherHarness,
    Visible,
    output_to,
    publisher_checks,
)
from memsource.memory.source import MemorySource
from tests.components import KafkaServer
from tests.fakes.support import consumer_of, publish, published, started, until
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import records
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.workload import Topic
from tests.memsource.contract.outage import killed


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class KafkaHarness:
    """A topic with one partition on ``server``, which is killed in an outage."""

    wrong_target = "no topic"

    def __init__(self, topic: Topic, can: Collection[PublisherAbility], server: KafkaServer | None = None) -> None:
        self.can = can
        self.target = topic.name
        self._topic, self._server = topic, server

    def publisher(self, name: str = "one") -> Publisher:
        # The name is for brokers that deduplicate.
        return KafkaPublisher({"bootstrap.servers": self._topic.url, "message.timeout.ms": 2_000})

    async def visible(self) -> Sequence[Visible]:
        found = await run_sync(records, self._topic)
        return [Visible(one.key(), one.value(), dict(READER.headers(one))) for one in found]

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]:
        return killed(self._server)


ON_THE_MOCK: tuple[PublisherAbility, ...] = ("targets",)
OUTAGE: tuple[PublisherAbility, ...] = ("outage",)


@pytest.mark.anyio
@pytest.mark.parametrize("check", publisher_checks(ON_THE_MOCK), ids=lambda check: check.__name__)
async def test_the_contract_holds_on_the_mock_cluster(check: PublisherCheck, cluster: MockCluster, name: str) -> None:
    cluster.create(name, 1)
    harness: PublisherHarness = KafkaHarness(Topic(cluster.url, name, 1), ON_THE_MOCK)
    await check(harness)


@pytest.mark.anyio
@pytest.mark.slow
@pytest.mark.parametrize("check", publisher_checks(ON_THE_MOCK), ids=lambda check: check.__name__)
async def test_the_contract_holds_on_a_broker(check: PublisherCheck, topic: MakeTopic) -> None:
    await check(KafkaHarness(topic(partitions=1), ON_THE_MOCK))


@pytest.mark.anyio
async def test_a_consumer_publishes_each_message_in_the_order_of_its_key(cluster: MockCluster, name: str) -> None:
    cluster.create(name, 1)
    harness = KafkaHarness(Topic(cluster.url, name, 1), ())
    keys = [f"key {number % 7}" for number in range(100)]
    broker = published(*keys)
    source = MemorySource(broker)
    source.finish()

    async def handler(message: Message) -> None:
        await message.publish(name, message.value, key=message.key)

    with anyio.fail_after(60):
        await consumer_of(source, handler, publisher=harness.publisher()).run()
    assert broker.unfinished == 0
    visible = await harness.visible()
    assert len(visible) == 100
    for key in set(keys):
        numbers = [int(one.value or b"") for one in visible if one.key == key.encode()]
        assert numbers == [number for number, other in enumerate(keys) if other == key]


async def reports_of(publisher: Publisher, *outputs: Output) -> dict[int, Exception | None]:
    """Publish outputs in one call, and return their errors by position."""
    found: dict[int, Exception | None] = {}

    def report(output: Output, error: Exception | None) -> None:
        assert output.position not in found
        found[output.position] = error

    with anyio.fail_after(60):
        await publisher.publish(outputs, report)
    return found


@pytest.mark.anyio
async def test_an_output_above_the_limit_of_its_topic_fails_alone(topic: MakeTopic) -> None:
    made = topic(config={"max.message.bytes": "10000"})
    publisher = KafkaPublisher({"bootstrap.servers": made.url, "linger.ms": 100})
    await publisher.open()
    # Together the small outputs are above the limit too.
    outputs = [output_to(made.name, position, value=bytes(2_000)) for position in range(20)]
    outputs[7].value = bytes(20_000)
    found = await reports_of(publisher, *outputs)
    await publisher.aclose()
    refused = found.pop(7)
    assert found == dict.fromkeys(found) and len(found) == 19
    assert isinstance(refused, SourceError) and not refused.retryable
    assert "MSG_SIZE_TOO_LARGE" in str(refused)
    assert len(await run_sync(records, made)) == 19


@pytest.mark.anyio
async def test_an_output_without_a_key_to_a_compacted_topic_fails_alone(topic: MakeTopic) -> None:
    made = topic(config={"cleanup.policy": "compact"})
    publisher = KafkaPublisher({"bootstrap.servers": made.url, "linger.ms": 100})
    await publisher.open()
    outputs = [output_to(made.name, position) for position in range(10)]
    outputs[3].key = None
    found = await reports_of(publisher, *outputs)
    await publisher.aclose()
    refused = found.pop(3)
    assert found == dict.fromkeys(found) and len(found) == 9
    assert isinstance(refused, SourceError) and not refused.retryable


@pytest.mark.anyio
async def test_an_output_above_the_default_limit_of_the_client_is_written_if_the_topic_allows_it(
    topic: MakeTopic,
) -> None:
    made = topic(config={"max.message.bytes": "3000000"})
    publisher = KafkaPublisher({"bootstrap.servers": made.url})
    await publisher.open()
    assert await reports_of(publisher, output_to(made.name, 1, value=bytes(2_000_000))) == {1: None}
    await publisher.aclose()


@pytest.fixture
def private(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker that the test may kill."""
    with KafkaServer() as server:
        yield server


@pytest.mark.anyio
@pytest.mark.slow
async def test_an_outage_of_a_broker_is_retryable(private: KafkaServer) -> None:
    (check,) = set(publisher_checks(OUTAGE)) - set(publisher_checks(()))
    made = Topic(private.url, "outputs", 1)
    made.create()
    await check(KafkaHarness(made, OUTAGE, private))


def test_the_settings_of_a_producer_pass_unchanged() -> None:
    given = {
        "bootstrap.servers": "localhost:9092",
        "client.id": "billing",
        "compression.type": "zstd",
        "linger.ms": 20,
        "partitioner": "murmur2_random",
    }
    safe = {"enable.idempotence": True, "acks": "all", "message.timeout.ms": 10_000}
    assert publisher_settings(given) == given | safe
    assert publisher_settings(given | {"delivery.timeout.ms": 500}) == given | {
        "enable.idempotence": True,
        "acks": "all",
        "delivery.timeout.ms": 500,
    }


def test_the_settings_of_a_consumer_are_omitted() -> None:
    settings = publisher_settings({"bootstrap.servers": "b:1", "group.id": "g", "auto.offset.reset": "earliest"})
    assert settings.keys() == {"bootstrap.servers", "enable.idempotence", "acks", "message.timeout.ms"}


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("enable.idempotence", False, "enable.idempotence=False: retries could write outputs twice or out of order"),
        ("enable.idempotence", "false", "enable.idempotence='false'"),
        ("acks", 1, "acks=1: outputs must survive a lost broker; set 'all', or leave it out"),
        ("request.required.acks", 0, "request.required.acks=0"),
        ("delivery.report.only.error", True, "delivery.report.only.error=True: the confirmations of outputs would be"),
        ("transactional.id", "mine", "transactional.id='mine': the publisher sends outputs without transactions"),
    ],
)
def test_settings_that_lose_or_repeat_outputs_are_refused(setting: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        KafkaPublisher({"bootstrap.servers": "b:1", setting: value})
    assert str(error.value).startswith(said)


@pytest.mark.anyio
async def test_an_output_waits_after_another_consumer_has_closed_the_publisher(cluster: MockCluster, name: str) -> None:
    cluster.create(name, 1)
    harness = KafkaHarness(Topic(cluster.url, name, 1), ())
    publisher = harness.publisher()
    await publisher.open()
    await publisher.aclose()
    with pytest.raises(SourceError, match="pass each consumer a publisher of its own") as error:
        await publisher.publish([output_to(name, 1)], lambda output, error: None)
    assert error.value.retryable


def test_a_confirmation_may_start_a_further_worker_on_a_plain_loop(cluster: MockCluster, name: str) -> None:
    cluster.create(name, 1)
    broker = published("a", "a")
    ended: list[int] = []

    async def handler(message: Message) -> None:
        if message.key == b"b":
            # The only worker runs while the broker confirms the output, so the next message needs another worker.
            await until(lambda: 1 in ended)
        elif message.position == 0:
            publish(broker, ["b"])
            await message.publish(name, b"an output")
        ended.append(message.position)

    async def consume() -> None:
        publisher = KafkaPublisher({"bootstrap.servers": cluster.url, "linger.ms": 300})
        async with started(consumer_of(MemorySource(broker), handler, publisher=publisher)) as run:
            await until(lambda: broker.unfinished == 0)
            assert await run.stop() is None

    # Unlike ``anyio.run``, the run of asyncio gives callbacks of the loop no context by which anyio finds the loop.
    asyncio.run(consume())
    assert ended == [0, 1, 2]


def test_settings_as_keyword_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'KafkaPublisher\(\{"bootstrap.servers": …\}\)$'):
        KafkaPublisher(bootstrap_servers="b:1")  # type: ignore[call-arg]
