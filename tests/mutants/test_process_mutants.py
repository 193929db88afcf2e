"""The tests of the processes of handlers find every mutant, each by the test that is meant for its fault."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.mutants.table_processes import PROCESSES


@pytest.mark.parametrize("mutant", PROCESSES.values(), ids=PROCESSES)
def test_the_old_text_of_each_mutant_occurs_once(mutant: Mutant) -> None:
    spec = find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    compile(mutated(Path(spec.origin).read_text(), mutant), spec.origin, "exec", dont_inherit=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", PROCESSES.values(), ids=PROCESSES)
def test_each_planted_bug_of_processes_is_found_by_its_tests(mutant: Mutant) -> None:
    failed = _hunted(mutant.name)
    assert set(failed) == set(mutant.found_by), f"{mutant.breaks}: {failed}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tests_of_processes_pass_without_a_planted_bug() -> None:
    assert _hunted() == {}


def _hunted(*names: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.mutants.process_hunt", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
