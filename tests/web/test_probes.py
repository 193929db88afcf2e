"""The probes of a port: whether the process lives, whether it is ready, and what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from threading import Event
from typing import Any

import anyio
import pytest
from prometheus_client import CollectorRegistry

from lanes import Message, SourceError, Status
from lanes.history.writer import key_hash
from lanes.web.values import VERSION
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, acknowledge, consumer_of, published, started, until
from tests.web.conftest import Answer, Ports, ask

pytestmark = pytest.mark.anyio


async def asked(*args: Any, **options: Any) -> Answer:
    return await anyio.to_thread.run_sync(partial(ask, *args, **options))


async def until_answer(port: Any, path: str, status: int) -> Answer:
    """Ask until the answer has this status."""
    for _ in range(1_000):
        answer = await asked(port, path)
        if answer.status == status:
            return answer
        await anyio.sleep(0.02)
    raise AssertionError(f"{path} has not answered {status}")


async def until_status(port: Any, holds: Callable[[Any], object]) -> Any:
    """Ask until the status of the consumer fulfils a condition, and return the answer."""
    for _ in range(1_000):
        found = (await asked(port, "/status")).value
        if holds(found["status"]):
            return found
        await anyio.sleep(0.02)
    raise AssertionError("/status has not fulfilled the condition")


async def test_a_consumer_is_ready_from_the_answer_of_its_group_until_its_drain(ports: Ports) -> None:
    handler = Gated()
    consumer = consumer_of(MemorySource(published("a")), handler)
    port = ports.open(consumer)
    assert (await asked(port, "/live")).value == {"live": True, "reason": None}
    before = await asked(port, "/ready")
    assert (before.status, before.value["reason"]) == (503, "the group has not answered the consumer yet")
    async with started(consumer) as run:
        await until(lambda: handler.running)
        assert (await until_answer(port, "/ready", 200)).value == {"ready": True, "reason": None}
        consumer.stop()
        drains = await asked(port, "/ready")
        assert (drains.status, drains.value) == (503, {"ready": False, "reason": "the consumer drains"})
        assert (await asked(port, "/live")).status == 200
        assert (await until_answer(port, "/status", 200)).value["draining"] is True
        handler.let(0)
        assert await run.end() is None
    assert (await asked(port, "/ready")).status == 503
    assert (await asked(port, "/live")).status == 200


async def test_a_consumer_that_an_error_ended_is_not_live(ports: Ports) -> None:
    source = MemorySource(published("a"))
    source.fail("receive", SourceError("the password is hunter2"))
    consumer = consumer_of(source, acknowledge)
    port = ports.open(consumer)
    async with started(consumer) as run:
        assert isinstance(await run.end(), SourceError)
    live = await until_answer(port, "/live", 503)
    assert live.value == {"live": False, "reason": "the consumer was stopped by SourceError"}
    assert b"hunter2" not in (await asked(port, "/status")).body


async def test_a_loop_that_stands_still_is_not_live_and_the_probes_answer(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes.web.values.STILL", 0.5)
    goes_on, blocked = Event(), Event()

    async def block(message: Message) -> None:
        blocked.set()
        goes_on.wait(30)

    consumer = consumer_of(MemorySource(published("a")), block)
    port = ports.open(consumer)
    found: list[Answer] = []
    took: list[float] = []

    def probe() -> None:
        blocked.wait(30)
        until_then = time.monotonic() + 30
        while time.monotonic() < until_then:
            begin = time.monotonic()
            found.append(ask(port, "/live"))
            took.append(time.monotonic() - begin)
            if found[-1].status == 503:
                break
            time.sleep(0.05)
        found.append(ask(port, "/ready"))
        found.append(ask(port, "/status"))
        goes_on.set()

    async with started(consumer) as run:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, probe)
        *_, live, ready, status = found
        assert live.value["reason"].startswith("the event loop has not answered for ")
        assert (ready.status, ready.value["reason"][:14]) == (503, "the event loop")
        assert status.value["loop_silent"] >= 0.5
        assert status.value["live"] is False
        # The first answer may wait a moment for the loop, and the later ones do not.
        assert len(took) > 3
        await until_answer(port, "/live", 200)
        await run.stop()


async def test_the_status_has_the_fields_of_status_and_no_key(ports: Ports) -> None:
    handler = Gated()
    consumer = consumer_of(MemorySource(published(b"secret\x00key")), handler)
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until(lambda: handler.running)
        status = await until_status(port, lambda status: status["oldest"])
        assert (status["version"], status["name"], status["healthy"], status["reasons"]) == (
            VERSION,
            "memory",
            True,
            [],
        )
        assert set(status["status"]) == {field.name for field in fields(Status)}
        assert status["status"]["oldest"]["key_hash"] == key_hash(b"secret\x00key")
        assert b"secret" not in (await asked(port, "/status")).body
        shown = ports.open(consumer, show_keys=True)
        assert (await asked(shown, "/status")).value["status"]["oldest"]["key"] == "secret\\x00key"
        handler.let(0)
        await run.stop()


async def test_no_route_takes_a_body_and_unknown_paths_are_not_found(ports: Ports) -> None:
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    for path in ("/live", "/ready", "/status", "/metrics"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await asked(port, path, method, b"x" * 1_000)).status == 405
    assert (await asked(port, "/pause")).status == 404
    assert (await asked(port, "/live", "HEAD")).body == b""


async def test_probes_answer_a_scraper_that_sends_another_host(ports: Ports) -> None:
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    for path in ("/live", "/status"):
        assert (await asked(port, path, Host="10.1.2.3:8080")).status == 200


async def test_the_snapshot_of_a_running_consumer_is_made_again_each_second(ports: Ports) -> None:
    consumer = consumer_of(MemorySource(published("a", "b", "c")), acknowledge)
    port = ports.open(consumer)
    async with started(consumer) as run:
        await until_status(port, lambda status: status["settled"] == 3)
        assert (await asked(port, "/status")).value["age"] < 5
        await run.stop()


async def test_the_metrics_of_a_provider_without_a_reader_for_prometheus_say_what_to_write(
    ports: Ports, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Another test of this process may have added a reader.
    monkeypatch.setattr("lanes.web.metrics.REGISTRY", CollectorRegistry())
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    answer = await asked(port, "/metrics")
    assert answer.status == 404
    assert b"PrometheusMetricReader()" in answer.body
    assert "/metrics has no metrics, because the MeterProvider of the program" in caplog.text
