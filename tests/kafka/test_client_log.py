"""The lines of librdkafka go to a logger, repeated lines are counted, and a wrong address fails within 10 s."""

from __future__ import annotations

import logging
import time
from typing import Any

import anyio
import pytest
from confluent_kafka.admin import AdminClient

import lanes
from lanes_kafka import KafkaDeadLetters, KafkaSource
from lanes_kafka.client_log import ClientLog
from lanes_kafka.config import client_config
from lanes_kafka.dead_letters.box import KafkaDeadLetterBox
from lanes_kafka.dead_letters.producer import producer_settings
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce, until

NOWHERE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "billing"}
LOGGER = "lanes.kafka.client"
TEMPLATE = "%s [%s] %s"


async def handler(message: lanes.Message) -> None:
    """A handler that is never called."""


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(each.levelname, each.getMessage()) for each in caplog.records if each.name == LOGGER]


def test_the_first_line_is_logged_and_repeated_lines_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 5.0
    log = ClientLog("kafka billing/orders", lambda: now, {"sasl.password": "hunter2"})
    for number in range(241):
        client = f"rdkafka#consumer-{number % 2}"
        log.log(40, TEMPLATE, "FAIL", client, f"a:1/2: Connect failed: hunter2\n (after {number}ms in state CONNECT)")
        log.log(30, TEMPLATE, "SESSTMOUT", client, f"timed out after {number} ms")
    start = "kafka billing/orders: "
    # The name of the client would only repeat the owner, or call a consumer a producer.
    fail = "FAIL a:1/2: Connect failed: …\\n (after {}ms in state CONNECT)"
    timeout = "SESSTMOUT timed out after {} ms"
    first = [("WARNING", start + fail.format(0)), ("WARNING", start + timeout.format(0))]
    assert lines(caplog) == first
    log.due()
    assert lines(caplog) == first
    now = 15.0
    log.due()
    assert lines(caplog)[2:] == [
        ("WARNING", f"{start}240 more line(s) in 10.0 s, the last: {each.format(240)}") for each in (fail, timeout)
    ]
    log.end()
    assert len(lines(caplog)) == 4
    log.log(40, TEMPLATE, "FAIL", "rdkafka#consumer-1", "b:1/3: Connect failed")
    assert len(lines(caplog)) == 5
    assert "hunter2" not in caplog.text


def test_lines_at_debug_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog("kafka billing/orders", lambda: 5.0, {})
    log.log(10, TEMPLATE, "STATE", "rdkafka#consumer-1", "up")
    assert lines(caplog) == []
    caplog.set_level(logging.DEBUG, LOGGER)
    for _ in range(3):
        log.log(10, TEMPLATE, "STATE", "rdkafka#consumer-1", "up")
    assert [level for level, _ in lines(caplog)] == ["DEBUG"] * 3


@pytest.mark.anyio
async def test_a_wrong_address_gives_few_lines_and_an_error_in_time(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_kafka.client.thread.OPEN_TIMEOUT", 1.0)
    with anyio.fail_after(30), pytest.raises(lanes.SourceError, match=r"at 127\.0\.0\.1:9 within 1 s .*start one"):
        await lanes.run(KafkaSource(NOWHERE, topics="orders"), handler)
    told = [text for _, text in lines(caplog)]
    assert len(told) == 2
    assert told[0].startswith("kafka billing/orders: FAIL ") and " more line(s) in " in told[1]
    assert capfd.readouterr() == ("", "")


@pytest.mark.anyio
@pytest.mark.parametrize("make", [KafkaDeadLetters, KafkaDeadLetterBox])
async def test_dead_letters_at_a_wrong_address_print_nothing(
    make: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_kafka.broker.TOPIC_DEADLINE", 1.0)
    with pytest.raises(lanes.SourceError, match="within 1 s"):
        await make(NOWHERE, "dead").open()
    told = [text for _, text in lines(caplog)]
    assert len(told) == 2
    assert told[0].startswith("dead letters ") and " more line(s) in " in told[1]
    assert capfd.readouterr() == ("", "")


def test_the_users_logger_stays() -> None:
    logger = logging.getLogger("team")
    log = ClientLog("kafka billing/orders", time.monotonic, {})
    given = NOWHERE | {"logger": logger}
    assert log.added_to(client_config(given).admin)["logger"] is logger
    assert log.added_to(producer_settings(given))["logger"] is logger
    assert log.added_to(NOWHERE)["logger"] is log


def test_the_client_calls_the_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    log = ClientLog("kafka billing/orders", time.monotonic, {})
    # The client warns about a setting of another kind of client.
    admin = AdminClient(log.added_to({"bootstrap.servers": "127.0.0.1:9", "session.timeout.ms": 6_000}))
    admin.poll(0.1)
    caplog.set_level(logging.DEBUG, LOGGER)
    assert any("session.timeout.ms" in text for _, text in lines(caplog))
    assert capfd.readouterr() == ("", "")


@pytest.mark.anyio
async def test_a_working_client_writes_no_line(
    topic: MakeTopic, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    orders, dead = topic(), topic()
    produce(orders, 3)
    config = {"bootstrap.servers": orders.url, "group.id": f"g-{orders.name}"}

    async def failing(message: lanes.Message) -> None:
        raise lanes.Term("no such card")

    consumer = lanes.Consumer(
        KafkaSource(config, topics=orders.name), failing, dead_letters=KafkaDeadLetters(config, dead.name)
    )
    box = KafkaDeadLetterBox(config, dead.name)
    with caplog.at_level(logging.INFO, LOGGER), anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.run)
            await until(lambda: dead.ends() == [3])
            consumer.stop()
        await box.open()
        assert len(await box.ids()) == 3
        await box.aclose()
    assert lines(caplog) == []
    assert capfd.readouterr() == ("", "")
