"""The campaigns find every mutant, each by a check that is meant for its fault."""

from __future__ import annotations

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
def found(request: pytest.FixtureRequest) -> dict[str, Hunted]:
    """The results of the search for the mutants of this session."""
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
