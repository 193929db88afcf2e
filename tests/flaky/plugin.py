"""What the slices need of pytest: `-p tests.flaky.plugin`.

`--flaky-choose FILE` collects, and writes all tests as a JSON object of ids: the name of the rule, "" where none holds,
and a digest of what the test is made of.
`--flaky-slice FILE` reads a JSON object of ids and numbers of runs, and runs each of these so often, and no other.
`--flaky-results FILE` appends a JSON object a line as each phase of a run of a test ends.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.flaky.choosing import Seen, imports_of, made_of, rule_of

RUN: Final = "flaky"
"""What the id of each run ends with, before its number."""

_RUN: Final = re.compile(rf"(-|\[){RUN}(\d+)\]$")
_SLICE: Final = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flaky", "tests again and again")
    for name in ("choose", "slice", "results"):
        group.addoption(f"--flaky-{name}", type=Path, metavar="FILE", default=None)


def pytest_configure(config: pytest.Config) -> None:
    path: Path | None = config.getoption("--flaky-slice")
    if path is not None:
        config.stash[_SLICE] = json.loads(path.read_text())
    results: Path | None = config.getoption("--flaky-results")
    if results is not None and not hasattr(config, "workerinput"):  # a worker's reports all come to the first process
        config.pluginmanager.register(Writer(results), "flaky-results")


def split(nodeid: str) -> tuple[str, int]:
    """The id of a test, and the number of its run, from 0."""
    found = _RUN.search(nodeid)
    if found is None:
        return nodeid, 0
    kept = nodeid[: found.start()]
    return (f"{kept}]" if found[1] == "-" else kept), int(found[2])


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Last, so that the number of the run ends the id."""
    runs = max(metafunc.config.stash.get(_SLICE, {}).values(), default=1)
    if runs > 1:
        metafunc.fixturenames.append("flaky_run")
        metafunc.parametrize("flaky_run", range(runs), ids=[f"{RUN}{number}" for number in range(runs)])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Before they are shuffled."""
    wanted = config.stash.get(_SLICE, None)
    if wanted is None:
        return
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        nodeid, number = split(item.nodeid)
        (kept if number < wanted.get(nodeid, 0) else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session: pytest.Session) -> None:
    path: Path | None = session.config.getoption("--flaky-choose")
    if path is not None:
        rules = {item: rule_of(seen(item)) for item in session.items}
        path.write_text(
            json.dumps(
                {item.nodeid: ("" if rule is None else rule.name, made_of(item.path)) for item, rule in rules.items()}
            )
        )


def seen(item: pytest.Item) -> Seen:
    """What the rules look at."""
    marked = item.get_closest_marker("timeout")
    return Seen(
        fixtures=frozenset(getattr(item, "fixturenames", ())),
        imports=imports_of(item.path).names,
        coroutine=inspect.iscoroutinefunction(getattr(item, "obj", None)),
        allowed=float(marked.args[0]) if marked is not None and marked.args else 0.0,
    )


class Writer:
    """Writes what became of each phase of each run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid, run = split(report.nodeid)
        line: dict[str, Any] = {
            "test": nodeid,
            "run": run,
            "phase": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
        }
        if report.failed:
            sections = [f"----- {name} -----\n{text}" for name, text in report.sections]
            line["text"] = "\n".join([report.longreprtext, *sections])
        # Each for itself: what has ended is known, however the rest does.
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
