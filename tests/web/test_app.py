"""``lanes.web.app`` in an ASGI application of the user, on the event loop of the consumer and on another one."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

import anyio
import pytest
from opentelemetry.metrics import NoOpMeterProvider
from prometheus_client import CollectorRegistry

from lanes import ConfigError
from lanes.web import app
from memsource.memory.source import MemorySource
from tests.fakes.support import Gated, acknowledge, consumer_of, published, started, until

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


async def answered(application: Any, path: str) -> tuple[int, bytes]:
    """Make one request of an ASGI application."""
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": [], "query_string": b""}
    await application({**scope, "http_version": "1.1", "scheme": "http"}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def get(application: Any, path: str) -> tuple[int, Any]:
    """The status and the JSON of an answer of the application."""
    status, body = await answered(application, path)
    return status, json.loads(body)


async def test_an_application_on_the_loop_of_the_consumer_serves_the_probes() -> None:
    handler = Gated()
    consumer = consumer_of(MemorySource(published("a")), handler)
    application = app(consumer)
    assert await get(application, "/ready") == (
        503,
        {"ready": False, "reason": "the group has not answered the consumer yet"},
    )
    async with started(consumer) as run:
        await until(lambda: handler.running)
        for _ in range(1_000):
            if (await get(application, "/status"))[1]["status"]["running"] == 1:
                break
            await anyio.sleep(0.02)
        assert await get(application, "/ready") == (200, {"ready": True, "reason": None})
        handler.let(0)
        await run.stop()
    assert (await get(application, "/ready"))[0] == 503


async def test_an_application_on_another_loop_serves_the_probes() -> None:
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    application = app(consumer)
    async with started(consumer) as run:
        await consumer.until_ready()
        there = await anyio.to_thread.run_sync(lambda: anyio.run(get, application, "/ready"))
        assert there == (200, {"ready": True, "reason": None})
        await run.stop()


async def test_another_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="consumer is a str: pass lanes"):
        app("orders")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="show_keys=1: must be True or False"):
        app(consumer_of(MemorySource(published()), acknowledge), show_keys=1)  # type: ignore[arg-type]


async def test_the_metrics_of_a_program_without_a_provider_say_what_to_write(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Another test of this process may have set a provider or added a reader.
    monkeypatch.setattr("lanes.web.metrics.REGISTRY", CollectorRegistry())
    monkeypatch.setattr("lanes.web.metrics.metrics.get_meter_provider", NoOpMeterProvider)
    status, body = await answered(app(consumer_of(MemorySource(published()), acknowledge)), "/metrics")
    said = (
        "the program has set no MeterProvider; write from opentelemetry.exporter.prometheus import "
        "PrometheusMetricReader; metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))"
    )
    assert (status, body.decode()) == (404, f"{said}\n")
    assert f"/metrics has no metrics, because {said}" in caplog.text
