"""The campaigns find every mutant, each by a check that is meant for its fault."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict

import pytest
from _pytest.mark import ParameterSet

from tests.mutants import Mutant
from tests.mutants.hunted import Hunted, hunted
from tests.mutants.table import MUTANTS

_SLOW = (
    "cohort",
    "cohort_forced",
    "jetstream_adapter",
    "kafka_adapter",
    "lease_walks",
    "postgres_adapter",
    "ranges_adapter",
)


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hunted]:
    """The results of the search for the mutants of this session.

    The first process of pytest-xdist that needs the results searches, and the others wait for its results.
    """
    # Each process has a folder of its own in the folder of the session.
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    results = folder / "hunted.json"
    with (folder / "hunted.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps({name: asdict(one) for name, one in _searched(request).items()}))
    return {name: Hunted(**one) for name, one in json.loads(results.read_text()).items()}


def _searched(request: pytest.FixtureRequest) -> dict[str, Hunted]:
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    return hunted([call.id for call in calls if isinstance(call.params.get("hidden"), Mutant)])


def _cases() -> list[ParameterSet]:
    """The test cases. The cases of the cohort and of real adapters are slow, because each takes many runs."""
    return [
        pytest.param(mutant, id=name, marks=[pytest.mark.slow] if mutant.campaign in _SLOW else [])
        for name, mutant in MUTANTS.items()
    ]


@pytest.mark.timeout(1800)  # the first test waits for the search of all mutants
@pytest.mark.parametrize("hidden", _cases())
def test_each_planted_bug_is_found_by_its_campaign(hidden: Mutant, found: dict[str, Hunted]) -> None:
    this = found[hidden.name]
    print(this.line(hidden))
    assert this.by(hidden), (
        f"{hidden.breaks}: found by {sorted(this.checks)} instead; findings of the state machine: {this.beside}"
    )
