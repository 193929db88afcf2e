"""Settings and brokers that contradict transactions are refused, with the remedy."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import lanes
from lanes.errors import ConfigError, SourceError
from lanes_jetstream import JetStreamPublisher
from lanes_kafka import KafkaPublisher, KafkaSource, KafkaTransactions
from memsource.memory.publisher import MemoryPublisher
from tests.components import KafkaServer
from tests.kafka.conftest import MakeTopic
from tests.kafka.mock_cluster import mock_cluster
from tests.kafka.workload import Topic

INIT_PRODUCER_ID = 22
NOWHERE: dict[str, Any] = {"bootstrap.servers": "b:1", "group.id": "g"}


async def nothing(message: lanes.Message) -> None:
    """Do nothing."""


def consumer(publisher: Any, source: KafkaSource | None = None) -> lanes.Consumer:
    source = source or KafkaSource(NOWHERE, topics="in", transactions=KafkaTransactions("billing"))
    return lanes.Consumer(source, nothing, publisher=publisher)


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({}, {"commit_metadata": False}, "transactions=… with commit_metadata=False: the outputs of a message above"),
        ({"isolation.level": "read_uncommitted"}, {}, "transactions=… with isolation.level='read_uncommitted': the"),
        ({"transactional.id": "mine"}, {}, "transactional.id='mine': the source makes this id from KafkaTransactions"),
        ({}, {"transactions": KafkaTransactions()}, "transactions=KafkaTransactions(): two processes with one"),
        ({}, {"transactions": "billing"}, "transactions is a str: pass KafkaTransactions"),
    ],
)
def test_a_source_refuses_settings_without_transactions(
    settings: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        KafkaSource(NOWHERE | settings, topics="in", **{"transactions": KafkaTransactions("billing"), **options})
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": ""}, "KafkaTransactions(name=''): pass a printable text"),
        ({"name": 1}, "KafkaTransactions(name=1)"),
        ({"every": 0}, "KafkaTransactions(every=0): pass 0.001 to 5 seconds"),
        ({"every": 60}, "KafkaTransactions(every=60)"),
        ({"every": "1s"}, "KafkaTransactions(every='1s')"),
        ({"messages": 0}, "KafkaTransactions(messages=…)=0: must be a whole number, 1 or more"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        KafkaTransactions(**options)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("publisher", "passed"),
    [
        (None, "no publisher"),
        (JetStreamPublisher("nats://localhost:4222", name="billing"), "JetStreamPublisher"),
        (MemoryPublisher(), "MemoryPublisher"),
    ],
)
def test_a_publisher_of_another_broker_is_refused(publisher: Any, passed: str) -> None:
    with pytest.raises(ConfigError, match=f"transactions=… with {passed}: a transaction writes only to the cluster"):
        consumer(publisher)


def test_idempotence_stays_on() -> None:
    with pytest.raises(ConfigError, match=r"enable.idempotence=False: retries could write outputs twice"):
        consumer(KafkaPublisher({"bootstrap.servers": "b:1", "enable.idempotence": False}))


@pytest.mark.parametrize(
    ("name", "instance", "wanted"),
    [("billing", None, "billing"), ("billing", "pod-3", "billing-pod-3"), (None, "pod-3", "g-pod-3")],
)
def test_each_process_has_one_transactional_id(name: str | None, instance: str | None, wanted: str) -> None:
    settings = NOWHERE if instance is None else {**NOWHERE, "group.instance.id": instance}
    source = KafkaSource(settings, topics="in", transactions=KafkaTransactions(name))
    transacted = source.transacted(KafkaPublisher({"bootstrap.servers": "b:1"}))
    assert transacted is not None and repr(transacted.publisher) == f"<TransactionalPublisher {wanted!r}>"


def test_a_source_without_transactions_leaves_the_publisher_alone() -> None:
    assert KafkaSource(NOWHERE, topics="in").transacted(None) is None


@pytest.mark.anyio
async def test_a_publisher_of_another_cluster_is_refused(topic: MakeTopic, kafka: KafkaServer) -> None:
    made = topic()
    source = KafkaSource(made.config(), topics=made.name, transactions=KafkaTransactions("other cluster"))
    with mock_cluster() as other:
        refused = consumer(KafkaPublisher({"bootstrap.servers": other.url, "log_level": 0}), source)
        with (
            anyio.fail_after(60),
            pytest.raises(ConfigError, match="with a publisher of another cluster, because the source"),
        ):
            await refused.run()


@pytest.mark.anyio
async def test_a_timeout_above_the_limit_of_the_broker_is_refused(topic: MakeTopic) -> None:
    made = topic()
    source = KafkaSource(made.config(), topics=made.name, transactions=KafkaTransactions("long timeout"))
    publisher = KafkaPublisher({"bootstrap.servers": made.url, "log_level": 0, "transaction.timeout.ms": 2_000_000})
    with anyio.fail_after(60), pytest.raises(ConfigError, match=r"transaction.timeout.ms=2000000: the broker refuses"):
        await consumer(publisher, source).run()


@pytest.mark.anyio
async def test_a_broker_without_transactions_is_refused() -> None:
    with mock_cluster() as old:
        old.create("in", 1)
        old.offer(INIT_PRODUCER_ID, -1, -1)
        settings = {"bootstrap.servers": old.url, "log_level": 0}
        source = KafkaSource({**settings, "group.id": "g"}, topics="in", transactions=KafkaTransactions("old broker"))
        refused = consumer(KafkaPublisher(settings), source)
        with (
            anyio.fail_after(60),
            pytest.raises(ConfigError, match=r"the broker is too old .*; use Kafka 2.5 or newer"),
        ):
            await refused.run()


@pytest.mark.anyio
async def test_no_broker_is_a_retryable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_kafka.transactions.performer.CLUSTER_TIMEOUT", 1.0)
    nowhere = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    source = KafkaSource({**nowhere, "group.id": "g"}, topics="in", transactions=KafkaTransactions("nobody"))
    with anyio.fail_after(60), pytest.raises(SourceError, match="check that a broker runs") as error:
        await consumer(KafkaPublisher(nowhere), source).run()
    assert error.value.retryable


@pytest.mark.anyio
async def test_a_broker_without_room_for_metadata_is_refused(kafka_prepared: None) -> None:
    with KafkaServer(properties={"offset.metadata.max.bytes": 10}) as server:
        made = Topic(server.url, "in", 1)
        made.create()
        source = KafkaSource(made.config(), topics="in", transactions=KafkaTransactions("no room"))
        with anyio.fail_after(60), pytest.raises(ConfigError, match=r"offset.metadata.max.bytes is too small"):
            await consumer(KafkaPublisher({"bootstrap.servers": server.url}), source).run()
