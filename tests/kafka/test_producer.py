"""The producer of dead letters makes its calls in a thread of its own, with safe settings."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from confluent_kafka import KafkaError, KafkaException

import lanes
from lanes import ConfigError
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.dead_letters.wire import Record
from tests.kafka.reader import WITHIN

pytestmark = pytest.mark.anyio


async def test_a_call_that_raises_system_exit_fails_alone(name: str) -> None:
    def leave(wanted: Any) -> None:
        raise SystemExit(3)

    producer = ConfirmedProducer({}, name)
    producer.open()
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError, match=f"{name}: .*SystemExit"):
            await producer.call(leave)
        # Later calls still work.
        assert await producer.call(lambda wanted: 3) == 3
        await producer.aclose()


async def test_a_closed_producer_refuses_calls(name: str) -> None:
    producer = ConfirmedProducer({}, name)
    with pytest.raises(lanes.SourceError, match="not opened, or already closed"):
        await producer.call(lambda wanted: 3)
    producer.open()
    with anyio.fail_after(WITHIN):
        await producer.aclose()
        with pytest.raises(lanes.SourceError, match="not opened, or already closed"):
            await producer.call(lambda wanted: 3)


class FailingProducer:
    """A client that fails permanently at its first record, and drops the record.

    The class has the calls of a producer.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._on_error = settings["error_cb"]
        self._dropped: list[Any] = []

    def __len__(self) -> int:
        return len(self._dropped)

    def produce(self, topic: str, **record: Any) -> None:
        self._dropped.append(record["on_delivery"])

    def poll(self, timeout: float) -> int:
        if self._dropped:
            self._on_error(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "a gap in the numbers", fatal=True))
            self._dropped.pop()(KafkaError(KafkaError._PURGE_QUEUE), None)
        return 0

    def flush(self, timeout: float) -> int:
        return 0


async def test_a_dropped_record_names_the_failure_of_the_client(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_kafka.dead_letters.producer.Producer", FailingProducer)
    producer = ConfirmedProducer({}, name)
    producer.open()
    with anyio.fail_after(WITHIN):
        with pytest.raises(KafkaException) as failed:
            await producer.send("dead", Record(None, b"", []))
        await producer.aclose()
    assert failed.value.args[0].code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert failed.value.args[0].str() == "a gap in the numbers"


def test_a_consumers_dictionary_makes_producer_settings() -> None:
    given = {
        "bootstrap.servers": "one:9092",
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "on_commit": print,
        "stats_cb": print,
        "compression.type": "lz4",
        "sasl.password": "secret",
    }
    settings = producer_settings(given)
    assert settings.keys().isdisjoint({"group.id", "auto.offset.reset", "on_commit", "stats_cb"})
    assert (settings["compression.type"], settings["sasl.password"]) == ("lz4", "secret")
    assert (settings["enable.idempotence"], settings["acks"]) == (True, "all")
    assert given["group.id"] == "g"


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("acks", -1, "acks"),
        ("request.required.acks", "all", "acks"),
        ("linger.ms", 50, "linger.ms"),
        ("delivery.timeout.ms", 1_000, "message.timeout.ms"),
        ("topic.message.timeout.ms", 1_000, "message.timeout.ms"),
        ("message.max.bytes", 5_000, "message.max.bytes"),
        ("log_level", 3, "log_level"),
    ],
)
def test_producer_settings_of_the_user_win(name: str, value: object, ours: str) -> None:
    settings = producer_settings({"bootstrap.servers": "one:9092", name: value})
    assert settings[name] == value
    assert name == ours or ours not in settings


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "bootstrap.servers is missing"),
        ({"bootstrap.servers": ""}, "bootstrap.servers is missing"),
        ({"bootstrap.servers": "a:9092", "enable.idempotence": False}, "enable.idempotence=False: "),
        ({"bootstrap.servers": "a:9092", "enable.idempotence": "false"}, "enable.idempotence='false': "),
        ({"bootstrap.servers": "a:9092", "acks": 1}, "acks=1: dead letters must survive a lost broker"),
        ({"bootstrap.servers": "a:9092", "request.required.acks": "0"}, "request.required.acks='0': "),
        ({"bootstrap.servers": "a:9092", "default.topic.config": {"acks": 0}}, "acks=0: "),
        ("bootstrap.servers=a", "config is of type str"),
    ],
)
def test_settings_that_would_lose_dead_letters_are_refused(config: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        producer_settings(config)
    assert str(refused.value).startswith(said)
