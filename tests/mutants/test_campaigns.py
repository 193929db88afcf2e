"""The campaigns pass on the code as it is, and find every mutant: each by the check that is there for it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings

from tests.mutants import Mutant
from tests.mutants.findings import findings
from tests.mutants.plans import Plan, plans
from tests.mutants.table import MUTANTS

BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])

Findings = dict[str, str]


@BACKENDS
@settings(max_examples=60)
@given(plan=plans(commits=False))
def test_nothing_is_found_where_each_message_is_settled(plan: Plan, backend: str) -> None:
    assert findings(plan, backend) == {}


@BACKENDS
@settings(max_examples=60)
@given(plan=plans(commits=True))
def test_nothing_is_found_where_positions_are_committed(plan: Plan, backend: str) -> None:
    assert findings(plan, backend) == {}


@pytest.fixture(scope="session")
def hunted(request: pytest.FixtureRequest) -> dict[str, Findings]:
    """What was found of the mutants that this session asks for; they are looked for by two processes."""
    calls = [
        item.callspec
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    names = [call.id for call in calls if isinstance(call.params.get("hidden"), Mutant)]
    with ThreadPoolExecutor(2) as pool:
        return {name: found for part in pool.map(hunt, (names[::2], names[1::2])) for name, found in part.items()}


def hunt(names: list[str]) -> dict[str, Findings]:
    command = [sys.executable, "-m", "tests.mutants.hunt", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.timeout(300)  # the first one waits for all
@pytest.mark.parametrize("hidden", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_found(hidden: Mutant, hunted: dict[str, Findings]) -> None:
    found = hunted[hidden.name]
    assert found.keys() & set(hidden.found_by), f"{hidden.breaks}: found by {sorted(found) or 'nothing'} instead"
