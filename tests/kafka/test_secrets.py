"""No output shows a secret of a Kafka configuration or a message; see tests/backends/test_secrets.py."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

import lanes
from lanes.cli import app as cli
from lanes.core.types import Partition, PartitionId, Settlement
from lanes_kafka import KafkaDeadLetters, KafkaSource
from lanes_kafka.cli.doctor import examine
from lanes_kafka.client.commits import Commit, Commits
from lanes_kafka.client.records import READER
from lanes_kafka.config import client_config, is_secret, redacted
from lanes_kafka.dead_letters.box import KafkaDeadLetterBox
from lanes_kafka.dead_letters.producer import ConfirmedProducer
from lanes_kafka.dead_letters.wire import Record
from lanes_kafka.errors import fatal_error
from tests.backends.test_secrets import CANARIES, HEADER, HERE, KEY, PASSWORD, USER, VALUE, handler, leaks, logged, told
from tests.conftest import KafkaFactory
from tests.fakes.dead_letters import dead_letter
from tests.kafka.conftest import MakeTopic
from tests.kafka.workload import produce

SECRETS: dict[str, Any] = {
    "sasl.username": USER,
    "sasl.password": PASSWORD,
    "sasl.oauthbearer.config": f"scope=orders secret={PASSWORD}",
    "sasl.oauthbearer.client.secret": PASSWORD,
    "ssl.key.password": PASSWORD,
    "ssl.keystore.password": PASSWORD,
    "ssl.key.pem": f"-----BEGIN PRIVATE KEY-----\n{PASSWORD}\n-----END PRIVATE KEY-----\n",
}
# The client accepts these and connects to no broker; its own log goes to stderr.
UNUSED: dict[str, Any] = {
    "bootstrap.servers": HERE,
    "group.id": "g",
    "log_level": 0,
    **{name: value for name, value in SECRETS.items() if not name.startswith("ssl.key")},
}
OIDC: dict[str, Any] = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.client.id": USER,
    "sasl.oauthbearer.token.endpoint.url": f"http://{HERE}/{PASSWORD}",
}


@pytest.fixture(autouse=True)
def everything_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use short timeouts for answers that never come."""
    monkeypatch.setattr("lanes_kafka.client.thread.OPEN_TIMEOUT", 0.3)
    monkeypatch.setattr("lanes_kafka.broker.TOPIC_DEADLINE", 0.3)
    monkeypatch.setattr("lanes_kafka.cli.commands.examine", functools.partial(examine, timeout=0.3))


@pytest.mark.parametrize(
    "name", [*SECRETS, "ssl.key.location", "ssl.certificate.pem", "sasl.kerberos.keytab", "some.new.token"]
)
def test_secret_settings_are_known_by_name(name: str) -> None:
    assert is_secret(name)
    text = f"no such key: {SECRETS.get(name, PASSWORD)}!"
    assert leaks([redacted(text, {name: SECRETS.get(name, PASSWORD)})]) == []


def test_other_settings_are_shown() -> None:
    for name in ("bootstrap.servers", "sasl.mechanism", "security.protocol", "client.id", "group.instance.id"):
        assert not is_secret(name)
        assert redacted("from here to there", {name: "here"}) == "from here to there"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-256"},
        OIDC,
        {"security.protocol": "SSL", "ssl.key.pem": SECRETS["ssl.key.pem"], "ssl.key.password": PASSWORD},
        {"security.protocol": "SSL", "ssl.keystore.location": f"/{PASSWORD}"},
        {"sasl.pasword": PASSWORD},
        {"ssl.key.password": 5.5},
        {"sasl.mechanism": PASSWORD, "security.protocol": "SASL_SSL"},
    ],
    ids=lambda more: "+".join(more) or "none",
)
async def test_an_unreachable_or_refusing_broker_shows_no_secret(
    more: dict[str, Any], soon: None, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = UNUSED | more
    source, letters = KafkaSource(config, topics="orders"), KafkaDeadLetters(config, "dead")
    consumer = lanes.Consumer(source, handler, dead_letters=letters)
    shown = [
        repr(each) for each in (source, letters, consumer, client_config(config), KafkaDeadLetterBox(config, "dead"))
    ]
    with pytest.raises(lanes.LanesError) as of_source:
        await lanes.run(source, handler)
    with pytest.raises(lanes.LanesError) as of_letters:
        await letters.open()
    said = [*told(of_source.value), *told(of_letters.value)]
    if more.get("sasl.mechanism") == PASSWORD:
        # A mechanism is not secret: the error names it, so that it can be corrected.
        said = [text.replace(f'"{PASSWORD}"', "") for text in said]
    printed = capfd.readouterr()
    found = [str(check) for check in examine(client_config(config), ["orders"], timeout=0.3)]
    found = found if more.get("sasl.mechanism") != PASSWORD else []
    assert leaks([*shown, *said, *found, *logged(caplog), *printed], (*CANARIES, USER)) == []


@pytest.mark.anyio
@pytest.mark.parametrize("error", [KafkaError._INVALID_ARG, KafkaError._AUTHENTICATION, KafkaError._FATAL])
async def test_errors_of_the_client_show_no_secret(
    error: int, topic: MakeTopic, caplog: pytest.LogCaptureFixture
) -> None:
    orders = topic()

    def refuse(config: dict[str, Any]) -> Any:
        said = KafkaError(error, f"cannot log in as {config['sasl.username']} with {config['sasl.password']}")
        config["error_cb"](said)
        raise KafkaException(said)

    config = UNUSED | {"bootstrap.servers": orders.url}
    with pytest.raises(lanes.LanesError, match="cannot log in as … with …") as refused:
        await lanes.run(KafkaSource(config, topics=orders.name, client=refuse), handler)
    assert any("cannot log in as … with …" in text for text in logged(caplog))
    assert leaks([*told(refused.value), *logged(caplog)], (*CANARIES, USER)) == []


@pytest.mark.anyio
@pytest.mark.parametrize("of_client", [True, False], ids=["by the client", "by another"])
@pytest.mark.parametrize(
    ("method", "what"), [("consume", "the client's thread failed"), ("committed", "assigning partitions failed")]
)
async def test_a_fatal_error_shows_no_secret(
    method: str,
    what: str,
    of_client: bool,
    topic: MakeTopic,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lanes_kafka.client.group._START_TIMEOUT", 0.0)
    orders = topic()

    def fail(*arguments: Any, **named: Any) -> Any:
        text = f"cannot go on with {PASSWORD}"
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, text)) if of_client else RuntimeError(text)

    failing = type("Failing", (Consumer,), {method: fail})
    config = UNUSED | {"bootstrap.servers": orders.url}
    with anyio.fail_after(20), pytest.raises(lanes.SourceError, match=f"{what}: .*: cannot go on with …") as ended:
        await lanes.run(KafkaSource(config, topics=orders.name, client=failing), handler)
    assert leaks([*told(ended.value), *logged(caplog)]) == []


def test_a_fatal_error_is_chained_if_it_shows_no_secret() -> None:
    found = RuntimeError("out of memory")
    assert fatal_error("kafka g: it failed", found, SECRETS).__cause__ is found


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (
            KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED, f"not with {PASSWORD}")),
            "orders/0: not committed: GROUP_AUTHORIZATION_FAILED: not with …; allow this user Read on the group",
        ),
        (RuntimeError(f"closed, {PASSWORD}"), "not committed: RuntimeError: closed, …"),
    ],
    ids=["refused", "closed"],
)
def test_a_refused_commit_shows_no_secret(raised: Exception, said: str) -> None:
    given: list[Exception] = []

    def commit(**named: Any) -> None:
        raise raised

    client: Any = SimpleNamespace(commit=commit)
    answer: Any = SimpleNamespace(given_up=False, fail=given.append)
    commits = Commits(lambda partition: True, lambda reason: None, lambda: 0.0, "kafka g", SECRETS)
    partition = Partition(PartitionId("orders", 0), READER, floor=0)
    commits.send(client, Commit([Settlement(partition, [], 7)], answer))
    (error,) = given
    assert str(error) == f"kafka g: {said}" and leaks([*told(error)]) == []


@pytest.mark.anyio
async def test_a_refused_dead_letter_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(*arguments: Any) -> None:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT, f"not with {PASSWORD}"))

    async def connect(producer: ConfirmedProducer) -> None: ...

    monkeypatch.setattr(ConfirmedProducer, "send", send)
    monkeypatch.setattr(ConfirmedProducer, "connect", connect)
    with pytest.raises(lanes.SourceError, match="_TRANSPORT: not with …") as parked:
        await KafkaDeadLetters(UNUSED, "dead").put(dead_letter())
    with pytest.raises(lanes.SourceError, match="_TRANSPORT: not with …") as replayed:
        await KafkaDeadLetterBox(UNUSED, "dead")._send("orders", Record(None, b"", []), 0)
    assert leaks([*told(parked.value), *told(replayed.value)]) == []


FILES = {
    "client.properties": "".join(f"{name}={str(value).replace(chr(10), ' ')}\n" for name, value in UNUSED.items()),
    "client.json": json.dumps(UNUSED),
    "client.toml": "".join(f"{name} = {json.dumps(value)}\n" for name, value in UNUSED.items()),
    "broken.properties": f"{UNUSED['sasl.password']}\n",
    "broken.json": json.dumps(UNUSED)[:-1],
    "broken.toml": f"sasl.password = {PASSWORD}\n",
    "refused.json": json.dumps(UNUSED | {"sasl.pasword": PASSWORD}),
    "userinfo.json": json.dumps(UNUSED | {"bootstrap.servers": f"{USER}:{PASSWORD}@{HERE}"}),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "kafka", "--topic", "orders"],
        ["doctor", "kafka", "--topic", "orders", "--json"],
        ["dead-letters", "list", "--topic", "dead"],
        ["dead-letters", "drop", "0" * 32, "--topic", "dead", "-X", PASSWORD],
    ],
    ids=" ".join,
)
def test_commands_show_no_secret(
    command: list[str],
    file: str,
    soon: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / file
    path.write_text(FILES[file])
    monkeypatch.setattr("sys.argv", ["lanes", *command, "--config", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    # An unreadable file is read first, and is no malformed value of an option.
    assert ended.value.code == (64 if "-X" in command and "broken" not in file else 3)
    printed = capfd.readouterr()
    assert printed.out + printed.err != ""
    assert leaks([*printed, *logged(caplog)], (*CANARIES, USER)) == []


@pytest.mark.anyio
@pytest.mark.slow
async def test_refused_credentials_are_not_shown(
    fresh_kafka: KafkaFactory, topic: MakeTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lanes_kafka.client.thread.OPEN_TIMEOUT", 2.0)
    server = fresh_kafka(users={"admin": "secretadmin"})
    orders = topic(on=server)
    config = UNUSED | server.config("admin") | {"sasl.password": PASSWORD}
    with pytest.raises(lanes.SourceError) as of_source:
        await lanes.run(KafkaSource(config, topics=orders.name), handler)
    with pytest.raises(lanes.SourceError, match="login refused") as of_letters:
        await KafkaDeadLetters(config, orders.name).open()
    found = [str(check) for check in examine(client_config(config), [orders.name])]
    assert any("_AUTHENTICATION" in text for text in found)
    assert leaks([*told(of_source.value), *told(of_letters.value), *found, *logged(caplog)]) == []


@pytest.mark.anyio
async def test_a_run_on_kafka_shows_neither_secrets_nor_messages(
    topic: MakeTopic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    orders, dead = topic(), topic()
    produce(orders, 3, keys=[KEY.encode()], value=lambda number: VALUE.encode(), headers=[("who", HEADER.encode())])
    shown: list[str] = []

    async def failing(message: lanes.Message) -> None:
        assert (message.key, message.value, message.headers) == (
            KEY.encode(),
            VALUE.encode(),
            [("who", HEADER.encode())],
        )
        shown.extend(map(repr, (message, message.partition, consumer, consumer.status(), history, source, letters)))
        shown.append(str(consumer.status()))
        if message.attempt == 1:
            raise lanes.Nak(delay=0)
        if message.position == 1:
            raise lanes.Term("no such customer")
        if message.position == 2:
            consumer.stop()

    config = UNUSED | {"bootstrap.servers": orders.url, "group.id": f"g-{orders.name}"}
    source, letters = KafkaSource(config, topics=orders.name), KafkaDeadLetters(config, dead.name)
    history = lanes.History(tmp_path, member="m-1")
    consumer = lanes.Consumer(source, failing, dead_letters=letters, history=history)
    with anyio.fail_after(30):
        await consumer.run()
    assert consumer.status().dead_lettered == 1
    (segment,) = tmp_path.iterdir()
    rows = segment.read_text().splitlines()
    assert any('"event":"dlq_confirmed"' in row for row in rows)
    assert leaks([*shown, *rows, *logged(caplog)], (*CANARIES, USER)) == []
