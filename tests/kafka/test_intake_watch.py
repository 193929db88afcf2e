"""A broker that accepts fetches and never answers them makes the consumer unhealthy."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import Producer

import lanes
from lanes_kafka import KafkaSource
from lanes_kafka.client import lag
from tests.kafka.conftest import MakeTopic
from tests.kafka.silent_fetches import SilentFetches
from tests.kafka.workload import QUIET, produce, until

pytestmark = pytest.mark.anyio

UNHEALTHY_AFTER = 2.0


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_fetches_without_answers_make_the_consumer_unhealthy(
    protocol: str, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lag, "ASK_AFTER", 0.5)
    caplog.set_level(logging.INFO, "lanes")
    orders = topic(2)
    produce(orders, 5, partition=0)
    handled: list[int] = []

    async def handle(message: lanes.Message) -> None:
        handled.append(message.position)

    async with SilentFetches(orders.url).open() as proxy:
        config = {
            "bootstrap.servers": proxy.url,
            "group.id": f"g-{orders.name}",
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            # A request without an answer for this time is an error of the client.
            "socket.timeout.ms": 1_000,
        }
        settings = lanes.Settings(unhealthy_after=UNHEALTHY_AFTER, commit_interval=0.05)
        consumer = lanes.Consumer(KafkaSource(config, topics=orders.name), handle, settings=settings)
        async with consumer:
            with anyio.fail_after(40):
                await until(lambda: len(handled) == 5)
                # Without messages at the broker, silence is no fault.
                await anyio.sleep(1.5 * UNHEALTHY_AFTER)
                assert consumer.health().reasons == ()
                proxy.silent = True
                # An answer with messages may be under way.
                await anyio.sleep(1.0)
                await run_sync(lambda: produce(orders, 7, partition=1))
                began = anyio.current_time()
                await until(lambda: not consumer.healthy)
                assert anyio.current_time() - began > UNHEALTHY_AFTER
                found: Sequence[str] = ()

                def names_the_error() -> bool:
                    nonlocal found
                    # On a busy machine, the health may wait for the next answer about the end of the log.
                    found = consumer.health().reasons
                    return "last error" in "".join(found)

                await until(names_the_error)
                (reason,) = found
                assert reason.startswith(f"{orders.name}/1 delivers nothing for ")
                assert (
                    "although 7 messages wait at the broker and the buffer has room; the last error of the "
                    "client, " in reason
                )
                assert " s ago: REQTMOUT " in reason and "Timed out 1 in-flight" in reason
                assert consumer.status().partitions[f"{orders.name}/1"].lag == 7
                assert proxy.swallowed and len(handled) == 5
                proxy.speak()
                await until(lambda: len(handled) == 12)
                await until(lambda: consumer.health().reasons == ())
    lines = [each.getMessage() for each in caplog.records if "delivers" in each.getMessage()]
    assert [f"{orders.name}/1 delivers {what}" in line for line, what in zip(lines, ("nothing", "again"), strict=True)]
    assert orders.committed(f"g-{orders.name}") == [5, 7]


async def test_an_open_transaction_leaves_the_consumer_healthy(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "ASK_AFTER", 0.5)
    orders = topic()
    produce(orders, 5)
    handled: list[int] = []

    async def handle(message: lanes.Message) -> None:
        handled.append(message.position)

    def write(count: int) -> None:
        for _ in range(count):
            producer.produce(orders.name, b"v", partition=0)
        assert not producer.flush(20)

    producer = Producer({**QUIET, "bootstrap.servers": orders.url, "transactional.id": orders.name})
    await run_sync(producer.init_transactions, 20)
    config = {**QUIET, "bootstrap.servers": orders.url, "group.id": f"g-{orders.name}", "auto.offset.reset": "earliest"}
    settings = lanes.Settings(unhealthy_after=UNHEALTHY_AFTER, commit_interval=0.05)
    consumer = lanes.Consumer(KafkaSource(config, topics=orders.name), handle, settings=settings)
    async with consumer:
        with anyio.fail_after(40):
            await until(lambda: len(handled) == 5)
            producer.begin_transaction()
            for _ in range(14):
                await run_sync(write, 1)
                await anyio.sleep(0.5)
                assert consumer.health().reasons == ()
            await until(lambda: consumer.status().partitions[f"{orders.name}/0"].lag == 14)
            await run_sync(producer.commit_transaction, 20)
            await until(lambda: len(handled) == 19)
            await until(lambda: consumer.status().partitions[f"{orders.name}/0"].lag == 0)
            assert consumer.health().reasons == ()


async def test_a_paused_or_full_consumer_is_not_silent(topic: MakeTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag, "ASK_AFTER", 0.2)
    orders, done, handled = topic(), anyio.Event(), 0
    produce(orders, 30)

    async def handle(message: lanes.Message) -> None:
        nonlocal handled
        handled += 1
        await done.wait()

    config = {**QUIET, "bootstrap.servers": orders.url, "group.id": f"g-{orders.name}", "auto.offset.reset": "earliest"}
    settings = lanes.Settings(unhealthy_after=UNHEALTHY_AFTER, concurrency=5, max_in_flight=10)
    consumer = lanes.Consumer(KafkaSource(config, topics=orders.name), handle, settings=settings)
    async with consumer:
        with anyio.fail_after(30):
            await until(lambda: handled == 5)
            await anyio.sleep(1.5 * UNHEALTHY_AFTER)
            assert not [reason for reason in consumer.health().reasons if "delivers" in reason]
            consumer.pause()
            done.set()
            await until(lambda: consumer.status().in_flight == 0)
            await anyio.sleep(1.5 * UNHEALTHY_AFTER)
            assert consumer.status().partitions[f"{orders.name}/0"].lag == 20
            assert consumer.health().reasons == ()
            consumer.resume()
            await until(lambda: handled == 30)
