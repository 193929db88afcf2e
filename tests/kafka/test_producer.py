"""The confirmed producer: calls in its thread, and the settings it is made with."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import lanes
from lanes import ConfigError
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
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
        ({"bootstrap.servers": "a:9092", "acks": 1}, "acks=1: dead letters must outlive a broker"),
        ({"bootstrap.servers": "a:9092", "request.required.acks": "0"}, "request.required.acks='0': "),
        ({"bootstrap.servers": "a:9092", "default.topic.config": {"acks": 0}}, "acks=0: "),
        ("bootstrap.servers=a", "config is of type str"),
    ],
)
def test_settings_that_would_lose_dead_letters_are_refused(config: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        producer_settings(config)
    assert str(refused.value).startswith(said)
