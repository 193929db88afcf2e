"""Plant a mutant of the processes of handlers, and run the tests that must find it: ``python -m
tests.mutants.process_hunt NAME``.

Without a name, the command runs those tests on the unchanged code. See ``tests.mutants.kafka_hunt`` for the output.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence

import pytest

from tests.mutants.kafka_hunt import Hunt
from tests.mutants.table_processes import PROCESSES


def main(names: Sequence[str]) -> int:
    """Run the tests for the named mutants, or for the unchanged code, and return the exit status."""
    hunt = Hunt([PROCESSES[name] for name in names])
    wanted = sorted({test for mutant in hunt.mutants or PROCESSES.values() for test in mutant.found_by})
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(["-q", "-m", "", "-p", "no:randomly", *wanted], plugins=[hunt])
    print(json.dumps(hunt.failed))
    return 0 if code in (0, 1) and not hunt.broken and len(hunt.failed.keys() | hunt.passed) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
