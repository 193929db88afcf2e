"""``docs/promises.md`` names existing tests, checkers and planted faults, and commands that run the tests."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from memsource import checkers
from tests.docs.test_docs import blocks_of
from tests.mutants.table import MUTANTS

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "promises.md"
NAMES: Final = [f"P{number}" for number in range(1, 8)]

IN_THE_SIMULATOR: Final = {"jetstream", "kafka"}
"""The campaigns of ``tests.memsource.sim``; a cohort has a separate campaign."""


class Promise(NamedTuple):
    """One section of the page. ``place`` is the file, or ``file::test``, of the proof."""

    words: str
    place: str
    checkers: list[str]
    faults: list[str]
    commands: list[str]


def listed(text: str, label: str) -> list[str]:
    """Return the words in backticks of the list item that begins with this label."""
    item = re.search(rf"^- \*\*{label}[^*]*\*\*:?\s(.*?)(?=^- |^$|\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", item[1]) if item is not None else []


def promises() -> dict[str, Promise]:
    text = PAGE.read_text()
    found = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        quoted = re.search(r"^> (.*)$", body, re.MULTILINE)
        assert quoted is not None, f"{name} has no words"
        found[name] = Promise(
            quoted[1],
            listed(body, "Proved by")[0],
            listed(body, "Checkers"),
            listed(body, "Planted faults"),
            [command for block in blocks_of(name, body) for command in block.commands()],
        )
    return found


PROMISES: Final = promises()


def found_in(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The tests of a file, by name."""
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {function.name: function for function in functions if function.name.startswith("test_")}


def target_of(place: str) -> str:
    """Return the Makefile target that runs the test or file: the target of its mark, or else ``test``."""
    file, _, name = place.partition("::")
    marked = found_in(ROOT / file)
    wanted = [marked[name]] if name else list(marked.values())
    marks = {"pytest.mark.slow": "test-slow", "pytest.mark.campaign": "campaign"}
    for mark, target in marks.items():
        if all(mark in map(ast.unparse, function.decorator_list) for function in wanted):
            return target
    return "test"


def faults_of(place: str) -> list[str]:
    """Return the faults of a reference of the form ``file`` or ``file::test``."""
    file, _, name = place.partition("::")
    if not (ROOT / file).is_file():
        return [f"there is no file {file}"]
    if name and name not in found_in(ROOT / file):
        return [f"{file} has no {name}"]
    return []


def test_the_page_has_the_promises_of_the_design() -> None:
    rows = re.findall(r"^\| (P\d) \| (.*?) \|", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert {name: promise.words for name, promise in PROMISES.items()} == dict(rows)
    assert list(PROMISES) == NAMES


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", PAGE.read_text())
    assert len(named) > 2 * len(NAMES)
    assert [fault for place in named for fault in faults_of(place)] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_command_of_a_promise_runs_the_tests_that_the_page_names(name: str) -> None:
    promise = PROMISES[name]
    file, _, test = promise.place.partition("::")
    (command,) = promise.commands
    words = shlex.split(command)
    target = target_of(promise.place)
    assert words[:2] == ["make", target]
    if target == "campaign":
        (run,) = re.findall(r"pytest -m campaign (.*)", (ROOT / "Makefile").read_text())
        assert words[2:] == [] and file in run.split()
        return
    (arguments,) = (shlex.split(word.removeprefix("ARGS=")) for word in words[2:])
    assert arguments[0] in (file, promise.place)
    assert arguments[1:] == [] or (arguments[1] == "-k" and arguments[2] in test)


@pytest.mark.parametrize("name", NAMES)
def test_named_checkers_and_planted_faults_exist_and_belong_together(name: str) -> None:
    promise = PROMISES[name]
    assert [checker for checker in promise.checkers if checker not in checkers.__all__] == []
    for fault in promise.faults:
        mutant = MUTANTS[fault]
        assert mutant.campaign in IN_THE_SIMULATOR, "the fault belongs to another campaign"
        assert set(mutant.found_by) & set(promise.checkers), f"{fault} is found by {mutant.found_by}"


def test_a_history_can_prove_five_of_the_promises() -> None:
    assert [name for name, promise in PROMISES.items() if not promise.checkers] == ["P6", "P7"]
    assert [name for name, promise in PROMISES.items() if not promise.faults] == ["P6", "P7"]


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_the_readme_and_the_site_link_the_page_of_promises(page: str) -> None:
    assert re.search(r"\]\((docs/)?promises\.md\)", (ROOT / page).read_text())


@pytest.mark.parametrize("place", ["tests/nowhere.py", "tests/runtime/test_config.py::test_of_tomorrow"])
def test_a_reference_to_a_missing_test_is_found(place: str) -> None:
    assert len(faults_of(place)) == 1
