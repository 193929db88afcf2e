"""A connection to NATS: a server that does not fit is refused with a remedy, and a caller's client stays open."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest
from anyio.from_thread import start_blocking_portal
from nats.aio.client import Client
from nats.aio.transport import TcpTransport

import lanes
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, whole_subject
from lanes_jetstream.wire.connection import Connection
from tests.components import NatsServer
from tests.jetstream.durable.test_arguments import READERS
from tests.jetstream.workload import Recorder, Stream, never_called, running, until

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


@pytest.mark.parametrize("kind", ["client", "context"])
def test_a_client_of_another_event_loop_is_refused(kind: str, nats_server: NatsServer) -> None:
    with start_blocking_portal("asyncio") as other:
        client = other.call(nats.connect, nats_server.url)
        given = client if kind == "client" else other.call(client.jetstream)
        try:
            for source in (
                JetStreamSource(given, stream="S", key=None, durable="d"),
                JetStreamSource(given, stream="S", key=None, cohort="c"),
            ):
                with pytest.raises(lanes.ConfigError, match=r"connected in another event loop.*, or pass the URL"):
                    anyio.run(lanes.run, source, never_called)
        finally:
            other.call(client.close)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:4222", "the scheme http:// is not a scheme of NATS; write nats://host:4222"),
        ("NATS://127.0.0.1:4222", "the scheme NATS:// is not a scheme of NATS"),
        ("kafka://localhost:9092", "the scheme kafka://"),
        ("nats://127.0.0.1:99999", "a port outside 1 to 65535"),
        ("nats://127.0.0.1:0", "a port outside 1 to 65535"),
        ("nats://127.0.0.1:port", "a port outside 1 to 65535"),
        ("nats://[", "has no host"),
        ("nats://", "has no host"),
        ("nats://:4222", "has no host"),
        ("nats://a:1,", "has no host"),
        ("nats://a:1, nats://b:2", "the scheme in the URL"),
        ("nats://a b:1", "no blanks"),
        ("nats://a:1,ws://b:2", "one client uses only one kind"),
    ],
)
def test_an_invalid_url_is_refused_at_construction(url: str, said: str) -> None:
    for make in (
        lambda: JetStreamSource(url, stream="S", durable="d", key=None),
        lambda: JetStreamSource(url, stream="S", cohort="c", key=None),
        lambda: JetStreamDeadLetters(url, "dead"),
    ):
        with pytest.raises(lanes.ConfigError) as refused:
            make()
        assert str(refused.value).startswith("server: ") and said in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "localhost:4222",
        "nats://localhost",
        "tls://user:password@my_host.example:4443",
        "nats://token@127.0.0.1:4222,nats://user:p-w@[::1]:4222",
        "ws://a:80,wss://b:443/path",
    ],
)
def test_a_url_that_the_client_can_use_is_accepted(url: str) -> None:
    JetStreamSource(url, stream="S", durable="d", key=None)


async def test_a_tls_url_of_a_server_without_tls_is_refused_before_the_password_is_sent(
    fresh_nats: Callable[..., NatsServer],
) -> None:
    server = fresh_nats(config='authorization { user: "u", password: "secret77" }')
    url = server.url.replace("nats://", "tls://u:secret77@")
    with anyio.fail_after(5), pytest.raises(lanes.ConfigError) as refused:
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), never_called)
    shown = server.url.replace("nats://", "tls://")
    assert str(refused.value) == (
        f"server: {shown} offers no TLS, so user and password would be sent in clear text; turn on TLS at the server, "
        "or write nats:// in place of tls://"
    )


async def test_a_tls_url_without_a_password_names_the_messages(fresh_nats: Callable[..., NatsServer]) -> None:
    url = fresh_nats().url.replace("nats://", "tls://")
    with anyio.fail_after(5), pytest.raises(lanes.ConfigError, match="offers no TLS, so the messages would be sent in"):
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), never_called)


async def test_a_tls_url_uses_tls_if_the_server_only_offers_it(
    fresh_nats: Callable[..., NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-keyout", "key", "-out", "crt"], cwd=tmp_path, check=True, capture_output=True)
    server = fresh_nats(
        config=f'tls {{ cert_file: "{tmp_path}/crt", key_file: "{tmp_path}/key" }}\nallow_non_tls: true'
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "crt"))
    for scheme, encrypted in (("tls", True), ("nats", False)):
        connection = Connection(server.url.replace("nats", scheme))
        await connection.open()
        try:
            transport = connection.client._transport
            assert isinstance(transport, TcpTransport) and transport._io_writer is not None
            assert (transport._io_writer.get_extra_info("ssl_object") is not None) is encrypted
        finally:
            await connection.close()


async def test_a_websocket_without_its_package_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with (
        anyio.fail_after(5),
        pytest.raises(lanes.ConfigError, match="need aiohttp, which is not installed; pip install"),
    ):
        await lanes.run(JetStreamSource("ws://127.0.0.1:9", stream="S", durable="d", key=None), never_called)


async def test_a_server_that_is_not_reached_is_logged_once_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 3.0)
    monkeypatch.setattr("lanes_jetstream.wire.connection.RECONNECT_WAIT", 0.01)
    with pytest.raises(lanes.SourceError):
        await lanes.run(JetStreamSource("nats://u:secret@127.0.0.1:9", stream="S", durable="d", key=None), never_called)
    # The client may also run out of time itself, once.
    lines = [
        each
        for each in caplog.records
        if each.name == "lanes.jetstream.client"
        and not each.getMessage().endswith("no answer of a NATS server in time")
    ]
    assert [each.levelname for each in lines] == ["WARNING", "WARNING"]
    first, more = (each.getMessage() for each in lines)
    assert first.startswith("jetstream S/d: NATS client at nats://127.0.0.1:9: ConnectionRefusedError: ")
    counted = r"jetstream S/d: NATS client at nats://127\.0\.0\.1:9: \d+ more line\(s\) in \d\.\d s, the last: Conn"
    assert re.match(counted, more)
    assert "secret" not in caplog.text


async def test_a_line_says_that_a_lost_connection_is_back(
    fresh_nats: Callable[..., NatsServer], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lanes.jetstream.client")
    server = fresh_nats()
    connection = Connection(server.url)
    await connection.open()
    try:
        server._process.signal(signal.SIGTERM)
        await anyio.to_thread.run_sync(server._process.wait)
        await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(60):
            await until(lambda: f"NATS client at {server.url}: connected again" in caplog.messages)
    finally:
        await connection.close()
    assert caplog.records[0].levelname == "WARNING"


async def test_wrong_credentials_are_refused_without_the_password(
    fresh_nats: Callable[..., NatsServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server answers at once, so nothing waits for this limit.
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 60.0)
    server = fresh_nats(config="authorization { user: a, password: b }")
    url = server.url.replace("nats://", "nats://a:hunter2@")
    with anyio.fail_after(30), pytest.raises(lanes.SourceError, match="Authorization") as refused:
        await lanes.run(JetStreamSource(url, stream="S", durable="d", key=None), never_called)
    said = str(refused.value)
    assert "login refused at " in said and said.endswith(
        "correct the user and the password, the token or the credentials"
    )
    assert "hunter2" not in said


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


async def test_a_source_refuses_an_empty_url() -> None:
    with pytest.raises(lanes.ConfigError, match="the URL of the NATS server is empty"):
        JetStreamSource("", stream="S", durable="d", key=None)


@pytest.mark.parametrize("where", [42, None])
async def test_a_source_refuses_an_argument_that_is_no_nats_connection(where: Any) -> None:
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


async def test_a_connection_closes_while_its_client_reconnects(fresh_nats: Callable[..., NatsServer]) -> None:
    server = fresh_nats()
    connection = Connection(server.url)
    await connection.open()
    client = connection.client
    server.kill()
    with anyio.fail_after(30):
        while client.is_connected:
            await anyio.sleep(0.01)
    # The client keeps the message, and flushes it to the lost connection when it closes.
    await client.publish("unsent", b"x")
    await connection.close()
    assert client.is_closed


async def test_a_client_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.1)

    async def select(client: Client) -> None:
        try:
            await anyio.sleep(1.0 if client.stats["reconnects"] == 0 else 0.01)
        except BaseException:
            client.stats["reconnects"] = 1
        raise OSError("refused")

    monkeypatch.setattr(Client, "_select_next_server", select)
    with pytest.raises(lanes.SourceError, match=r"^jetstream S/d: no NATS server reached at nats://127\.0\.0\.1:1 "):
        await lanes.run(JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=None), never_called)
