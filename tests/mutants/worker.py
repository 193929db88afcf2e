"""A worker of the demo with a planted fault: ``python -m tests.mutants.worker NAME``."""

from __future__ import annotations

import sys

from tests.mutants import install
from tests.mutants.table_demo import MUTANTS


def main() -> int:
    """Install the mutant that the first argument names, then run the worker."""
    install(MUTANTS[sys.argv[1]])
    from demo.workers.worker import main as work

    return work()


if __name__ == "__main__":
    sys.exit(main())
