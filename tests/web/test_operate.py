"""The commands of an operator: only with the token, from a page of the port, and on the loop of the consumer."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio
import pytest

from lanes import ConfigError, Message
from lanes.history.writer import key_hash
from lanes.web import Web
from lanes.web.port import Port
from memsource.memory.source import MemoryDeadLetters, MemorySource
from tests.fakes.support import acknowledge, consumer_of, fail, published, settled, started, until
from tests.web.conftest import Answer, Ports, ask

pytestmark = pytest.mark.anyio

TOKEN = "0123456789abcdef"
JSON = {"content_type": "application/json", "authorization": f"Bearer {TOKEN}"}


async def send(port: Port, command: str, body: Any = None, **headers: str) -> Answer:
    whole = json.dumps({} if body is None else body).encode() if not isinstance(body, bytes) else body
    call = partial(ask, port, f"/operate/{command}", "POST", whole, **{**JSON, **headers})
    return await anyio.to_thread.run_sync(call)


async def test_an_operator_pauses_and_resumes(ports: Ports, caplog: pytest.LogCaptureFixture) -> None:
    consumer = consumer_of(MemorySource(published("a")), acknowledge)
    port = ports.open(consumer, operate=True, token=TOKEN)
    async with started(consumer) as run:
        await consumer.until_ready()
        assert (await send(port, "pause")).status == 200
        assert consumer.status().paused
        assert (await send(port, "resume")).body == b"resumed\n"
        assert not consumer.status().paused
        await run.stop()
    assert "an operator sent pause: paused" in caplog.text
    assert TOKEN not in caplog.text
    refused = await send(port, "pause")
    assert (refused.status, refused.body) == (409, b"the consumer does not run\n")


async def test_an_operator_unblocks_one_key_and_sends_another_one_to_the_dead_letters(ports: Ports) -> None:
    broker = published("good", "bad")
    source = MemorySource(broker)
    attempts: list[int] = []

    async def handler(message: Message) -> None:
        attempts.append(message.position)
        if attempts.count(message.position) == 1 or message.key == b"bad":
            await fail(message)

    consumer = consumer_of(source, handler, poison="block", dead_letters=MemoryDeadLetters(broker))
    port = ports.open(consumer, operate=True, token=TOKEN)
    async with started(consumer) as run:
        await until(lambda: consumer.status().blocked == 2)
        done = await send(port, "unblock", {"key_hash": key_hash(b"good")})
        assert (done.status, done.body) == (200, b"1 lane(s) continue\n")
        done = await send(port, "dead-letter", {"key_hash": key_hash(b"bad")})
        assert (done.status, done.body) == (200, b"1 message(s) become dead letters\n")
        await until(lambda: consumer.status().settled == 2)
        assert sorted(settled(source)) == [0, 1]
        gone = await send(port, "unblock", {"key_hash": key_hash(b"bad")})
        assert (gone.status, gone.body) == (409, b"no stopped lane has this key now\n")
        await run.stop()
    assert len(broker.dead_letters) == 1


async def test_a_port_without_operate_has_no_commands(ports: Ports) -> None:
    port = ports.open(consumer_of(MemorySource(published()), acknowledge))
    for command in ("pause", "resume", "unblock", "dead-letter"):
        assert (await send(port, command)).status == 404


async def test_a_request_without_the_token_or_of_another_site_is_refused(ports: Ports) -> None:
    consumer = consumer_of(MemorySource(published()), acknowledge)
    port = ports.open(consumer, operate=True, token=TOKEN)
    own = f"127.0.0.1:{port.address.port}"
    async with started(consumer) as run:
        await consumer.until_ready()
        for wrong in ("Bearer 0123456789abcdeX", f"Bearer {TOKEN}é", TOKEN):
            refused = await send(port, "pause", authorization=wrong)
            assert (refused.status, refused.body) == (401, b"the token is wrong: write the token of the operator\n")
        for missing in ("", "Bearer ", "Bearer"):
            refused = await send(port, "pause", authorization=missing)
            assert (refused.status, refused.body) == (401, b"write the token of the operator\n")
        assert (await send(port, "pause", origin="http://evil.example.com")).status == 403
        assert (await send(port, "pause", host="evil.example.com")).status == 403
        assert (await send(port, "pause", content_type="text/plain")).status == 415
        assert (await send(port, "pause", origin=f"http://{own}")).status == 200
        await run.stop()


@pytest.mark.parametrize(
    ("command", "body", "why"),
    [
        ("pause", b"", b"the body is no JSON\n"),
        ("pause", b"[" * 2_000, b"the body is no JSON\n"),
        ("pause", b"x" * 5_000, b"the body has more than 4096 bytes\n"),
        ("pause", [], b'the body must be {} or {"key_hash": "\xe2\x80\xa6"}\n'),
        ("pause", {"key": "a"}, b'the body must be {} or {"key_hash": "\xe2\x80\xa6"}\n'),
        ("pause", {"key_hash": "a"}, b"pause takes no key\n"),
        ("unblock", {}, b"unblock needs key_hash\n"),
        ("unblock", {"key_hash": 7}, b"key_hash must be a text\n"),
    ],
)
async def test_a_wrong_body_is_refused(ports: Ports, command: str, body: Any, why: bytes) -> None:
    port = ports.open(consumer_of(MemorySource(published()), acknowledge), operate=True, token=TOKEN)
    answer = await send(port, command, body)
    assert (answer.status, answer.body) == (422, why)


def test_operate_and_token_need_each_other_and_no_repr_shows_the_token() -> None:
    address = "127.0.0.1:0"
    with pytest.raises(ConfigError, match="operate=True needs a token"):
        Web(address=address, operate=True)
    with pytest.raises(ConfigError, match="token has no effect without operate=True"):
        Web(address=address, token=TOKEN)
    with pytest.raises(ConfigError, match="token has less than 16 characters") as caught:
        Web(address=address, operate=True, token="hunter2")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"hosts is a str: write the names of hosts"):
        Web(address=address, hosts="ops.example.com")
    assert TOKEN not in repr(Web(address=address, operate=True, token=TOKEN))
