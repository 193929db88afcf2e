"""Faults of the user's callbacks in the settings of a client: each error names the callback and its exception."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException

import lanes
from lanes_kafka import KafkaDeadLetters, KafkaSource
from lanes_kafka.callbacks import CallbackError
from lanes_kafka.cli.doctor import examine
from lanes_kafka.config import client_config
from lanes_kafka.dead_letters.producer import ConfirmedProducer, producer_settings
from lanes_kafka.errors import ErrorLog, client_text, fatal_error
from tests.backends.test_secrets import CANARIES, PASSWORD, leaks
from tests.kafka.mock_cluster import MockCluster
from tests.kafka.reader import NOTHING, WITHIN, topic_of
from tests.kafka.workload import QUIET

HERE: dict[str, Any] = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g"}
LOGIN = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER", "log_level": 0}


def fail(*arguments: object) -> Any:
    raise RuntimeError("the team's queue is full")


async def waits(text: object) -> None: ...


async def read(source: KafkaSource) -> None:
    await source.open()
    while True:
        await source.receive(NOTHING)


class BrokenLogger:
    def log(self, level: int, template: str, *values: object) -> None:
        fail()


class ShortLogger:
    def log(self, line: str) -> None: ...


class AwaitedCall:
    async def __call__(self, text: object) -> None: ...


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"stats_cb": lambda: None},
        r"stats_cb takes nothing, but the client passes \(text\); pass a plain",
    ),
    ({"error_cb": lambda one, two: None}, r"error_cb takes one, two, but the client passes \(error\)"),
    ({"throttle_cb": fail.__name__}, "throttle_cb is a str, which is not callable"),
    ({"oauth_cb": waits}, "oauth_cb is async, but the client awaits nothing"),
    ({"oauth_cb": AwaitedCall()}, "oauth_cb is async"),
    ({"stats_cb": functools.partial(waits)}, "stats_cb is async"),
    ({"on_commit": lambda error: None}, r"on_commit takes error, but the client passes \(error, partitions\)"),
    ({"logger": "kafka"}, "logger is a str, which has no method log; pass a logging.Logger"),
    ({"logger": ShortLogger()}, r"logger.log takes line, but the client passes \(level, template, facility, client"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_a_callback_that_the_client_cannot_call_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        KafkaSource(HERE | settings, topics="orders")


@pytest.mark.parametrize(("settings", "words"), [each for each in WRONG if set(each[0]) & {"oauth_cb", "logger"}])
def test_a_producer_refuses_a_callback_that_it_cannot_call(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(lanes.ConfigError, match=words):
        KafkaDeadLetters(HERE | settings, "dead")


def test_a_wrong_callback_is_shown_without_its_value() -> None:
    for name in ("error_cb", "logger", "on_commit"):
        with pytest.raises(lanes.ConfigError) as refused:
            client_config(HERE | {name: PASSWORD})
        assert leaks([str(refused.value)], CANARIES) == []


def test_callbacks_with_other_parameters_are_accepted() -> None:
    logger = logging.getLogger("tests.kafka.callbacks")
    given = {"stats_cb": lambda *all: None, "error_cb": lambda error, more=0: None, "throttle_cb": print}
    config = client_config(HERE | given | {"logger": logger, "oauth_cb": None})
    assert config.client["logger"] is logger
    # The settings of a client may be checked twice.
    again = client_config(config.client)
    assert {name: again.client[name] for name in given} == {name: config.client[name] for name in given}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("callback", "settings", "raised"),
    [
        ("stats_cb", {"stats_cb": fail, "statistics.interval.ms": 50}, RuntimeError),
        # ``float`` accepts one argument, so only the call shows the fault.
        ("stats_cb", {"stats_cb": float, "statistics.interval.ms": 50}, ValueError),
        ("logger", {"logger": BrokenLogger(), "debug": "cgrp", "log_level": 7}, RuntimeError),
    ],
    ids=["stats_cb", "arguments", "logger"],
)
async def test_an_error_of_a_callback_ends_the_source_and_names_it(
    callback: str,
    settings: dict[str, Any],
    raised: type[Exception],
    cluster: MockCluster,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topic_of(cluster, name, 1)
    source = KafkaSource(QUIET | {"bootstrap.servers": cluster.url, "group.id": f"g-{name}"} | settings, topics=name)
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError) as ended:
            await read(source)
        await source.aclose()
    text = str(ended.value)
    assert f"the client's thread failed: {callback} raised {raised.__name__}: " in text
    assert text.endswith(f"; correct {callback} in the configuration, and start again")
    assert isinstance(ended.value.__cause__, raised)


def test_an_error_of_error_cb_and_on_commit_names_them() -> None:
    config = client_config(HERE | {"error_cb": fail, "on_commit": fail})
    errors = ErrorLog("kafka g", lambda: 0.0, config.client["error_cb"], config.client)
    on_commit = config.on_commit
    assert on_commit is not None
    calls: list[tuple[str, Callable[[], object]]] = [
        ("error_cb", lambda: errors.on_error(KafkaError(KafkaError._TRANSPORT))),
        ("on_commit", lambda: on_commit(None, [])),
    ]
    for name, call in calls:
        with pytest.raises(CallbackError) as failed:
            call()
        text = str(fatal_error("kafka g: the client's thread failed", failed.value, {}))
        assert f"failed: {name} raised RuntimeError: the team's queue is full; correct {name}" in text


def test_a_callback_that_raises_system_exit_is_named() -> None:
    def leave(text: str) -> None:
        raise SystemExit(3)

    with pytest.raises(CallbackError) as failed:
        client_config(HERE | {"stats_cb": leave}).client["stats_cb"]("{}")
    assert "stats_cb raised SystemExit: 3" in str(fatal_error("kafka g: it failed", failed.value, {}))


# --- oauth_cb, whose errors the client drops


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("token", "the result is a str, not a tuple of a token"),
        (("token",), "the result is a tuple, not a tuple of a token, a str, and the time of its expiry, a number"),
        ((b"token", 1.0), "the result has a bytes and a float; return a tuple of a token, a str"),
    ],
)
def test_a_token_of_a_wrong_type_is_named(result: object, words: str) -> None:
    callback = client_config(HERE | {"oauth_cb": lambda config: result}).client["oauth_cb"]
    with pytest.raises(CallbackError):
        callback("")
    found = client_text(KafkaError(KafkaError._AUTHENTICATION, "no token"), {"oauth_cb": callback})
    assert found.startswith(f"_AUTHENTICATION: no token (oauth_cb raised TypeError: {words}")


def test_a_token_ends_the_report_of_an_earlier_error() -> None:
    results: list[Any] = [lambda: fail(), lambda: ("token", 9e9)]
    settings = client_config(HERE | {"oauth_cb": lambda config: results.pop(0)()}).client
    refused = KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "no")
    with pytest.raises(CallbackError):
        settings["oauth_cb"]("")
    assert client_text(refused, settings).endswith("no (oauth_cb raised RuntimeError: the team's queue is full)")
    assert client_text(KafkaError(KafkaError._TRANSPORT, "down"), settings) == "_TRANSPORT: down"
    assert settings["oauth_cb"]("") == ("token", 9e9)
    assert client_text(refused, settings) == "SASL_AUTHENTICATION_FAILED: no"


@pytest.mark.anyio
async def test_a_login_without_a_token_names_the_error_of_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: dict[str, Any]) -> Any:
        # As the client does after ten seconds.
        with pytest.raises(CallbackError):
            settings["oauth_cb"]("")
        raise KafkaException(KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, "OAuth token not set"))

    config = HERE | LOGIN | {"oauth_cb": fail}
    said = "OAuth token not set (oauth_cb raised RuntimeError: the team's queue is full)"
    for place in ("lanes_kafka.client.thread.AdminClient", "lanes_kafka.dead_letters.producer.Producer"):
        monkeypatch.setattr(place, refuse)
    monkeypatch.setattr("lanes_kafka.cli.doctor.Consumer", refuse)
    source = KafkaSource(config, topics="orders")
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError) as of_source:
            await source.open()
        await source.aclose()
        producer = ConfirmedProducer(producer_settings(config), "dead letters")
        producer.open()
        with pytest.raises(lanes.ConfigError) as of_producer:
            await producer.connect()
        await producer.aclose()
    assert said in str(of_source.value) and said in str(of_producer.value)
    (found,) = examine(client_config(config), ["orders"])
    assert said in found.detail


@pytest.mark.anyio
async def test_an_error_of_a_callback_in_the_producers_thread_is_a_source_error() -> None:
    producer = ConfirmedProducer(producer_settings(HERE | {"logger": BrokenLogger()}), "dead letters")
    logger = producer.settings["logger"]
    producer.open()
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.SourceError, match=r"dead letters: logger raised RuntimeError: .*; correct logger"):
            await producer.call(lambda wanted: logger.log(6, "%s", "x", "y", "z"))
        await producer.aclose()


# --- files


@pytest.mark.parametrize(
    "name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.crl.location"]
)
def test_a_missing_file_of_the_settings_is_named_with_its_path(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "absent.pem")
    with pytest.raises(KafkaException) as refused:
        Consumer(HERE | {"security.protocol": "SSL", name: path})
    found = client_text(refused.value.args[0], {name: path})
    assert found == f"_INVALID_ARG: {name}={path!r}: the file does not exist"


@pytest.mark.anyio
async def test_the_start_names_a_missing_certificate(tmp_path: Path) -> None:
    path = str(tmp_path / "ca.pem")
    config = HERE | {"security.protocol": "SSL", "ssl.ca.location": path}
    words = f"ssl.ca.location={path!r}: the file does not exist; correct the "
    source, letters = KafkaSource(config, topics="orders"), KafkaDeadLetters(config, "dead")
    with anyio.fail_after(WITHIN):
        with pytest.raises(lanes.ConfigError) as refused:
            await source.open()
        await source.aclose()
        assert words in str(refused.value)
        with pytest.raises(lanes.ConfigError) as refused:
            await letters.open()
        assert words in str(refused.value)
    (found,) = examine(client_config(config), ["orders"])
    assert f"ssl.ca.location={path!r}: the file does not exist" in found.detail


def test_a_folder_or_a_text_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    failed = KafkaError(KafkaError._INVALID_ARG, "ssl.certificate.location failed: error:0A080009")
    settings: dict[str, Any] = {"ssl.certificate.location": str(tmp_path)}
    assert client_text(failed, settings).endswith(f"location={str(tmp_path)!r} is a folder; write the path of a file")
    settings = {"ssl.certificate.location": "a\0b"}
    assert client_text(failed, settings).endswith("location='a\\x00b': it is not a path")
    (tmp_path / "garbage.pem").write_text("hello")
    settings = {"ssl.certificate.location": str(tmp_path / "garbage.pem")}
    # The client reads the file, so its own text names the fault.
    assert client_text(failed, settings) == "_INVALID_ARG: ssl.certificate.location failed: error:0A080009"


def test_a_key_in_place_of_its_path_is_not_shown() -> None:
    failed = KafkaError(KafkaError._INVALID_ARG, "ssl.key.location failed: error:0A080002")
    for value in (PASSWORD, f"-----BEGIN PRIVATE KEY-----\n{PASSWORD}\n-----END-----\n"):
        found = client_text(failed, {"ssl.key.location": value})
        assert found == "_INVALID_ARG: ssl.key.location: the file does not exist"


def test_the_thread_names_its_own_errors_without_a_callback() -> None:
    text = str(fatal_error("kafka g: it failed", ValueError("no"), {}))
    assert text == "kafka g: it failed: ValueError: no; start again"
