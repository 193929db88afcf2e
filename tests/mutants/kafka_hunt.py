"""Plant a mutant of the Kafka adapter and run the tests that are to find it: ``python -m tests.mutants.kafka_hunt
NAME``, or without a name those tests on the code as it is.

Prints a JSON object: test -> what it said, for each that failed. A test that could not be run at all is an error: then
the status is not 0.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

import pytest

from tests.mutants import Mutant, install
from tests.mutants.table_kafka import KAFKA

_SECONDS = 45


class Hunt:
    """Plants the mutants, and notes what failed, and what broke before or behind a test."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.mutants = mutants
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()
        self.broken: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        # Behind nothing that imports the adapter, and in front of the finder of pytest, which loads by itself.
        for mutant in self.mutants:
            install(mutant)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = report.longreprtext.strip().splitlines()
        if report.failed and report.when == "call":
            self.failed[report.nodeid] = said[-1] if said else ""
        elif report.failed and report.nodeid not in self.failed:
            # What a test that failed leaves behind is no wonder.
            self.broken[report.nodeid] = "\n".join(said)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)


def main(names: Sequence[str]) -> int:
    """Hunt one, or none."""
    hunt = Hunt([KAFKA[name] for name in names])
    wanted = sorted({test for mutant in hunt.mutants or KAFKA.values() for test in mutant.found_by})
    options = ["-q", "-m", "", "-p", "no:randomly", f"--timeout={_SECONDS}"]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([*options, *wanted], plugins=[hunt])
    print(json.dumps(hunt.failed))
    run = hunt.failed.keys() | hunt.passed
    return 0 if code in (0, 1) and not hunt.broken and len(run) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
