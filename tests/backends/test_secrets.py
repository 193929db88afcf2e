"""No credential, key, payload or header is in a log, error, repr or page; the tests use a canary for each.

The tests read reprs, error texts with their causes, log records of every logger and level, the status and
the history. The text of a handler's own exception is shown.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import nats
import pytest

import lanes
from lanes.arguments import shown_value
from lanes_jetstream import JetStreamDeadLetters, JetStreamSource, subject_token
from lanes_kafka import KafkaDeadLetters
from lanes_postgres import Positions
from memsource import MemoryBroker, MemorySource
from tests.backends.test_refused_arguments import ARGUMENTS
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


def test_the_search_for_secrets_finds_a_password_in_an_error_and_in_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    # Without its package, the client of a websocket makes no attempt.
    without = form.startswith("ws://") and importlib.util.find_spec("aiohttp") is None
    refused = lanes.ConfigError if without else lanes.SourceError
    source = JetStreamSource(url(form), stream="S", durable="d", key=None)
    letters = JetStreamDeadLetters(url(form), "dead.s")
    with pytest.raises(refused) as of_source:
        await lanes.run(source, handler)
    with pytest.raises(refused) as of_letters:
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


class Client:
    def __repr__(self) -> str:
        return f"<client of {PASSWORD}>"


KAFKA: dict[str, Any] = {"bootstrap.servers": HERE, "group.id": "g", "sasl.username": "u", "sasl.password": PASSWORD}
CONFUSED: dict[str, Any] = {
    "configuration": KAFKA,
    "several": [KAFKA],
    "values": ("a", {"sasl.password": PASSWORD}),
    "text": json.dumps(KAFKA),
    "client": Client(),
    "bytes": PASSWORD.encode(),
    "url": url(URLS[0]),
    "urls": url(URLS[5]),
    "path": url(URLS[9]),
    "no_scheme": url(URLS[2]),
    "connection": f"host=db user=u password={PASSWORD} dbname=d",
}
"""Arguments that hold a password, and stand where another argument belongs."""


MAKERS = [
    *((maker, arguments, name) for maker, arguments, name, _ in ARGUMENTS),
    *((lanes.Settings, {}, name) for name in lanes.Settings.__dataclass_fields__),
    *((lanes.Retry, {}, name) for name in lanes.Retry.__dataclass_fields__),
    *((Positions, {"subscription": "s"}, name) for name in ("schema", "by")),
    (Positions, {}, "subscription"),
]


@pytest.mark.parametrize(
    ("maker", "arguments", "name"), [pytest.param(*each, id=f"{each[0].__name__}-{each[2]}") for each in MAKERS]
)
def test_a_password_in_a_wrong_argument_is_hidden(maker: Any, arguments: dict[str, Any], name: str) -> None:
    texts: list[str] = []
    for value in CONFUSED.values():
        try:
            maker(**arguments | {name: value})
        except lanes.ConfigError as refused:
            texts += told(refused)
    assert texts
    assert leaks(texts) == []


@pytest.mark.parametrize("form", [*URLS, *(form for form in UNUSABLE if "://" in form)])
def test_an_error_shows_no_user_and_no_path_of_a_url(form: str) -> None:
    assert leaks([shown_value(url(form)), shown_value([url(form)])], (PASSWORD,)) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (url(URLS[0]), f"'nats://…@{HERE}'"),
        (url(URLS[2]), f"'…@{HERE}'"),
        (url(URLS[9]), f"'nats://{HERE}…'"),
        ("host=db password=x dbname=d", "'host=db password=…'"),
        ("orders", "'orders'"),
        ("x" * 300, "'" + "x" * 99 + "…"),
        (5, "5"),
        (None, "None"),
        pytest.param(-(10**5000), "a number of 16610 bits", id="digits"),
        (["a", KAFKA], "['a', a dict]"),
        ((1,), "(1,)"),
        (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
        (KAFKA, "a dict"),
        (Client(), "a Client"),
        (dict, "the class dict"),
        (b"payload", "a bytes"),
    ],
)
def test_an_error_shows_an_argument_without_secrets(value: object, said: str) -> None:
    assert shown_value(value) == said


def test_swapped_arguments_of_dead_letters_are_refused_with_the_right_order() -> None:
    wanted = "pass the configuration first and the topic second"
    with pytest.raises(lanes.ConfigError, match=f"dead-letter topic is a dict, no str; {wanted}") as of_kafka:
        KafkaDeadLetters("orders-dead", KAFKA)  # type: ignore[arg-type]
    wanted = "is a URL; pass the server first and the subject second"
    with pytest.raises(lanes.ConfigError, match=f"dead-letter subject 'nats://…@{HERE}' {wanted}") as of_jetstream:
        JetStreamDeadLetters("dead.x", url(URLS[0]))
    assert leaks([*told(of_kafka.value), *told(of_jetstream.value)], (*CANARIES, USER)) == []


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
