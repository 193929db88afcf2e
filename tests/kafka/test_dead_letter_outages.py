"""Dead letters on a real broker that hangs or dies, and the end of the client."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from confluent_kafka import KafkaError, KafkaException, Producer

import lanes
from lanes_kafka import KafkaDeadLetters, KafkaSource, read_dead_letter
from lanes_kafka.dead_letters import producer
from memsource import MemoryBroker, MemorySource
from tests.components import KafkaServer
from tests.fakes.dead_letters import dead_letter
from tests.kafka.conftest import MakeTopic
from tests.kafka.dead_letters import config_of, confirmed, opened, stored
from tests.kafka.workload import produce, until

pytestmark = pytest.mark.anyio

SECRET = "canary5e1f"


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


only_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, "; create this topic again"),
        (KafkaError._UNKNOWN_TOPIC, "; create this topic again"),
        (KafkaError._MSG_TIMED_OUT, "; check that the broker runs and has this topic"),
    ],
)
def test_a_failed_write_names_the_remedy_for_its_error(code: int, remedy: str) -> None:
    failure = KafkaDeadLetters({"bootstrap.servers": "127.0.0.1:1"}, "dead")._failure(KafkaError(code))
    assert str(failure).endswith(remedy) and failure.retryable


# --- outages


@pytest.fixture(scope="module")
def private(kafka_prepared: None) -> Iterator[KafkaServer]:
    """A broker that tests of this module may pause and kill."""
    with KafkaServer() as server:
        yield server


@pytest.mark.slow
async def test_a_broker_that_hangs_fails_the_write_and_the_next_try_is_confirmed(
    private: KafkaServer, topic: MakeTopic
) -> None:
    dead = topic(on=private)
    sent = dead_letter()
    async with opened(config_of(dead, **{"message.timeout.ms": 2_000}), dead.name) as target:
        await confirmed(target, dead_letter())
        private.pause()
        try:
            with pytest.raises(lanes.SourceError, match=r"not confirmed by .*_MSG_TIMED_OUT") as failed:
                await target.put(sent)
        finally:
            private.resume()
        assert failed.value.retryable
        await confirmed(target, sent)
    # The broker may have stored the first copy without a confirmation, so two copies are possible.
    assert {one.id for one in await stored(dead)} >= {sent.id}


@pytest.mark.slow
@only_asyncio
async def test_a_dead_letter_survives_a_killed_broker(private: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=private)
    sent = dead_letter()
    async with opened(config_of(dead, **{"message.timeout.ms": 30_000}), dead.name) as target:
        await confirmed(target, dead_letter())
        await run_sync(private.kill)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(target.put, sent)
            tasks.start_soon(run_sync, private.start)
    assert sent in await stored(dead)


@pytest.mark.slow
async def test_a_dead_letter_outage_stops_only_its_lane(private: KafkaServer, topic: MakeTopic) -> None:
    """While the broker of dead letters hangs, the lane of the failed message waits, and other lanes continue."""
    dead = topic(on=private)
    broker = MemoryBroker()
    source = MemorySource(broker)
    handled: list[int] = []

    async def handler(message: lanes.Message) -> None:
        if message.value == b"poison":
            raise lanes.Term("poison")
        handled.append(message.position)

    target = KafkaDeadLetters(config_of(dead, **{"message.timeout.ms": 2_000}), dead.name)
    consumer = lanes.Consumer(source, handler, dead_letters=target)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        with anyio.fail_after(30):
            await until(lambda: consumer.ready)
        private.pause()
        try:
            broker.publish(b"poison", key="a")
            broker.publish(b"behind it", key="a")
            for number in range(50):
                broker.publish(b"fine", key=f"k{number}")
            with anyio.fail_after(30):
                await until(lambda: len(handled) == 50 and consumer.status().parking == 1)
            assert consumer.status().dead_lettered == 0
        finally:
            private.resume()
        with anyio.fail_after(30):
            await until(lambda: len(handled) == 51 and consumer.status().dead_lettered == 1)
        consumer.stop()
    (parked, *copies) = await stored(dead)
    assert (parked.value, parked.key, parked.error_type) == (b"poison", b"a", "Term")
    assert {one.id for one in copies} <= {parked.id}


@pytest.mark.slow
@only_asyncio
async def test_a_cancelled_write_does_not_affect_the_next_one(private: KafkaServer, topic: MakeTopic) -> None:
    dead = topic(on=private)
    async with opened(config_of(dead, **{"message.timeout.ms": 3_000}), dead.name) as target:
        await confirmed(target, dead_letter())
        private.pause()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(target.put, dead_letter())
                await until(lambda: target._producer._producer is not None and len(target._producer._producer) > 0)
                tasks.cancel_scope.cancel()
        finally:
            private.resume()
        sent = dead_letter()
        with anyio.fail_after(20):
            await target.put(sent)
    assert sent in await stored(dead)


# --- the client


def lanes_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lanes-kafka")]


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0


@pytest.mark.slow
async def test_closed_dead_letters_leave_no_thread_and_no_descriptor(topic: MakeTopic) -> None:
    dead = topic()
    async with opened(config_of(dead), dead.name) as target:
        await target.put(dead_letter())
    before, threads = open_files(), len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 0
    for _ in range(3):
        async with opened(config_of(dead), dead.name) as target:
            await target.put(dead_letter())
            assert lanes_threads() == ["lanes-kafka-producer"]
        await target.aclose()
        assert lanes_threads() == []
    with anyio.fail_after(10):
        await until(lambda: open_files() <= before)
        await until(lambda: not threads or len(os.listdir("/proc/self/task")) <= threads)


@only_asyncio
async def test_a_failed_open_leaves_no_thread(topic: MakeTopic) -> None:
    there = topic()
    with pytest.raises(lanes.ConfigError):
        await KafkaDeadLetters(config_of(there), f"{there.name}-not").open()
    assert lanes_threads() == []


@pytest.mark.slow
@only_asyncio
async def test_a_cancelled_open_ends_at_once(private: KafkaServer) -> None:
    private.pause()
    try:
        with anyio.fail_after(5):
            with anyio.move_on_after(0.3):
                await KafkaDeadLetters({"bootstrap.servers": private.url}, "dead").open()
    finally:
        private.resume()
    assert lanes_threads() == []


@only_asyncio
async def test_a_target_may_be_opened_again(topic: MakeTopic) -> None:
    dead = topic()
    target = KafkaDeadLetters(config_of(dead), dead.name)
    for _ in range(2):
        await target.open()
        await target.put(dead_letter())
        await target.aclose()
    assert dead.ends() == [2]
    with pytest.raises(lanes.SourceError, match="not opened, or already closed"):
        await target.put(dead_letter())


@only_asyncio
async def test_close_waits_for_unconfirmed_dead_letters(topic: MakeTopic) -> None:
    dead = topic()
    target = KafkaDeadLetters(config_of(dead), dead.name)
    await target.open()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(target.put, dead_letter())
        await until(lambda: target._producer._producer is not None and len(target._producer._producer) > 0)
        await target.aclose()
    assert dead.ends() == [20]


@pytest.mark.slow
@only_asyncio
async def test_close_fails_unconfirmed_dead_letters(
    private: KafkaServer, topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = topic(on=private)
    target = KafkaDeadLetters(config_of(dead), dead.name)
    await target.open()
    await confirmed(target, dead_letter())
    private.pause()
    failed: list[lanes.SourceError] = []

    async def put() -> None:
        with pytest.raises(lanes.SourceError) as one:
            await target.put(dead_letter())
        failed.append(one.value)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(put)
            await until(lambda: target._producer._producer is not None and len(target._producer._producer) > 0)
            with anyio.fail_after(5):
                await target._producer.aclose(0.2)
    finally:
        private.resume()
    assert [one.retryable for one in failed] == [True]
    assert "_PURGE" in str(failed[0])


@only_asyncio
async def test_a_producer_that_has_failed_for_good_is_rebuilt(
    topic: MakeTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead = topic()
    made: list[Any] = []

    class Fails:
        """A producer that fails for good at its first record, as after an unknown sequence number."""

        def __init__(self, settings: dict[str, Any]) -> None:
            self._inner = Producer(settings)
            made.append(self)

        def produce(self, *arguments: Any, **more: Any) -> None:
            if made[0] is self:
                raise KafkaException(KafkaError(KafkaError._FATAL, "out of order", True))
            self._inner.produce(*arguments, **more)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __len__(self) -> int:
            return len(self._inner)

    monkeypatch.setattr(producer, "Producer", Fails)
    sent = dead_letter()
    with caplog.at_level(logging.WARNING):
        async with opened(config_of(dead), dead.name) as target:
            with pytest.raises(lanes.SourceError, match="_FATAL") as failed:
                await target.put(sent)
            assert failed.value.retryable
            await confirmed(target, sent)
            assert len(made) == 2
    assert await stored(dead) == [sent]
    assert "is rebuilt" in caplog.text


# --- with a source


@only_asyncio
async def test_dead_letters_of_a_source_are_read_back_by_another(topic: MakeTopic) -> None:
    orders, dead = topic(partitions=2), topic(partitions=2)
    sent = produce(
        orders, 4, keys=[b"a", None], value=lambda n: None if n == 0 else b"poison", headers=[("h", None), ("h", b"")]
    )

    async def fail(message: lanes.Message) -> None:
        raise ValueError("no such customer")

    retry = lanes.Retry(attempts=2, backoff=0.0)
    consumer = lanes.Consumer(
        KafkaSource(config_of(orders), topics=orders.name),
        fail,
        dead_letters=KafkaDeadLetters(config_of(orders), dead.name),
        settings=lanes.Settings(retry=retry),
    )
    found: list[lanes.DeadLetter] = []

    async def read(message: lanes.Message) -> None:
        assert isinstance(message.data, lanes.DeadLetter)
        found.append(message.data)

    reader = lanes.Consumer(
        KafkaSource(config_of(dead), topics=dead.name), read, decode=read_dead_letter, settings=lanes.Settings()
    )
    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.run)
            tasks.start_soon(reader.run)
            await until(lambda: len(found) == 4)
            consumer.stop()
            reader.stop()
    assert {(one.source, one.partition, one.position) for one in found} == {
        (orders.name, one.partition, one.offset) for one in sent
    }
    (tombstone,) = [one for one in found if one.tombstone]
    assert (tombstone.key, tombstone.record_key, tombstone.value) == (b"a", b"a", b"")
    for one in found:
        assert (list(one.headers), one.null_headers) == ([("h", b""), ("h", b"")], (0,))
        assert (one.attempts, one.error_type, one.error_text) == (2, "ValueError", "no such customer")
        assert one.timestamp is not None
        assert 0 <= one.time - one.timestamp < 60
    assert len({one.id for one in found}) == 4
