"""The command line: every mistake is one clear line and an exit status of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from lanes import cli
from lanes.core.types import PartitionId
from lanes.history import History


class Said(NamedTuple):
    status: object
    out: str
    err: str


Command = Callable[..., Said]

SERVER = ("--server", "nats://127.0.0.1:1")


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def command(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["lanes", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return Said(ended.value.code or 0, captured.out, captured.err)

    return command


def test_version(lanes: Command) -> None:
    assert lanes("--version") == (0, f"lanes {version('lanes-runtime')}\n", "")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["demo", "--help"], ["check", "--help"]])
def test_help(lanes: Command, arguments: list[str]) -> None:
    said = lanes(*arguments)
    assert (said.status, said.err) == (0, "")
    assert "Usage: lanes" in said.out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 64, "'nonsense'"),
        (["demo", "--nonsense"], 64, "--nonsense"),
        (["demo", *SERVER, "--events", "many"], 64, "--events"),
        (["check"], 64, "FILE"),
        (["demo"], 3, "needs --server URL"),
        (["demo", *SERVER, "--latency", "10"], 3, "--latency '10': must be a number with a unit"),
        (["demo", *SERVER, "--sample", "-1s"], 3, "--sample '-1s'"),
        (["demo", *SERVER, "--kill-at", "half"], 3, "--kill-at 'half': must be fractions"),
        (["demo", *SERVER, "--kill-at", "2"], 3, "kill_at=[2.0]: must be rising fractions"),
        (["demo", *SERVER, "--events", "0"], 3, "events=0"),
        (["demo", *SERVER, "--data", "/no/such/file"], 3, "/no/such/file: no such file"),
        (["check", "/no/such/file"], 3, "/no/such/file"),
    ],
)
def test_a_mistake_is_one_line(lanes: Command, arguments: list[str], status: int, words: str) -> None:
    said = lanes(*arguments)
    assert (said.status, said.out) == (status, "")
    assert said.err.startswith("lanes: ")
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("missing", "extra"), [("typer", "cli"), ("nats", "cli,jetstream")])
def test_what_is_not_installed_is_one_line_with_the_remedy(
    lanes: Command, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == missing else find_spec(name))
    said = lanes("demo", *SERVER)
    assert said.status == 3
    assert f"needs {missing}: pip install 'lanes-runtime[{extra}]'" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("text", "value"), [("10ms", 0.01), ("0.5s", 0.5), (".5s", 0.5), ("2m", 120.0), ("0s", 0.0)])
def test_durations(text: str, value: float) -> None:
    assert cli.seconds("--latency", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "10", "ms", "1e3s", "-1s", "1 s", "infs", "10ms "])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(SystemExit):
        cli.seconds("--latency", text)


def test_check_prints_every_verdict_and_says_what_it_found(lanes: Command, tmp_path: Path) -> None:
    history = History(tmp_path, member="publisher")
    history.open(source="S", concurrency=1, max_in_flight=1, max_in_flight_bytes=1, now=1.0)
    history.produced(PartitionId("S", 0), 1, b"a", 1.0)
    history.close("stopped", 2.0)
    said = lanes("check", str(tmp_path))
    # Produced, and nothing shows that it was ever handled.
    assert said.status in (1, 2)
    assert said.err == ""
    for name in ("PerKeyOrder", "NoOverlap", "AtLeastOnce", "BoundedInFlight", "NoSettleBeforeEnd"):
        assert name in said.out
