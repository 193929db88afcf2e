"""A worker of the demo with a planted fault of the cohort: ``python -m tests.demo.cohort_mutants NAME``."""

from __future__ import annotations

import sys
from typing import Final

from tests.mutants import Mutant, install
from tests.mutants.table_cohort import COHORT

RUNTIME: Final = (
    Mutant(
        "starts_behind_the_deadline",
        "lanes.workers.tasks",
        "                if now >= message.partition.deadline:\n",
        "                if False:\n",
        "handlers start in a process that was frozen past its lease",
        "demo",
        ("overlaps: ",),
    ),
)

MUTANTS: Final = {mutant.name: mutant for mutant in (*RUNTIME, *COHORT)}


def main() -> int:
    """Install the mutant named first, then run the worker."""
    install(MUTANTS[sys.argv[1]])
    from demo.workers.worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
