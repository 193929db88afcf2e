"""Plant a mutant of the Kafka adapter, and run the tests that must find it: ``python -m tests.mutants.kafka_hunt
NAME``.

Without a name, the command runs those tests on the unchanged code. Prints a JSON object with the last line of each
failed test. If a test cannot run, the exit status is 1.
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
    """A pytest plugin that plants mutants, and records failed tests, passed tests, and errors outside of a test's
    call."""

    def __init__(self, mutants: Sequence[Mutant]) -> None:
        self.mutants = mutants
        self.failed: dict[str, str] = {}
        self.passed: set[str] = set()
        self.broken: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_load_initial_conftests(self) -> None:
        # The mutants must be planted before any import of the adapter, and before pytest installs its own import hook.
        for mutant in self.mutants:
            install(mutant)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = report.longreprtext.strip().splitlines()
        if report.failed and report.when == "call":
            self.failed[report.nodeid] = said[-1] if said else ""
        elif report.failed and report.nodeid not in self.failed:
            # An error in the teardown of a failed test does not count.
            self.broken[report.nodeid] = "\n".join(said)
        elif report.passed and report.when == "call":
            self.passed.add(report.nodeid)


def main(names: Sequence[str]) -> int:
    """Run the tests for the named mutants, or for the unchanged code, and return the exit status."""
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
