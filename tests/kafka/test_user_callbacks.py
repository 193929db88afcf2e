"""The source still calls the callbacks and the logger of the user's configuration."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.errors import LOG_EVERY, ErrorLog
from tests.conftest import KafkaFactory
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import QUIET, Topic, produce, until


@asynccontextmanager
async def running(topic: Topic, config: dict[str, Any], **source: Any) -> AsyncIterator[list[int]]:
    """A consumer with these settings; yields the handled positions."""
    whole = {"bootstrap.servers": topic.url, "group.id": f"g-{topic.name}", **config}
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        handled.append(message.position)

    settings = lanes.Settings(commit_interval=0.02)
    with anyio.fail_after(30):
        async with lanes.Consumer(KafkaSource(whole, topics=topic.name, **source), handler, settings=settings):
            yield handled


@pytest.mark.anyio
async def test_the_users_callbacks_are_called(topic: MakeTopic) -> None:
    orders = topic()
    produce(orders, 3)
    threads: set[str] = set()
    statistics: list[dict[str, Any]] = []
    errors: list[KafkaError] = []
    committed: list[int] = []

    def on_statistics(text: str) -> None:
        threads.add(threading.current_thread().name)
        statistics.append(json.loads(text))

    def on_error(error: KafkaError) -> None:
        threads.add(threading.current_thread().name)
        errors.append(error)

    def on_commit(error: KafkaError | None, partitions: list[Any]) -> None:
        threads.add(threading.current_thread().name)
        assert error is None
        committed.extend(each.offset for each in partitions)

    config = {
        **QUIET,
        "statistics.interval.ms": 50,
        "stats_cb": on_statistics,
        "error_cb": on_error,
        "on_commit": on_commit,
    }

    def make(final: dict[str, Any]) -> Consumer:
        # The client repeats this error while it loses a broker.
        final["error_cb"](KafkaError(KafkaError._TRANSPORT))
        return Consumer(final)

    async with running(orders, config, client=make) as handled:
        await until(lambda: handled == [0, 1, 2] and 3 in committed)
        await until(lambda: any(orders.name in each["topics"] for each in statistics))
    assert KafkaError._TRANSPORT in {each.code() for each in errors}
    assert threads == {"lanes-kafka"}
    # The dictionary of the team is unchanged.
    assert config["error_cb"] is on_error and config["on_commit"] is on_commit


@pytest.mark.anyio
async def test_the_users_logger_gets_the_log_of_the_client(topic: MakeTopic) -> None:
    orders = topic()
    produce(orders, 1)
    logger = logging.getLogger(f"team.{orders.name}")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    said: list[str] = []
    logger.addFilter(lambda record: said.append(record.getMessage()) or False)  # type: ignore[func-returns-value]
    async with running(orders, {"logger": logger, "debug": "cgrp,protocol", "log_level": 7}) as handled:
        await until(lambda: handled == [0])
        await until(lambda: any(f'Group "g-{orders.name}"' in line for line in said))
        # The client for topic ids logs too; without polls, its log lines would accumulate.
        before = sum("rdkafka#producer" in line for line in said)
        await until(lambda: sum("rdkafka#producer" in line for line in said) > before)


def test_a_storm_of_errors_is_logged_rarely_and_reported_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[int] = []
    now = 100.0
    errors = ErrorLog("kafka g", lambda: now, lambda error: told.append(error.code()), {})
    down, reset = KafkaError(KafkaError._ALL_BROKERS_DOWN, "1/1 down"), KafkaError(KafkaError._TRANSPORT, "reset")
    for _ in range(500):
        errors.on_error(down)
        errors.on_error(reset)
    assert told == [down.code(), reset.code()] * 500
    assert [record.getMessage() for record in caplog.records] == [
        "kafka g: _ALL_BROKERS_DOWN: 1/1 down",
        "kafka g: _TRANSPORT: reset",
    ]
    now += LOG_EVERY
    errors.on_error(reset)
    errors.on_error(reset)
    assert caplog.records[2].getMessage() == "kafka g: _TRANSPORT: reset (499 times more since)"
    now += LOG_EVERY
    errors.on_error(reset)
    assert caplog.records[3].getMessage() == "kafka g: _TRANSPORT: reset (1 times more since)"
    assert len(caplog.records) == 4


def test_an_outage_lasts_until_a_broker_answers() -> None:
    errors = ErrorLog("kafka g", lambda: 0.0, None, {})
    seen = [errors.down]
    errors.on_error(KafkaError(KafkaError._TRANSPORT))
    seen.append(errors.down)
    errors.on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    seen.append(errors.down)
    errors.answered()
    assert [*seen, errors.down] == [False, False, True, False]


def token(seconds: float) -> tuple[str, float]:
    """An unsigned token, as a test broker accepts it, and its expiry."""
    now = time.time()

    def part(content: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'sub': 'admin', 'iat': now, 'exp': now + 3_600})}.", now + seconds


@pytest.mark.anyio
@pytest.mark.slow
async def test_tokens_are_requested_and_renewed(fresh_kafka: KafkaFactory, topic: MakeTopic) -> None:
    login = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    server = fresh_kafka(
        warm=True,
        users={"admin": "secret"},
        properties={
            "listener.name.clients.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.clients.oauthbearer.sasl.jaas.config": f'{login} unsecuredLoginStringClaim_sub="admin";',
        },
    )
    orders = topic(on=server)
    produce(orders, 2)
    asked: list[str] = []

    def oauth(text: str) -> tuple[str, float]:
        asked.append(text)
        # A short lifetime makes each client renew its token repeatedly.
        return token(3.0)

    config = {
        **QUIET,
        "bootstrap.servers": server.url,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.config": "scope=orders",
        "oauth_cb": oauth,
    }
    async with running(orders, config) as handled:
        await until(lambda: handled == [0, 1])
        before = len(asked)
        assert before >= 2, "the consumer, and the client that asks about topics"
        await until(lambda: len(asked) >= before + 4)
    assert set(asked) == {"scope=orders"}
