"""An argument of a wrong kind is refused by the constructor, with its name, its kind and the kind that is wanted"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import lanes
from lanes import ConfigError, Consumer, History, Journal
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
        ("source", SECRET, "source is a str, without the method open: pass a source, such as KafkaSource(…) or"),
        ("source", acknowledge, "source is a function, without the method open: pass a source"),
        ("source", MemorySource, "source is the class MemorySource: pass a source"),
        ("source", None, "source is None, without the method open: pass a source"),
        ("settings", {"a": SECRET}, "settings is a dict: pass lanes.Settings(…)"),
        ("settings", {}, "settings is a dict: pass lanes.Settings(…)"),
        ("settings", lanes.Settings, "settings is the class Settings: pass lanes.Settings(…)"),
        ("dead_letters", SECRET, "dead_letters is a str, without the method open: pass a target of dead letters, such"),
        ("dead_letters", MemoryDeadLetters, "dead_letters is the class MemoryDeadLetters: pass a target"),
        ("dead_letters", NoPut(), "dead_letters is a NoPut, without the method put: pass a target"),
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


def test_main_refuses_an_unknown_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        lanes.main(MemorySource(MemoryBroker()), acknowledge, backend="uvloop")  # type: ignore[arg-type]
    assert ended.value.code == 1
    assert capsys.readouterr().err == 'lanes: ConfigError: backend=\'uvloop\' is unknown: use "asyncio" or "trio"\n'


@pytest.mark.parametrize("delay", ["5", [1], object()])
def test_a_delay_is_a_number(delay: Any) -> None:
    with pytest.raises(ValueError, match=r"^Nak\(delay=.*\): the delay must be a finite number of seconds, 0 or more$"):
        lanes.Nak(delay=delay)
