"""``python -m demo`` prints its help, and one line for each mistake in its options."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import pytest

from demo.__main__ import main
from lanes.cli import kit

SERVER = ("--server", "nats://127.0.0.1:1")


class Said(NamedTuple):
    """The output of a command, and its exit status."""

    status: int
    out: str
    err: str


Command = Callable[..., Said]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``python -m demo`` with these arguments, in this process."""

    def run(*arguments: str) -> Said:
        monkeypatch.setattr("sys.argv", ["demo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.mark.parametrize("arguments", [[], ["--help"], ["run", "--help"], ["spark", "--help"]])
def test_the_demo_prints_its_help(demo: Command, arguments: list[str]) -> None:
    said = demo(*arguments)
    assert (said.status, said.err) == (0, "")
    assert "Usage: python -m demo" in said.out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nonsense"], 64, "'nonsense'"),
        (["run", "--nonsense"], 64, "--nonsense"),
        (["run", *SERVER, "--events", "many"], 64, "--events"),
        (["run"], 3, "needs --server URL"),
        (["run", "--broker", "kafka"], 3, "needs --server HOST:PORT of a Kafka broker"),
        (["run", "--broker", "postgres"], 3, "needs --server URL of a PostgreSQL server"),
        (["run", *SERVER, "--latency", "10"], 3, "--latency '10': must be a number with a unit"),
        (["run", *SERVER, "--sample", "-1s"], 3, "--sample '-1s'"),
        (["run", *SERVER, "--kill-at", "half"], 3, "--kill-at 'half': must be fractions"),
        (["run", *SERVER, "--kill-at", "2"], 3, "kill_at=[2.0]: must be rising fractions"),
        (["run", *SERVER, "--events", "0"], 3, "events=0"),
        (["run", *SERVER, "--members", "65"], 3, "members=65: must be 1 to 64"),
        (["run", *SERVER, "--width", "0"], 3, "width=0: must be 1 to 64 physical queues, such as 4"),
        (["run", *SERVER, "--width", "four"], 64, "'--width': Input should be a valid integer"),
        (["run", *SERVER, "--data", "/no/such/file"], 3, "/no/such/file: no such file"),
    ],
)
def test_the_demo_prints_one_line_about_a_wrong_argument(
    demo: Command, arguments: list[str], status: int, words: str
) -> None:
    said = demo(*arguments)
    assert (said.status, said.out) == (status, "")
    assert said.err.startswith("lanes: ")
    assert words in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(("missing", "extra"), [("typer", "cli"), ("nats", "cli,jetstream")])
def test_the_demo_names_a_missing_package(
    demo: Command, monkeypatch: pytest.MonkeyPatch, missing: str, extra: str
) -> None:
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == missing else find_spec(name))
    said = demo("run", *SERVER)
    assert said.status == 3
    assert f"needs {missing}: pip install '.[{extra}]' in the checkout of lanes" in said.err
    assert said.err.count("\n") == 1
