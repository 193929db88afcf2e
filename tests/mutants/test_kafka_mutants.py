"""The tests of the Kafka adapter find every mutant, each by the tests that are meant for its fault."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mutants import Mutant, mutated
from tests.mutants.table_kafka import KAFKA


@pytest.mark.parametrize("mutant", KAFKA.values(), ids=KAFKA)
def test_the_old_text_of_each_mutant_occurs_once(mutant: Mutant) -> None:
    spec = find_spec(mutant.module)
    assert spec is not None and spec.origin is not None
    source = mutated(Path(spec.origin).read_text(), mutant)
    compile(source, spec.origin, "exec", dont_inherit=True)


def test_the_table_of_kafka_has_enough_planted_bugs() -> None:
    assert len(KAFKA) >= 10
    assert all(mutant.found_by for mutant in KAFKA.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", KAFKA.values(), ids=KAFKA)
def test_each_planted_bug_of_kafka_is_found_by_its_tests(mutant: Mutant) -> None:
    failed = _hunted(mutant.name)
    # Every listed test must find the mutant, because the table names the purpose of each test.
    assert set(failed) == set(mutant.found_by), f"{mutant.breaks}: {failed}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tests_of_kafka_pass_without_a_planted_bug() -> None:
    assert _hunted() == {}


def _hunted(*names: str) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.mutants.kafka_hunt", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found
