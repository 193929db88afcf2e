"""The pytest plugin for tests made by ``memsource.simulate``. Pytest finds the plugin by its entry point.

``--lanes-runs N`` makes N runs of each simulated test. ``--lanes-replay TOKEN`` makes only the run that the token
describes, in the one selected simulated test. The summary of pytest has a line for each simulated test that ran
a campaign.

The plugin imports a module only when an option or a simulated test needs the module. A project without a simulated test
therefore imports nothing of ``lanes``.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from memsource.sim.runs.campaign import CampaignReport


RUNS_MAX: Final = 10_000_000

_NAMED: Final = 3
"""Maximum number of tests that an error names."""

_PROPERTY: Final = "lanes_simulation"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes", "simulated tests (memsource.simulate)")
    group.addoption(
        "--lanes-runs",
        type=_runs,
        metavar="N",
        help="make N runs of each simulated test, and ignore its sometimes=",
    )
    group.addoption(
        "--lanes-replay",
        metavar="TOKEN",
        help="make only the run TOKEN of the one selected test",
    )


def pytest_configure(config: pytest.Config) -> None:
    runs, token = config.getoption("lanes_runs"), config.getoption("lanes_replay")
    if runs is None and token is None:
        return
    from memsource.sim.errors import TokenRefused
    from memsource.sim.plans.token import decode
    from memsource.sim.runs.simulate import OPTIONS

    if token is not None:
        try:
            decode(token)
        except TokenRefused as error:
            raise pytest.UsageError(f"--lanes-replay: {error}") from error
    # A test may start an inner test run. The cleanup restores the options of the outer test run.
    config.add_cleanup(functools.partial(vars(OPTIONS).update, runs=OPTIONS.runs, replay=OPTIONS.replay))
    OPTIONS.runs, OPTIONS.replay = runs, token


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the test of a token, after options of pytest such as ``-k`` have selected tests."""
    if config.getoption("lanes_replay") is None:
        return
    others = [item for item in items if _simulation(item) is None]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _simulation(item) is not None]
    if len(items) > 1 and not config.getoption("collectonly"):
        named = ", ".join(_id_of(item) for item in items[:_NAMED])
        more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
        raise pytest.UsageError(
            f"--lanes-replay: a token belongs to one test, and {len(items)} simulated tests are selected ({named}{more}"
            "); add the id of the test, as in the line that printed the token"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    simulation = _simulation(item)
    if simulation is None:
        return (yield)
    # The item is a simulated test, so its file has imported the module.
    from memsource.sim.runs.simulate import OPTIONS

    outer, OPTIONS.test = OPTIONS.test, _id_of(item)
    try:
        return (yield)
    finally:
        OPTIONS.test = outer
        if simulation.report is not None:
            # pytest sends the properties of an item with its report, even from another process.
            item.user_properties.append((_PROPERTY, _told(simulation.report)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        f"{report.nodeid}: {told}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, told in report.user_properties
        if name == _PROPERTY
    ]
    if terminalreporter.config.getoption("lanes_replay") is not None and terminalreporter.stats.get("passed"):
        # A token does not name its test, and a run of another test shows nothing about the failure.
        lines.append(
            "--lanes-replay: the replayed run passed, so the failure is mended, or the token belongs to another test; "
            "use the whole line that printed the token"
        )
    if lines:
        terminalreporter.section("simulated by lanes")
        for line in sorted(lines):
            terminalreporter.write_line(line)


def _simulation(item: pytest.Item) -> Any:
    """Return the simulated test of an item; None for other tests."""
    test = getattr(item, "obj", None)
    return test if getattr(test, "lanes_simulation", None) is True else None


def _id_of(item: pytest.Item) -> str:
    """Return the argument that selects an item in the working directory of pytest."""
    file = os.path.relpath(item.path, item.config.invocation_params.dir)
    _, colons, names = item.nodeid.partition("::")
    return Path(file).as_posix() + colons + names


def _told(report: CampaignReport) -> str:
    faults = sum(count for name, count in report.happened.items() if name.startswith("fault: "))
    return (
        f"{report.runs} runs, {report.seconds / 3600:.1f} virtual hours, {report.crashes} crash points, {faults} faults"
    )


def _runs(text: str) -> int:
    try:
        runs = int(text)
    except ValueError:
        runs = 0
    if not 1 <= runs <= RUNS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of runs in 1 … {RUNS_MAX}")
    return runs
