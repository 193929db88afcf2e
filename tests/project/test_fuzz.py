"""The fuzz targets run, and print each failure that they find."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fuzz.__main__ as command
from fuzz import guided, targets
from fuzz.running import Target, run
from fuzz.targets import TARGETS


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.timeout(400)  # shrinking a failing example may take minutes
def test_each_fuzz_target_holds_for_a_moment(target: Target) -> None:
    result = run(target, 0.0, batch=5)
    if result.failure is not None:
        raise result.failure
    assert result.examples >= 5


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_first_line_of_a_target_is_its_invariant(target: Target) -> None:
    assert target.invariant.endswith(".")
    assert len(target.invariant.split()) > 5


def properties(effort: settings, tick: Callable[[], None]) -> list[Callable[[], None]]:
    @effort
    @given(st.integers())
    def numbers_are_small(number: int) -> None:
        tick()
        assert number < 1_000

    return [numbers_are_small]


BROKEN = Target(name="broken", invariant="Numbers are small.", properties=properties, batch=50)
QUICK = replace(TARGETS["reply"], batch=5)
"""A target whose invariant holds, with few examples."""


def test_a_falsifying_example_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(targets.TARGETS, "broken", BROKEN)
    monkeypatch.setitem(targets.TARGETS, "reply", QUICK)
    assert command.main(["--seconds", "0", "reply", "broken"]) == 1
    shown = capsys.readouterr().out
    assert "broken: Numbers are small." in shown
    assert "number=1000" in shown
    table = [line.split() for line in shown.splitlines()[-3:]]
    assert [(row[0], row[-1]) for row in table] == [("target", "failures"), ("reply", "0"), ("broken", "1")]


_GUIDED = """
import sys
from fuzz import guided
from fuzz.targets import TARGETS
from tests.project.test_fuzz import BROKEN
TARGETS["broken"] = BROKEN
guided.CACHE = guided.Path(sys.argv[1])
guided.main("broken", "100")
"""


@pytest.mark.skipif(not guided.available(), reason="there is no coverage-guided fuzzer for this platform")
@pytest.mark.timeout(300)  # seven seconds of computing, which take a minute on a busy machine
def test_a_guided_fuzzer_finds_a_broken_invariant(tmp_path: Path) -> None:
    inputs, said = guided.attack("reply", 1)
    assert inputs > 0
    assert said == ""
    command = [sys.executable, "-c", _GUIDED, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode != 0
    assert guided.UNCAUGHT in done.stdout
    assert "assert number < 1_000" in done.stdout


def test_a_finding_of_the_guided_fuzzer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(targets.TARGETS, "reply", QUICK)
    monkeypatch.setattr(guided, "available", lambda: True)
    monkeypatch.setattr(guided, "attack", lambda name, seconds: (7, "numbers grew"))
    assert command.main(["--seconds", "4", "reply"]) == 1
    shown = capsys.readouterr().out
    assert "AssertionError: numbers grew" in shown
    assert shown.splitlines()[-1].split()[2::2] == ["7", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ledgre"], f"fuzz: unknown target 'ledgre'; use {', '.join(TARGETS)}"),
        (["--seconds", "-1"], "fuzz: --seconds -1.0: must be a finite number, 0 or more"),
        (["--seconds", "nan"], "fuzz: --seconds nan: must be a finite number, 0 or more"),
    ],
)
def test_a_wrong_argument_of_the_fuzzer_prints_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert capsys.readouterr().err == said + "\n"
