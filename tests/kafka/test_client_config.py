"""The user's configuration is passed to the client and completed; unsafe settings are refused by name."""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st

from lanes.errors import ConfigError
from lanes_kafka.config import _CONSUMER_ONLY, _OF_EVERY_CLIENT, ClientConfig, client_config, is_secret, redacted
from lanes_kafka.errors import client_message

HERE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "log_level": 0}
NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
CANARY = "canary-5e1f"
SECRETS = {
    "sasl.username": f"{CANARY}-user",
    "sasl.password": f"{CANARY}-password",
    "sasl.oauthbearer.client.secret": f"{CANARY}-client",
    "sasl.oauthbearer.config": f"principal={CANARY}",
    "ssl.key.password": f"{CANARY}-key",
    "ssl.key.pem": f"-----BEGIN PRIVATE KEY-----\n{CANARY}",
    "ssl.keystore.password": f"{CANARY}-store",
}

CHOSEN = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "fetch.queue.backoff.ms": 5,
    "queued.max.messages.kbytes": 16_384,
    "queued.min.messages": 20_000,
    "max.partition.fetch.bytes": 1_048_576,
    "fetch.wait.max.ms": 100,
    "enable.partition.eof": False,
    "auto.offset.reset": "error",
}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"enable.auto.commit": True}, ["enable.auto.commit=True", "False"]),
    ({"enable.auto.commit": "true"}, ["enable.auto.commit='true'"]),
    ({"enable.auto.commit": "T"}, ["enable.auto.commit='T'"]),
    ({"enable.auto.commit": 1}, ["enable.auto.commit=1"]),
    ({"enable.auto.commit": "yes"}, ["enable.auto.commit='yes'"]),
    ({"enable.auto.commit": None}, ["enable.auto.commit=None"]),
    ({"enable.auto.offset.store": True}, ["enable.auto.offset.store=True"]),
    ({"enable.auto.commit": False, "default.topic.config": {"enable.auto.commit": True}}, ["enable.auto.commit=True"]),
    ({"auto.commit.enable": True}, ["auto.commit.enable=True"]),
    ({"topic.enable.auto.commit": "1"}, ["topic.enable.auto.commit='1'"]),
    ({"offset.store.method": "file"}, ["offset.store.method='file'", "leave it out"]),
    ({"group.id": ""}, ["group.id is missing or empty"]),
    ({"group.id": "", "group_id": "g"}, ["group.id is missing or empty", "write 'group.id' in place of 'group_id'"]),
    (
        {"bootstrap.servers": "", "bootstrap_servers": "a:1"},
        ["bootstrap.servers is missing", "write 'bootstrap.servers' in place of 'bootstrap_servers'"],
    ),
    ({"group.id": None}, ["group.id is missing or empty"]),
    ({"group.id": " \t"}, ["group.id is missing or empty"]),
    ({"group.id": b"g"}, ["group.id is of type bytes", "str"]),
    ({"group.id": f"kafka://me:{CANARY}@host"}, ["group.id is an address", "bootstrap.servers"]),
    ({"group.id": True}, ["group.id is of type bool"]),
    ({"bootstrap.servers": ""}, ["bootstrap.servers is missing", "host:port"]),
    ({"bootstrap.servers": " , "}, ["names no broker", "host:port"]),
    ({"bootstrap.servers": ["a:9092"]}, ["bootstrap.servers is of type list", "write a str"]),
    ({"bootstrap.servers": "localhost"}, ["'localhost' has no port", "write 'localhost:9092'"]),
    ({"bootstrap.servers": "a:9092, b"}, ["'b' has no port"]),
    ({"metadata.broker.list": "[::1]"}, ["'[::1]' has no port", "write '[::1]:9092'"]),
    ({"bootstrap.servers": "kafka://host:9092"}, ["has the scheme 'kafka'", "write 'host:9092'", "security.protocol"]),
    ({"bootstrap.servers": "http://host"}, ["has the scheme 'http'", "write 'host:9092'"]),
    ({"bootstrap.servers": "a:1,nats://"}, ["'nats://' has the scheme 'nats'", "write 'host:9092'"]),
    ({"bootstrap.servers": "SASL_SSL://host"}, ["'SASL_SSL://host' has no port"]),
    ({"bootstrap.servers": "localhost:port"}, ["'localhost:port' is not host:port"]),
    ({"bootstrap.servers": "localhost:"}, ["is not host:port"]),
    ({"bootstrap.servers": ":9092"}, ["is not host:port"]),
    ({"bootstrap.servers": "localhost:0"}, ["a port from 1 to 65535"]),
    ({"bootstrap.servers": "localhost:99999"}, ["a port from 1 to 65535"]),
    ({"bootstrap.servers": "::1"}, ["is not host:port", "[::1]:9092"]),
    ({"bootstrap.servers": "my host:9092"}, ["is not host:port"]),
    ({"bootstrap.servers": f"{CANARY}:{CANARY}@127.0.0.1:9"}, ["bootstrap.servers", "'@'", "sasl.password"]),
    ({"group.protocol": "share"}, ["group.protocol='share'", "no order"]),
    ({"share.acknowledgement.mode": "explicit"}, ["share.acknowledgement.mode='explicit'", "no order", "leave it out"]),
    ({"log_cb": print}, ["log_cb", "pass logger"]),
    ({"group.protocol": "new"}, ["group.protocol='new'", "'classic' or 'consumer'"]),
    ({"group.protocol": "consumer", "session.timeout.ms": 6_000}, ["session.timeout.ms=6000", "consumer.session"]),
    ({"group.protocol": "CONSUMER", "heartbeat.interval.ms": 1}, ["heartbeat.interval.ms=1", "group.consumer.heartb"]),
    (
        {"group.protocol": "consumer", "partition.assignment.strategy": "range"},
        ["partition.assignment.strategy='range'", "group.remote.assignor"],
    ),
    ({"group.protocol": "consumer", "group.protocol.type": "consumer"}, ["group.protocol.type='consumer'"]),
    ({"group.remote.assignor": "uniform"}, ["group.remote.assignor='uniform'", "partition.assignment.strategy"]),
    ({"partition.assignment.strategy": "range,cooperative-sticky"}, ["'range,cooperative-sticky'", "stop every"]),
    ({"partition.assignment.strategy": "sticky"}, ["'sticky'", "cooperative-sticky"]),
    ({"partition.assignment.strategy": ""}, ["partition.assignment.strategy=''"]),
    ({"partition.assignment.strategy": "range "}, ["'range '"]),
    ({"max.poll.interval.ms": 6_000}, ["max.poll.interval.ms=6000", "session.timeout.ms=45000"]),
    ({"max.poll.interval.ms": "90000", "session.timeout.ms": "100000"}, ["90000", "100000"]),
    (
        {"session.timeout.ms": 99_999_999},
        ["session.timeout.ms=99999999", "max.poll.interval.ms=300000; lower one"],
    ),
    ({"heartbeat.interval.ms": 45_000}, ["heartbeat.interval.ms=45000", "session.timeout.ms=45000", "a third"]),
    ({"heartbeat.interval.ms": "9", "session.timeout.ms": "8"}, ["heartbeat.interval.ms=9", "session.timeout.ms=8"]),
    ({"session.timeout.ms": 3_000}, ["heartbeat.interval.ms=3000 (the default) is not below session.timeout.ms=3000"]),
    ({"session.timeout.ms": "1000"}, ["heartbeat.interval.ms=3000 (the default)", "set it to a third"]),
    ({"heartbeat.interval.ms": "3s"}, ["heartbeat.interval.ms='3s'", "milliseconds"]),
    ({"max.poll.interval.ms": "6e5"}, ["max.poll.interval.ms='6e5'", "milliseconds"]),
    ({"max.poll.interval.ms": "600_000"}, ["'600_000'"]),
    ({"max.poll.interval.ms": 0}, ["max.poll.interval.ms=0"]),
    ({"max.poll.interval.ms": True}, ["max.poll.interval.ms=True"]),
    ({"session.timeout.ms": "1\u0660000"}, ["session.timeout.ms="]),
    ({"session.timeout.ms": "\u00a06000"}, ["session.timeout.ms="]),
    ({"session.timeout.ms": float("nan")}, ["session.timeout.ms=nan"]),
    ({"auto.offset.reset": "by_duration:PT1H"}, ["by_duration:PT1H", "start="]),
    ({"auto.offset.reset": "none"}, ["auto.offset.reset='none'", "'earliest'"]),
    ({"auto.offset.reset": None}, ["auto.offset.reset=None"]),
    ({"topic.auto.offset.reset": "never"}, ["auto.offset.reset='never'"]),
    ({"on_assign": print}, ["on_assign", "leave it out"]),
    ({"on_revoke": None}, ["on_revoke"]),
    ({"on_lost": print}, ["on_lost"]),
    ({"on_commit": 1}, ["on_commit is an int", "(error, partitions)"]),
    ({"default.topic.config": "x"}, ["default.topic.config is of type str"]),
    ({1: 2}, ["a name of type int"]),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_an_unsafe_setting_is_refused_by_name_and_without_a_secret(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        client_config(HERE | SECRETS | settings)
    text = str(refused.value)
    assert [word for word in words if word not in text] == []
    assert CANARY not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "servers", ["a:1", "a:1,b.example:65535", " a:1 , ,b:2,", "[::1]:9092", "SASL_SSL://my_host:9092", "ssl://a:1/path"]
)
def test_an_address_is_passed_on_unchanged(servers: str) -> None:
    assert client_config({"bootstrap.servers": servers, "group.id": "g"}).client["bootstrap.servers"] == servers
    assert client_config({"metadata.broker.list": servers, "group.id": "g"}).client["metadata.broker.list"] == servers


@pytest.mark.parametrize("settings", [{**HERE, "group.id": "g"}, {"bootstrap.servers": "h:1"}, {"group.id": "g"}])
def test_group_and_address_are_required_and_sufficient(settings: dict[str, Any]) -> None:
    if {"group.id", "bootstrap.servers"} <= settings.keys():
        assert client_config(settings).group == "g"
    else:
        with pytest.raises(ConfigError, match="is missing"):
            client_config(settings)


@pytest.mark.parametrize("config", [f"sasl.password={CANARY}", None, 7, [("group.id", CANARY)], Consumer])
def test_a_config_that_is_no_dictionary_is_refused_by_its_type(config: Any) -> None:
    with pytest.raises(ConfigError, match=f"config is of type {type(config).__name__}; pass the dict") as refused:
        client_config(config)
    assert CANARY not in str(refused.value)


def test_a_ready_consumer_is_refused_with_the_remedy() -> None:
    ready = Consumer(HERE)
    try:
        with pytest.raises(ConfigError, match=r"config is of type Consumer; pass the dict .* and a function"):
            client_config(ready)  # type: ignore[arg-type]
    finally:
        ready.close()


ORDINARY = st.text(st.sampled_from("abcdefgh.-_"), min_size=1, max_size=12).map(lambda name: f"x.{name}")
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.lists(st.integers()))


@given(st.dictionaries(ORDINARY, VALUES))
def test_other_settings_pass_through_unchanged(settings: dict[str, Any]) -> None:
    before = HERE | settings
    config = client_config(before)
    assert config.client == before | CHOSEN
    assert before == HERE | settings
    assert all(config.client[name] is value for name, value in settings.items())
    assert {name: config.admin[name] for name in settings} == settings


@given(st.sets(st.sampled_from(sorted(CHOSEN.keys() - {"enable.auto.commit", "enable.auto.offset.store"}))))
def test_settings_of_the_user_win_over_chosen_ones(mine: set[str]) -> None:
    own = {name: "error" if name == "auto.offset.reset" else "4321" for name in mine}
    config = client_config(HERE | own)
    assert {name: config.client[name] for name in mine} == own
    assert {one.name: one.value for one in config.chosen} == {
        name: value for name, value in CHOSEN.items() if name not in mine
    }
    assert all(one.reason for one in config.chosen)


def test_an_alias_counts_as_the_setting() -> None:
    config = client_config(
        {
            "metadata.broker.list": "127.0.0.1:9",
            "group.id": "g",
            "fetch.message.max.bytes": 1,
            "enable.auto.commit": "f",
        }
    )
    assert "max.partition.fetch.bytes" not in config.client
    assert config.client["enable.auto.commit"] == "f"
    assert config.admin == {"metadata.broker.list": "127.0.0.1:9"}


def test_fetch_settings_are_not_chosen_beside_fetch_min_bytes() -> None:
    config = client_config(HERE | {"fetch.min.bytes": 1_000_000})
    assert not {"max.partition.fetch.bytes", "fetch.wait.max.ms"} & config.client.keys()


@pytest.mark.parametrize(
    ("settings", "start", "out_of_range"),
    [
        ({}, "beginning", "fail"),
        ({"auto.offset.reset": "earliest"}, "beginning", "earliest"),
        ({"auto.offset.reset": " SMALLEST"}, "beginning", "earliest"),
        ({"auto.offset.reset": "beginning"}, "beginning", "earliest"),
        ({"auto.offset.reset": "latest"}, "next", "latest"),
        ({"topic.auto.offset.reset": "largest"}, "next", "latest"),
        ({"auto.offset.reset": "end"}, "next", "latest"),
        ({"auto.offset.reset": "error"}, "beginning", "fail"),
        ({"auto.offset.reset": "error", "default.topic.config": {"auto.offset.reset": "end"}}, "next", "latest"),
        ({"auto.offset.reset": "end", "topic.auto.offset.reset": "earliest"}, "beginning", "earliest"),
    ],
)
def test_the_offset_reset_becomes_start_and_out_of_range(
    settings: dict[str, Any], start: str, out_of_range: str
) -> None:
    config = client_config(HERE | settings)
    assert (config.start, config.out_of_range) == (start, out_of_range)
    resets = {name: value for name, value in config.client.items() if "offset.reset" in name}
    assert resets == {"auto.offset.reset": "error"}
    assert "default.topic.config" not in config.client


@pytest.mark.parametrize("reset", [{}, {"auto.offset.reset": "error"}])
def test_start_and_out_of_range_may_be_given_beside_error(reset: dict[str, Any]) -> None:
    config = client_config(HERE | reset, start=NOON)
    assert (config.start, config.out_of_range) == (NOON, "fail")


def test_start_and_out_of_range_may_equal_the_offset_reset() -> None:
    config = client_config(HERE | {"auto.offset.reset": "latest"}, start="next", out_of_range="latest")
    assert (config.start, config.out_of_range) == ("next", "latest")


@pytest.mark.parametrize(
    ("reset", "choice", "words"),
    [
        ("earliest", {"start": "next"}, "start='next' contradicts auto.offset.reset='earliest'.*'beginning'"),
        ("latest", {"start": NOON}, "contradicts auto.offset.reset='latest'"),
        ("latest", {"out_of_range": "fail"}, "out_of_range='fail' contradicts auto.offset.reset='latest'"),
        ("error", {"out_of_range": "earliest"}, "out_of_range='earliest' contradicts auto.offset.reset='error'"),
        (None, {"start": "earliest"}, r"start='earliest': must be .* \(did you mean \"beginning\"\?\)$"),
        (None, {"start": "latest"}, r"start='latest': must be .* \(did you mean \"next\"\?\)$"),
        (None, {"start": "first"}, "start='first': must be .* datetime$"),
        (None, {"start": datetime(2026, 7, 1)}, "start=2026-07-01T00:00:00 has no time zone"),  # noqa: DTZ001
        (None, {"out_of_range": "error"}, "out_of_range='error': must be"),
    ],
)
def test_a_contradiction_to_the_offset_reset_is_refused(reset: str | None, choice: dict[str, Any], words: str) -> None:
    settings = {} if reset is None else {"auto.offset.reset": reset}
    with pytest.raises(ConfigError, match=words):
        client_config(HERE | settings, **choice)


@pytest.mark.parametrize(
    ("settings", "protocol", "interval", "session"),
    [
        ({}, "eager", 300.0, 45.0),
        ({"partition.assignment.strategy": "roundrobin, range"}, "eager", 300.0, 45.0),
        ({"partition.assignment.strategy": "cooperative-sticky"}, "cooperative", 300.0, 45.0),
        ({"group.protocol": " Classic", "session.timeout.ms": " 6000 "}, "eager", 300.0, 6.0),
        ({"group.protocol": "consumer", "max.poll.interval.ms": "6000"}, "848", 6.0, None),
        ({"session.timeout.ms": 6_000.0, "max.poll.interval.ms": 6_000}, "eager", 6.0, 6.0),
        ({"session.timeout.ms": 3_001}, "eager", 300.0, 3.001),
    ],
)
def test_protocol_and_intervals_equal_those_of_the_client(
    settings: dict[str, Any], protocol: str, interval: float, session: float | None
) -> None:
    config = client_config(HERE | settings)
    assert (config.protocol, config.max_poll_interval, config.session_timeout) == (protocol, interval, session)
    Consumer(config.client).close()


@pytest.mark.parametrize("name", sorted(_CONSUMER_ONLY | _OF_EVERY_CLIENT))
def test_only_settings_of_the_client_are_suggested(name: str) -> None:
    # The client reads the settings in order, so it refuses an unknown name before the last name.
    with pytest.raises((KafkaException, TypeError, ValueError)) as refused:
        Consumer({"group.id": "g", name: "?", "no.such.setting": "?"})
    assert f'No such configuration property: "{name}"' not in str(refused.value)


def test_group_and_instance_are_read_as_the_client_reads_them() -> None:
    config = client_config(HERE | {"group.id": " orders", "group.instance.id": "a-1"})
    assert (config.group, config.instance) == ("orders", "a-1")
    assert client_config(HERE | {"group.id": 7, "group.instance.id": ""}).instance is None
    assert client_config(HERE | {"group.id": 7}).group == "7"


def test_on_commit_is_separated_from_the_other_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    config = client_config(HERE | {"on_commit": print, "stats_cb": print, "error_cb": print, "throttle_cb": print})
    assert config.on_commit is not None and config.on_commit("an error", []) is None
    assert capsys.readouterr().out == "an error []\n"
    assert "on_commit" not in config.client
    assert {"stats_cb", "error_cb", "throttle_cb"} <= config.client.keys()
    assert client_config(HERE | {"on_commit": None}).on_commit is None


CONSUMERS_OWN = {
    "auto.commit.interval.ms": 100,
    "check.crcs": True,
    "coordinator.query.interval.ms": 60_000,
    "fetch.error.backoff.ms": 5,
    "fetch.max.bytes": 5_000_000,
    "fetch.min.bytes": 1,
    "group.instance.id": "i",
    "group.protocol": "classic",
    "heartbeat.interval.ms": 500,
    "isolation.level": "read_uncommitted",
    "max.poll.interval.ms": 60_000,
    "partition.assignment.strategy": "range",
    "session.timeout.ms": 6_000,
    "topic.consume.callback.max.messages": 1,
}


def test_an_admin_client_gets_connection_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def token(_: str) -> tuple[str, float]:
        return "t", 0.0

    connecting = {
        "bootstrap.servers": "127.0.0.1:9",
        "client.id": "c",
        "log_level": 4,
        "oauth_cb": token,
        "security.protocol": "PLAINTEXT",
        "socket.timeout.ms": 5_000,
        "ssl.endpoint.identification.algorithm": "none",
    }
    called = {"stats_cb": print, "error_cb": print, "statistics.interval.ms": 1_000, "transactional.id": "t"}
    config = client_config(connecting | CONSUMERS_OWN | called | {"group.id": "g"})
    assert config.admin["oauth_cb"]("") == token("")
    assert config.admin | {"oauth_cb": token} == connecting

    said: list[logging.LogRecord] = []
    logger = logging.getLogger("tests.kafka.admin")
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", False)
    quiet = {name: value for name, value in config.admin.items() if name not in ("oauth_cb", "bootstrap.servers")}
    AdminClient(quiet | {"logger": logger}).poll(0)
    assert [record.getMessage() for record in said if "CONFWARN" in record.getMessage()] == []


def test_the_default_topic_config_wins_as_in_the_client() -> None:
    with pytest.raises(KafkaException, match='Invalid value "bad"'):
        Consumer(HERE | {"auto.offset.reset": "error", "default.topic.config": {"auto.offset.reset": "bad"}})


def test_the_repr_of_a_config_shows_group_and_protocol_alone() -> None:
    config = client_config(HERE | SECRETS)
    assert isinstance(config, ClientConfig)
    assert repr(config) == str(config) == "<ClientConfig group 'g' protocol eager>"


@pytest.mark.parametrize("name", [*SECRETS, "ssl_key", "sasl.oauthbearer.assertion.private.key.pem"])
def test_secrets_are_known_by_name(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["sasl.mechanism", "sasl.mechanisms", "security.protocol", "ssl.ca.location", "debug"])
def test_settings_that_errors_must_name_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "config", "shown"),
    [
        ("beginning at: x scope=tok-en-5", {"sasl.oauthbearer.config": "a=1 x scope=tok-en-5"}, "beginning at: … …=…"),
        ("user=abc: abcdef", {"sasl.username": "abc"}, "user=…: abcdef"),
        ("x+a x", {"sasl.password": "+a"}, "x+a x"),
        ("say +a", {"sasl.password": b"+a"}, "say …"),
        ("say PLAIN", {"sasl.mechanism": "PLAIN", "ssl.key.password": None}, "say PLAIN"),
        ("a.b", {"sasl.password": "a.b", "ssl.key.password": "b"}, "…"),
    ],
)
def test_an_error_is_shown_without_the_words_of_a_secret(text: str, config: dict[str, Any], shown: str) -> None:
    assert redacted(text, config) == shown


@pytest.mark.parametrize(("settings", "value"), [({"session.timeout.ms": 100}, "100"), ({}, "45000")])
def test_a_session_timeout_outside_of_the_bounds_names_the_bounds(settings: dict[str, Any], value: str) -> None:
    assert client_message(KafkaError(KafkaError.INVALID_SESSION_TIMEOUT), settings).endswith(
        f"; session.timeout.ms={value} is outside the bounds of the broker; set session.timeout.ms between "
        "group.min.session.timeout.ms (default 6000) and group.max.session.timeout.ms (default 1800000)"
    )
