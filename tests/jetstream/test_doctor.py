"""``lanes doctor jetstream`` names the faults of a server, a stream, a durable and a subject, each with a remedy."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from lanes.cli import app as cli
from tests.components import NatsServer

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

Doctor = Callable[..., Awaitable[tuple[int, dict[str, Any]]]]


@pytest.fixture
async def client(nats_server: NatsServer) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_server.url)
    yield connected
    await connected.close()


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Run the command, and return its exit status and its checks by their names."""

    def run(arguments: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["lanes", "doctor", "jetstream", *arguments, "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        found = json.loads(capsys.readouterr().out)
        checks = {check["name"]: check for check in found["checks"]}
        assert found["usable"] is (ended.value.code in (0, None))
        return int(ended.value.code or 0), checks

    async def command(*arguments: str) -> tuple[int, dict[str, Any]]:
        return await asyncio.get_running_loop().run_in_executor(None, run, arguments)

    return command


async def test_a_server_with_a_stream_and_a_new_durable_is_usable(
    nats_server: NatsServer, client: Client, doctor: Doctor
) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="DOC", subjects=["doc.>"])
    await stream.add_stream(name="DOCDEAD", subjects=["docdead"])
    await client.request("doc.a", b"x")
    status, checks = await doctor(
        *("--server", nats_server.url, "--stream", "DOC", "--durable", "billing", "--dead-letters", "docdead")
    )
    assert status == 0
    assert checks["server"]["detail"].startswith("nats-server 2.")
    assert "DOC: 1 messages in file storage with 1 replica(s)" in checks["stream"]["detail"]
    assert "1: a killed server loses the last acknowledgements" in checks["replicas"]["detail"]
    assert checks["limits"]["ok"] is True
    assert checks["durable"]["detail"] == "billing does not exist yet, and the first consumer creates it"
    assert checks["dead letters"]["detail"] == "the stream DOCDEAD captures 'docdead'"
    assert {check["ok"] for check in checks.values()} == {True, None}
    # The command has created nothing.
    assert [info.name for info in await stream.consumers_info("DOC")] == []
    await stream.delete_stream("DOC")
    await stream.delete_stream("DOCDEAD")


async def test_a_missing_stream_and_a_subject_that_no_stream_captures_are_named(
    nats_server: NatsServer, client: Client, doctor: Doctor
) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="DOCORDERS", subjects=["docorders.>"])
    status, checks = await doctor("--server", nats_server.url, "--stream", "DOCORDER", "--dead-letters", "nowhere")
    assert status == 3
    assert "'DOCORDER' does not exist" in checks["stream"]["detail"]
    assert "DOCORDERS" in checks["stream"]["remedy"]
    assert checks["dead letters"]["detail"] == "no stream captures the subject 'nowhere'"
    await stream.delete_stream("DOCORDERS")


async def test_a_durable_that_lanes_would_refuse_and_a_limit_are_named(
    nats_server: NatsServer, client: Client, doctor: Doctor
) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="DOCLIMITS", subjects=["doclimits.>"], max_age=3_600, storage="memory")
    await stream.add_consumer("DOCLIMITS", durable_name="once", ack_policy="explicit", max_deliver=5)
    status, checks = await doctor(
        *("--server", nats_server.url, "--stream", "DOCLIMITS", "--durable", "once", "--dead-letters", "doclimits.dead")
    )
    assert status == 3
    assert "max_deliver is 5" in checks["durable"]["detail"]
    assert "set it to -1" in checks["durable"]["remedy"]
    assert "memory: a restart of the server loses all messages" in checks["storage"]["detail"]
    assert "max_age=" in checks["limits"]["detail"]
    text = "captures 'doclimits.dead' itself, so the source would read its own dead letters"
    assert text in checks["dead letters"]["detail"]
    await stream.delete_stream("DOCLIMITS")


async def test_a_durable_that_a_process_pulls_is_named(nats_server: NatsServer, client: Client, doctor: Doctor) -> None:
    stream = client.jetstream()
    await stream.add_stream(name="DOCPULLED", subjects=["docpulled.>"])
    pulled = await stream.pull_subscribe("docpulled.>", durable="busy", stream="DOCPULLED")
    fetch = asyncio.create_task(pulled.fetch(1, timeout=20))
    asked = ("--server", nats_server.url, "--stream", "DOCPULLED", "--durable", "busy")
    status, checks = await doctor(*asked)
    while "pulls it now" not in checks["durable"]["detail"]:
        status, checks = await doctor(*asked)
    assert status == 0
    assert checks["durable"]["ok"] is None
    assert "a process pulls it now" in checks["durable"]["detail"]
    fetch.cancel()
    await asyncio.gather(fetch, return_exceptions=True)
    await stream.delete_stream("DOCPULLED")


async def test_a_server_that_refuses_jetstream_is_named(doctor: Doctor, fresh_nats: Callable[..., NatsServer]) -> None:
    users = "{user: a, password: a, permissions: {publish: {deny: '$JS.API.INFO'}}}"
    server = fresh_nats(config=f"authorization {{ users: [{users}] }}\n")
    status, checks = await doctor("--server", server.url.replace("nats://", "nats://a:a@"), "--stream", "S")
    assert status == 3
    assert list(checks) == ["server"]
    assert checks["server"]["remedy"]


async def test_a_server_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.5)
    status, checks = await doctor("--server", "nats://127.0.0.1:1", "--stream", "S")
    assert status == 3
    assert list(checks) == ["server"]
    assert "no NATS server reached at nats://127.0.0.1:1" in checks["server"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--server", "http://127.0.0.1"), "--server: "),
        (("--server", "nats://127.0.0.1:4222", "--durable", "d"), "has --durable and no --stream"),
        (("--server", "nats://127.0.0.1:4222", "--dead-letters", "dead.>"), "--dead-letters: dead-letter subject"),
    ],
)
async def test_wrong_options_end_with_status_64(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lanes", "doctor", "jetstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 64
    assert error in capsys.readouterr().err
