"""No credential, key, payload or header is in a log, error, repr or page; the tests use a canary for each.

The tests read reprs, error texts with their causes, log records of every logger and level, the status and
the history. The text of a handler's own exception is shown.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

import lanes
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, subject_token
from memsource import MemoryBroker, MemorySource
from tests.conftest import NatsFactory

PASSWORD, USER, KEY, VALUE, HEADER = (f"canary-{name}-5e1f" for name in ("password", "user", "key", "value", "header"))
CANARIES = (PASSWORD, KEY, VALUE, HEADER)
HERE = "127.0.0.1:9"  # a port without a listener

URLS = [
    "nats://{user}:{secret}@{here}",
    "nats://{secret}@{here}",
    "{user}:{secret}@{here}",
    "tls://{user}:{secret}@{here}",
    "ws://{user}:{secret}@{here}",
    "nats://a:{secret}@{here},nats://b:{secret}@127.0.0.1:10",
    "nats://{here},nats://b:{secret}@127.0.0.1:10",
    "nats://{user}:x@{secret}@{here}",
    "nats://{user}:x:{secret}@{here}",
    "nats://{here}/{secret}",
    "nats://{here}?token={secret}",
    "nats://{here}#{secret}",
    "nats://{user}:x@{here}/{secret}?x={secret}#{secret}",
]
UNUSABLE = [
    "nats://{user}:x/{secret}@{here}",
    "nats://{user}:{secret}/x@{here}",
    "nats://{user}:x?{secret}@{here}",
    "nats://{user}:x#{secret}@{here}",
    "nats://{user}:x[{secret}@{here}",
    "nats://{user}:x,{secret}@{here}",
    "nats://{user}:{secret},x@{here}",
    "nats://{user}:{secret}@127.0.0.1:port",
    "nats://{user}:{secret}@127.0.0.1:99999",
    "nats://{user}:{secret}@[",
    "http://{user}:{secret}@{here}",
    "nats://{user}:{secret}",
    "{user}:{secret}",
    "nats://{user}:{secret}/",
    "nats://{user}:x,{secret}",
    "nats://{here},nats://{user}:{secret}",
    "nats://{here}:{secret}",
    "nats://{user}:{secret}@",
    "{secret}://{user}:x@{here}",
]
"""URLs that the client cannot use, so that they are refused at construction."""


def url(form: str) -> str:
    return form.format(user=USER, secret=PASSWORD, here=HERE)


def told(error: BaseException | None) -> Iterator[str]:
    """The text of an error, with everything that its traceback shows."""
    while error is not None:
        yield from (str(error), repr(error), "".join(traceback.format_exception(error)))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def logged(caplog: pytest.LogCaptureFixture) -> Iterator[str]:
    """Every record as a log handler writes it, with its arguments."""
    for record in caplog.records:
        yield logging.Formatter("%(name)s %(message)s").format(record)
        yield from told(record.exc_info[1] if record.exc_info else None)


def leaks(texts: Iterator[str] | list[str], canaries: tuple[str, ...] = CANARIES) -> list[str]:
    return [text for text in texts if any(canary in text for canary in canaries)]


async def handler(message: lanes.Message) -> None:
    """A handler that is never called."""


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("lanes_jetstream.wire.connection.CONNECT_TIMEOUT", 0.3)


def test_a_leak_would_be_seen(caplog: pytest.LogCaptureFixture) -> None:
    def failing(text: str) -> None:
        try:
            raise ValueError(text)
        except ValueError:
            raise lanes.SourceError("no server")  # noqa: B904 (what is said of the first one is looked for here)

    with pytest.raises(lanes.SourceError) as raised:
        failing(PASSWORD)
    assert leaks(told(raised.value))
    logging.getLogger("anything").debug("to %s", PASSWORD)
    assert leaks(logged(caplog))
    caplog.clear()
    logging.getLogger("anything").debug("failed", exc_info=raised.value)
    assert leaks(logged(caplog))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("form", URLS)
async def test_credentials_for_an_unreachable_server_are_hidden(form: str, caplog: pytest.LogCaptureFixture) -> None:
    source = JetStreamSource(url(form), stream="S", durable="d", key=None)
    letters = JetStreamDeadLetters(url(form), "dead.s")
    with pytest.raises(lanes.SourceError) as of_source:
        await lanes.run(source, handler)
    with pytest.raises(lanes.SourceError) as of_letters:
        await letters.open()
    consumer = lanes.Consumer(source, handler, dead_letters=letters)
    shown = [repr(source), repr(letters), str(source), str(letters), repr(consumer)]
    assert leaks([*shown, *told(of_source.value), *told(of_letters.value), *logged(caplog)], (*CANARIES, USER)) == []


@pytest.mark.parametrize("form", UNUSABLE)
def test_credentials_in_an_unusable_url_are_hidden(form: str) -> None:
    with pytest.raises(lanes.ConfigError) as of_source:
        JetStreamSource(url(form), stream="S", durable="d", key=None)
    with pytest.raises(lanes.ConfigError) as of_letters:
        JetStreamDeadLetters(url(form), "dead.s")
    assert leaks([*told(of_source.value), *told(of_letters.value)], (*CANARIES, USER)) == []


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"servers": x}, str.encode],
    ids=["list", "tuple", "dict", "bytes"],
)
def test_credentials_in_a_wrong_address_are_hidden(wrap: Callable[[str], Any]) -> None:
    where = wrap(url(URLS[0]))
    with pytest.raises(lanes.ConfigError) as of_source:
        JetStreamSource(where, stream="S", durable="d", key=None)
    with pytest.raises(lanes.ConfigError) as of_letters:
        JetStreamDeadLetters(where, "dead.s")
    assert leaks([*told(of_source.value), *told(of_letters.value)], (*CANARIES, USER)) == []


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_refused_credentials_are_hidden(fresh_nats: NatsFactory, caplog: pytest.LogCaptureFixture) -> None:
    server = fresh_nats(config="authorization { user: a, password: b }")
    where = server.url.replace("://", f"://{USER}:{PASSWORD}@")
    with pytest.raises(lanes.SourceError, match="Authorization") as refused:
        await lanes.run(JetStreamSource(where, stream="S", durable="d", key=None), handler)
    assert leaks([*told(refused.value), *logged(caplog)]) == []


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("given", ["url", "client"])
async def test_a_run_shows_neither_credentials_nor_messages(
    given: str, fresh_nats: NatsFactory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = fresh_nats(config=f'authorization {{ user: "{USER}", password: "{PASSWORD}" }}')
    where = server.url.replace("://", f"://{USER}:{PASSWORD}@")
    client = await nats.connect(where)
    await client.jetstream().add_stream(name="S", subjects=["s.>"])
    await client.jetstream().add_stream(name="DEAD", subjects=["dead.>"])
    for _ in range(3):
        await client.jetstream().publish(f"s.{KEY}", VALUE.encode(), headers={"who": HEADER})
    shown: list[str] = []

    async def failing(message: lanes.Message) -> None:
        assert (message.key, message.value, message.subject) == (KEY.encode(), VALUE.encode(), f"s.{KEY}")
        assert ("who", HEADER.encode()) in message.headers
        shown.extend(map(repr, (message, message.partition, consumer, consumer.status(), history, source, letters)))
        shown.append(str(consumer.status()))
        if message.attempt == 1:
            raise lanes.Nak(delay=0)
        if message.position == 2:
            raise lanes.Term("no such customer")
        if message.position == 3:
            consumer.stop()

    to = where if given == "url" else client
    source = JetStreamSource(to, stream="S", durable="d", key=subject_token(1))
    letters = JetStreamDeadLetters(to, "dead.s")
    history = lanes.History(tmp_path, member="m-1")
    consumer = lanes.Consumer(source, failing, dead_letters=letters, history=history)
    with anyio.fail_after(20):
        await consumer.run()
    assert consumer.status().dead_lettered == 1
    await client.close()
    (segment,) = tmp_path.iterdir()
    rows = segment.read_text().splitlines()
    events = {row.partition('"event":"')[2].partition('"')[0] for row in rows}
    assert {"delivered", "retry", "dlq_confirmed", "ack"} <= events
    assert any("giving up" in text for text in logged(caplog))
    assert leaks([*shown, *rows, *logged(caplog)], (*CANARIES, USER)) == []


@pytest.mark.anyio
async def test_a_halted_run_shows_no_message(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    broker = MemoryBroker()
    broker.publish(VALUE, key=KEY)
    source = MemorySource(broker)
    history = lanes.History(tmp_path)

    async def failing(message: lanes.Message) -> None:
        raise lanes.Term("no such customer")

    with pytest.raises(lanes.HandlerHalted) as halted:
        await lanes.run(source, failing, history=history)
    (segment,) = tmp_path.iterdir()
    assert leaks([*told(halted.value), *logged(caplog), segment.read_text(), repr(source), repr(broker)]) == []
