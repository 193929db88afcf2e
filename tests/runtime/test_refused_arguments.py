"""The constructor refuses an argument of a wrong kind, and names the argument, its kind and the wanted kind."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lanes
import lanes_jetstream
import lanes_kafka
import lanes_postgres
import memsource
from lanes import ConfigError, Consumer, History, Journal
from lanes_jetstream import JetStreamSource
from lanes_kafka import KafkaDeadLetters, KafkaSource
from memsource import MemoryBroker, MemoryDeadLetters, MemorySource
from tests.fakes.support import acknowledge

SECRET = "nats://user:canary19c4@host"


class NoPut:
    async def open(self) -> None: ...

    async def aclose(self) -> None: ...


async def on_event(event: lanes.GroupEvent) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "source",
            SECRET,
            (
                "source is a str, without the method open: pass a source, such as KafkaSource(…), JetStreamSource(…) "
                "or PostgresSource(…)"
            ),
        ),
        ("source", acknowledge, "source is a function, without the method open: pass a source"),
        ("source", MemorySource, "source is the class MemorySource: pass a source"),
        ("source", None, "source is None, without the method open: pass a source"),
        ("settings", {"a": SECRET}, "settings is a dict: pass lanes.Settings(…)"),
        ("settings", {}, "settings is a dict: pass lanes.Settings(…)"),
        ("settings", lanes.Settings, "settings is the class Settings: pass lanes.Settings(…)"),
        ("dead_letters", SECRET, "dead_letters is a str, without the method open: pass a target of dead letters, such"),
        ("dead_letters", MemoryDeadLetters, "dead_letters is the class MemoryDeadLetters: pass a target"),
        ("dead_letters", NoPut(), "dead_letters is a NoPut, without the method put: pass a target"),
        (
            "attempts",
            5,
            (
                "attempts is an int, without the method load: pass a store of attempts, such as PostgresAttempts(…); "
                "the largest number of attempts is settings=lanes.Settings(retry=lanes.Retry(attempts=…))"
            ),
        ),
        ("attempts", SECRET, "attempts is a str, without the method load: pass a store of attempts"),
        ("history", SECRET, "history is a str: pass lanes.History(directory)"),
        ("journal", 5, "journal is an int: pass a directory, or lanes.Journal(directory, …)"),
        ("on_event", SECRET, "on_event is a str: pass a plain function of one GroupEvent"),
        ("on_event", on_event, "on_event is an async function: pass a plain function of one GroupEvent"),
        ("clock", 5.0, "clock is a float: pass a function that returns seconds, or leave it out"),
    ],
)
def test_an_argument_of_a_consumer_is_refused_without_its_value(name: str, value: Any, said: str) -> None:
    arguments: dict[str, Any] = {"source": MemorySource(MemoryBroker()), "handler": acknowledge, name: value}
    with pytest.raises(ConfigError) as refused:
        Consumer(**arguments)
    assert str(refused.value).startswith(said)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    ("on_event", "said"),
    [
        (lambda: None, r"nothing, and .* with one GroupEvent \("),
        (lambda event, more: None, r"event, more, .* alone \("),
    ],
)
def test_a_function_of_events_takes_one_event(on_event: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^on_event=.*<lambda> takes {said}"):
        Consumer(MemorySource(MemoryBroker()), acknowledge, on_event=on_event)
    Consumer(MemorySource(MemoryBroker()), acknowledge, on_event=print)


@pytest.mark.anyio
async def test_an_unknown_option_is_named_with_a_known_one() -> None:
    options: Any = {"deadletters": 1}
    with pytest.raises(ConfigError) as refused:
        await lanes.run(MemorySource(MemoryBroker()), acknowledge, **options)
    assert str(refused.value) == "lanes.run has no option deadletters=: did you mean dead_letters=?"


@pytest.mark.anyio
async def test_the_port_is_refused_by_a_consumer_with_its_place() -> None:
    options: Any = {"http": "127.0.0.1:0"}
    said = (
        "has no option http=: write lanes.main(source, handler, http=…), or await lanes.serve(lanes.Consumer(…), "
        "http=…)"
    )
    with pytest.raises(ConfigError) as refused:
        Consumer(MemorySource(MemoryBroker()), acknowledge, **options)
    assert str(refused.value) == f"lanes.Consumer {said}"
    with pytest.raises(ConfigError) as refused:
        await lanes.run(MemorySource(MemoryBroker()), acknowledge, **options)
    assert str(refused.value) == f"lanes.run {said}"


CONSUMER = Consumer(MemorySource(MemoryBroker()), acknowledge)
WANTS = "takes a source and a handler, and other arguments by their names: write"
SERVE_WANTS = "lanes.serve takes one consumer, and other arguments by their names: write"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("call", "values", "said"),
    [
        (lanes.run, (CONSUMER,), f"lanes.run {WANTS} lanes.run(source, handler, settings=…), or await consumer.run()"),
        (lanes.run, (), f"lanes.run {WANTS} lanes.run(source, handler, settings=…)"),
        (lanes.run, (1, 2, lanes.Settings()), f"lanes.run {WANTS} lanes.run(source, handler, settings=…)"),
        (
            lanes.serve,
            (MemorySource(MemoryBroker()), acknowledge),
            f"{SERVE_WANTS} lanes.serve(lanes.Consumer(source, handler, …))",
        ),
    ],
)
async def test_a_wrong_call_names_the_right_call(call: Any, values: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        await call(*values)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("values", "end"),
    [((CONSUMER,), ", or await lanes.serve(consumer)"), ((1, 2, lanes.Settings()), ""), ((1,), "")],
)
def test_a_wrong_call_of_main_is_one_line(
    values: tuple[Any, ...], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call: Any = lanes.main
    with pytest.raises(SystemExit) as ended:
        call(*values)
    assert ended.value.code == 1
    said = f"lanes: ConfigError: lanes.main {WANTS} lanes.main(source, handler, settings=…){end}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (KafkaSource, ({}, "orders"), "KafkaSource takes 1 argument(s) without a name, and the call has 2: "),
        (
            JetStreamSource,
            (SECRET, "orders", None),
            "JetStreamSource takes 1 argument(s) without a name, and the call has 3: ",
        ),
        (lanes.Settings, (10,), "Settings takes no argument(s) without a name, and the call has 1: "),
        (Consumer, (1, 2, 3), "lanes.Consumer takes 2 argument(s) without a name, and the call has 3: "),
    ],
)
def test_a_value_without_its_name_names_the_argument(kind: Any, values: tuple[Any, ...], said: str) -> None:
    names = {"KafkaSource": "topics=…", "JetStreamSource": "stream=…, key=…", "Settings": "concurrency=…"}
    with pytest.raises(ConfigError) as refused:
        kind(*values)
    text = str(refused.value)
    assert text.startswith(said)
    assert text.endswith(f"write the names, such as {names.get(text.split()[0], 'settings=…')}")


def test_an_unknown_option_of_main_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    options: Any = {"bakend": "trio"}
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge, **options)
    assert ended.value.code == 1
    assert capsys.readouterr().err == "lanes: ConfigError: lanes.main has no option bakend=: did you mean backend=?\n"


@pytest.mark.anyio
async def test_main_in_a_running_loop_names_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "lanes: ConfigError: lanes.main was called while an event loop runs, and starts an event loop itself: write "
        "await lanes.serve(lanes.Consumer(source, handler, …))\n"
    )


def test_trio_is_refused_for_jetstream_before_it_is_looked_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_trio(*_: object, **__: object) -> None:
        raise LookupError("Backend 'trio' is not available")

    monkeypatch.setattr("lanes.process.anyio.run", no_trio)
    source = JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=None)
    with pytest.raises(SystemExit):
        lanes.main(source, acknowledge, backend="trio")
    said = 'lanes: ConfigError: backend="trio": JetStreamSource needs asyncio; leave backend out\n'
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (lambda: 1, "cannot be called with the client's message ("),
        (lambda message, more: 1, "cannot be called with the client's message alone ("),
        (acknowledge, "is async"),
    ],
)
@pytest.mark.parametrize("kind", ["kafka", "jetstream"])
def test_a_key_function_takes_one_message(kind: str, key: Any, said: str) -> None:
    def make() -> object:
        if kind == "kafka":
            return KafkaSource({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, topics="t", key=key)
        return JetStreamSource("nats://127.0.0.1:1", stream="S", durable="d", key=key)

    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value).startswith("key=")
    assert said in str(refused.value)


@pytest.mark.parametrize("kind", [History, Journal])
@pytest.mark.parametrize("value", [5, None, ["a"]])
def test_a_directory_is_a_path(kind: Any, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"directory=.*: must be the path of a folder, a str or a pathlib\.Path$"):
        kind(value)
    with pytest.raises(ConfigError, match="member=5: must be 1 to 64"):
        kind(tmp_path, member=5)


@pytest.mark.anyio
async def test_serve_takes_a_consumer() -> None:
    source: Any = MemorySource(MemoryBroker())
    with pytest.raises(ConfigError, match=r"^consumer is a MemorySource: pass lanes\.Consumer\(source, handler, …\)$"):
        await lanes.serve(source)
    with pytest.raises(ConfigError, match=r"^grace='5': must be a finite number of seconds"):
        await lanes.serve(Consumer(source, acknowledge), grace="5")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^gc='off' is unknown: use \"tuned\" or \"default\"$"):
        await lanes.serve(Consumer(source, acknowledge), gc="off")  # type: ignore[arg-type]


def test_main_refuses_an_unknown_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge, backend="curio")  # type: ignore[arg-type]
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        'lanes: ConfigError: backend=\'curio\' is unknown: use "asyncio", "auto", "trio" or "uvloop"\n'
    )


def test_main_names_the_extra_of_uvloop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.loops.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge, backend="uvloop")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "lanes: ConfigError: backend=\"uvloop\": uvloop is not installed; pip install '.[uvloop]' in the checkout of "
        'lanes, or write backend="auto"\n'
    )


def test_main_says_how_to_install_trio(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lanes.loops.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge, backend="trio")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "lanes: ConfigError: backend=\"trio\": trio is not installed; pip install 'anyio[trio]', or leave backend out\n"
    )


@pytest.mark.parametrize(
    ("kind", "option", "remedy"),
    [
        (KafkaSource, "bootstrap_servers", 'KafkaSource({"bootstrap.servers": …}, topics=…)'),
        (KafkaSource, "group_id", 'KafkaSource({"group.id": …}, topics=…)'),
        (KafkaDeadLetters, "security_protocol", 'KafkaDeadLetters({"security.protocol": …}, topic)'),
    ],
)
def test_a_client_setting_as_a_keyword_names_the_dictionary(kind: Any, option: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        kind(**{option: "x", "topics": "orders"})
    assert str(refused.value) == (
        f"{kind.__name__} has no option {option}=: write it into the dictionary of the client: {remedy}"
    )


@pytest.mark.parametrize("kind", [KafkaSource, lanes_jetstream.JetStreamSource, lanes_postgres.PostgresSource])
@pytest.mark.parametrize(
    ("option", "value", "settings"),
    [
        ("concurrency", 4, "lanes.Settings(concurrency=…)"),
        ("retry", lanes.Retry(attempts=2), "lanes.Settings(retry=…)"),
        ("settings", lanes.Settings(), "…"),
    ],
)
def test_an_option_of_the_consumer_at_a_source_names_its_place(
    kind: Any, option: str, value: object, settings: str
) -> None:
    remedy = f"pass it to the consumer: lanes.Consumer(source, handler, settings={settings})"
    with pytest.raises(ConfigError, match=re.escape(f"no option {option}=: {remedy}")):
        kind("127.0.0.1:9", **{option: value})


@pytest.mark.parametrize("kind", [KafkaSource, lanes_jetstream.JetStreamSource, lanes_postgres.PostgresSource])
@pytest.mark.parametrize(("option", "meant"), [("retries", "retry"), ("concurency", "concurrency")])
def test_a_name_like_an_option_of_the_consumer_at_a_source_names_the_option(kind: Any, option: str, meant: str) -> None:
    settings = f"lanes.Settings({meant}=…)"
    remedy = f"pass it to the consumer: lanes.Consumer(source, handler, settings={settings})"
    with pytest.raises(ConfigError, match=re.escape(f"no option {option}=: did you mean {meant}=? If so, {remedy}")):
        kind("127.0.0.1:9", **{option: 3})


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lanes_jetstream, "Cohort CohortStream JetStreamDeadLetters JetStreamSource header subject_token"),
        (lanes_kafka, "KafkaDeadLetters KafkaSource"),
        (lanes_postgres, "Log PostgresDeadLetters PostgresSource Record"),
        (memsource, "MemoryBroker MemoryDeadLetters MemorySource World"),
    ],
)
def test_an_import_of_a_backend_from_lanes_names_its_package(module: ModuleType, names: str) -> None:
    for name in names.split():
        assert hasattr(module, name)
        said = f"^{name} is not in lanes: write from {module.__name__} import {name}$"
        with pytest.raises(ImportError, match=said):
            exec(f"from lanes import {name}")
        with pytest.raises(ImportError, match=said):
            getattr(lanes, name)
    with pytest.raises(ImportError, match="cannot import name 'KafkaConsumer' from 'lanes'"):
        exec("from lanes import KafkaConsumer")


@pytest.mark.parametrize("delay", ["5", [1], object()])
def test_a_delay_is_a_number(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"^Nak\(delay=.*\): the delay must be a finite number of seconds, 0 or more$"):
        lanes.Nak(delay=delay)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: lanes.Settings(concurrency=0),
        lambda: lanes.Settings(retry=lanes.Retry(attempts=0)),
        lambda: Consumer(3, acknowledge),  # type: ignore[arg-type]
        lambda: Consumer(MemorySource(MemoryBroker()), 3),  # type: ignore[arg-type]
        lambda: KafkaSource({"bootstrap.servers": "kafka://b"}, topics="orders"),
        lambda: lanes_jetstream.JetStreamSource("http://b", stream="orders", durable="billing", key=None),
        lambda: lanes_postgres.PostgresSource("b", lanes_postgres.Log("orders"), subscription="billing"),
    ],
)
def test_a_refused_constructor_shows_the_call_and_one_frame_of_lanes(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as refused:
        wrong()
    frames = [frame.name for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert frames[-2:] == ["<lambda>", "checked"]


def test_an_error_of_a_users_function_in_a_constructor_keeps_its_frames() -> None:
    class Wrong(MemorySource):
        def declared(self) -> Any:
            raise ConfigError("the user's own check")

    with pytest.raises(ConfigError) as refused:
        Consumer(Wrong(MemoryBroker()), acknowledge)
    assert traceback.extract_tb(refused.value.__traceback__)[-1].name == "declared"


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("concurrency", "write settings=lanes.Settings(concurrency=…)"),
        ("max_backoff", "write settings=lanes.Settings(retry=lanes.Retry(max_backoff=…))"),
        ("deadletters", "did you mean dead_letters=?"),
        ("retries", "did you mean settings=lanes.Settings(retry=…)?"),
        ("concurency", "did you mean settings=lanes.Settings(concurrency=…)?"),
    ],
)
def test_an_option_of_the_settings_is_refused_by_a_consumer(
    option: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {option: 5}
    with pytest.raises(ConfigError) as refused:
        Consumer(MemorySource(MemoryBroker()), acknowledge, **options)
    assert str(refused.value) == f"lanes.Consumer has no option {option}=: {remedy}"
    with pytest.raises(SystemExit):
        lanes.main(MemorySource(MemoryBroker()), acknowledge, **options)
    assert capsys.readouterr().err == f"lanes: ConfigError: lanes.main has no option {option}=: {remedy}\n"
