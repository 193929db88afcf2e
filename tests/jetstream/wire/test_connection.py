"""A connection to NATS: a server that does not fit is refused with a remedy, and a caller's client stays open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

import lanes
from lanes_jetstream import JetStreamSource, whole_subject
from tests.components import NatsServer
from tests.jetstream.durable.test_arguments import READERS
from tests.jetstream.workload import Recorder, Stream, never_called, running

pytestmark = pytest.mark.anyio


@READERS
async def test_an_unreachable_server_is_reported_without_credentials(
    reader: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    source = JetStreamSource("nats://user:secret@127.0.0.1:9", stream="S", key=whole_subject, **reader)
    with pytest.raises(lanes.SourceError, match=r"nats://127\.0\.0\.1:9 within 0\.5 s.*correct the URL") as refused:
        await lanes.run(source, never_called)
    assert "secret" not in str(refused.value)
    assert "secret" not in repr(source)


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://[", "http://127.0.0.1:4222"])
async def test_an_invalid_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    with pytest.raises(lanes.SourceError, match="correct the URL"):
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), never_called)


async def test_wrong_credentials_are_refused_without_the_password(
    fresh_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 1.0)
    server = fresh_nats(config="authorization { user: a, password: b }")
    url = server.url.replace("nats://", "nats://a:hunter2@")
    with pytest.raises(lanes.SourceError, match="Authorization") as refused:
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), never_called)
    assert "hunter2" not in str(refused.value)


async def test_jetstream_disabled_for_the_account_is_refused(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats(config="accounts { A { users: [{user: a, password: b}] } }\nno_auth_user: a")
    source = JetStreamSource(server.url, stream="S", durable="d", key=None)
    with pytest.raises(lanes.SourceError, match=r"'S' at nats://.*JetStream not enabled.*enable JetStream.*account"):
        await lanes.run(source, never_called)


@READERS
async def test_jetstream_disabled_on_the_server_is_refused(
    fresh_nats: Callable[..., NatsServer], reader: dict[str, Any]
) -> None:
    server = fresh_nats(arguments=["-js=false"])
    source = JetStreamSource(server.url, stream="S", key=whole_subject, **reader)
    with pytest.raises(lanes.SourceError, match=r"nats://.*JetStream does not answer; enable it on the server \(-js\)"):
        await lanes.run(source, never_called)


async def test_an_old_server_is_refused(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.OLDEST_SERVER", (99, 1))
    with pytest.raises(lanes.ConfigError, match=r"nats-server \d+\.\d+ is too old; upgrade it to 99\.1 or newer"):
        await lanes.run(stream.source(), never_called)


@pytest.mark.parametrize("where", ["", 42, None])
async def test_an_argument_that_is_no_connection_is_refused(where: Any) -> None:
    with pytest.raises(lanes.ConfigError, match="no NATS connection"):
        JetStreamSource(where, stream="S", durable="d", key=None)


def test_trio_is_refused_by_name() -> None:
    async def job() -> None:
        await lanes.run(JetStreamSource("nats://x", stream="S", durable="d", key=None), never_called)

    with pytest.raises(lanes.ConfigError, match=r"asyncio.*trio"):
        anyio.run(job, backend="trio")


async def test_a_closed_client_is_refused(stream: Stream) -> None:
    await stream.publish(1)
    other = type(stream.client)()
    with pytest.raises(lanes.SourceError, match="not connected"):
        await lanes.run(stream.source(where=other), never_called)


async def test_a_callers_client_stays_open(stream: Stream) -> None:
    await stream.publish(10)
    for where in (stream.client, stream.client.jetstream()):
        recorder = Recorder()
        async with running(lanes.Consumer(stream.source(where=where, durable=f"d{id(where)}"), recorder)):
            with anyio.fail_after(10):
                await recorder.reached(10)
        assert stream.client.is_connected


async def test_a_client_that_loses_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.1)

    async def select(client: Client) -> None:
        try:
            await anyio.sleep(1.0 if client.stats["reconnects"] == 0 else 0.01)
        except BaseException:
            client.stats["reconnects"] = 1
        raise OSError("refused")

    monkeypatch.setattr(Client, "_select_next_server", select)
    with pytest.raises(lanes.SourceError, match=r"no NATS server reached at nats://127\.0\.0\.1:1 "):
        await lanes.run(JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=None), never_called)
